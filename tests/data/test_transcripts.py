"""Dialogues written as one text (hh-rlhf), rows dropped by data.on_bad, and held-out splits."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli import data, jsonl, terminal
from rlhf_cli.config.sources import DataSource, HoldoutSplit
from rlhf_cli.errors import RLHFError

ONE = "\n\nHuman: Why?\n\nAssistant:"
TWO = "\n\nHuman: Hi\n\nAssistant: Yes:\n- a\n\n- b\n\nHuman: More\n\nAssistant:"
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes:\n- a\n\n- b"},
    {"role": "user", "content": "More"},
]
GOOD = {"prompt": "Tell me", "chosen": " Yes", "rejected": " No"}
SAME = {**GOOD, "rejected": " Yes"}


def source(folder: Path, *contents: dict[str, Any], **options: Any) -> DataSource:
    path = folder / "rows.jsonl"
    jsonl.write_jsonl(path, contents)
    return DataSource(str(path), **options)


def problems(read: Any, rows: DataSource, tokenizer: Any, **options: Any) -> list[Any]:
    with pytest.raises(RLHFError) as error:
        read(rows, tokenizer, **{"max_length": 999, **options})
    return error.value.problems


# --- transcripts


def test_pairs_of_transcripts_use_the_template_or_else_their_own_text(
    tokenizer: Any, chat: Any, tmp_path: Path
) -> None:
    rows = source(tmp_path, {"chosen": f"{TWO} Sure.", "rejected": f"{TWO} No."})
    (row,) = data.preference_rows(rows, chat, max_length=999)
    prompt, chosen = data.encode(chat, TURNS, "Sure.")
    assert row["prompt_ids"] == prompt and row["chosen_ids"] == prompt + chosen
    (row,) = data.preference_rows(rows, tokenizer, max_length=999)
    assert tokenizer.decode(row["prompt_ids"]) == TWO
    assert tokenizer.decode(row["chosen_ids"]) == f"{TWO} Sure.<eos>"
    assert tokenizer.decode(row["rejected_ids"]) == f"{TWO} No.<eos>"


def test_each_column_may_contain_a_dialogue(tokenizer: Any, chat: Any, tmp_path: Path) -> None:
    prompt_ids, response = data.encode(chat, TURNS, "Sure.")
    (row,) = data.sft_rows(source(tmp_path, {"prompt": TWO, "completion": " Sure."}), chat, max_length=999)
    assert row["input_ids"] == prompt_ids + response
    first, last = data.sft_rows(source(tmp_path, {"text": f"{TWO} Sure."}), chat, max_length=999)
    first_prompt, first_response = data.encode(chat, TURNS[:1], "Yes:\n- a\n\n- b")
    assert last == row and first["input_ids"] == first_prompt + first_response
    (prompt,) = data.prompt_rows(source(tmp_path, {"prompt": TWO}), chat, max_length=999)
    assert (prompt.ids, prompt.text) == (prompt_ids, TURNS)
    (prompt,) = data.prompt_rows(source(tmp_path, {"prompt": TWO}), tokenizer, max_length=999)
    assert tokenizer.decode(prompt.ids) == prompt.text == TWO
    pair_source = source(tmp_path, {"prompt": TWO, "chosen": "Sure.", "rejected": "No."})
    (pair,) = data.preference_rows(pair_source, chat, max_length=999)
    assert pair["chosen_ids"] == row["input_ids"]


def test_data_format_selects_how_texts_are_read(tokenizer: Any, chat: Any, tmp_path: Path) -> None:
    dialogue, plain = {"prompt": TWO, "completion": " Sure."}, {"prompt": "Why?", "completion": " Sure."}
    (row,) = data.sft_rows(source(tmp_path, dialogue, format="plain"), chat, max_length=999)
    assert chat.decode(row["input_ids"]) == f"{TWO} Sure.<|im_end|>"
    (_, row) = data.sft_rows(source(tmp_path, plain, dialogue), tokenizer, max_length=999)  # auto: by the first row
    assert tokenizer.decode(row["input_ids"]) == f"{TWO} Sure.<eos>"
    (problem,) = problems(data.sft_rows, source(tmp_path, plain, format="transcripts"), chat)
    assert problem.code == "D12" and "data.format" in str(problem)
    (problem,) = problems(data.sft_rows, source(tmp_path, {"prompt": f"{ONE} Well", "completion": " no"}), chat)
    assert problem.code == "D12" and "an assistant turn" in problem.text


PAIR = {"chosen": f"{TWO} Sure.", "rejected": f"{TWO} No."}


@pytest.mark.parametrize(
    ("bad", "code", "text"),
    [
        ({**PAIR, "chosen": f"{TWO} Sure.\n\nHuman: Thanks"}, "D12", "one assistant message"),
        ({**PAIR, "chosen": TWO}, "D09", '"chosen" is empty'),
        ({**PAIR, "rejected": TWO}, "D09", '"rejected" is empty'),
        ({"chosen": f"{ONE} a{TWO} b", "rejected": f"{ONE} c{TWO} b"}, "D12", "one assistant message"),
        ({**PAIR, "rejected": "No."}, "D12", '"rejected" does not begin with "Human:"'),
        ({**PAIR, "rejected": None}, "D06", '"rejected" is null'),
        ({**PAIR, "rejected": PAIR["chosen"]}, "D07", "equals"),
    ],
)
def test_bad_dialogues_have_a_code_or_are_dropped(
    chat: Any, tmp_path: Path, bad: dict[str, Any], code: str, text: str
) -> None:
    (problem,) = problems(data.preference_rows, source(tmp_path, PAIR, bad), chat)
    assert problem.code == code and text in problem.text and str(problem.where).endswith("rows.jsonl:2")
    lenient = source(tmp_path, PAIR, bad, bad, on_bad="drop")
    assert len(data.preference_rows(lenient, chat, max_length=999, on_identical="drop")) == 1
    (warning,) = terminal.emitted_warnings()
    assert f"warning[{code}]" in warning and "2 of 3 rows dropped: " in warning and "(first: line 2)" in warning


# --- data.on_bad


def test_on_bad_counts_each_dropped_row_once_by_its_fault(tokenizer: Any, tmp_path: Path) -> None:
    faults = [{"prompt": None}, {"prompt": None}, {"prompt": 7}, {"rejected": ""}, {"prompt": " ", "chosen": ""}]
    faults.append({"prompt": "Tell me " * 99})
    rows = source(tmp_path, *({**GOOD, **fault} for fault in faults), {"odd": 1}, GOOD, on_bad="drop")
    assert len(data.preference_rows(rows, tokenizer, max_length=99)) == 1
    warnings = {line.split("]")[0][-3:]: line for line in terminal.emitted_warnings()}
    assert set(warnings) == {"D06", "D09", "D08", "D10", "D12"}
    null = '"prompt" is null; expected text or a list of messages; the others are similar (first: line 1)'
    assert f"3 of 8 rows dropped: {null}" in warnings["D06"]
    assert "1 of 8 rows dropped: the prompt is empty (first: line 5)" in warnings["D08"]
    assert sum(int(line.split(" of 8")[0].split()[-1]) for line in warnings.values()) == 7
    mixed = {**GOOD, "chosen": [{"role": "assistant", "content": "Yes"}]}  # the first usable row is the schema
    assert len(data.preference_rows(source(tmp_path, mixed, GOOD, on_bad="drop"), tokenizer, max_length=99)) == 1
    for contents, code in ((SAME, "D07"), ({**GOOD, "prompt": "Tell me " * 99}, "D10")):
        rows = source(tmp_path, GOOD, contents, on_bad="drop")
        (problem,) = problems(data.preference_rows, rows, tokenizer, max_length=99, on_long="error")
        assert problem.code == code


# --- held-out splits

PROMPTS = [f"Question {number}?" for number in range(400)]


def split(tokenizer: Any, path: Path, read: Any, fraction: float, seed: int) -> tuple[Counter[int], Counter[int]]:
    """Return the counts of the training and of the held-out prompts by number."""
    counts = []
    for held_out in (False, True):
        share = HoldoutSplit(fraction, seed, held_out)
        rows = read(DataSource(str(path), share=share), tokenizer, max_length=999)
        ids = [row.ids if read is data.prompt_rows else row.get("prompt_ids") or row["input_ids"] for row in rows]
        decoded = [tokenizer.decode(each) for each in ids]
        counts.append(Counter(int(text.partition("Question ")[2].partition("?")[0]) for text in decoded))
    return counts[0], counts[1]


@pytest.mark.full
def test_every_form_order_and_file_holds_out_the_same_prompts(chat: Any, tmp_path: Path) -> None:
    answer = [{"role": "assistant", "content": "Yes"}]
    more = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "No"}]
    turns = [[{"role": "system", "content": "Be"}, {"role": "user", "content": f" {text}\n"}] for text in PROMPTS]
    dialogues = [f"\n\nHuman: {prompt}\n\nAssistant:" for prompt in PROMPTS]
    forms: list[tuple[Any, int, list[dict[str, Any]]]] = [  # reader, rows per prompt, rows
        (data.prompt_rows, 1, [{"prompt": prompt} for prompt in PROMPTS]),
        (data.sft_rows, 1, [{"prompt": f"{prompt} ", "completion": " Yes"} for prompt in PROMPTS]),
        (data.sft_rows, 2, [{"messages": question + answer + more} for question in reversed(turns)]),
        (data.preference_rows, 2, [{"prompt": prompt, "chosen": "Yes", "rejected": "No"} for prompt in PROMPTS * 2]),
        (data.preference_rows, 1, [{"chosen": f"{text} Yes", "rejected": f"{text} No"} for text in dialogues]),
    ]
    held_out = []
    for number, (read, count, contents) in enumerate(forms):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(contents))
        training, held_out_prompts = split(chat, path, read, 0.25, 0)
        assert set(training) | set(held_out_prompts) == set(range(400)) and not set(training) & set(held_out_prompts)
        assert set((training + held_out_prompts).values()) == {count}
        held_out.append(set(held_out_prompts))
    assert all(numbers == held_out[0] for numbers in held_out) and 70 < len(held_out[0]) < 130  # a quarter of 400


def test_the_seed_changes_the_held_out_prompts_and_a_larger_fraction_adds_some(tokenizer: Any, tmp_path: Path) -> None:
    jsonl.write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    settings = ((0.25, 0), (0.25, 1), (0.5, 0))
    splits = (split(tokenizer, tmp_path / "a.jsonl", data.prompt_rows, *each) for each in settings)
    first, other_seed, larger = (set(held_out) for _, held_out in splits)
    assert first < larger and 0 < len(first & other_seed) < 60


def test_d05_of_an_empty_split_names_the_fraction(tokenizer: Any, tmp_path: Path) -> None:
    rows = source(tmp_path, {"prompt": "Question 1?"}, share=HoldoutSplit(1e-9, 0, held_out=True))
    (problem,) = problems(data.prompt_rows, rows, tokenizer)
    assert "1 read, none of them in the part selected by data.eval_fraction 1e-09" in problem.text
