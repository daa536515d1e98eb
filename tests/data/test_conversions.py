"""Rows of other tools become rlhf's columns."""

from pathlib import Path
from typing import Any

import pytest
from bad_inputs import check

from rlhf_cli import data, jsonl
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data import conversions
from rlhf_cli.errors import RLHFError
from tests.conftest import turns
from tests.data.test_bad_rows import ALPACA, ANSWERED, RANKED, write
from tests.data.test_rows_of_other_tools import dialogue, messages, texts_of, turn


def test_what_becomes_of_rows_of_sharegpt_and_alpaca() -> None:
    user, good, bad = (
        {"role": "user", "content": "Tell me about it.\n\nThe sun."},
        *({"role": "assistant", "content": text} for text in ("bright", "dull")),
    )
    assert conversions.convert_row(
        {**ALPACA, "system": "Be brief.", "output": "bright", "history": [["Hi.", "bright"]]}
    ) == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}, good, user, good]
    }
    assert conversions.convert_row({**ALPACA, "history": "", "output": "bright"}) == {
        "messages": [user, good]
    }  # of a CSV
    assert conversions.convert_row({**RANKED, "chosen": "bright", "rejected": "dull"}) == {
        "prompt": [{"role": "user", "content": "Tell me about it."}], "chosen": [good], "rejected": [bad],
    }  # fmt: skip


DIALOGUES = {name: f"Human: Say 0\n\nAssistant: {text}" for name, text in (("chosen", "yes"), ("rejected", "no"))}
QUESTION = {"from": "human", "value": "Say 0\n"}


@pytest.mark.parametrize(
    "row",
    [
        {**RANKED, **{name: f"Q: {RANKED['instruction']} A: {RANKED[name]}" for name in ("chosen", "rejected")}},
        {"instruction": "Say 0 ", **DIALOGUES},
        {"instruction": "", **DIALOGUES},
        {"instruction": "Other words, beside transcripts.", **DIALOGUES},
        {"conversations": [QUESTION], **DIALOGUES},
        {"conversations": [{"from": "system", "value": "Be brief."}, QUESTION, ANSWERED], **DIALOGUES},
    ],
)
def test_whole_dialogues_beside_their_question_are_pairs_as_they_stand(folder: Path, row: dict[str, Any]) -> None:
    assert conversions.target_form(row) is None
    write("pairs", *[row] * 64)
    done = check("reward.yaml")
    assert done.exit_code == 0 and "64 rows" in done.output, done.output


@pytest.mark.parametrize("asked", [{"instruction": "Hi."}, {"conversations": [{"from": "human", "value": "Hi."}]}])
def test_an_answer_that_repeats_its_question_is_no_dialogue(asked: dict[str, Any]) -> None:
    """The other answer does not begin so: read as it stands, the pair would lose its prompt."""
    assert conversions.target_form({**asked, "chosen": "Hi. I am here.", "rejected": "What?"}) == conversions.PAIR_FORM


@pytest.mark.parametrize("share", [0.4, 0.6])
def test_a_prompt_is_taken_off_where_most_answers_begin_with_it(tmp_path: Path, tokenizer: Any, share: float) -> None:
    """The other answers stay as they are."""
    rows = []
    for number in range(10):
        prompt, chosen, rejected = texts_of(number)
        before = f"{prompt} " if number < 10 * share else ""
        rows.append({"prompt": prompt, "chosen": before + chosen, "rejected": before + rejected})
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", rows)
    source = DataSource(str(tmp_path / "pairs.jsonl"))
    found = data.preference_rows(source, tokenizer, max_length=None)
    answers = [tokenizer.decode(row["chosen_ids"][len(row["prompt_ids"]) :]) for row in (found[0], found[9])]
    first = " The thing is fine 0.<eos>" if share > 0.5 else "How is thing 0? The thing is fine 0.<eos>"
    assert answers == [first, "The thing is fine 9.<eos>"] and not found.dropped
    kept = data.preference_rows(DataSource(source.name, format="plain"), tokenizer, max_length=None)
    assert tokenizer.decode(kept[0]["chosen_ids"]).startswith("How is thing 0?How is thing 0?")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Rain", "chosen": "Rain is bright.", "rejected": "Rain is grim."},
        {"prompt": "a", "chosen": "apple pie", "rejected": "ant"},
        {"prompt": "Name the sun", "chosen": "Name the sunny day.", "rejected": "Name the sunless day."},
    ],
)
def test_an_answer_may_begin_with_the_words_that_it_explains(tmp_path: Path, tokenizer: Any, row: dict) -> None:
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", [row] * 9)
    found = data.preference_rows(tmp_path / "pairs.jsonl", tokenizer, max_length=None)
    assert tokenizer.decode(found[0]["chosen_ids"]) == f"{row['prompt']}{row['chosen']}<eos>"


def test_sft_takes_the_prompt_off_a_completion(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": f"{p} ", "completion": f"{p} {c}"} for p, c, _ in map(texts_of, range(9))]
    jsonl.write_jsonl(tmp_path / "rows.jsonl", rows)
    found = data.sft_rows(tmp_path / "rows.jsonl", tokenizer, max_length=None)
    assert tokenizer.decode(found[3]["input_ids"]) == "How is thing 3? The thing is fine 3.<eos>"


def test_sft_reads_whole_dialogues_beside_a_prompt_as_pairs_are_read(tmp_path: Path, chat: Any, tokenizer: Any) -> None:
    answer = dialogue("How is it?", "Fine.") + dialogue("Why?", "The sun is up.")
    jsonl.write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "How is it?", "chosen": answer, "rejected": "x"}])
    source = DataSource(str(tmp_path / "rows.jsonl"), columns={"completion": "chosen"})
    (row,) = data.sft_rows(source, chat, max_length=None)
    turns = [*messages("How is it?", "Fine."), turn("user", "Why?")]
    prompt, response = data.encode(chat, turns, "The sun is up.")
    assert (row["input_ids"], sum(row["completion_mask"])) == (prompt + response, len(response))
    (row,) = data.sft_rows(source, tokenizer, max_length=None)
    assert tokenizer.decode(row["input_ids"]) == f"{answer}<eos>"


ANSWER = [{"role": "assistant", "content": "yes"}]
OTHER = [{"role": "assistant", "content": "no"}]


def in_parts(role: str, *texts: str, kind: str = "text") -> dict[str, Any]:
    return {"role": role, "content": [{"type": kind, "text": text} for text in texts]}


def test_text_parts_are_joined_and_others_refused(
    chat: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = {"prompt": turns("Say it"), "chosen": ANSWER, "rejected": OTHER}
    parts = {
        "prompt": [in_parts("user", "Say ", "it")],
        "chosen": [in_parts("assistant", "yes", kind="output_text")],
        "rejected": [in_parts("assistant", "no")],
    }
    jsonl.write_jsonl(tmp_path / "plain.jsonl", [plain])
    jsonl.write_jsonl(tmp_path / "parts.jsonl", [parts, {**parts, "prompt": turns("And it")}])
    [expected] = data.preference_rows(tmp_path / "plain.jsonl", chat, max_length=None)
    [found, _] = data.preference_rows(tmp_path / "parts.jsonl", chat, max_length=None)
    assert found == expected
    assert "parts.jsonl: contents of messages that are lists of text parts: joined" in capsys.readouterr().err

    image = {"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": "x"}]}
    jsonl.write_jsonl(tmp_path / "image.jsonl", [{**parts, "prompt": [image]}])
    with pytest.raises(RLHFError) as error:
        data.preference_rows(tmp_path / "image.jsonl", chat, max_length=None)
    [problem] = error.value.problems
    assert (problem.code, problem.text) == ("D06", "a message has a part of type 'image_url'; rlhf reads text alone")
    assert problem.where and problem.where.endswith("image.jsonl:1")
