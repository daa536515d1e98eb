"""Graded preferences: the margin of each pair by hand, ties that are left out, and grades that are none."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli import data, jsonl
from rlhf_cli.config.sources import DataSource
from rlhf_cli.errors import RLHFError


def two(prompt: str, grade: Any, names: tuple[str, str] = ("response_1", "response_2")) -> dict[str, Any]:
    """A row of HelpSteer2, whose first answer is better if the grade is below 0."""
    first, second = names
    return {"prompt": prompt, first: " a", second: " b", "preference_strength": grade}


def pair(prompt: str, grade: Any, column: str = "preference_strength") -> dict[str, Any]:
    return {"prompt": prompt, "chosen": " a", "rejected": " b", column: grade}


ALL = ["Say", "Why", "How", "Who", "Tell", "Ask"]
WORDS = ["Significantly better", "better", "slightly better ", "negligibly better / unsure", "tie", "about the same"]
STRENGTH = {"rating": "strength"}
# Rows, options, and the pairs (prompt, chosen, rejected, margin) as found by hand.
FORMS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], list[tuple[str, str, str, Fraction | None]]]] = {
    "HelpSteer2": (
        [two(name, grade) for name, grade in zip(ALL, [-3, 2, 0, "1", None, -1.5], strict=True)],
        {},
        [
            ("Say", " a", " b", Fraction(1)),
            ("Why", " b", " a", Fraction(2, 3)),
            ("Who", " b", " a", Fraction(1, 3)),
            ("Ask", " a", " b", Fraction(1, 2)),
        ],
    ),
    "other names, the margin of Llama 2 that is large, and no slight preferences": (
        [two(name, grade, ("response1", "response2")) for name, grade in zip(ALL, [-3, 2, 0, 1, -1, 0], strict=True)],
        {"margin_per_point": 1, "min_rating_gap": 2},
        [("Say", " a", " b", Fraction(3)), ("Why", " b", " a", Fraction(2))],
    ),
    "words beside chosen and rejected": (
        [pair(name, grade, "strength") for name, grade in zip(ALL, WORDS, strict=True)],
        {"columns": STRENGTH},
        [
            ("Say", " a", " b", Fraction(1)),
            ("Why", " a", " b", Fraction(2, 3)),
            ("How", " a", " b", Fraction(1, 3)),
            ("Who", " a", " b", Fraction(0)),
        ],
    ),
    "numbers beside chosen and rejected, with the sign of HelpSteer": (
        [pair(name, grade) for name, grade in zip(ALL, [3, -2, 1, 0, None, -1], strict=True)],
        {},
        [
            ("Say", " a", " b", Fraction(1)),
            ("Why", " a", " b", Fraction(2, 3)),
            ("How", " a", " b", Fraction(1, 3)),
            ("Ask", " a", " b", Fraction(1, 3)),
        ],
    ),
    "no margin": (
        [pair("Say", 3), pair("Why", 0)],
        {"margin_per_point": 0},
        [("Say", " a", " b", None)],
    ),
    "a margin of the file is not replaced": (
        [pair("Say", 3) | {"margin": 0.5}, pair("Why", 0) | {"margin": 0.25}],
        {},
        [("Say", " a", " b", Fraction(1, 2)), ("Why", " a", " b", Fraction(1, 4))],
    ),
    "what is no grade in the first row is not read": (
        [pair("Say", "response_2", "overall_preference"), pair("Why", 3, "overall_preference")],
        {},
        [("Say", " a", " b", None), ("Why", " a", " b", None)],
    ),
    "the gaps of scores, if asked for": (
        [{"prompt": "Say", "responses": [" a", " b"], "scores": [2, 8]}],
        {"margin_per_point": 0.25},
        [("Say", " b", " a", Fraction(3, 2))],
    ),
}


def source(folder: Path, rows: list[dict[str, Any]], **options: Any) -> DataSource:
    jsonl.write_jsonl(folder / "graded.jsonl", rows)
    return DataSource(str(folder / "graded.jsonl"), **options)


@pytest.mark.parametrize("form", FORMS)
def test_tokens_and_margins(form: str, tokenizer: Any, tmp_path: Path) -> None:
    rows, options, pairs = FORMS[form]
    found = data.preference_rows(source(tmp_path, rows, **options), tokenizer, max_length=None)
    expected = []
    for *texts, margin in pairs:
        prompt, chosen, rejected = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        end = [tokenizer.eos_token_id]
        row = {"prompt_ids": prompt, "chosen_ids": prompt + chosen + end, "rejected_ids": prompt + rejected + end}
        expected.append(row if margin is None else {**row, "margin": pytest.approx(float(margin), abs=1e-12)})
    assert list(found) == expected
    assert found.num_read == len(rows) and found.num_dropped == 0


def test_conversations_of_helpsteer3(chat: Any, tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "Say it"}]
    row = {"context": prompt, "response1": "no", "response2": "yes", "overall_preference": 2, "language": "english"}
    [found] = data.preference_rows(source(tmp_path, [row]), chat, max_length=None)
    assert "yes" in chat.decode(found["chosen_ids"]) and "no" in chat.decode(found["rejected_ids"])
    assert found["margin"] == pytest.approx(2 / 3)


def test_what_is_left_out_is_counted(tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [pair(name, grade) for name, grade in zip(ALL, [3, "tie", 1, 0, None, -1], strict=True)]
    found = data.preference_rows(source(tmp_path, rows, min_rating_gap=2), tokenizer, max_length=None)
    said = (
        '1 pairs graded by "preference_strength", a margin of 0.333 for each point; '
        "omitted: 2 ties, 2 pairs closer than 2, 1 pairs without a grade"
    )
    assert said in capsys.readouterr().err.replace("\n", " ")
    assert found.columns == "prompt, chosen, rejected, margin from preference_strength"


def test_prompts_of_ties_are_prompts(tokenizer: Any, tmp_path: Path) -> None:
    found = data.prompt_rows(source(tmp_path, [pair("Say", 3), pair("Why", 0)]), tokenizer, max_length=None)
    assert [prompt.text for prompt in found] == ["Say", "Why"]


# The second row, its code and what is said of it.
BAD: list[tuple[dict[str, Any], str, str]] = [
    (pair("Why", 7), "D21", '"preference_strength" is 7; expected a grade from -3 to 3'),
    (pair("Why", True), "D21", '"preference_strength" is True; expected a grade from -3 to 3'),
    (pair("Why", "great"), "D21", "\"preference_strength\" is 'great'; expected a grade from -3 to 3"),
    (pair("Why", "nan"), "D21", "\"preference_strength\" is 'nan'; expected a grade from -3 to 3"),
    (
        {"prompt": "Why", "chosen": " a", "rejected": " b"},
        "D12",
        'no column "preference_strength", which the rows before have',
    ),
]


@pytest.mark.parametrize(("row", "code", "text"), BAD)
def test_bad_grades(row: dict[str, Any], code: str, text: str, tokenizer: Any, tmp_path: Path) -> None:
    rows = [pair("Say", 3), row]
    with pytest.raises(RLHFError) as error:
        data.preference_rows(source(tmp_path, rows), tokenizer, max_length=None)
    [problem] = error.value.problems
    assert (problem.code, problem.text) == (code, text)
    assert problem.where and problem.where.endswith("graded.jsonl:2")

    kept = data.preference_rows(source(tmp_path, rows, on_bad="drop"), tokenizer, max_length=None)
    assert len(kept) == 1 and kept.num_dropped == 1


NONE: list[tuple[list[dict[str, Any]], dict[str, Any], str, str]] = [
    ([pair("Say", 0), pair("Why", "tie")], {}, "D22", 'no pair has a better answer by "preference_strength": 2 ties'),
    ([two("Say", 0), two("Why", 0)], {}, "D22", '"preference_strength" is 0 of all 4 answers'),
    ([pair("Say", 1)], {"columns": {"rating": "grade"}}, "D02", 'no column "grade" (mapped to rating)'),
]


@pytest.mark.parametrize(("rows", "options", "code", "text"), NONE)
def test_grades_without_a_pair(
    rows: list[dict[str, Any]], options: dict[str, Any], code: str, text: str, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(RLHFError) as error:
        data.preference_rows(source(tmp_path, rows, **options), tokenizer, max_length=None)
    [problem] = error.value.problems
    assert problem.code == code and text in problem.text
