"""Dialogues written as one text (hh-rlhf), the rows that data.on_bad leaves out, and the share that is held out."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import World

from rlhf_cli import data, jsonl, terminal
from rlhf_cli.config.sources import DataSource, HoldoutSplit
from rlhf_cli.data import other_formats
from rlhf_cli.data.readers import BadRow
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import tokenizers

ONE = "\n\nHuman: Why?\n\nAssistant:"
TWO = "\n\nHuman: Hi\n\nAssistant: Yes:\n- a\n\n- b\n\nHuman: More\n\nAssistant:"
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes:\n- a\n\n- b"},
    {"role": "user", "content": "More"},
]


@pytest.fixture
def plain(world: World) -> Any:
    return world.tokenizer()


@pytest.fixture
def chat(world: World) -> Any:
    tokenizer = world.tokenizer()
    tokenizers.set_chat_template(tokenizer, "chatml")
    return tokenizer


def source(folder: Path, *contents: dict[str, Any], **options: Any) -> DataSource:
    path = folder / "rows.jsonl"
    jsonl.write_jsonl(path, contents)
    return DataSource(str(path), **options)


# --- transcripts


def test_a_transcript_becomes_its_turns_and_back() -> None:
    assert (
        other_formats.parse_transcript_prompt(TWO, "prompt") == TURNS and other_formats.render_transcript(TURNS) == TWO
    )
    assert other_formats.parse_transcript_prompt(ONE, "prompt") == [{"role": "user", "content": "Why?"}]
    assert other_formats.render_transcript(other_formats.parse_transcript_prompt(ONE, "prompt")) == ONE
    answered = other_formats.parse_transcript(f"{TWO} Human: is no turn here\n", "chosen")
    assert answered == [*TURNS, {"role": "assistant", "content": "Human: is no turn here"}]


@pytest.mark.parametrize("text", ["Why?", "Assistant", "Well.\n\nHuman: Why?\n\nAssistant:", ""])
def test_what_begins_with_no_turn_is_no_transcript(text: str) -> None:
    assert not other_formats.is_transcript(text)
    with pytest.raises(BadRow) as bad:
        other_formats.parse_transcript(text, "prompt")
    assert bad.value.code == "D12"


def test_pairs_of_transcripts_are_conversations_with_a_template_and_their_own_text_without(
    plain: Any, chat: Any, tmp_path: Path
) -> None:
    found = source(tmp_path, {"chosen": f"{TWO} Sure.", "rejected": f"{TWO} No."})
    (row,) = data.preference_rows(found, chat, max_length=999)
    prompt, chosen = data.encode(chat, TURNS, "Sure.")
    assert row["prompt_ids"] == prompt and row["chosen_ids"] == prompt + chosen
    (row,) = data.preference_rows(found, plain, max_length=999)
    assert plain.decode(row["prompt_ids"]) == TWO
    assert plain.decode(row["chosen_ids"]) == f"{TWO} Sure.<eos>"
    assert plain.decode(row["rejected_ids"]) == f"{TWO} No.<eos>"


def test_each_column_that_may_hold_a_dialogue(plain: Any, chat: Any, tmp_path: Path) -> None:
    wanted = data.encode(chat, TURNS, "Sure.")
    (row,) = data.sft_rows(source(tmp_path, {"prompt": TWO, "completion": " Sure."}), chat, max_length=999)
    assert row["input_ids"] == wanted[0] + wanted[1]
    first, last = data.sft_rows(source(tmp_path, {"text": f"{TWO} Sure."}), chat, max_length=999)
    asked, answer = data.encode(chat, TURNS[:1], "Yes:\n- a\n\n- b")
    assert last == row and first["input_ids"] == asked + answer
    (prompt,) = data.prompt_rows(source(tmp_path, {"prompt": TWO}), chat, max_length=999)
    assert (prompt.ids, prompt.text) == (wanted[0], TURNS)
    (prompt,) = data.prompt_rows(source(tmp_path, {"prompt": TWO}), plain, max_length=999)
    assert plain.decode(prompt.ids) == prompt.text == TWO
    both = source(tmp_path, {"prompt": TWO, "chosen": "Sure.", "rejected": "No."})
    (pair,) = data.preference_rows(both, chat, max_length=999)
    assert pair["chosen_ids"] == row["input_ids"]


def test_format_says_how_texts_are_read(plain: Any, chat: Any, tmp_path: Path) -> None:
    whole = {"prompt": TWO, "completion": " Sure."}
    (row,) = data.sft_rows(source(tmp_path, whole, format="plain"), chat, max_length=999)
    assert chat.decode(row["input_ids"]) == f"{TWO} Sure.<|im_end|>"
    other = {"prompt": "Why?", "completion": " Sure."}
    (_, row) = data.sft_rows(source(tmp_path, other, whole), plain, max_length=999)  # auto goes by the first row
    assert plain.decode(row["input_ids"]) == f"{TWO} Sure.<eos>"
    with pytest.raises(RLHFError) as error:
        data.sft_rows(source(tmp_path, other, format="transcripts"), chat, max_length=999)
    assert error.value.problems[0].code == "D12" and "data.format" in str(error.value)


PAIR = {"chosen": f"{TWO} Sure.", "rejected": f"{TWO} No."}
ODD = [
    ({**PAIR, "chosen": f"{TWO} Sure.\n\nHuman: Thanks"}, "D12", "one assistant message"),
    ({**PAIR, "chosen": TWO}, "D09", '"chosen" is empty'),
    ({**PAIR, "rejected": TWO}, "D09", '"rejected" is empty'),
    ({"chosen": f"{ONE} a{TWO} b", "rejected": f"{ONE} c{TWO} b"}, "D12", "one assistant message"),
    ({**PAIR, "rejected": "No."}, "D12", '"rejected" does not begin with "Human:"'),
    ({**PAIR, "rejected": None}, "D06", '"rejected" is null'),
    ({**PAIR, "rejected": PAIR["chosen"]}, "D07", "equals"),
]  # fmt: skip


@pytest.mark.parametrize(("odd", "code", "text"), ODD)
def test_odd_dialogues_have_a_code_or_are_left_out(
    chat: Any, tmp_path: Path, odd: dict[str, Any], code: str, text: str
) -> None:
    with pytest.raises(RLHFError) as error:
        data.preference_rows(source(tmp_path, PAIR, odd), chat, max_length=999)
    (problem,) = error.value.problems
    assert problem.code == code and text in problem.text and str(problem.where).endswith("rows.jsonl:2")
    lenient = source(tmp_path, PAIR, odd, odd, on_bad="drop")
    assert len(data.preference_rows(lenient, chat, max_length=999, on_identical="drop")) == 1
    (said,) = terminal.emitted_warnings()
    assert said.startswith(f"warning[{code}]") and "2 of 3 rows dropped: " in said and "(first: line 2)" in said


def test_a_prompt_that_ends_in_words_of_the_assistant_is_refused(chat: Any, tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as error:
        data.sft_rows(source(tmp_path, {"prompt": f"{ONE} Well", "completion": " no"}), chat, max_length=999)
    assert error.value.problems[0].code == "D12" and "an assistant turn" in str(error.value)


# --- data.on_bad


GOOD = {"prompt": "Tell me", "chosen": " Yes", "rejected": " No"}
SAME = {**GOOD, "rejected": " Yes"}


def test_rows_left_out_are_counted_by_fault_wherever_they_stand(plain: Any, tmp_path: Path) -> None:
    bad = [
        {"prompt": None},
        {"prompt": 7},
        {"rejected": ""},
        {"prompt": " ", "chosen": ""},
        {"prompt": "Tell me " * 99},
    ]
    contents = [{**GOOD, "prompt": None}, *[{**GOOD, **one} for one in bad], {"odd": 1}, GOOD]
    found = source(tmp_path, *contents, on_bad="drop")
    assert len(data.preference_rows(found, plain, max_length=99)) == 1
    told = {line.split("]")[0][-3:]: line for line in terminal.emitted_warnings()}
    assert set(told) == {"D06", "D09", "D08", "D10", "D12", "D02"} - {"D02"}
    null = '"prompt" is null; expected text or a list of messages; the others are similar (first: line 1)'
    assert f"3 of 8 rows dropped: {null}" in told["D06"]
    assert "1 of 8 rows dropped: the prompt is empty (first: line 5)" in told["D08"]
    assert sum(int(line.split(" of 8")[0].split()[-1]) for line in told.values()) == 7  # every row once


def test_the_keys_of_identical_and_long_rows_are_their_own(plain: Any, tmp_path: Path) -> None:
    for contents, code in ((SAME, "D07"), ({**GOOD, "prompt": "Tell me " * 99}, "D10")):
        with pytest.raises(RLHFError) as error:
            data.preference_rows(source(tmp_path, GOOD, contents, on_bad="drop"), plain, max_length=99, on_long="error")
        assert [problem.code for problem in error.value.problems] == [code]


def test_nothing_left_is_d05_with_the_breakdown(plain: Any, tmp_path: Path) -> None:
    found = source(tmp_path, {**GOOD, "rejected": ""}, {**GOOD, "prompt": ""}, {**GOOD, "chosen": " "}, on_bad="drop")
    with pytest.raises(RLHFError) as error:
        data.preference_rows(found, plain, max_length=99)
    assert error.value.problems[0].code == "D05"
    assert '3 read, dropped 2 "rejected" is empty; the others are similar; 1 the prompt is empty' in str(error.value)


def test_the_hint_of_many_bad_rows_is_what_helps(plain: Any, tmp_path: Path) -> None:
    for contents, hint in (({**GOOD, "rejected": ""}, "set data.on_bad: drop"), (SAME, None)):
        with pytest.raises(RLHFError) as error:
            data.preference_rows(source(tmp_path, *[contents] * 9), plain, max_length=99)
        last = error.value.problems[-1]
        assert last.text.startswith("9 of 9 rows are bad") and last.hint == hint


def test_a_conversation_that_the_template_refuses_is_one_row_left_out(plain: Any, tmp_path: Path) -> None:
    plain.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m['content'] + eos_token }}{% endfor %}"
    )
    answers = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    good = {"prompt": [{"role": "user", "content": "Hi"}], **answers}
    bad = {"prompt": [{"role": "system", "content": "Hi"}], **answers}
    assert len(data.preference_rows(source(tmp_path, bad, good, good, on_bad="drop"), plain, max_length=99)) == 2
    (said,) = [line for line in terminal.emitted_warnings() if "D06" in line]
    assert "1 of 3 rows dropped: the chat template rejects" in said and "(first: line 1)" in said


# --- the share that is held out

PROMPTS = [f"Question {number}?" for number in range(400)]


def split(tokenizer: Any, path: Path, read: Any = data.prompt_rows, **options: Any) -> tuple[list[str], list[str]]:
    """The texts of the learnt and of the held-out rows."""
    parts = []
    for held_out in (False, True):
        share = HoldoutSplit(options.get("fraction", 0.25), options.get("seed", 0), held_out)
        found = read(DataSource(str(path), share=share), tokenizer, max_length=999)
        ids = [row.ids if read is data.prompt_rows else row.get("prompt_ids") or row["input_ids"] for row in found]
        parts.append([tokenizer.decode(one) for one in ids])
    return parts[0], parts[1]


def numbers(texts: list[str]) -> Counter[int]:
    return Counter(int(text.partition("Question ")[2].partition("?")[0]) for text in texts)


def test_the_same_prompts_are_held_out_of_every_form_of_data_order_and_file(chat: Any, tmp_path: Path) -> None:
    answer = [{"role": "assistant", "content": "Yes"}]
    dialogues = [f"\n\nHuman: {prompt}\n\nAssistant:" for prompt in PROMPTS]
    more = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "No"}]
    asked = {
        prompt: [{"role": "system", "content": "Be"}, {"role": "user", "content": f" {prompt}\n"}] for prompt in PROMPTS
    }
    forms: list[tuple[Any, list[dict[str, Any]]]] = [
        (data.prompt_rows, [{"prompt": prompt} for prompt in PROMPTS]),
        (data.sft_rows, [{"prompt": f"{prompt} ", "completion": " Yes"} for prompt in PROMPTS]),
        (data.sft_rows, [{"messages": asked[prompt] + answer + more} for prompt in reversed(PROMPTS)]),
        (data.preference_rows, [{"prompt": prompt, "chosen": "Yes", "rejected": "No"} for prompt in PROMPTS * 2]),
        (data.preference_rows, [{"chosen": f"{said} Yes", "rejected": f"{said} No"} for said in dialogues]),
    ]  # fmt: skip
    held = []
    for number, (read, contents) in enumerate(forms):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(contents))
        learnt, kept = (numbers(texts) for texts in split(chat, path, read))
        assert set(learnt) | set(kept) == set(range(400)) and not set(learnt) & set(kept)
        assert set((learnt + kept).values()) == {1 if number not in (2, 3) else 2}  # each row, each turn
        held.append(set(kept))
    assert all(one == held[0] for one in held) and 70 < len(held[0]) < 130  # a quarter of 400


def test_another_seed_holds_out_others_and_a_larger_fraction_more_of_the_same(plain: Any, tmp_path: Path) -> None:
    jsonl.write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    kept = {
        (fraction, seed): set(split(plain, tmp_path / "a.jsonl", fraction=fraction, seed=seed)[1])
        for fraction, seed in ((0.25, 0), (0.25, 1), (0.5, 0))
    }
    assert kept[0.25, 0] < kept[0.5, 0] and 0 < len(kept[0.25, 0] & kept[0.25, 1]) < 60


def test_d05_of_a_share_says_so(plain: Any, tmp_path: Path) -> None:
    found = source(tmp_path, {"prompt": "Question 1?"}, share=HoldoutSplit(1e-9, 0, held_out=True))
    with pytest.raises(RLHFError) as error:
        data.prompt_rows(found, plain, max_length=99)
    assert "1 read, none of them in the part selected by data.eval_fraction 1e-09" in str(error.value)
