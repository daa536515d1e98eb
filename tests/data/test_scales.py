"""Ratings of two scales: refused where answers of both are compared, a warning where they may be, no false alarm."""

from pathlib import Path
from typing import Any

import pytest

from rlhf_cli import data, jsonl
from rlhf_cli.config.sources import DataSource
from rlhf_cli.errors import RLHFError

UP_TO_ONE = [(0.1, 0.9), (0.75, 0.2), (0, 1)] * 2
UP_TO_TEN = [(1, 9), (10, 3), (7, 8)] * 2
BOTH = [(0.9, 7), (2, 0.35), (0.8, 4)] * 2


def source(folder: Path, scores: list[tuple[float, float]], **options: Any) -> DataSource:
    rows = []
    for number, pair in enumerate(scores):
        rows.append({"prompt": f"Say {number}", "responses": [" a", " b"], "scores": pair})
    jsonl.write_jsonl(folder / "rated.jsonl", rows)
    return DataSource(str(folder / "rated.jsonl"), **options)


REFUSED: dict[str, tuple[list[tuple[float, float]], dict[str, Any], int, str]] = {
    "answers of both scales are compared": (
        [*UP_TO_TEN, *BOTH],
        {},
        7,
        '"scores" is 0.9 here and 7 in the same row: ratings of two scales, which are compared with each other',
    ),
    "a least gap of both scales": (
        [*UP_TO_ONE, *UP_TO_TEN],
        {"min_rating_gap": 0.5},
        1,
        '"scores" is 0.1 here and 9 in line 7: ratings of two scales',
    ),
    "margins of both scales": (
        [*UP_TO_TEN, *UP_TO_ONE],
        {"margin_per_point": 0.1},
        7,
        '"scores" is 0.1 here and 9 in line 1: ratings of two scales',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_two_scales_are_refused(name: str, tokenizer: Any, tmp_path: Path) -> None:
    scores, options, line, text = REFUSED[name]
    with pytest.raises(RLHFError) as error:
        data.preference_rows(source(tmp_path, scores, **options), tokenizer, max_length=None)
    [problem] = error.value.problems
    assert (problem.code, problem.text) == ("D21", text)
    assert problem.where and problem.where.endswith(f"rated.jsonl:{line}")
    assert problem.hint and problem.hint.startswith("bring all ratings to one scale, for example those up to 1")


def test_prompts_need_no_scale(tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for number, (first, second) in enumerate([*UP_TO_TEN, *BOTH]):
        answers = [{"response": " a", "overall_score": first}, {"response": " b", "overall_score": second}]
        rows.append({"instruction": f"Say {number}", "completions": answers})
    jsonl.write_jsonl(tmp_path / "rated.jsonl", rows)
    assert len(data.prompt_rows(tmp_path / "rated.jsonl", tokenizer, max_length=None)) == len(rows)
    assert "D21" not in capsys.readouterr().err
    with pytest.raises(RLHFError, match="two scales"):
        data.preference_rows(tmp_path / "rated.jsonl", tokenizer, max_length=None)


@pytest.mark.parametrize("scores", [[*UP_TO_ONE, *UP_TO_TEN], BOTH[:3]], ids=["harmless", "few"])
def test_two_scales_are_a_warning(
    scores: list[tuple[float, float]], tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = data.preference_rows(source(tmp_path, scores), tokenizer, max_length=None)
    assert len(found) == len(scores)
    assert "warning[D21]" in capsys.readouterr().err


ONE_SCALE = {
    "up to 1": UP_TO_ONE,
    "up to 10": UP_TO_TEN,
    "half steps": [(0.5, 1), (0.5, 3), (1.5, 4), (0.5, 5)] * 3,
    "means": [(0.3, 4.7), (0.9, 8), (0.25, 3), (0.6, 5)] * 3,
    "percent": [(0.5, 100), (0.25, 99.5), (0.75, 50)] * 3,
    "below 0": [(-0.5, 3), (0.5, 4), (0.25, 5), (0.75, 6)] * 3,
    "ratios": [(0.125, 4), (0.25, 8), (0.5, 4), (1, 8)] * 3,
    "up to 2": [(0.5, 2), (0.25, 1), (0.75, 2)] * 3,
}


@pytest.mark.parametrize("name", ONE_SCALE)
def test_one_scale_is_no_alarm(name: str, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data.preference_rows(source(tmp_path, ONE_SCALE[name], min_rating_gap=0.01), tokenizer, max_length=None)
    assert "D21" not in capsys.readouterr().err
