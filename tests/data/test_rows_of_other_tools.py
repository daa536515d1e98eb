"""Files as other people have them: read as they are meant, or refused with what to do; never read as something else."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bad_inputs import refused
from run_cli import rlhf
from typer.testing import Result

from rlhf_cli import data, jsonl
from rlhf_cli.commands.init import sizes
from rlhf_cli.commands.init.sizes import Speed
from rlhf_cli.data.readers import RowLocation
from rlhf_cli.data.rendering import RenderedRow, check_rendering
from rlhf_cli.models import tokenizers
from tests.conftest import SHARED, World

# As many templates do, it ignores the roles that it does not know.
TEMPLATE = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}[{{ m.role }}]{{ m.content }}<eos>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
RULE = "Speak as a pirate would."
NUM_ROWS = 40
Make = Callable[[str, str, str], dict[str, Any]]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def texts_of(number: int) -> tuple[str, str, str]:
    return f"How is thing {number}?", f"The thing is fine {number}.", f"The moon is grim {number}."


def dialogue(prompt: str, answer: str) -> str:
    return f"\n\nHuman: {prompt}\n\nAssistant: {answer}"


def messages(prompt: str, answer: str) -> list[dict[str, str]]:
    return [turn("user", prompt), turn("assistant", answer)]


def write(path: Path, make: Make) -> Path:
    jsonl.write_jsonl(path, [make(*texts_of(number)) for number in range(NUM_ROWS)])
    return path


@pytest.fixture(autouse=True)
def _fixed_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "measure_speed", lambda folder: Speed(training=20_000.0, generation=4_000.0))


@pytest.fixture
def chat_base(world: World, tmp_path: Path) -> Path:
    """The base model with a chat template and room for long texts."""
    tokenizer = world.tokenizer()
    tokenizers.set_chat_template(tokenizer, TEMPLATE)
    shutil.copytree(world.base, tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    config = json.loads((tmp_path / "base/config.json").read_text())
    (tmp_path / "base/config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    return tmp_path / "base"


def init(base: Path, file: Path, *options: str) -> tuple[Result, Path]:
    run = file.parent / f"run-{file.stem}"
    result = rlhf("init", "preferences", "--data", file, "--base", base, run, "--minutes", 1, *options)
    return result, run


def check_reward(base: Path, file: Path, *options: str) -> Result:
    config = file.parent / "reward.yaml"
    config.write_text(f"model: {{path: {base}}}\ndata: {{train: {file}}}\nreward: {{max_steps: 1}}\n")
    return rlhf("check", config, "-s", "reward.per_device_train_batch_size=4", *options)


def pairs_of(run: Path) -> list[dict[str, Any]]:
    return [row for _, row in jsonl.read_jsonl(run / "data/pairs.jsonl")]


def expected_pair(row: dict[str, Any], system: str | None) -> dict[str, Any]:
    """The pair that has the number in the last words of this row's chosen answer."""
    number = int(re.findall(r"\d+", json.dumps(row["chosen"]))[-1])
    prompt, chosen, rejected = texts_of(number)
    before = [turn("system", system)] if system else []
    answers = {"chosen": [turn("assistant", chosen)], "rejected": [turn("assistant", rejected)]}
    return {"prompt": [*before, turn("user", prompt)], **answers}


# Name: how a row is written, options of init, the system message of its conversation, what is said.
READ: dict[str, tuple[Make, tuple[str, ...], str | None, str]] = {
    "a question and a system column": (
        lambda p, c, r: {"system": RULE, "question": p, "chosen": c, "rejected": r},
        ("--column", "prompt=question"),
        RULE,
        "columns: prompt from question, chosen, rejected, system",
    ),
    "a system column beside a prompt": (
        lambda p, c, r: {"system_prompt": RULE, "prompt": p, "chosen": c, "rejected": r, "id": "a b"},
        (),
        RULE,
        "columns: prompt, chosen, rejected, system_prompt; not read: id",
    ),
    "a system column beside messages": (
        lambda p, c, r: {"system": RULE, "chosen": messages(p, c), "rejected": messages(p, r)},
        (),
        RULE,
        "columns: chosen, rejected, system",
    ),
    "messages as JSON in texts": (
        lambda p, c, r: {"prompt": p, "chosen": json.dumps(messages(p, c)), "rejected": json.dumps(messages(p, r))},
        (),
        None,
        "chosen, rejected: lists of messages stored as text, parsed",
    ),
    "messages as pandas writes them": (
        lambda p, c, r: {"prompt": p, "chosen": str(messages(p, c)), "rejected": str(messages(p, r))},
        (),
        None,
        "chosen, rejected: lists of messages stored as text, parsed",
    ),
    "a transcript as prompt beside whole transcripts": (
        lambda p, c, r: {"prompt": dialogue(p, "").rstrip(), "chosen": dialogue(p, c), "rejected": dialogue(p, r)},
        (),
        None,
        "the answers are whole dialogues",
    ),
    "a text as prompt beside whole transcripts": (
        lambda p, c, r: {"prompt": p, "chosen": dialogue(p, c), "rejected": dialogue(p, r)},
        (),
        None,
        "the answers are whole dialogues",
    ),
    "answers that repeat the prompt": (
        lambda p, c, r: {"prompt": p, "chosen": f"{p}\n{c}", "rejected": f"{p}\n{r}"},
        (),
        None,
        "the prompt is taken off the beginning of chosen and rejected",
    ),
    "other names of roles": (
        lambda p, c, r: {"prompt": [turn("human", p)], "chosen": [turn("gpt", c)], "rejected": [turn("gpt", r)]},
        (),
        None,
        "roles of messages: human is user, gpt is assistant",
    ),
    "OpenAI's preferences": (
        lambda p, c, r: {
            "input": {"messages": [turn("user", p)], "tools": []},
            "preferred_output": [turn("assistant", c)],
            "non_preferred_output": [turn("assistant", r)],
        },
        (),
        None,
        "OpenAI's preferences, read as {prompt, chosen, rejected}",
    ),
    "a margin that is null": (
        lambda p, c, r: {"prompt": p, "chosen": c, "rejected": r, "margin": None},
        (),
        None,
        "columns: prompt, chosen, rejected, margin",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("form", READ)
def test_what_stands_in_other_columns_and_forms_is_read(form: str, chat_base: Path, tmp_path: Path) -> None:
    make, options, system, says = READ[form]
    result, run = init(chat_base, write(tmp_path / "pairs.jsonl", make), *options)
    assert result.exit_code == 0, result.output
    assert says in result.output.replace("\n", " "), result.output
    assert "warning" not in result.stderr
    made = pairs_of(run)
    assert len(made) == 18
    assert made == [expected_pair(row, system) for row in made]


@pytest.mark.full
@pytest.mark.parametrize("form", [form for form, (_, _, system, _) in READ.items() if system is None])
def test_a_reward_model_gets_the_tokens_of_the_same_pairs(form: str, chat_base: Path, tmp_path: Path) -> None:
    """From a YAML, where texts stay texts."""
    path = write(tmp_path / "pairs.jsonl", READ[form][0])
    tokenizer = tokenizers.load_tokenizer(chat_base)
    found = data.preference_rows(path, tokenizer, max_length=None)
    assert len(found) == NUM_ROWS
    for number, row in enumerate(found):
        prompt, chosen, rejected = texts_of(number)
        is_conversation = tokenizer.decode(row["prompt_ids"]).startswith("[user]")
        space = "\n" if "repeat" in form else ""
        before = f"[user]{prompt}<eos>[assistant]" if is_conversation else prompt + space
        assert tokenizer.decode(row["chosen_ids"]) == f"{before}{chosen}<eos>"
        assert tokenizer.decode(row["rejected_ids"]) == f"{before}{rejected}<eos>"
        assert "margin" not in row
    assert check_reward(chat_base, path).exit_code == 0


@pytest.mark.parametrize("column", ["tools", "chat_template_kwargs"])
def test_what_a_row_sets_for_the_chat_template_is_refused_if_it_has_no_effect(
    column: str, chat_base: Path, tmp_path: Path
) -> None:
    value = {"tools": [{"name": "weather"}], "chat_template_kwargs": {"enable_thinking": False}}[column]

    def row(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
        return {"chosen": messages(prompt, chosen), "rejected": messages(prompt, rejected), column: value}

    file = write(tmp_path / "rows.jsonl", row)
    result = check_reward(chat_base, file)
    assert result.exit_code == 2, result.output
    assert re.search(rf'error\[D19\]: {file}:1: .*"{column}".*\nhint: set ', result.stderr), result.stderr


def test_a_system_column_beside_texts_of_a_yaml_is_named(chat_base: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", lambda p, c, r: {"system": RULE, "prompt": p, "chosen": c, "rejected": r})
    result = check_reward(chat_base, path)
    assert result.exit_code == 0
    assert "warning[D17]: " in result.stderr and "not read: system, which may be meant for the model" in result.stderr
    assert "columns: prompt, chosen, rejected; not read: system" in re.sub(r"\s+", " ", result.stdout)
    plain, run = init(chat_base, path, "--plain")
    assert plain.exit_code == 0 and plain.stderr.count("warning[D17]") == 1
    assert {type(row["prompt"]) for row in pairs_of(run)} == {str}


def test_prompts_of_ppo_get_the_system_message(chat_base: Path, tmp_path: Path) -> None:
    jsonl.write_jsonl(tmp_path / "prompts.jsonl", [{"system": RULE, "prompt": [turn("user", "Hi")], "answer": "1"}])
    (prompt,) = data.prompt_rows(tmp_path / "prompts.jsonl", tokenizers.load_tokenizer(chat_base), max_length=None)
    assert prompt.text == [turn("system", RULE), turn("user", "Hi")]
    jsonl.write_jsonl(tmp_path / "rows.jsonl", [{"system": RULE, "messages": messages("Hi", "Yes")}])
    tokenizer = tokenizers.load_tokenizer(chat_base)
    (row,) = data.sft_rows(tmp_path / "rows.jsonl", tokenizer, max_length=None)
    assert tokenizer.decode(row["input_ids"]) == f"[system]{RULE}<eos>[user]Hi<eos>[assistant]Yes<eos>"


# Rows, code, what is said, what must not be said.
REFUSED: dict[str, tuple[Make, str, tuple[str, ...], tuple[str, ...]]] = {
    "a question without --column": (
        lambda p, c, r: {"question": p, "chosen": c, "rejected": r},
        "D02",
        ('no column "prompt"', "question"),
        (),
    ),
    "a question without spaces": (
        lambda p, c, r: {"question": f"\u65e5\u672c{p[-3:]}", "chosen": f"Yes. {c}", "rejected": f"Yes. {r}"},
        "D02",
        ("other texts: question", "question"),
        (),
    ),
    "a question of one word": (
        lambda p, c, r: {"question": "Hi", "chosen": f"Sure! {c}", "rejected": f"Sure! {r}"},
        "D02",
        ("other texts: question", "question"),
        (),
    ),
    "another text of each row": (
        lambda p, c, r: {"note": f"Written on day {p.split()[-1]}", "chosen": f"{p}\n{c}", "rejected": f"{p}\n{r}"},
        "D02",
        ("other texts: note", "NAME", "or remove them"),
        (": note}", "=note"),
    ),
    "the letter of the better answer": (
        lambda p, c, r: {"prompt": p, "response_a": c, "response_b": r, "preferred": "A"},
        "D02",
        ('"preferred" decides which answer is better',),
        ("chosen=", "chosen: "),
    ),
    "one message stored as text": (
        lambda p, c, r: {"prompt": p, "chosen": c if "0" in c else json.dumps(turn("assistant", c)), "rejected": r},
        "D12",
        ('"chosen" is a list of messages stored as text here',),
        (),
    ),
    "a context and a question": (
        lambda p, c, r: {"context": "A long text.", "question": p, "chosen": c, "rejected": r},
        "D02",
        ("other texts: question", "question"),
        ("prompt=context",),
    ),
    "messages beside answers": (
        lambda p, c, r: {"conversation_id": "a", "dialog": [turn("user", p)], "chosen": c, "rejected": r},
        "D02",
        ("other texts: dialog", "dialog"),
        (),
    ),
    "answers alone": (lambda p, c, r: {"chosen": c, "rejected": r}, "D08", ("no common prefix of whole turns",), ()),
    "a winner": (
        lambda p, c, r: {"prompt": p, "response_a": c, "response_b": r, "winner": "a"},
        "D02",
        ('"winner" decides which answer is better',),
        ("chosen=", "chosen: "),
    ),
    "two answers in one output": (
        lambda p, c, r: {"instruction": p, "input": "", "output": [c, r]},
        "D06",
        ('write its better answer as "chosen"',),
        (),
    ),
    "names that say nothing": (
        lambda p, c, r: {"prompt_id": "7 a", "question": p, "response_j": c, "response_k": r},
        "D02",
        ("question", "NAME"),
        ("response_j=", "=response", ": response"),
    ),
    "dialogues about something else than the prompt": (
        lambda p, c, r: {"prompt": "Other words.", "chosen": dialogue(p, c), "rejected": dialogue(p, r)},
        "D12",
        ("do not begin with the prompt",),
        (),
    ),
    "messages as numpy writes them": (
        lambda p, c, r: {"prompt": p, "chosen": str(messages(p, c)).replace("}, {", "}\n {"), "rejected": "[]"},
        "D06",
        ("neither JSON nor Python", "orient="),
        (),
    ),
    "a role that the template leaves out": (
        lambda p, c, r: {"prompt": [turn("narrator", p), turn("user", "?")], **answers_of(c, r)},
        "T08",
        ('leaves out the text of message 1, of the role "narrator"', "user, assistant and system"),
        (),
    ),
}


def answers_of(chosen: str, rejected: str) -> dict[str, Any]:
    return {"chosen": [turn("assistant", chosen)], "rejected": [turn("assistant", rejected)]}


@pytest.mark.full
@pytest.mark.parametrize("form", REFUSED)
def test_what_cannot_be_read_is_refused_with_what_to_do(form: str, chat_base: Path, tmp_path: Path) -> None:
    make, code, says, never = REFUSED[form]
    path = write(tmp_path / "pairs.jsonl", make)
    of_init, run = init(chat_base, path)
    of_check = check_reward(chat_base, path)
    assert not run.exists()
    assert of_init.exit_code == of_check.exit_code == 2
    assert re.search(rf"error\[{code}\]: {path}:\d+: ", of_check.stderr), of_check.stderr
    for result in (of_init, of_check):
        message = result.stderr.replace("\n", " ")
        assert all(text in message for text in says), message
        assert not any(text in message for text in never), message
        assert "Traceback" not in message


def test_the_mapping_of_all_columns_is_asked_for_at_once(chat_base: Path, tmp_path: Path) -> None:
    """And it works when followed."""
    path = write(tmp_path / "pairs.jsonl", lambda p, c, r: {"Query": p, "response_chosen": c, "rejected_response": r})
    result, _ = init(chat_base, path)
    hint = "--column prompt=Query --column chosen=response_chosen --column rejected=rejected_response"
    assert result.exit_code == 2 and f"e.g. {hint}\n" in result.stderr
    assert init(chat_base, path, *hint.split())[0].exit_code == 0
    result = check_reward(chat_base, path)
    hint = "data.columns: {prompt: Query, chosen: response_chosen, rejected: rejected_response}"
    assert f"e.g. {hint}\n" in result.stderr
    assert check_reward(chat_base, path, "-s", hint.replace(": {", "={")).exit_code == 0


MARKED: dict[str, Make] = {
    "ChatML": lambda p, c, r: {
        "prompt": f"<|im_start|>user\n{p}<|im_end|>\n<|im_start|>assistant\n", "chosen": c, "rejected": r,
    },
    "[INST]": lambda p, c, r: {"prompt": f"<s> [INST] {p} [/INST]", "chosen": c, "rejected": r},
    "### Human": lambda p, c, r: {"prompt": f"### Human: {p}\n### Assistant:", "chosen": c, "rejected": r},
    "Human": lambda p, c, r: {"prompt": f"Human: {p}\nAssistant:", "chosen": c, "rejected": r},
    "Alpaca": lambda p, c, r: {"prompt": f"### Instruction:\n{p}\n\n### Response:", "chosen": c, "rejected": r},
    "in messages": lambda p, c, r: {"prompt": [turn("user", f"<|user|>\n{p}")], **answers_of(c, r)},
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("kind", MARKED)
def test_markup_that_is_there_already_is_named(kind: str, chat_base: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", MARKED[kind])
    result, _ = init(chat_base, path)
    assert result.exit_code == 0
    assert "warning[D18]: --data: 20 of 20 sampled rows have chat markup" in result.stderr
    is_wrapped = kind == "in messages"
    assert ("hint: write the texts without it" if is_wrapped else "hint: add --plain") in result.stderr
    assert ("warning[D18]" in check_reward(chat_base, path).stderr) == is_wrapped
    if not is_wrapped:
        shutil.rmtree(tmp_path / "run-pairs")
        result, run = init(chat_base, path, "--plain")
        assert result.exit_code == 0 and "D18" not in result.stderr
        assert all(row["prompt"] == MARKED[kind](*texts_of(number_of(row)))["prompt"] for row in pairs_of(run))


def number_of(row: dict[str, Any]) -> int:
    return int(re.findall(r"\d+", row["chosen"])[-1])


def test_a_clean_file_has_no_markup(chat_base: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", lambda p, c, r: {"prompt": f"Human nature: {p}", "chosen": c, "rejected": r})
    assert "D18" not in init(chat_base, path)[0].stderr


def test_an_answer_that_ends_in_the_stop_token_and_a_line_end_has_one(tokenizer: Any) -> None:
    assert data.encode(tokenizer, "A", "B<eos>\n") == data.encode(tokenizer, "A", "B")
    assert data.encode(tokenizer, "A", "B\n")[1] != data.encode(tokenizer, "A", "B")[1]


@pytest.mark.parametrize(("bad", "code", "exit_code"), [(33, "error[D16]", 2), (12, "warning[D16]", 0)])
def test_the_share_of_rows_that_init_drops_counts_whatever_the_reason(
    chat_base: Path, tmp_path: Path, bad: int, code: str, exit_code: int
) -> None:
    rows = [dict(zip(("prompt", "chosen", "rejected"), texts_of(number), strict=True)) for number in range(NUM_ROWS)]
    for number in range(bad):
        rows[number] |= {"prompt": ""} if number % 2 else {"rejected": rows[number]["chosen"]}
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", rows)
    result, run = init(chat_base, tmp_path / "pairs.jsonl")
    assert result.exit_code == exit_code and run.exists() == (exit_code == 0)
    counts = f"{bad} of 40 rows are dropped: {bad // 2 + bad % 2} by D07"
    assert code in result.stderr and counts in result.stderr, result.stderr


def test_a_template_without_a_system_role_is_named_with_the_row(world: World, chat_base: Path, tmp_path: Path) -> None:
    tokenizer = world.tokenizer()
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    tokenizers.set_chat_template(tokenizer, refusing + TEMPLATE)
    tokenizer.save_pretrained(chat_base)
    path = write(tmp_path / "pairs.jsonl", lambda p, c, r: {"system": RULE, "prompt": p, "chosen": c, "rejected": r})
    result, _ = init(chat_base, path)
    assert result.exit_code == 2
    assert f"error[D06]: {path}:1: the chat template rejects the conversation: System role not" in result.stderr
    assert "hint: without a system role in the template, put the text before the first user message's" in result.stderr


CP1252 = "prompt,chosen,rejected\na,b \u2013 c,d\n".encode("cp1252")
FILES = [
    (
        "a.csv",
        b'prompt;chosen\n"a, b";"c"\n',
        "D02",
        "a.csv:1: ",
        "separated by semicolons it would name prompt, chosen",
    ),
    ("a.csv", b'"prompt";"chosen"\n"a, b";"c"\n', "D02", "a.csv:1: ", "separated by semicolons it would name prompt"),
    ("a.csv", b"prompt\tchosen\trejected\na\tb\tc\n", "D02", "a.csv:1: ", "hint: separate the columns by commas"),
    ("a.json", b'{\n "data": [\n  {"prompt": "a"}\n ]\n}', "D12", "a.json: ", """for example: jq '.["data"]' a.json"""),
    (
        "a.json",
        b'{"prompt": ["a b", "c"], "chosen": ["d", "e"], "rejected": ["f", "g"]}',
        "D12",
        "a.json:1: ",
        "hint: write each row as a separate object",
    ),
    ("a.csv", CP1252, "D04", "a.csv:2: ", "iconv -f cp1252"),
]


@pytest.mark.parametrize(("name", "content", "code", "place", "says"), FILES)
def test_files_of_other_formats_are_refused_with_the_way(
    folder: Path, name: str, content: bytes, code: str, place: str, says: str
) -> None:
    (folder / name).write_bytes(content)
    assert refused(rlhf("reward", "-c", "reward.yaml", "-s", f"data.train={name}"), code, place, says)


def test_one_conversation_in_a_json_file_is_one_row(tmp_path: Path, chat: Any) -> None:
    (tmp_path / "one.json").write_text(json.dumps({"messages": messages("Hi", "Yes")}))
    assert len(data.sft_rows(tmp_path / "one.json", chat, max_length=None)) == 1


def test_a_text_of_another_source_is_no_prompt(tmp_path: Path, tokenizer: Any) -> None:
    rows = [
        {"source": "harmless base", "chosen": f"{p}\n{c}", "rejected": f"{p}\n{r}"}
        for p, c, r in map(texts_of, range(9))
    ]
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", rows)
    found = data.preference_rows(tmp_path / "pairs.jsonl", tokenizer, max_length=None)
    assert tokenizer.decode(found[3]["prompt_ids"]) == "How is thing 3?"


def test_a_message_that_the_template_writes_as_json_is_not_left_out(tmp_path: Path, chat: Any) -> None:
    chat.chat_template = "{% for m in messages %}{{ m.content | tojson }}<|im_end|>{% endfor %}"
    turns = [turn("user", "Hi"), turn("tool", 'line one\nline "two"\ttab'), turn("assistant", "Yes")]
    check_rendering([RenderedRow(RowLocation(tmp_path, 1), turns, ["No"])], chat, where="here", hint="")


def test_init_drops_a_pair_that_the_template_does_not_render(chat_base: Path, tmp_path: Path, world: World) -> None:
    tokenizer = world.tokenizer()
    refusing = (
        "{% for m in messages %}{% if 'grim 7.' in m.content %}{{ raise_exception('No.') }}{% endif %}{% endfor %}"
    )
    tokenizers.set_chat_template(tokenizer, refusing + TEMPLATE)
    tokenizer.save_pretrained(chat_base)
    path = write(tmp_path / "pairs.jsonl", lambda p, c, r: {"prompt": p, "chosen": c, "rejected": r})
    result, _ = init(chat_base, path)
    assert result.exit_code == 0 and "39 pairs used" in result.stdout
    reason = f"the chat template rejects the conversation: No. (first: {path}:8)"
    assert f"warning[D06]: --data: 1 of 40 pairs dropped: {reason}" in result.stderr.replace("\n", " ")


def test_numbers_of_a_table_are_margins(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "pairs.csv").write_text("prompt,chosen,rejected,margin\nA,b,c,1.5\nA,c,b,-2\n")
    rows = data.preference_rows(tmp_path / "pairs.csv", tokenizer, max_length=None)
    assert [row["margin"] for row in rows] == [1.5, -2.0]


# The files of the shared folder: read, or refused with a code.

CASES = {
    "json_text_answers": "read",
    "margin_null": "read",
    "pku_style": "read",
    "prerendered_chatml": "D18",
    "prompt_and_full_transcripts": "read",
    "question_chosen_rejected": "D02",
    "role_human": "read",
    "system_column": "read",
}


@pytest.mark.full
@pytest.mark.skipif(not (SHARED / "cases/data").is_dir(), reason="../shared, the developers' cases, is missing")
def test_the_shared_cases_are_read_right_or_refused(chat_base: Path, tmp_path: Path) -> None:
    files = sorted((SHARED / "cases/data").glob("*.jsonl"))
    assert {path.stem for path in files} >= CASES.keys()
    for path in files:
        shutil.copy(path, tmp_path / path.name)
        result, run = init(chat_base, tmp_path / path.name)
        expected = CASES.get(path.stem, "read")
        of_check = check_reward(chat_base, tmp_path / path.name)
        if expected == "D02":
            for refusal in (result, of_check):
                assert refusal.exit_code == 2 and "error[D02]" in refusal.stderr
            continue
        assert of_check.exit_code == 0, of_check.stderr
        assert result.exit_code == 0 and ("warning" in result.stderr) == (expected == "D18"), result.stderr
        for row in pairs_of(run):
            (*_, user) = row["prompt"]
            thing = re.search(r"make (.+) for (\d+)", user["content"])
            (answer,) = row["chosen"]
            assert thing and thing[1] in answer["content"] and thing[2] in answer["content"]
            assert expected == "D18" or user["content"] == f"How do I make {thing[1]} for {thing[2]} people?"
            assert "role" not in answer["content"] and "Human" not in answer["content"]
