"""Rated answers as preference pairs: each form by its tokens, the choice of pairs, and ratings that give none."""

from pathlib import Path
from typing import Any

import pytest

from rlhf_cli import data, jsonl
from rlhf_cli.config.sources import DataSource, HoldoutSplit
from rlhf_cli.errors import RLHFError
from tests.conftest import turns


def scored(answer: str, **ratings: Any) -> dict[str, Any]:
    return {"response": answer, **ratings}


def rated(value: str) -> dict[str, Any]:
    return {"Rating": value}


def numbered(first: str, second: str, better: Any, safer: Any) -> dict[str, Any]:
    return {"response_0": first, "response_1": second, "better_response_id": better, "safer_response_id": safer}


def one(prompt: str, answer: str, helpfulness: Any, correctness: Any = 0) -> dict[str, Any]:
    return {"prompt": prompt, "response": answer, "helpfulness": helpfulness, "correctness": correctness}


def labelled(prompt: Any, answer: Any, label: Any) -> dict[str, Any]:
    return {"prompt": prompt, "completion": answer, "label": label}


ULTRAFEEDBACK = {
    "instruction": "Say",
    "source": "flan",
    "completions": [
        scored(" low", overall_score=9.0, **{"fine-grained_score": 2.0}, annotations={"help": rated("1")}),
        scored(" mid", overall_score=1.0, **{"fine-grained_score": 1.0}, annotations={"help": rated("N/A")}),
        scored(
            " top",
            overall_score=None,
            **{"fine-grained_score": 5.0},
            annotations={"help": rated("5"), "honesty": rated("N/A"), "truth": rated("2")},
        ),
    ],
}
RATING = {"rating": "fine-grained_score"}
# Rows, options, and the pairs (prompt, chosen, rejected) as found by hand.
FORMS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], list[tuple[str, str, str]]]] = {
    "lists, all": (
        [{"prompt": "Say", "responses": [" a", " b", " c"], "scores": [1, "3", 3.0]}],
        {"pairs_per_prompt": "all"},
        [("Say", " b", " a"), ("Say", " c", " a")],
    ),
    "lists, the first of the best and a worse one": (
        [{"prompt": "Say", "responses": [" a", " b", " c"], "scores": [1, 3, 3]}],
        {},
        [("Say", " b", " a")],
    ),
    "lists, a least gap": (
        [
            {"prompt": "Say", "responses": [" a", " b", " c"], "scores": [1, 2, 3.5]},
            {"prompt": "Why", "responses": [" a", " b"], "scores": [1, 2]},
        ],
        {"pairs_per_prompt": "all", "min_rating_gap": 1.5},
        [("Say", " c", " a"), ("Say", " c", " b")],
    ),
    "lists of other names": (
        [{"question": "Say", "texts": [" a", " b"], "stars": [2, 1]}],
        {"columns": {"prompt": "question", "responses": "texts", "rating": "stars"}},
        [("Say", " a", " b")],
    ),
    "UltraFeedback, its overall score": ([ULTRAFEEDBACK], {}, [("Say", " low", " mid")]),
    "UltraFeedback, fine-grained": (
        [ULTRAFEEDBACK],
        {"columns": RATING, "pairs_per_prompt": "all"},
        [("Say", " low", " mid"), ("Say", " top", " low"), ("Say", " top", " mid")],
    ),
    "UltraFeedback, the mean of aspects": (
        [ULTRAFEEDBACK],
        {"columns": {"rating": "annotations"}},
        [("Say", " top", " low")],
    ),
    "HelpSteer": (
        [one("Say", " a", 1, 4), one("Why", " c", 2), one("Say", " b", 3, 2)],
        {},
        [("Say", " b", " a")],
    ),
    "HelpSteer, correctness": (
        [one("Say", " a", 1, 4), one("Why", " c", 2), one("Say", " b", 3, 2)],
        {"columns": {"rating": "correctness"}},
        [("Say", " a", " b")],
    ),
    "PKU-SafeRLHF, better": (
        [{"prompt": "Say", **numbered(" a", " b", 1, 0)}, {"prompt": "Say", **numbered(" c", " d", "0", "1")}],
        {},
        [("Say", " b", " a"), ("Say", " c", " d")],
    ),
    "PKU-SafeRLHF, safer": (
        [{"prompt": "Say", **numbered(" a", " b", 1, 0)}, {"prompt": "Say", **numbered(" c", " d", "0", "1")}],
        {"columns": {"rating": "safer_response_id"}},
        [("Say", " a", " b"), ("Say", " d", " c")],
    ),
    "labels of KTO": (
        [labelled("Say", " a", False), labelled("Why", " c", True), labelled("Say", " b", True)],
        {},
        [("Say", " b", " a")],
    ),
    "labels of KTO, all": (
        [labelled("Say", " a", "False"), labelled("Say", " b", "true"), labelled("Say", " c", "TRUE")],
        {"pairs_per_prompt": "all"},
        [("Say", " b", " a"), ("Say", " c", " a")],
    ),
}


def source(folder: Path, rows: list[dict[str, Any]], **options: Any) -> DataSource:
    jsonl.write_jsonl(folder / "rated.jsonl", rows)
    return DataSource(str(folder / "rated.jsonl"), **options)


@pytest.mark.parametrize("form", FORMS)
def test_tokens_of_the_pairs(form: str, tokenizer: Any, tmp_path: Path) -> None:
    rows, options, pairs = FORMS[form]
    found = data.preference_rows(source(tmp_path, rows, **options), tokenizer, max_length=None)
    expected = []
    for texts in pairs:
        prompt, chosen, rejected = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        end = [tokenizer.eos_token_id]
        ids = {"prompt_ids": prompt, "chosen_ids": prompt + chosen + end, "rejected_ids": prompt + rejected + end}
        expected.append(ids)
    assert list(found) == expected
    assert found.num_read == len(rows) and found.num_dropped == 0


def test_messages_with_labels(chat: Any, tmp_path: Path) -> None:
    prompt, _ = turns("Say", "x")
    answers = [[{"role": "assistant", "content": text}] for text in ("no", "yes")]
    rows = [labelled([prompt], answer, answer is answers[1]) for answer in answers]
    [row] = data.preference_rows(source(tmp_path, rows), chat, max_length=None)
    assert "yes" in chat.decode(row["chosen_ids"]) and "no" in chat.decode(row["rejected_ids"])


def test_what_is_omitted_is_counted(tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        labelled("Say", " a", True),
        labelled("Say", " b", False),
        labelled("Say", " c", False),
        labelled("Why", " d", True),
        labelled("How", " e", False),
        labelled("How", " f", False),
        labelled("How", " g", None),
    ]
    data.preference_rows(source(tmp_path, rows), tokenizer, max_length=None)
    said = (
        'one rated answer a row: 1 pairs of 1 prompts by "label" (data.pairs_per_prompt: all gives 2); omitted: '
        "1 answers without a rating, 1 ties, 1 prompts of one rated answer, 1 prompts whose answers are rated alike"
    )
    assert said in capsys.readouterr().err.replace("\n", " ")


def test_a_prompt_is_counted_once_by_why_it_has_no_pair(
    tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = [[1, 5], [2, 2], [2, 3], [None, 4], [None, "N/A"]]
    rows = []
    for number, pair in enumerate(scores):
        rows.append({"prompt": f"Say {number}", "responses": [" a", " b"], "scores": pair})
    data.preference_rows(source(tmp_path, rows, min_rating_gap=2), tokenizer, max_length=None)
    said = (
        "omitted: 1 prompts whose answers are rated alike, 1 prompts whose ratings differ by less than 2, "
        "3 answers without a rating, 1 prompts of one rated answer, 1 prompts without a rated answer"
    )
    found = capsys.readouterr().err.replace("\n", " ")
    assert sorted(said.removeprefix("omitted: ").split(", ")) == sorted(found.strip().split("omitted: ")[1].split(", "))


def test_prompts_are_read_without_their_pairs(tokenizer: Any, tmp_path: Path) -> None:
    alike = {"instruction": "Why", "completions": [scored(" a", overall_score=1), scored(" b", overall_score=1)]}
    found = data.prompt_rows(source(tmp_path, [ULTRAFEEDBACK, alike]), tokenizer, max_length=None)
    assert [prompt.text for prompt in found] == ["Say", "Why"]


def test_the_form_of_prompts_is_that_of_the_first_row_alone(tmp_path: Path) -> None:
    file = source(tmp_path, [ULTRAFEEDBACK] * 3)
    with open(file.name, "a") as rows:
        rows.write("no JSON\n")
    assert data.prompt_form(file) == "text"


def test_the_worse_answer_is_drawn_of_all_and_the_same_each_time(tokenizer: Any, tmp_path: Path) -> None:
    rows = []
    for number in range(60):
        answers = [f" answer {number} {rank}" for rank in range(4)]
        rows.append({"prompt": f"Say {number}", "responses": answers, "scores": [2, 9, 4, 3]})
    first, again = (data.preference_rows(source(tmp_path, rows), tokenizer, max_length=None) for _ in range(2))
    assert list(first) == list(again)
    ranks = [tokenizer.decode(row["rejected_ids"], skip_special_tokens=True)[-1] for row in first]
    assert {rank: ranks.count(rank) > 9 for rank in sorted(set(ranks))} == {"0": True, "2": True, "3": True}


LISTS = {"prompt": "Say", "responses": [" a", " b"], "scores": [1, 2]}
# The second row, its code and what is said of it.
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({**LISTS, "scores": [1]}, "D21", '"scores" has 1 values for 2 answers in "responses"'),
    ({**LISTS, "scores": 3}, "D21", '"scores" is the number 3; expected a list'),
    ({**LISTS, "scores": [1, "high"]}, "D21", "\"scores\" is 'high'; expected a finite number, true or false"),
    ({**LISTS, "scores": [1, "inf"]}, "D21", "\"scores\" is 'inf'; expected a finite number, true or false"),
    ({**LISTS, "scores": [True, 1]}, "D21", '"scores" is True here, a number in line 1'),
    (
        {"prompt": "Say", "scores": [1, 2]},
        "D12",
        'no column "responses", which rows of lists of answers and scores have',
    ),
]


@pytest.mark.parametrize(("row", "code", "text"), BAD)
def test_bad_ratings(row: dict[str, Any], code: str, text: str, tokenizer: Any, tmp_path: Path) -> None:
    rows = [LISTS, row]
    with pytest.raises(RLHFError) as error:
        data.preference_rows(source(tmp_path, rows), tokenizer, max_length=None)
    [problem] = error.value.problems
    assert (problem.code, problem.text) == (code, text)
    assert problem.where and problem.where.endswith("rated.jsonl:2")
    assert problem.hint == "correct the row, or set data.on_bad: drop"

    kept = data.preference_rows(source(tmp_path, rows, on_bad="drop"), tokenizer, max_length=None)
    assert len(kept) == 1 and kept.num_dropped == 1


NONE: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    ([labelled("Say", " a", True), labelled("Say", " b", True)], {}, '"label" is true of all 2 answers'),
    ([one("Say", " a", 3), one("Why", " b", 3)], {}, '"helpfulness" is 3 of all 2 answers'),
    ([one("Say", " a", 3), one("Why", " b", 2)], {}, 'worse answer by "helpfulness": 2 prompts of one rated answer'),
    ([LISTS], {"min_rating_gap": 2}, 'worse answer by "scores": 1 prompts whose ratings differ by less than 2'),
]


@pytest.mark.parametrize(("rows", "options", "text"), NONE)
def test_ratings_without_a_pair(
    rows: list[dict[str, Any]], options: dict[str, Any], text: str, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(RLHFError) as error:
        data.preference_rows(source(tmp_path, rows, **options), tokenizer, max_length=None)
    [problem] = error.value.problems
    assert problem.code == "D22" and text in problem.text
    assert error.value.exit_code == 2


def test_pairs_of_labels_are_split_by_prompt(tokenizer: Any, tmp_path: Path) -> None:
    """Both parts of data.eval_fraction together have each pair once."""
    rows = [labelled(f"Say {number // 2}", f" a {number}", bool(number % 2)) for number in range(60)]
    parts = []
    for held_out in (False, True):
        share = HoldoutSplit(0.3, 0, held_out)
        parts.append(data.preference_rows(source(tmp_path, rows, share=share), tokenizer, max_length=None))
    assert len(parts[0]) + len(parts[1]) == 30 and min(map(len, parts)) > 3
