"""Files to tokens: the one encoder, the forms of rows, faults of rows, and the order of rows.

Modules: `data/column_hints.py`.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from rlhf_cli import data, jsonl, terminal
from rlhf_cli.config.sources import DataSource, HoldoutSplit
from rlhf_cli.data.readers import RowLocation
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import tokenizers
from tests.conftest import SHARED

USER = {"role": "user", "content": "Hi"}
PAIR = {"prompt": "Tell me", "chosen": " Yes", "rejected": " No"}


NAMES, LONG_NAME = "does the first line name the columns? if so,", f"How do I make {'a very ' * 40}good soup?"


def turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def write(folder: Path, *contents: Any) -> Path:
    path = folder / "rows.jsonl"
    jsonl.write_jsonl(path, contents)
    return path


def error_of(read: Any, path: Path | DataSource, tokenizer: Any, **options: Any) -> RLHFError:
    with pytest.raises(RLHFError) as error:
        read(path, tokenizer, **{"max_length": 99, **options})
    assert error.value.exit_code == 2
    return error.value


# --- the encoder


def test_decode_stream_yields_each_character_once_it_is_complete(tokenizer: Any) -> None:
    ids = [*tokenizer("The é🙂")["input_ids"], tokenizer.eos_token_id]
    stream = iter(ids)
    assert next(data.decode_stream(tokenizer, stream)) == tokenizer.decode(ids[:1])
    assert next(stream) == ids[1]  # no token was read ahead
    pieces = list(data.decode_stream(tokenizer, ids))
    assert "".join(pieces) == "The é🙂" and len(pieces) == len(ids) + 1
    assert {piece for piece in pieces if not piece.isascii()} == {"é", "🙂"}
    truncated = list(data.decode_stream(tokenizer, ids[:-2]))
    assert truncated[-1] == "\N{REPLACEMENT CHARACTER}" and "".join(truncated[:-1]) == "The é"
    assert "".join(data.decode_stream(tokenizer, ids, special=True)) == "The é🙂<eos>"


def test_prompt_and_response_are_tokenised_separately_and_end_in_one_stop_token(tokenizer: Any) -> None:
    prompt, response = data.encode(tokenizer, "Tell me about the s", "un.")
    joined = tokenizer("Tell me about the sun.").input_ids
    assert prompt + response != [*joined, tokenizer.eos_token_id]  # joined, "sun" would be one token
    assert tokenizer.decode(prompt) == "Tell me about the s" and tokenizer.decode(response) == "un.<eos>"
    assert data.encode(tokenizer, "Tell", None)[1] == []
    assert data.encode(tokenizer, "A", "B<eos>") == data.encode(tokenizer, "A", "B")
    assert data.stop_token_id(tokenizer) == tokenizer.eos_token_id


def test_a_prompt_keeps_the_added_start_token_and_loses_the_added_end_token(tokenizer: Any) -> None:
    bare = tokenizer("Tell me").input_ids
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    special = [("<bos>", bos), ("<eos>", eos)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A <eos>", special_tokens=special)
    assert tokenizer("Tell me").input_ids == [bos, *bare, eos]
    assert data.encode(tokenizer, "Tell me", "Tell me") == ([bos, *bare], [*bare, eos])


def test_a_conversation_is_the_templates_rendering_up_to_the_stop_token(chat: Any) -> None:
    turns = [turn("user", "Hi there"), turn("assistant", "Yes."), turn("user", "More")]
    prompt, response = data.encode(chat, turns, "All of it.")
    rendered = chat.apply_chat_template([*turns, turn("assistant", "All of it.")], tokenize=False)
    assert rendered.endswith("<|im_end|>\n")
    assert chat.decode(prompt + response) == rendered.removesuffix("\n")
    assert response[-1] == data.stop_token_id(chat) == chat.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.parametrize("name", ["stories260K", "reviews-sft"])
def test_encode_many_equals_encode(name: str) -> None:
    if not (SHARED / "models" / name).is_dir():
        pytest.skip(f"../shared/models/{name} is missing")
    tokenizer = tokenizers.load_tokenizer(SHARED / "models" / name)
    texts = (SHARED / "data/rt-polarity/pos.txt").read_text(encoding="utf-8").splitlines()[:50]
    pairs = list(pairwise(texts))
    many = data.encode_many(tokenizer, [a for a, _ in pairs], [b for _, b in pairs])
    start = [tokenizer.bos_token_id] if name == "stories260K" else []
    for (prompt, response), ids in zip(pairs, many, strict=True):
        assert ids == data.encode(tokenizer, prompt, response)
        assert ids[0] == start + tokenizer(prompt, add_special_tokens=False).input_ids
        alone = tokenizer(response, add_special_tokens=False).input_ids
        if name == "stories260K":  # of the SentencePiece kind
            assert tokenizer.convert_ids_to_tokens(tokenizer("\n").input_ids) == ["<s>", "▁", "<0x0A>"]
            alone = tokenizer(f"\n{response}").input_ids[3:]
        assert ids[1] == [*alone, tokenizer.eos_token_id]


# --- the forms of rows


def test_prompt_and_completion_and_plain_text_whose_tokens_are_all_trained(tokenizer: Any, tmp_path: Path) -> None:
    prompt, response = data.encode(tokenizer, "Tell me.", " Yes.")
    path = write(tmp_path, {"prompt": "Tell me.", "completion": " Yes."})
    (row,) = data.sft_rows(path, tokenizer, max_length=99)
    assert row == {"input_ids": prompt + response, "completion_mask": [0] * len(prompt) + [1] * len(response)}
    renamed = write(tmp_path, {"question": "Tell me.", "completion": " Yes.", "prompt": 7})
    assert data.sft_rows(DataSource(str(renamed), columns={"prompt": "question"}), tokenizer, max_length=99) == [row]
    (row,) = data.sft_rows(write(tmp_path, {"text": "The sun."}), tokenizer, max_length=99)
    assert tokenizer.decode(row["input_ids"]) == "The sun.<eos>" and set(row["completion_mask"]) == {1}
    assert data.is_plain_text(tmp_path / "rows.jsonl")


def test_messages_give_an_example_per_assistant_turn(chat: Any, tmp_path: Path) -> None:
    turns = [turn("system", "Be brief."), USER, turn("assistant", "One."), turn("user", "On"), turn("assistant", "Two")]
    examples = data.sft_rows(write(tmp_path, {"messages": turns}), chat, max_length=99)
    expected = [data.encode(chat, turns[:2], "One."), data.encode(chat, turns[:4], "Two")]
    assert [row["input_ids"] for row in examples] == [prompt + response for prompt, response in expected]
    assert [sum(row["completion_mask"]) for row in examples] == [len(response) for _, response in expected]
    split = write(tmp_path, {"prompt": turns[:4], "completion": turns[4:]})
    assert data.sft_rows(split, chat, max_length=99) == examples[1:]


def test_pairs(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "Tell", "chosen": " me.", "rejected": " on", "margin": 2})
    (row,) = data.preference_rows(path, tokenizer, max_length=99)
    prompt, chosen = data.encode(tokenizer, "Tell", " me.")
    _, rejected = data.encode(tokenizer, "Tell", " on")
    ids = {"prompt_ids": prompt, "chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected}
    assert row == {**ids, "margin": 2.0}


@pytest.mark.parametrize(
    ("chosen", "rejected", "parts"),
    [
        ("Q: why? A: yes it is", "Q: why? A: no", ("Q: why? A:", " yes it is", " no")),
        ("Q: why? A: yes", "Q: why? A: yep", ("Q: why? A:", " yes", " yep")),  # not inside a word
        ("Human: hi\n\nBot: a b", "Human: hi\n\nBot: a c", ("Human: hi\n\nBot:", " a b", " a c")),  # not in an answer
        (
            "Tell me more. No",
            "Tell me more. No.",
            ("Tell me more.", " No", " No."),
        ),  # one is the beginning of the other
        ("Why?\nThe sun is up", "Why?\nThe sun is down", ("Why?", "\nThe sun is up", "\nThe sun is down")),
        ("[INST] Hi [/INST] Yes", "[INST] Hi [/INST] You", ("[INST] Hi [/INST]", " Yes", " You")),
        ("Hi. Why? Yes. I am.", "Hi. Why? Yes. I do.", ("Hi. Why? Yes.", " I am.", " I do.")),
        ("Q: What is 2?\nIt is 2", "Q: What is 2?\nIt was 2", ("Q: What is 2?", "\nIt is 2", "\nIt was 2")),
        ("POST: A dog.\nTL;DR: dog a", "POST: A dog.\nTL;DR: dog b", ("POST: A dog.\nTL;DR:", " dog a", " dog b")),
        ("USER: q ASSISTANT: yes", "USER: q ASSISTANT: you", ("USER: q ASSISTANT:", " yes", " you")),
        ("Take plan a: or b?\nYes", "Take plan a: or b?\nYou", ("Take plan a: or b?", "\nYes", "\nYou")),
        ("<start_of_turn>model\nDo a", "<start_of_turn>model\nDo b", ("<start_of_turn>model", "\nDo a", "\nDo b")),
        ("\u4f60\u597d\uff1f\u6211a", "\u4f60\u597d\uff1f\u6211b", ("\u4f60\u597d\uff1f", "\u6211a", "\u6211b")),
    ],
)
def test_the_prompt_of_two_texts_is_their_common_beginning_of_whole_turns(
    tokenizer: Any, tmp_path: Path, chosen: str, rejected: str, parts: tuple[str, str, str]
) -> None:
    (row,) = data.preference_rows(write(tmp_path, {"chosen": chosen, "rejected": rejected}), tokenizer, max_length=99)
    assert tokenizer.decode(row["prompt_ids"]) == parts[0]
    for name, text in zip(("chosen_ids", "rejected_ids"), parts[1:], strict=True):
        assert tokenizer.decode(row[name][len(row["prompt_ids"]) :]) == f"{text}<eos>"


def test_implicit_explicit_and_repeated_prompts_of_conversations_are_the_same(chat: Any, tmp_path: Path) -> None:
    turns = [USER, turn("assistant", "Yes?"), turn("user", "Why")]
    good, bad = turn("assistant", "Because."), turn("assistant", "No.")
    full = {"chosen": [*turns, good], "rejected": [*turns, bad]}
    forms = [full, {"prompt": turns, "chosen": [good], "rejected": [bad]}, {"prompt": turns, **full}]
    forms.append({"prompt": "Hi", **full})  # as in UltraFeedback
    results = [data.preference_rows(write(tmp_path, form), chat, max_length=99) for form in forms]
    prompt, chosen = data.encode(chat, turns, "Because.")
    assert results[0][0]["chosen_ids"] == prompt + chosen and results[0][0]["prompt_ids"] == prompt
    assert all(rows == results[0] for rows in results)


def test_a_prompt_and_answers_of_which_one_is_messages(chat: Any, tmp_path: Path) -> None:
    prompt, chosen = data.encode(chat, [USER], "Yes")
    answers = {"chosen": [turn("assistant", "Yes")], "rejected": [turn("assistant", "No")]}
    for form in ({"prompt": [USER], "chosen": "Yes", "rejected": "No"}, {"prompt": "Hi", **answers}):
        (pair,) = data.preference_rows(write(tmp_path, form), chat, max_length=99)
        assert (pair["prompt_ids"], pair["chosen_ids"]) == (prompt, prompt + chosen)
    whole = [USER, turn("assistant", "Yes")]
    for completion in ("Yes", whole[1:], whole):
        (row,) = data.sft_rows(write(tmp_path, {"prompt": [USER], "completion": completion}), chat, max_length=99)
        assert (row["input_ids"], sum(row["completion_mask"])) == (prompt + chosen, len(chosen))
    for completion in (whole[1:], whole):
        (row,) = data.sft_rows(write(tmp_path, {"prompt": "Hi", "completion": completion}), chat, max_length=99)
        assert (row["input_ids"], sum(row["completion_mask"])) == (prompt + chosen, len(chosen))
    error = error_of(data.sft_rows, write(tmp_path, {"prompt": "Why?", "completion": whole}), chat)
    assert error.problems[0].code == "D12" and "does not contain the prompt" in str(error)


def test_prompts_of_each_form(chat: Any, tmp_path: Path) -> None:
    ids = data.encode(chat, [USER], None)[0]
    for form in ({"prompt": [USER]}, {"messages": [USER, turn("assistant", "Yes?")]}, {"messages": [USER]}):
        (prompt,) = data.prompt_rows(write(tmp_path, form), chat, max_length=99)
        assert prompt == data.Prompt(ids, [USER], RowLocation(tmp_path / "rows.jsonl", 1))
    rows = write(tmp_path, {"prompt": "a", "answer": 1}, {"prompt": "b", "day": "Monday"})
    columns = [prompt.columns for prompt in data.prompt_rows(rows, chat, max_length=99)]
    assert columns == [{"answer": 1, "day": None}, {"answer": None, "day": "Monday"}]  # the same in each batch


def test_t10_texts_beside_a_chat_template_that_may_be_a_chat_models(chat: Any, tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "Hi"})
    as_text, as_turns = (data.encode(chat, prompt, None)[0] for prompt in ("Hi", [USER]))

    def read(**options: Any) -> tuple[list[int], list[str]]:
        terminal.reset()
        (prompt,) = data.prompt_rows(DataSource(str(path), **options), chat, max_length=99)
        return prompt.ids, [line[8:11] for line in terminal.emitted_warnings()]

    assert read() == (as_text, ["T10"])
    assert read(format="plain") == read(first_words=(1, 1)) == (as_text, [])
    assert read(format="turns") == (as_turns, [])
    for in_turns, ids in ((False, as_text), (True, as_turns)):  # of a model that was trained here
        data.set_speaks_in_turns(chat, in_turns)
        assert read() == (ids, [])


def test_texts_as_turns_in_each_stage(chat: Any, tmp_path: Path) -> None:
    prompt, answer = data.encode(chat, [USER], "Yes")

    def source(row: dict[str, str]) -> DataSource:
        return DataSource(str(write(tmp_path, row)), format="turns")

    (row,) = data.sft_rows(source({"prompt": "Hi", "completion": " Yes"}), chat, max_length=99)
    assert row["input_ids"] == prompt + answer
    (pair,) = data.preference_rows(source({**PAIR, "prompt": "Hi"}), chat, max_length=99)
    assert pair["chosen_ids"] == prompt + answer
    whole = {"chosen": "Hi. A", "rejected": "Hi. B"}
    for read, form in ((data.sft_rows, {"text": "Hi"}), (data.preference_rows, whole)):
        error = error_of(read, source(form), chat)
        assert error.problems[0].code == "D12" and "data.format: turns needs a prompt" in str(error)


def test_a_file_of_pairs_gives_its_distinct_prompts(tokenizer: Any, tmp_path: Path) -> None:
    pairs = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in ("Aab", "Aba", "Bxy", "Bxx", "Cyx")]
    rows = data.prompt_rows(write(tmp_path, *pairs), tokenizer, max_length=99)
    assert [(prompt.text, prompt.location.number) for prompt in rows] == [("A", 1), ("B", 3), ("C", 5)]
    assert (rows.num_expected, rows.num_dropped) == (5, 1)  # all rows of a prompt count
    assert len(data.prompt_rows(write(tmp_path, {"prompt": "A"}, {"prompt": "A"}), tokenizer, max_length=99)) == 2


def test_first_words_cuts_texts_by_a_uniform_hash_and_splits_by_the_full_text(tokenizer: Any, tmp_path: Path) -> None:
    def prompts(path: Path, **options: Any) -> list[data.Prompt]:
        return data.prompt_rows(DataSource(str(path), **options), tokenizer, max_length=99)

    path = write(tmp_path, {"prompt": "  Tell me,\nplease: about  the sun."}, {"prompt": "Two words"})
    cut = prompts(path, first_words=(3, 3))
    assert [prompt.text for prompt in cut] == ["  Tell me,\nplease:", "Two words"]
    assert cut[0].ids == data.encode(tokenizer, "  Tell me,\nplease:", None)[0]
    texts = [f"{n} b c d e f g h" for n in range(600)]
    counts, reverse = (
        [len(prompt.text.split()) for prompt in prompts(write(tmp_path, *contents), first_words=(2, 4))]
        for contents in ([{"prompt": text} for text in texts], [{"prompt": text} for text in reversed(texts)])
    )
    assert set(counts) == {2, 3, 4} and all(160 < counts.count(n) < 240 for n in (2, 3, 4))  # 200 is the mean
    assert reverse[::-1] == counts
    path = write(tmp_path, *({"prompt": f"The same start, and then {n}"} for n in range(60)))
    share = HoldoutSplit(0.3, 0, held_out=True)
    full, cut = prompts(path, share=share), prompts(path, share=share, first_words=(2, 2))
    assert [prompt.location for prompt in cut] == [prompt.location for prompt in full] and 5 < len(cut) < 40
    assert {prompt.text for prompt in cut} == {"The same"}


# --- faults of rows; tests/data/test_bad_rows.py has the others

SFT_FAULTS = [
    ([{"question": "a", "answer": "b"}], "D02", ":1: the row needs {prompt, completion}", "columns found: question"),
    ([{"data": [PAIR]}], "D02", ":1:", "hint: write each row as a separate object, with the column prompt"),
    ([{"prompt": "a"}], "D02", ":1:", "data.columns: {completion: NAME}"),
    ([PAIR], "D02", ":1:", "data.columns: {completion: chosen}"),  # never the prompt: SFT would learn the prompts
    ([{"messages": [USER, {"role": "assistant", "content": None}]}], "D06", ":1:", "content of message 2"),
    ([{"messages": [USER, "Yes"]}], "D06", ":1:", "message 2"),
    (
        [{"messages": [USER, {**turn("assistant", "I look."), "tool_calls": [{}]}]}],
        "D06",
        ":1:",
        "tool_calls of a message",
    ),
    ([{"messages": "Yes"}], "D06", ":1:", "expected a list of messages"),
    ([{"messages": [USER]}], "D09", ":1:", "no assistant message"),
    (b'["a", "b"]\n', "D12", "rows.jsonl:1", ""),
    (b"", "D05", "", "no usable row: 0 read"),
]
PAIR_FAULTS = [
    ([{**PAIR, "rejected": ""}], "D09", ":1:", '"rejected" is empty'),
    ([{**PAIR, "margin": True}], "D06", ":1:", '"margin" is True'),
    ([{**PAIR, "margin": 1}, PAIR], "D12", ":2:", "compare line 1"),
    ([{**PAIR, "chosen": [USER]}], "D12", ":1:", "both be text"),
    ([{"chosen": [USER, turn("assistant", "a"), USER], "rejected": [USER]}], "D12", ":1:", "one assistant message"),
    ([{"chosen": [USER, turn("tool", "a")], "rejected": [USER]}], "D12", ":1:", "one assistant message, not by tool"),
    ([{"chosen": "The first step.", "rejected": "The shop."}], "D08", ":1:", "no common prefix of whole turns"),
    ([{**PAIR, "margin": "wide"}], "D06", ":1:", "\"margin\" is 'wide'"),
    ([{**PAIR, "margin": 1}, {**PAIR, "margin": None}], "D12", ":2:", "compare line 1"),
]


@pytest.mark.parametrize(
    ("read", "contents", "code", "place", "text"),
    [(data.sft_rows, *fault) for fault in SFT_FAULTS] + [(data.preference_rows, *fault) for fault in PAIR_FAULTS],
)
def test_a_fault_has_its_code_and_place(
    tokenizer: Any, tmp_path: Path, read: Any, contents: list[Any] | bytes, code: str, place: str, text: str
) -> None:
    path = write(tmp_path, *(contents if isinstance(contents, list) else ()))
    if isinstance(contents, bytes):
        path.write_bytes(contents)
    error = error_of(read, path, tokenizer)
    assert [problem.code for problem in error.problems] == [code]
    assert place in str(error) and text in str(error), str(error)


@pytest.mark.parametrize(
    ("header", "hint"),
    [
        ("question,answer", "map the columns, e.g. {prompt: question, completion: answer}"),
        ("prompt;completion", "separate the columns by commas, or by tabs in a .tsv file"),
        ("prompt\tcompletion", "separate the columns by commas, or by tabs in a .tsv file"),
        ("prompt,What do you prefer?,Why?", "map the columns, e.g. {completion: NAME}"),
        (f"{LONG_NAME},Just add leek", f"{NAMES} map the columns, e.g. {{prompt: NAME, completion: NAME}}"),
    ],
)
def test_d02_suggests_a_column_and_shortens_long_names(tmp_path: Path, header: str, hint: str) -> None:
    (tmp_path / "a.csv").write_text(f"{header}\n{header}\n")
    (problem,) = error_of(data.sft_rows, DataSource(str(tmp_path / "a.csv")), None).problems
    assert problem.code == "D02" and len(problem.text) < 200
    assert str(problem.hint).replace("data.columns: ", "") == hint


@pytest.mark.parametrize(
    ("columns", "text", "hint"),
    [
        ({"prompt": "questions"}, 'no column "questions"', "did you mean question?"),
        ({"promt": "prompt"}, 'data.columns names "promt"', "did you mean prompt?"),
        ({"question": "prompt"}, 'data.columns names "question"', "swap the two: data.columns: {prompt: question}?"),
    ],
)
def test_d02_of_mapped_columns(tokenizer: Any, tmp_path: Path, columns: dict, text: str, hint: str) -> None:
    path = str(write(tmp_path, {**PAIR, "question": "D"}))
    (problem,) = error_of(data.preference_rows, DataSource(path, columns=columns), tokenizer).problems
    assert problem.code == "D02" and text in problem.text and problem.hint == hint


def test_d12_a_conversation_has_no_first_words(chat: Any, tmp_path: Path) -> None:
    source = DataSource(str(write(tmp_path, {"prompt": [USER]})), first_words=(2, 2))
    (problem,) = error_of(data.prompt_rows, source, chat).problems
    assert problem.code == "D12" and "truncate_prompt_words cuts only text" in problem.text


def test_d05_counts_the_rows_lost_to_each_fault(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, PAIR, {**PAIR, "rejected": " Yes"})
    error = error_of(data.preference_rows, path, tokenizer, max_length=3, on_identical="drop")
    assert error.problems[0].code == "D05"
    assert '2 read, dropped 1 "chosen" equals "rejected"; 1 longer than 3 tokens' in str(error)
    assert len(data.preference_rows(path, tokenizer, max_length=99, on_identical="drop")) == 1
    assert terminal.emitted_warnings()[0].startswith("warning[D07]")


def test_d06_a_conversation_that_the_template_rejects(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
        "{{ m['content'] + eos_token }}{% endfor %}"
    )
    good = [USER, turn("assistant", "Yes")]
    path = write(tmp_path, {"messages": good}, {"messages": [turn("system", "Go"), *good]}, {"messages": good})
    error = error_of(data.sft_rows, path, tokenizer)
    assert "error[D06]" in str(error) and ":2: the chat template rejects" in str(error)
    assert "no system turns" in str(error)
    assert len(data.sft_rows(DataSource(str(path), on_bad="drop"), tokenizer, max_length=99)) == 2
    (warning,) = [line for line in terminal.emitted_warnings() if "D06" in line]
    assert "1 of 3 rows dropped: the chat template rejects" in warning and "(first: line 2)" in warning
    tokenizer.chat_template = "{% for name in messages[0]['content']|items %}{% endfor %}"  # of a mapping
    assert "error[D06]: " in (text := str(error_of(data.sft_rows, path, tokenizer))) and ":1: the chat template" in text


def test_all_turns_of_a_row_are_on_one_side_of_a_split(chat: Any, tmp_path: Path) -> None:
    hi, bye = [turn("system", "Go"), turn("assistant", "Hi")], turn("assistant", "Bye now")
    path = write(tmp_path, *({"messages": [*hi, turn("user", f"{n}"), bye]} for n in range(60)))
    for held_out in (False, True):
        source = DataSource(str(path), share=HoldoutSplit(0.3, 0, held_out=held_out))
        rows = [row["input_ids"] for row in data.sft_rows(source, chat, max_length=99)]
        assert 2 * rows.count(min(rows, key=len)) == len(rows) and 0 < len(rows) < 120


# --- the order of rows


def test_prompt_batches_are_permutations_and_depend_only_on_step_and_seed() -> None:
    order = [i for step in range(1, 8) for i in data.prompt_batch(10, step, 10, seed=3)]
    epochs = [order[start : start + 10] for start in range(0, 70, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 7
    assert [i for step in range(1, 11) for i in data.prompt_batch(10, step, 7, seed=3)] == order
    assert data.prompt_batch(10, 4, 10, seed=4) != data.prompt_batch(10, 4, 10, seed=3)
    assert sorted(data.prompt_batch(3, 1, 6, seed=0)) == [0, 0, 1, 1, 2, 2]  # more than one epoch in a batch


def test_length_grouped_batches_hold_every_row_once_in_a_new_order_each_epoch() -> None:
    lengths = [7 * i % 101 for i in range(997)]
    sampler = data.LengthGroupedSampler(lengths, 10, seed=1)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert sorted(first) == sorted(second) == list(range(997)) and first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    batches = [first[start : start + 10] for start in range(0, 997, 10)]
    padded = sum(max(lengths[i] for i in batch) * len(batch) for batch in batches)
    assert padded < 1.05 * sum(lengths)
    # transformers' sampler would order batches from long to short; here their lengths are in random order.
    falls = sum(lengths[a[0]] > lengths[b[0]] for a, b in pairwise(batches[:-1]))
    assert 30 < falls < 70
