"""Convert rows of other people's files to rlhf's columns, one kind of row a function.

Rows of ShareGPT and Alpaca become conversations and pairs. Lists of messages may be stored as text, name their
roles otherwise, or have the system prompt in another column. Answers may repeat the prompt, or be the whole dialogue.
"""

import ast
import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from rlhf_cli.data import texts
from rlhf_cli.data.columns import is_prompt_name, is_prose, system_text, tools_of
from rlhf_cli.data.readers import BadRow, Row, describe_value
from rlhf_cli.data.texts import Form
from rlhf_cli.data.tokens import TOOL_CALLS, TOOLS, common_prefix_length

ROLE_ALIASES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
}
TURN_COLUMNS = ("conversations", "conversation", "messages")
FOREIGN_COLUMNS = {
    *TURN_COLUMNS, "system", "instruction", "input", "output", "history", "chosen", "rejected",
    "preferred_output", "non_preferred_output",
}  # fmt: skip
MESSAGES_FORM: Form = ("messages",)
PAIR_FORM: Form = ("prompt", "chosen", "rejected")
CONTEXTS = ("prompt", "messages")  # columns whose messages begin a conversation
SHAREGPT_OR_ALPACA = "ShareGPT or Alpaca"
OPENAI = "OpenAI's preferences"
MIN_REPEATED_WORDS = 3  # of a prompt without the end of a sentence
SENTENCE_ENDS = tuple(".?!:\u2026\u3002\uff1f\uff01\uff1a")  # the last four of Chinese
# A list of messages, or a single one, as JSON or Python writes it.
TEXT_PARTS = ("text", "input_text", "output_text")  # types of parts of a content; the last two of OpenAI's responses
STORED_MESSAGES = re.compile(
    r"""\s*(?:\[\s*\{\s*["'](?:role|content|from|value)["']\s*:|\{\s*["']role["']\s*:\s*["'](?:user|assistant|system)["'])"""
)


def other_format(row: Row, own: Form | None) -> str:
    """Return the name of a row's format if it must be converted, else "".

    A row whose columns have the form `own` is converted only if that form is not complete.
    """
    if _is_openai_pair(row):
        return OPENAI
    target = target_form(row)
    if target is None or "prompt" in row:
        return ""
    if own is None:
        return SHAREGPT_OR_ALPACA
    lacks_messages = own == MESSAGES_FORM and _turns(row)
    lacks_prompt = target == PAIR_FORM and "prompt" not in own
    return SHAREGPT_OR_ALPACA if lacks_messages or lacks_prompt else ""


def target_form(row: Row) -> Form | None:
    """Return the columns of the row that `convert_row` would return, or None for an unknown format."""
    if _is_openai_pair(row):
        return PAIR_FORM
    answers = [row.get("chosen"), row.get("rejected")]
    has_pair = all(isinstance(answer, str) or _is_turn(answer) for answer in answers)
    if has_pair and _is_full_dialogue(row):
        return None  # full dialogues need no separate prompt
    has_answer = has_pair or "output" in row
    is_alpaca = has_answer and isinstance(row.get("instruction"), str)
    if not (is_alpaca or _turns(row)):
        return None
    return PAIR_FORM if has_pair else MESSAGES_FORM


def _is_openai_pair(row: Row) -> bool:
    return "preferred_output" in row and isinstance(row.get("input"), dict)


def convert_row(row: Row) -> Row:
    """Convert a row. Raises BadRow D12 (unknown format), D06 (not text)."""
    form = target_form(row)
    if form is None:
        raise BadRow("D12", f"columns {', '.join(row)} match neither ShareGPT, Alpaca nor OpenAI")
    if _is_openai_pair(row):
        return _openai_pair(row)
    turns = _turns(row)
    messages = [_message(turn) for turn in turns] if turns else _alpaca_messages(row)
    text = system_text(row)
    if text:
        messages.insert(0, {"role": "system", "content": text})

    if form == PAIR_FORM:
        chosen = _answer(row["chosen"], "chosen")
        rejected = _answer(row["rejected"], "rejected")
        return {"prompt": messages, "chosen": [chosen], "rejected": [rejected]}
    if isinstance(row.get("output"), list):
        raise BadRow("D06", '"output" is a list: write its better answer as "chosen" and another one as "rejected"')
    if not turns:
        messages.append(_answer(row["output"], "output"))
    return {"messages": messages}


def _openai_pair(row: Row) -> Row:
    """Return a row of OpenAI's preference fine-tuning as a pair: {input: {messages}, preferred_output, ...}."""
    given = row["input"]
    pair = {
        "prompt": given.get("messages"),
        "chosen": row["preferred_output"],
        "rejected": row.get("non_preferred_output"),
    }
    if not all(isinstance(messages, list) for messages in pair.values()):
        raise BadRow("D06", '"input.messages", "preferred_output" and "non_preferred_output" must be lists of messages')
    return {**pair, "tools": given.get("tools")}


def _is_full_dialogue(row: Row) -> bool:
    """Return True if the answers are full dialogues: transcripts, or texts whose common prefix has the question."""
    chosen = row["chosen"]
    rejected = row["rejected"]
    if not (isinstance(chosen, str) and isinstance(rejected, str)):
        return False
    if texts.is_transcript(chosen) and texts.is_transcript(rejected):
        return True
    question = _question(row)
    end = chosen.find(question) + len(question)
    return question in chosen and rejected.startswith(chosen[:end])


def _question(row: Row) -> str:
    """Return the last text that is not the assistant's."""
    question = row.get("instruction") or row.get("input")
    for turn in _turns(row):
        if _is_turn(turn) and ROLE_ALIASES.get(str(turn["from"])) != "assistant":
            question = turn["value"]
    return str(question or "").strip()


def _alpaca_messages(row: Row) -> list[Row]:
    history = row.get("history") or []
    if not (isinstance(history, list) and all(isinstance(turn, list) and len(turn) == 2 for turn in history)):
        raise BadRow("D12", f'"history" is not a list of [question, answer]: `{history!r:.60}`')
    messages = []
    for question, answer in history:
        messages.append(_user_turn(_text(question, "history")))
        messages.append(_answer(answer, "history"))

    parts = []
    for name in ("instruction", "input"):
        if row.get(name) is not None:
            parts.append(_text(row[name], name))
    question = "\n\n".join(filter(None, parts))
    messages.append(_user_turn(question))
    return messages


def _user_turn(text: str) -> Row:
    return {"role": "user", "content": text}


def _assistant_turn(text: str) -> Row:
    return {"role": "assistant", "content": text}


def _turns(row: Row) -> list[Any]:
    """Return the list in the first column that has a ShareGPT turn, or []."""
    for name in TURN_COLUMNS:
        turns = row.get(name)
        if isinstance(turns, list) and any(map(_is_turn, turns)):
            return turns
    return []


def _is_turn(value: Any) -> bool:
    return isinstance(value, dict) and {"from", "value"} <= value.keys()


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise BadRow("D06", f'"{column}" is {describe_value(value)}; expected text')
    return value


def _message(turn: Any) -> Row:
    if not _is_turn(turn) or str(turn["from"]) not in ROLE_ALIASES:
        raise BadRow("D12", f"`{turn!r:.60}` is not a turn of {', '.join(ROLE_ALIASES)}")
    marks = {name: turn[name] for name in texts.TRAINING_MARKS if name in turn}
    return {"role": ROLE_ALIASES[turn["from"]], "content": _text(turn["value"], "value"), **marks}


def _answer(value: Any, column: str) -> Row:
    return _message(value) if _is_turn(value) else _assistant_turn(_text(value, column))


# Lists of messages


def stored_messages(row: Row, names: Collection[str]) -> list[str]:
    """Return the columns among `names` whose text is a list of messages, as json.dumps or pandas store it."""
    return [name for name, value in row.items() if name in names and _is_stored(value)]


def _is_stored(value: Any) -> bool:
    return isinstance(value, str) and STORED_MESSAGES.match(value) is not None


def parse_stored_messages(text: Any, column: str) -> list[Any]:
    """Return the list that a text of JSON or Python holds. Raises BadRow D06."""
    if not _is_stored(text):
        problem = f'"{column}" is {describe_value(text)}, in other rows a list of messages stored as text'
        raise BadRow("D06", problem)
    for parse in (json.loads, ast.literal_eval):
        try:
            messages = parse(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        return messages if isinstance(messages, list) else [messages]
    problem = f'"{column}" is a list of messages stored as text that is neither JSON nor Python'
    hint = 'write lists as JSON, for example table.to_json("rows.jsonl", orient="records", lines=True)'
    raise BadRow("D06", f"{problem}: {hint}")


def other_roles(messages: list[Any]) -> list[str]:
    """Return the names of roles that `with_standard_names` changes."""
    roles = [message.get("role") for message in messages if isinstance(message, dict)]
    names = [role for role in roles if isinstance(role, str)]
    return [role for role in names if ROLE_ALIASES.get(role, role) != role]


def with_standard_names(messages: list[Any]) -> list[Any]:
    """Return the messages with the roles user, assistant and system in place of other names, and readable calls.

    A content that is a list of parts becomes their text. Raises BadRow D06 for another part.
    """
    standard = []
    for message in messages:
        if isinstance(message, dict):
            role = message.get("role")
            if isinstance(role, str) and role in ROLE_ALIASES:
                message = {**message, "role": ROLE_ALIASES[role]}
            if _has_parts(message):
                message = {**message, "content": _joined_parts(message["content"])}
            if message.get(TOOL_CALLS):
                message = _with_readable_calls(message)
        standard.append(message)
    return standard


def have_parts(messages: list[Any]) -> bool:
    """Return True if a message has a list of parts as its content, as those of vision models."""
    return any(isinstance(message, dict) and _has_parts(message) for message in messages)


def _has_parts(message: Row) -> bool:
    content = message.get("content")
    return isinstance(content, list) and bool(content) and all(_is_part(each) for each in content)


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and "type" in value


def _joined_parts(parts: list[Row]) -> str:
    """Return the texts of parts, one behind the other as templates write them. Raises BadRow D06 for other parts."""
    texts = []
    for part in parts:
        text = part.get("text")
        if part["type"] not in TEXT_PARTS or not isinstance(text, str):
            raise BadRow("D06", f"a message has a part of type {part['type']!r:.40}; rlhf reads text alone")
        texts.append(text)
    return "".join(texts)


def _with_readable_calls(message: Row) -> Row:
    """Return a message that calls tools as templates read it: no content is "", and JSON of arguments an object."""
    calls = message[TOOL_CALLS]
    if not (isinstance(calls, list) and all(map(_calls_function, calls))):
        text = f"tool_calls of a message is {calls!r:.60}; expected a list of {{function: {{name, arguments}}}}"
        raise BadRow("D06", text)
    calls = [{**call, "function": _with_parsed_arguments(call["function"])} for call in calls]
    return {**message, "content": message.get("content") or "", TOOL_CALLS: calls}


def _calls_function(call: Any) -> bool:
    match call:
        case {"function": {"name": str()}}:
            return True
    return False


def _with_parsed_arguments(function: Row) -> Row:
    with suppress(TypeError, ValueError):
        return {**function, "arguments": json.loads(function["arguments"])}
    return function


def as_turns(row: Row, form: Form) -> Row:
    """Make messages of a prompt and its answers that are texts; an empty prompt stays text, which is refused later."""
    if not row["prompt"].strip():
        return row
    return row | answers_as_turns(row, form) | {"prompt": [_user_turn(row["prompt"])]}


def answers_as_turns(row: Row, form: Form) -> Row:
    """Return a message for each answer that is text."""
    return {name: [_assistant_turn(row[name].strip())] for name in form if name != "prompt"}


def with_prompt_as_turn(row: Row, form: Form) -> Row:
    """Make a user's turn of a prompt that is text, before answers that are messages of the assistant alone."""
    answers = [row[name] for name in form if name != "prompt"]
    are_alone = answers and all(_first_role(messages) == "assistant" for messages in answers)
    if not (are_alone and "prompt" in form and isinstance(row["prompt"], str)):
        return row
    if not row["prompt"].strip():
        raise BadRow("D08", "the prompt is empty")
    return {**row, "prompt": [_user_turn(row["prompt"])]}


def _first_role(messages: str | list[Any]) -> Any:
    """Return the role of the first message, None for a text and for no messages."""
    return messages[0]["role"] if messages and isinstance(messages, list) else None


def with_tools(row: Row, form: Form) -> Row:
    """Put the row's tools into the first message of its prompt or conversations. Raises BadRow D06."""
    tools = tools_of(row)
    if not tools:
        return row
    changed = {}
    for name in form:
        role = _first_role(row[name])
        if role is None or (role == "assistant" and name not in CONTEXTS):
            continue
        first, *others = row[name]
        changed[name] = [{**first, TOOLS: tools}, *others]
    return row | changed


def with_system_message(row: Row, form: Form) -> Row:
    """Put the text of the row's system column before its messages, unless they begin with a system message.

    Raises BadRow D06 if it is not text.
    """
    text = system_text(row)
    if not text:
        return row
    changed = {}
    for name in form:
        role = _first_role(row[name])
        if role == "user" or (role == "assistant" and name in CONTEXTS):
            changed[name] = [{"role": "system", "content": text}, *row[name]]
    return row | changed


# Texts of answers that hold the prompt


def prompt_candidates(rows: Sequence[Row]) -> list[str]:
    """Return the columns beside chosen and rejected, without a prompt, that may be their prompt in some of the rows.

    Empty for whole dialogues, which contain it. A text at the beginning of both answers is not counted, nor one that
    most rows have, such as the name of a source.
    """
    found = chain.from_iterable(map(_texts_beside_answers, rows))
    return [name for name in dict.fromkeys(found) if is_prompt_name(name) or _is_varied(name, rows)]


def _is_varied(name: str, rows: Sequence[Row]) -> bool:
    values = [repr(row.get(name)) for row in rows]
    return len(values) == 1 or len(set(values)) > len(values) / 2


def _texts_beside_answers(row: Row) -> list[str]:
    beginning = ""
    match row:
        case {"chosen": str(chosen), "rejected": str(rejected)}:
            if texts.is_transcript(chosen) and texts.is_transcript(rejected):
                return []
            beginning = chosen[: common_prefix_length(chosen, rejected)]
        case {"chosen": list(chosen), "rejected": list()}:
            if chosen and isinstance(chosen[0], dict) and chosen[0].get("role") != "assistant":
                return []
        case _:
            return []

    names = []
    for name, value in row.items():
        if name in PAIR_FORM:
            continue
        if isinstance(value, str):
            is_beside = value.strip() not in beginning  # as an empty text is not
            may_be_prompt = is_beside and (is_prose(value) or is_prompt_name(name))
        else:
            may_be_prompt = isinstance(value, list) and any(map(_is_message, value))
        if may_be_prompt:
            names.append(name)
    return names


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value


def answers_repeat_prompt(rows: Sequence[Row], answers: Sequence[str]) -> bool:
    """Return True if in most rows each answer begins with the prompt; then the answers are whole texts."""
    num_texts = 0
    num_repeating = 0
    for row in rows:
        values: list[Any] = [row.get(name) for name in ("prompt", *answers)]
        if all(isinstance(value, str) for value in values):
            num_texts += 1
            prompt, *texts_of_answers = values
            num_repeating += all(begins_with(text, prompt) for text in texts_of_answers)
    return num_repeating > num_texts / 2


def begins_with(text: str, prompt: str) -> bool:
    """Return True if a text begins with a prompt that is at least a sentence, without regard to white space around.

    An answer may begin with the words that it explains: "Photosynthesis is ..."
    """
    prompt = prompt.strip()
    text = text.lstrip()
    if not prompt or not text.startswith(prompt):
        return False
    is_sentence = prompt.endswith(SENTENCE_ENDS) or len(prompt.split()) >= MIN_REPEATED_WORDS
    following = text[len(prompt) : len(prompt) + 1]
    ends_inside_word = prompt[-1].isalnum() and following.isalnum()
    return is_sentence and not ends_inside_word


def without_prompt(row: Row, answers: Sequence[str]) -> Row:
    """Take the prompt off the beginning of the answers, if each of them begins with it."""
    prompt = row["prompt"]
    if not all(begins_with(row[name], prompt) for name in answers):
        return row
    rest = {}
    for name in answers:
        answer = row[name]
        if answer.startswith(prompt):
            rest[name] = answer.removeprefix(prompt)
        else:  # they differ in the white space around
            rest[name] = answer.lstrip().removeprefix(prompt.strip())
    return row | rest


def require_prompt_in_dialogues(row: Row, answers: Sequence[str]) -> None:
    """Raise BadRow D12 if the dialogues beside a prompt do not all begin with it."""
    question = row["prompt"].strip().removesuffix("Assistant:").strip().removeprefix("Human:").strip()
    first = row[answers[0]]
    beginning = first[: first.find(question) + len(question)]
    if question not in first or not all(row[name].startswith(beginning) for name in answers):
        names = " and ".join(f'"{name}"' for name in answers)
        raise BadRow("D12", f"{names}: whole dialogues that do not begin with the prompt")
