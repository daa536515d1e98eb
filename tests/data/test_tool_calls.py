"""Conversations with tools: their schemas, calls of them as answers, and answers that are not to be trained."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli import data, terminal
from rlhf_cli.data import tokens
from rlhf_cli.errors import RLHFError
from tests.data.test_datasets import error_of, turn, write
from tests.data.test_rendering import tokenizer_of

QUESTION, ANSWER = turn("user", "How is Rome?"), turn("assistant", "Sunny.")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Tells the weather.", "parameters": CITY}}]
ARGUMENTS = {"city": "Rome"}
CALL = {
    **turn("assistant", ""),
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}],
}
AS_OPENAI: dict[str, Any] = {  # content is null, and the arguments are text
    **CALL,
    "content": None,
    "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}
    ],
}
RESULT = turn("tool", "25 degrees")


@pytest.fixture(scope="module")
def qwen() -> Any:
    return tokenizer_of("qwen2_5")


def sft_texts(path: Path, tokenizer: Any) -> list[tuple[str, str]]:
    """The rows as texts: what is not trained, and what is."""
    texts = []
    for row in data.sft_rows(path, tokenizer, max_length=None):
        start = row["completion_mask"].index(1)
        texts.append((tokenizer.decode(row["input_ids"][:start]), tokenizer.decode(row["input_ids"][start:])))
    return texts


def pair_prompts(path: Path, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(row["prompt_ids"]) for row in data.preference_rows(path, tokenizer, max_length=None)]


def prompts(path: Path, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(row.ids) for row in data.prompt_rows(path, tokenizer, max_length=None)]


PAIR = {"chosen": [ANSWER], "rejected": [turn("assistant", "No.")]}
READERS: list[tuple[Callable[[Path, Any], list[Any]], dict[str, Any]]] = [
    (sft_texts, {"messages": [QUESTION, ANSWER]}),
    (sft_texts, {"prompt": [QUESTION], "completion": [ANSWER]}),
    (sft_texts, {"prompt": QUESTION["content"], "completion": [ANSWER]}),
    (sft_texts, {"conversations": [{"from": "human", "value": "How is Rome?"}, {"from": "gpt", "value": "Sunny."}]}),
    (pair_prompts, {"prompt": [QUESTION], **PAIR}),
    (pair_prompts, {"prompt": QUESTION["content"], **PAIR}),
    (pair_prompts, {name: [QUESTION, *answer] for name, answer in PAIR.items()}),
    (prompts, {"prompt": [QUESTION]}),
    (prompts, {"messages": [QUESTION, ANSWER]}),
    (prompts, {"prompt": [QUESTION], **PAIR}),
]


@pytest.mark.parametrize(("read", "row"), READERS)
def test_tools_beside_messages_are_rendered_in_every_stage(
    tmp_path: Path, qwen: Any, capsys: pytest.CaptureFixture[str], read: Any, row: dict[str, Any]
) -> None:
    rendered = qwen.apply_chat_template([QUESTION], tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert "Tells the weather." in rendered
    for tools in (TOOLS, json.dumps(TOOLS)):
        (found,) = read(write(tmp_path, {**row, "tools": tools}), qwen)
        assert (found[0] if read is sft_texts else found) == rendered
    (without,) = read(write(tmp_path, {**row, "tools": []}), qwen)
    assert "Tells" not in str(without) and "not read" not in capsys.readouterr().err


def test_a_system_column_stands_before_a_text_prompt_of_an_answer_in_messages(tmp_path: Path, qwen: Any) -> None:
    row = {"system": "Be kind.", "prompt": QUESTION["content"], **PAIR}
    (prompt,) = pair_prompts(write(tmp_path, row), qwen)
    assert "system\nBe kind.<|im_end|>" in prompt and "user\nHow is Rome?" in prompt


def test_openais_preferences_bring_their_tools(tmp_path: Path, qwen: Any) -> None:
    outputs = {"preferred_output": PAIR["chosen"], "non_preferred_output": PAIR["rejected"]}
    (prompt,) = pair_prompts(write(tmp_path, {"input": {"messages": [QUESTION], "tools": TOOLS}, **outputs}), qwen)
    assert "Tells the weather." in prompt


def test_calls_of_tools_are_trained_as_the_template_writes_them(tmp_path: Path, qwen: Any) -> None:
    called, answered = sft_texts(write(tmp_path, {"messages": [QUESTION, AS_OPENAI, RESULT, ANSWER]}), qwen)
    dialogue = [QUESTION, CALL, RESULT, ANSWER]
    whole = [qwen.apply_chat_template(dialogue[:end], tokenize=False) for end in (2, 4)]
    assert ["".join(called) + "\n", "".join(answered) + "\n"] == whole
    assert called[1] == '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize(
    ("template", "rows", "code", "says"),
    [
        ("phi3", [{"messages": [QUESTION, ANSWER], "tools": TOOLS}], "D19", 'the rows have "tools"'),
        ("phi3", [{"messages": [QUESTION, CALL]}], "T09", "leaves out a part of the answer: 'weather'"),
        ("phi3", [{"messages": [QUESTION, CALL, QUESTION, ANSWER]}], "T08", "leaves out the calls or"),
        ("qwen2_5", [{"messages": [QUESTION, {**ANSWER, "tool_calls": [{}]}]}], "D06", "tool_calls of a message is"),
        ("qwen2_5", [{"messages": [QUESTION, ANSWER], "tools": "weather"}], "D06", '"tools" is text; expected'),
        ("qwen2_5", [{"messages": [QUESTION, ANSWER], "chat_template_kwargs": {"a": 1}}], "D19", "is not read"),
        ("qwen2_5", [{"messages": [QUESTION, {**ANSWER, "weight": 0.5}]}], "D06", "weight of a message"),
        ("qwen2_5", [{"messages": [QUESTION, {**ANSWER, "weight": 0}]}], "D09", "not to be trained"),
        ("qwen2_5", [{"prompt": "", "completion": [ANSWER]}], "D08", "the prompt is empty"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_its_name(
    tmp_path: Path, template: str, rows: list[Any], code: str, says: str
) -> None:
    problem = error_of(data.sft_rows, write(tmp_path, *rows), tokenizer_of(template)).problems[0]
    assert problem.code == code and says in problem.text and problem.where


def test_a_conversation_for_another_template_keeps_its_tools(qwen: Any) -> None:
    """As for a judge: the same messages are rendered by its own template, or refused."""
    asked = [{**QUESTION, "tools": TOOLS}]
    assert "Tells" in tokens.render(qwen, asked, generation_prompt=True)
    with pytest.raises(RLHFError, match="which the chat template does not write"):
        tokens.render(tokenizer_of("phi3"), asked, generation_prompt=True)


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"training": False}])
def test_an_answer_of_weight_0_is_context_alone(tmp_path: Path, qwen: Any, mark: dict[str, Any]) -> None:
    draft, final = {**turn("assistant", "Draft."), **mark}, {**ANSWER, **dict.fromkeys(mark, 1)}
    ((prompt, answer),) = sft_texts(write(tmp_path, {"messages": [QUESTION, draft, QUESTION, final]}), qwen)
    assert "Draft.<|im_end|>" in prompt and answer == "Sunny.<|im_end|>"
    names = {"user": "human", "assistant": "gpt"}
    turns = [QUESTION, draft, QUESTION, final]
    shared = [{**turn, "from": names[turn.pop("role")], "value": turn.pop("content")} for turn in map(dict, turns)]
    assert sft_texts(write(tmp_path, {"conversations": shared}), qwen) == [(prompt, answer)]


def test_tools_beside_texts_are_said_not_to_be_read(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal.reset()
    data.prompt_rows(write(tmp_path, {"prompt": "How is Rome?", "tools": TOOLS}), tokenizer, max_length=None)
    assert "warning[D17]" in (said := capsys.readouterr().err) and "not read: tools" in said
