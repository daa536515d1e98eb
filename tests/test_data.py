"""Files to tokens: the one encoder, the forms of rows, what is wrong with bad ones, and which rows come when."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import SHARED, World
from tokenizers.processors import TemplateProcessing

from rlhf_cli import data, jsonl, terminal
from rlhf_cli.config.sources import DataSource, HoldoutSplit
from rlhf_cli.data.readers import RowLocation
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import tokenizers

PLAIN_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
USER = {"role": "user", "content": "Hi"}


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


@pytest.fixture
def tokenizer(world: World) -> Any:
    return world.tokenizer()


@pytest.fixture
def chat(world: World) -> Any:
    tokenizer = world.tokenizer()
    tokenizers.set_chat_template(tokenizer, "chatml")
    return tokenizer


def file_of(folder: Path, *contents: Any) -> Path:
    path = folder / "rows.jsonl"
    jsonl.write_jsonl(path, contents)
    return path


# --- tokens to text


def test_a_text_comes_in_pieces_as_its_tokens_do(tokenizer: Any) -> None:
    """Those of one token at once, a letter of several with the last of them, and what is left at the end."""
    ids = [*tokenizer("The é🙂")["input_ids"], tokenizer.eos_token_id]
    stream = iter(ids)
    assert next(data.decode_stream(tokenizer, stream)) == tokenizer.decode(ids[:1])
    assert next(stream) == ids[1]  # nothing was taken before its time
    whole = list(data.decode_stream(tokenizer, ids))
    assert "".join(whole) == "The é🙂" and len(whole) == len(ids) + 1
    assert {piece for piece in whole if not piece.isascii()} == {"é", "🙂"}
    cut = list(data.decode_stream(tokenizer, ids[:-2]))
    assert cut[-1] == "\N{REPLACEMENT CHARACTER}" and "".join(cut[:-1]) == "The é"
    assert "".join(data.decode_stream(tokenizer, ids, special=True)) == "The é🙂<eos>"


# --- the encoder


def test_prompt_and_response_are_tokenised_apart_and_end_in_the_stop_token(tokenizer: Any) -> None:
    prompt, response = data.encode(tokenizer, "Tell me about the s", "un.")
    joined = tokenizer("Tell me about the sun.").input_ids
    assert prompt + response != [*joined, tokenizer.eos_token_id]  # joined, "sun" would be one token
    assert tokenizer.decode(prompt) == "Tell me about the s"
    assert tokenizer.decode(response) == "un.<eos>"
    assert data.encode(tokenizer, "Tell", None)[1] == []


def test_a_response_that_ends_in_the_stop_token_gets_no_second_one(tokenizer: Any) -> None:
    assert data.encode(tokenizer, "A", "B<eos>") == data.encode(tokenizer, "A", "B")


def test_a_prompt_keeps_the_start_token_and_loses_the_end_token_that_the_tokenizer_adds(tokenizer: Any) -> None:
    bare = tokenizer("Tell me").input_ids
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    special = [("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A <eos>", special_tokens=special)
    assert tokenizer("Tell me").input_ids == [tokenizer.bos_token_id, *bare, tokenizer.eos_token_id]
    prompt, response = data.encode(tokenizer, "Tell me", "Tell me")
    assert prompt == [tokenizer.bos_token_id, *bare]
    assert response == [*bare, tokenizer.eos_token_id]


def test_a_conversation_is_the_templates_rendering_up_to_the_stop_token(chat: Any) -> None:
    turns = [said("user", "Hi there"), said("assistant", "Yes."), said("user", "More")]
    prompt, response = data.encode(chat, turns, "All of it.")
    whole = chat.apply_chat_template([*turns, said("assistant", "All of it.")], tokenize=False)
    assert whole.endswith("<|im_end|>\n")
    assert chat.decode(prompt + response) == whole.removesuffix("\n")
    assert response[-1] == data.stop_token_id(chat) == chat.convert_tokens_to_ids("<|im_end|>")


def test_the_stop_token_is_the_end_token_without_a_template(tokenizer: Any) -> None:
    assert data.stop_token_id(tokenizer) == tokenizer.eos_token_id


def test_t06_a_template_without_a_stop_token_is_named(tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer.chat_template = PLAIN_TEMPLATE
    assert data.stop_token_id(tokenizer) == tokenizer.eos_token_id
    assert "warning[T06]" in capsys.readouterr().err


def test_d14_a_conversation_without_a_template(tokenizer: Any) -> None:
    with pytest.raises(RLHFError) as error:
        data.encode(tokenizer, [USER], "Yes")
    assert error.value.problems[0].code == "D14" and "model.chat_template" in str(error.value)


@pytest.mark.parametrize("name", ["stories260K", "reviews-sft"])
def test_many_rows_at_once_are_encoded_as_one_by_one(name: str) -> None:
    if not (SHARED / "models" / name).is_dir():
        pytest.skip(f"../shared/models/{name} is not there")
    tokenizer = tokenizers.load_tokenizer(SHARED / "models" / name)
    texts = (SHARED / "data/rt-polarity/pos.txt").read_text(encoding="utf-8").splitlines()[:50]
    pairs = list(pairwise(texts))
    many = data.encode_many(tokenizer, [a for a, _ in pairs], [b for _, b in pairs])
    start = [tokenizer.bos_token_id] if name == "stories260K" else []
    for (prompt, response), ids in zip(pairs, many, strict=True):
        assert ids == data.encode(tokenizer, prompt, response)
        assert ids[0] == start + tokenizer(prompt, add_special_tokens=False).input_ids
        assert ids[1] == [*tokenizer(response, add_special_tokens=False).input_ids, tokenizer.eos_token_id]


# --- the forms of rows


def test_prompt_and_completion(tokenizer: Any, tmp_path: Path) -> None:
    path = file_of(tmp_path, {"prompt": "Tell me.", "completion": " Yes."})
    prompt, response = data.encode(tokenizer, "Tell me.", " Yes.")
    (row,) = data.sft_rows(path, tokenizer, max_length=99)
    assert row == {"input_ids": prompt + response, "completion_mask": [0] * len(prompt) + [1] * len(response)}


def test_plain_text_is_trained_whole(tokenizer: Any, tmp_path: Path) -> None:
    (row,) = data.sft_rows(file_of(tmp_path, {"text": "The sun."}), tokenizer, max_length=99)
    assert tokenizer.decode(row["input_ids"]) == "The sun.<eos>" and set(row["completion_mask"]) == {1}
    assert data.is_plain_text(tmp_path / "rows.jsonl")


def test_messages_give_an_example_for_each_turn_of_the_assistant(chat: Any, tmp_path: Path) -> None:
    turns = [
        said("system", "Be brief."),
        USER,
        said("assistant", "One."),
        said("user", "On"),
        said("assistant", "Two."),
    ]
    examples = data.sft_rows(file_of(tmp_path, {"messages": turns}), chat, max_length=99)
    wanted = [data.encode(chat, turns[:2], "One."), data.encode(chat, turns[:4], "Two.")]
    assert [row["input_ids"] for row in examples] == [prompt + response for prompt, response in wanted]
    assert [sum(row["completion_mask"]) for row in examples] == [len(response) for _, response in wanted]
    split = file_of(tmp_path, {"prompt": turns[:4], "completion": turns[4:]})
    assert data.sft_rows(split, chat, max_length=99) == examples[1:]


def test_pairs(tokenizer: Any, tmp_path: Path) -> None:
    path = file_of(tmp_path, {"prompt": "Tell", "chosen": " me.", "rejected": " on", "margin": 2})
    (row,) = data.preference_rows(path, tokenizer, max_length=99)
    prompt, chosen = data.encode(tokenizer, "Tell", " me.")
    _, rejected = data.encode(tokenizer, "Tell", " on")
    ids = {"prompt_ids": prompt, "chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected}
    assert row == {**ids, "margin": 2.0}


IMPLICIT = [
    ("Q: why? A: yes it is", "Q: why? A: no", ("Q: why? A:", " yes it is", " no")),
    ("Q: why? A: yes", "Q: why? A: yep", ("Q: why? A:", " yes", " yep")),  # cut inside a word: back to its start
    ("Human: hi\n\nBot: a b", "Human: hi\n\nBot: a c", ("Human: hi\n\nBot: a", " b", " c")),
    ("tell me more", "tell me more now", ("tell me", " more", " more now")),  # one is the beginning of the other
]


@pytest.mark.parametrize(("chosen", "rejected", "parts"), IMPLICIT)
def test_implicit_prompts_of_texts(
    tokenizer: Any, tmp_path: Path, chosen: str, rejected: str, parts: tuple[str, str, str]
) -> None:
    (row,) = data.preference_rows(file_of(tmp_path, {"chosen": chosen, "rejected": rejected}), tokenizer, max_length=99)
    assert tokenizer.decode(row["prompt_ids"]) == parts[0]
    for name, text in zip(("chosen_ids", "rejected_ids"), parts[1:], strict=True):
        assert tokenizer.decode(row[name][len(row["prompt_ids"]) :]) == f"{text}<eos>"


def test_implicit_explicit_and_repeated_prompts_of_conversations_are_the_same(chat: Any, tmp_path: Path) -> None:
    turns = [USER, said("assistant", "Yes?"), said("user", "Why")]
    good, bad = said("assistant", "Because."), said("assistant", "No.")
    whole = {"chosen": [*turns, good], "rejected": [*turns, bad]}
    forms = [
        whole,
        {"prompt": turns, "chosen": [good], "rejected": [bad]},
        {"prompt": turns, **whole},
        {"prompt": "Hi", **whole},  # as in UltraFeedback
    ]
    found = [data.preference_rows(file_of(tmp_path, form), chat, max_length=99) for form in forms]
    prompt, chosen = data.encode(chat, turns, "Because.")
    assert found[0][0]["chosen_ids"] == prompt + chosen and found[0][0]["prompt_ids"] == prompt
    assert all(rows == found[0] for rows in found)


def test_prompts_of_each_form(chat: Any, tmp_path: Path) -> None:
    turns = [USER, said("assistant", "Yes?")]
    wanted = data.encode(chat, [USER], None)[0]
    for form in ({"prompt": [USER]}, {"messages": turns}, {"messages": [USER]}):
        (prompt,) = data.prompt_rows(file_of(tmp_path, form), chat, max_length=99)
        assert prompt == data.Prompt(wanted, [USER], RowLocation(tmp_path / "rows.jsonl", 1))


def test_a_file_of_pairs_gives_its_distinct_prompts(tokenizer: Any, tmp_path: Path) -> None:
    pairs = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in ("Aab", "Aba", "Bxy", "Bxx", "Cyx")]
    found = data.prompt_rows(file_of(tmp_path, *pairs), tokenizer, max_length=99)
    assert [(prompt.text, prompt.location.number) for prompt in found] == [("A", 1), ("B", 3), ("C", 5)]
    twice = data.prompt_rows(file_of(tmp_path, {"prompt": "A"}, {"prompt": "A"}), tokenizer, max_length=99)
    assert len(twice) == 2


def test_prompts_are_cut_to_their_first_words_as_they_stand_there(tokenizer: Any, tmp_path: Path) -> None:
    path = file_of(tmp_path, {"prompt": "  Tell me,\nplease: about  the sun."}, {"prompt": "Two words"})
    cut = data.prompt_rows(DataSource(str(path), first_words=(3, 3)), tokenizer, max_length=99)
    assert [prompt.text for prompt in cut] == ["  Tell me,\nplease:", "Two words"]
    assert cut[0].ids == data.encode(tokenizer, "  Tell me,\nplease:", None)[0]


def test_how_many_words_are_kept_is_the_texts_own_draw_and_uniform(tokenizer: Any, tmp_path: Path) -> None:
    path = file_of(tmp_path, *({"prompt": f"{n} b c d e f g h"} for n in range(600)))
    source = DataSource(str(path), first_words=(2, 4))
    counts = [len(prompt.text.split()) for prompt in data.prompt_rows(source, tokenizer, max_length=99)]
    assert set(counts) == {2, 3, 4} and all(160 < counts.count(n) < 240 for n in (2, 3, 4))  # 200 is the mean
    jsonl.write_jsonl(path, [{"prompt": f"{n} b c d e f g h"} for n in reversed(range(600))])
    again = [len(prompt.text.split()) for prompt in data.prompt_rows(source, tokenizer, max_length=99)]
    assert again[::-1] == counts


def test_the_held_out_share_goes_by_the_whole_text_before_it_is_cut(tokenizer: Any, tmp_path: Path) -> None:
    path = file_of(tmp_path, *({"prompt": f"The same start, and then {n}"} for n in range(60)))
    whole, cut = (
        data.prompt_rows(
            DataSource(str(path), first_words=words, share=HoldoutSplit(0.3, 0, held_out=True)),
            tokenizer,
            max_length=99,
        )
        for words in (None, (2, 2))
    )
    assert [prompt.location for prompt in cut] == [prompt.location for prompt in whole] and 5 < len(cut) < 40
    assert {prompt.text for prompt in cut} == {"The same"}


def test_d12_a_conversation_has_no_first_words(chat: Any, tmp_path: Path) -> None:
    path = file_of(tmp_path, {"prompt": [USER]})
    with pytest.raises(RLHFError, match="first_words cuts only text") as error:
        data.prompt_rows(DataSource(str(path), first_words=(2, 2)), chat, max_length=99)
    assert error.value.problems[0].code == "D12" and "rows.jsonl:1" in str(error.value)


def test_columns_are_read_under_the_files_names(tokenizer: Any, tmp_path: Path) -> None:
    path = file_of(tmp_path, {"question": "Tell", "completion": " me", "prompt": 7})
    (row,) = data.sft_rows(DataSource(str(path), columns={"prompt": "question"}), tokenizer, max_length=99)
    assert tokenizer.decode(row["input_ids"]) == "Tell me<eos>"


# --- what is wrong with rows

GOOD = {"prompt": "Tell me", "completion": " Yes"}
PAIR = {"prompt": "Tell me", "chosen": " Yes", "rejected": " No"}
BAD_SFT = [
    ([{"question": "a", "answer": "b"}], "D02", ":1: the row needs {prompt, completion}", "columns found: question"),
    ([{"prompt": "a"}], "D02", ":1:", "data.columns: {completion: NAME}"),
    ([GOOD, {"prompt": "a", "completion": None}], "D06", ":2:", '"completion" is null'),
    ([GOOD, {"prompt": 3, "completion": "b"}], "D06", ":2:", '"prompt" is the number 3'),
    ([{"messages": [USER, {"role": "assistant", "content": None}]}], "D06", ":1:", "content of message 2"),
    ([{"messages": [USER, "Yes"]}], "D06", ":1:", "message 2"),
    ([{"messages": "Yes"}], "D06", ":1:", "expected a list of messages"),
    ([GOOD, {"prompt": " \n", "completion": "b"}], "D08", ":2:", "the prompt is empty"),
    ([GOOD, {"prompt": "a", "completion": "  "}], "D09", ":2:", '"completion" is empty'),
    ([{"prompt": "a", "completion": "<eos>"}], "D09", ":1:", "no tokens besides the stop token"),
    ([{"messages": [USER]}], "D09", ":1:", "no assistant message"),
    ([GOOD, {"text": "a"}], "D12", ":2:", 'no column "prompt"; line 1 has one'),
    ([GOOD, {"prompt": [USER], "completion": "b"}], "D12", ":2:", "a conversation here, text in line 1"),
    ([{"messages": [USER, said("assistant", "Yes")]}], "D14", ":1:", "model.chat_template"),
]
BAD_PAIRS = [
    ([PAIR, {**PAIR, "rejected": " Yes"}], "D07", ':2: "chosen" equals "rejected"', "data.on_identical: drop"),
    ([{"chosen": "Yes", "rejected": "No"}], "D08", ":1:", "the prompt is empty"),
    ([{**PAIR, "rejected": ""}], "D09", ":1:", '"rejected" is empty'),
    ([{**PAIR, "margin": True}], "D06", ":1:", '"margin" is True'),
    ([{**PAIR, "margin": 1}, PAIR], "D12", ":2:", "compare line 1"),
    ([{**PAIR, "chosen": [USER]}], "D12", ":1:", "both be text"),
    ([{"prompt": [USER], "chosen": "a", "rejected": "b"}], "D12", ":1:", "list of messages"),
    ([{"chosen": [USER, said("assistant", "a"), USER], "rejected": [USER]}], "D12", ":1:", "one assistant message"),
]


def problems_of(read: Any, path: Path, tokenizer: Any, **options: Any) -> RLHFError:
    with pytest.raises(RLHFError) as error:
        read(path, tokenizer, **{"max_length": 99, **options})
    assert error.value.exit_code == 2
    return error.value


@pytest.mark.parametrize(("contents", "code", "place", "text"), BAD_SFT)
def test_bad_sft_rows(tokenizer: Any, tmp_path: Path, contents: list, code: str, place: str, text: str) -> None:
    error = problems_of(data.sft_rows, file_of(tmp_path, *contents), tokenizer)
    assert [problem.code for problem in error.problems] == [code]
    assert place in str(error) and text in str(error), str(error)


@pytest.mark.parametrize(("contents", "code", "place", "text"), BAD_PAIRS)
def test_bad_pairs(tokenizer: Any, tmp_path: Path, contents: list, code: str, place: str, text: str) -> None:
    error = problems_of(data.preference_rows, file_of(tmp_path, *contents), tokenizer)
    assert [problem.code for problem in error.problems] == [code]
    assert place in str(error) and text in str(error), str(error)


ASKED, SAID = "How do I make a soup?", "With pleasure! Just add some leek."
SEEMS = "the first line of {} looks like data; add a header line"
COLUMNS = "map the columns, e.g. data.columns: "
NO_HEADER = [
    (data.sft_rows, "a.csv", f"{ASKED},{SAID}\nb,c\n", {}, SEEMS.format("a.csv") + " 'prompt,completion'"),
    (data.sft_rows, "a.tsv", f"{ASKED}\t{SAID}\nb\tc\n", {}, SEEMS.format("a.tsv") + " 'prompt\\tcompletion'"),
    (data.preference_rows, "a.csv", f"{ASKED},{SAID},No.\nb,c,d\n", {},
     SEEMS.format("a.csv") + " 'prompt,chosen,rejected'"),
    (data.preference_rows, "a.csv", f"{ASKED},{SAID}\nb,c\n", {}, SEEMS.format("a.csv") + " 'chosen,rejected'"),
    # the file's own names, where they are told
    (data.sft_rows, "a.csv", f"How,{ASKED} {SAID}\nb,c\n", {"prompt": "how", "completion": "said"},
     SEEMS.format("a.csv") + " 'how,said'"),
    (data.preference_rows, "a.csv", f"{ASKED},{ASKED},{SAID}\nb,c,d\n", {}, SEEMS.format("a.csv")),
    # names, though none of ours, or not in a header
    (data.sft_rows, "a.csv", "question,answer\nb,c\n", {}, COLUMNS + "{prompt: question}"),
    (data.sft_rows, "a.csv", f"prompt,What do you prefer?,{ASKED}\nb,c,d\n", {},
     COLUMNS + "{completion: What do you prefer?}"),
    (data.sft_rows, "a.jsonl", f'{{"{ASKED}": "b", "{SAID}": "c"}}\n', {}, COLUMNS + f"{{prompt: {ASKED}}}"),
]  # fmt: skip


@pytest.mark.parametrize(("read", "name", "text", "columns", "hint"), NO_HEADER)
def test_a_first_row_taken_for_names_of_columns_is_told(
    tmp_path: Path, read: Any, name: str, text: str, columns: dict[str, str], hint: str
) -> None:
    (tmp_path / name).write_text(text)
    error = problems_of(read, DataSource(str(tmp_path / name), columns=columns), None)
    (problem,) = error.problems
    assert problem.code in ("D02", "D03") and problem.hint == hint
    assert len(problem.text) < 200  # a row is not told as a whole


RAW = [
    (b'{"prompt": "a", "completion": "b"}\n{"prompt": "a",\n', "D03", "rows.jsonl:2:16"),
    (b'{"prompt": "a", "completion": "b"}\n{"prompt": "caf\xe9"}\n', "D04", "rows.jsonl:2: byte 0xE9"),
    (b'["a", "b"]\n', "D12", "rows.jsonl:1"),
    (b"", "D05", "no usable row: 0 read"),
]


@pytest.mark.parametrize(("raw", "code", "text"), RAW)
def test_bad_files(tokenizer: Any, tmp_path: Path, raw: bytes, code: str, text: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(raw)
    error = problems_of(data.sft_rows, tmp_path / "rows.jsonl", tokenizer)
    assert error.problems[0].code == code and text in str(error)


def test_d01_names_the_nearest_file_and_the_key(tokenizer: Any, tmp_path: Path) -> None:
    file_of(tmp_path, GOOD)
    error = problems_of(data.sft_rows, DataSource(str(tmp_path / "row.jsonl"), "sft.yaml:3"), tokenizer)
    assert error.problems[0].code == "D01"
    assert "sft.yaml:3" in str(error) and "rows.jsonl" in str(error.problems[0].hint)


def test_the_first_five_bad_rows_and_a_count(tokenizer: Any, tmp_path: Path) -> None:
    path = file_of(tmp_path, *[PAIR] * 3, *[{**PAIR, "rejected": " Yes"}] * 9)
    error = problems_of(data.preference_rows, path, tokenizer)
    lines = [str(problem) for problem in error.problems]
    assert len(lines) == 6 and "rows.jsonl:4:" in lines[0] and "9 of 12 rows are bad" in lines[5]
    assert "drop the row" in lines[0] and sum("hint" in line for line in lines) == 1


def test_d02_a_column_is_never_named_for_what_it_is_not(tokenizer: Any, tmp_path: Path) -> None:
    """Of pairs SFT would learn the chosen answers, never the prompts."""
    error = problems_of(data.sft_rows, file_of(tmp_path, PAIR), tokenizer)
    assert "data.columns: {completion: chosen}" in str(error)


def test_d02_a_column_that_the_file_has_not(tokenizer: Any, tmp_path: Path) -> None:
    path = file_of(tmp_path, {"prompt": "A", "chosen": " B", "rejected": " C", "question": "D"})
    source = DataSource(str(path), columns={"prompt": "questions"})
    error = problems_of(data.preference_rows, source, tokenizer)
    assert error.problems[0].code == "D02" and 'no column "questions"' in str(error)
    assert error.problems[0].hint == "did you mean question?"


def test_d02_a_column_that_is_none_of_ours(tokenizer: Any, tmp_path: Path) -> None:
    path = str(file_of(tmp_path, GOOD))
    error = problems_of(data.sft_rows, DataSource(path, columns={"promt": "prompt"}), tokenizer)
    assert error.problems[0].code == "D02" and "did you mean prompt?" in str(error)
    error = problems_of(data.sft_rows, DataSource(path, columns={"question": "prompt"}), tokenizer)
    assert error.problems[0].hint == "swap the two: data.columns: {prompt: question}?"
    error = problems_of(data.sft_rows, DataSource(path, columns={"prompt": "question"}), tokenizer)
    assert error.problems[0].code == "D02"  # and not the file's own "prompt"


def test_long_rows_are_dropped_and_counted_or_refused(
    tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {"prompt": "Tell me about the sun. " * 9, "completion": " Yes"}
    path = file_of(tmp_path, GOOD, long, long)
    assert len(data.sft_rows(path, tokenizer, max_length=20)) == 1
    assert "rows.jsonl: 2 of 3 rows dropped: longer than 20 tokens (first: line 2)" in capsys.readouterr().err
    assert terminal.emitted_warnings()[0].startswith("warning[D10]")
    error = problems_of(data.sft_rows, path, tokenizer, max_length=20, on_long="error")
    assert [problem.code for problem in error.problems] == ["D10", "D10"] and ":2: " in str(error)


def test_d05_says_how_many_rows_were_lost_to_what(tokenizer: Any, tmp_path: Path) -> None:
    path = file_of(tmp_path, PAIR, {**PAIR, "rejected": " Yes"})
    error = problems_of(data.preference_rows, path, tokenizer, max_length=3, on_identical="drop")
    assert error.problems[0].code == "D05"
    assert '2 read, dropped 1 "chosen" equals "rejected"; 1 longer than 3 tokens' in str(error)


def test_identical_pairs_may_be_dropped(tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = [{**PAIR, "rejected": " Yes"}, PAIR]
    assert len(data.preference_rows(file_of(tmp_path, *same), tokenizer, max_length=99, on_identical="drop")) == 1
    assert "warning[D07]" in capsys.readouterr().err


def test_a_conversation_that_the_template_refuses_is_named(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
        "{{ m['content'] + eos_token }}{% endfor %}"
    )
    good = [USER, said("assistant", "Yes")]
    path = file_of(tmp_path, {"messages": good}, {"messages": [said("system", "Go"), *good]})
    error = problems_of(data.sft_rows, path, tokenizer)
    assert "error[D06]" in str(error) and ":2: the chat template rejects" in str(error)
    assert "no system turns" in str(error)


# --- which rows come when


def test_prompt_batches_are_permutations_that_a_step_number_alone_decides() -> None:
    walked = [i for step in range(1, 8) for i in data.prompt_batch(10, step, 10, seed=3)]
    epochs = [walked[start : start + 10] for start in range(0, 70, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 7
    assert [i for step in range(1, 11) for i in data.prompt_batch(10, step, 7, seed=3)] == walked
    assert data.prompt_batch(10, 4, 10, seed=4) != data.prompt_batch(10, 4, 10, seed=3)
    assert sorted(data.prompt_batch(3, 1, 6, seed=0)) == [0, 0, 1, 1, 2, 2]  # more than one epoch in a batch


def test_batches_of_like_length_hold_every_row_once_in_an_order_of_their_own_each_epoch() -> None:
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
    # transformers' sampler would run from long to short; here a batch says nothing about the next one.
    falls = sum(lengths[a[0]] > lengths[b[0]] for a, b in pairwise(batches[:-1]))
    assert 30 < falls < 70
