"""Tokenisation for all stages: prompt + response + stop token, nothing after it, with an on-disk cache."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import chain, product, takewhile
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from jinja2 import TemplateError

from rlhf_cli import terminal
from rlhf_cli.data import template_trial
from rlhf_cli.data.sources import cache_folder
from rlhf_cli.errors import RLHFError, short_reason, translate_rust_panics
from rlhf_cli.progress import Progress
from rlhf_cli.system import CPUTimeExceeded, cpu_time_limit, format_bytes, memory_limit

Message = dict[str, Any]
Conversation = list[Message]
PromptText = str | Conversation
Answer = str | Message  # text after a text, or the assistant's message after a conversation
Encoded = tuple[list[int], list[int]]  # ids of a prompt and of a response
BATCH_ROWS = 4096  # rows
RENDER_TIMEOUT = 10.0  # seconds; a template takes milliseconds
RENDER_BYTES = 10**9  # a conversation of a million characters takes some MB
MIN_CACHED_ROWS = 10_000  # fewer rows are tokenised as fast as they are looked up
MAX_CACHE_BYTES = 5e9  # above it, the least recently used files are deleted
CACHE_VERSION = 3  # increase it if `encode_many` returns different tokens
_INTERNED_IDS: dict[int, int] = {}
_MARK = "assistant-text-stands-here"
_QUESTION: Message = {"role": "user", "content": "text"}
_PLAIN_ANSWER: Message = {"role": "assistant", "content": _MARK}
_THOUGHT_ANSWER: Message = {"role": "assistant", "content": f"<think>\nA thought.\n</think>\n\n{_MARK}"}
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")  # of a message: a thought beside its content
TOOL_CALLS = "tool_calls"  # of an answer
TOOLS = "tools"  # of the first message of a conversation: the schemas in its row, for the chat template's variable
_SCHEMA = {"type": "function", "function": {"name": _MARK, "description": _MARK, "parameters": {"type": "object"}}}
GENERATION_PROMPT = "generation_prompt"  # of data.chat_template_kwargs: the text that takes the place of the template's
_OWN_THOUGHT = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
_THOUGHT_TAG = re.compile(
    r"[<\[\u25c1][^<>\[\]\u25c1\u25b7\s]*(?:think|thought|reason)[^<>\[\]\u25c1\u25b7\s]*[>\]\u25b7]", re.IGNORECASE
)
WITHOUT_EMBEDDING = "rlhf_without_embedding"  # attribute of a tokenizer: ids of special tokens its model cannot read
SPEAKS_IN_TURNS = "rlhf_speaks_in_turns"  # attribute of a tokenizer: whether its model was trained on conversations


def ids_without_embedding(tokenizer: Any) -> frozenset[int] | None:
    """Return the ids set by `set_ids_without_embedding`, None before it."""
    return getattr(tokenizer, WITHOUT_EMBEDDING, None)


def speaks_in_turns(tokenizer: Any) -> bool | None:
    """Return whether the model was trained on conversations by its chat template; None if that is not known."""
    return getattr(tokenizer, SPEAKS_IN_TURNS, None)


def set_speaks_in_turns(tokenizer: Any, in_turns: bool) -> None:
    """Set whether the texts of a data file become turns of a user and the assistant."""
    setattr(tokenizer, SPEAKS_IN_TURNS, in_turns)


def encode(tokenizer: Any, prompt: PromptText, response: Answer | None) -> Encoded:
    """Return the token ids (prompt, response) of one row; the response ends in one stop token, and is [] for None.

    A string prompt keeps the special tokens that the tokenizer prepends (BOS), not those that it appends.
    After a conversation, both are the chat template's rendering of the whole conversation: the prompt up to the end of
    its generation prompt, the response behind it.
    Raises RLHFError D14 without a template, T09 as `answer_text`.
    """
    return encode_many(tokenizer, [prompt], [response])[0]


def encode_many(
    tokenizer: Any,
    prompts: Sequence[PromptText | None],
    responses: Sequence[Answer | None],
    *,
    any_text: bool = False,
) -> list[Encoded]:
    """Encode many rows as `encode` does, but several times faster; fast tokenizers use all cores.

    A None prompt gets no ids; the ids of a response do not depend on its prompt: a message is rendered, text is not.
    `any_text`: messages may have any text, as those that a policy samples: it stays as it is behind what the template
    writes before an answer, and so does one with thoughts that the template cannot render.
    Shows progress if it takes long.
    """
    encoded: list[Encoded] = []
    responses = [as_answer(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
    with Progress("data", len(prompts), "row", brief=True) as bar:
        for first in range(0, len(prompts), BATCH_ROWS):
            rows = slice(first, first + BATCH_ROWS)
            response_ids = _encode_responses(tokenizer, responses[rows], any_text)
            encoded += zip(_encode_prompts(tokenizer, prompts[rows]), response_ids, strict=True)
            bar.advance(len(encoded) - first, note="tokenised")
    return encoded


def encode_answer(tokenizer: Any, prompt: PromptText, answer: str, *, ended: bool) -> Encoded:
    """Return the token ids of a prompt and of any answer to it; one that was cut off has no stop token."""
    prompt_ids, response_ids = encode_many(tokenizer, [prompt], [answer], any_text=True)[0]
    if not ended and len(response_ids) > 1:
        response_ids = response_ids[:-1]
    return prompt_ids, response_ids


def as_answer(prompt: PromptText | None, response: Answer | None) -> Answer | None:
    """Return the response as the assistant's message if the prompt is a conversation."""
    if isinstance(prompt, list) and isinstance(response, str):
        return {"role": "assistant", "content": response}
    return response


def _encode_responses(tokenizer: Any, responses: Sequence[Answer | None], any_text: bool) -> list[list[int]]:
    texts = [_response_text(tokenizer, response, any_text) for response in responses if response is not None]
    if not texts:
        return [[] for _ in responses]
    stop = stop_token_id(tokenizer)
    stop_text = tokenizer.decode([stop])
    texts = [_without_space_after(stop_text, text) for text in texts]
    tokenized = _tokenize_behind_a_prompt(tokenizer, texts)
    for ids in tokenized:
        if ids[-1:] != [stop]:
            ids.append(stop)
    remaining = iter(tokenized)
    return [[] if response is None else next(remaining) for response in responses]


def _tokenize_behind_a_prompt(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Tokenise texts without the space that SentencePiece (Llama 1 and 2, Mistral 0.1) puts before a text.

    Between a prompt and its answer there is none. Each text is tokenised behind a line break, whose tokens are cut off.
    """
    if not _puts_space_before_texts(tokenizer):
        return tokenize(tokenizer, texts)
    line_break = tokenize(tokenizer, ["\n"])[0]
    size = len(line_break)
    rows = tokenize(tokenizer, [f"\n{text}" for text in texts])
    behind = [ids[size:] for ids in rows]
    merged = [number for number, ids in enumerate(rows) if ids[:size] != line_break]
    alone = tokenize(tokenizer, [texts[number] for number in merged])
    for number, ids in zip(merged, alone, strict=True):
        behind[number] = ids
    return behind


@lru_cache(maxsize=8)
def _puts_space_before_texts(tokenizer: Any) -> bool:
    tokens = tokenizer.convert_ids_to_tokens(tokenize(tokenizer, ["a"])[0])
    return bool(tokens) and tokens[0].startswith("\u2581")


def _without_space_after(stop: str, text: str) -> str:
    """Return a text that ends in the stop token without the white space after it: one stop token ends the answer."""
    stripped = text.rstrip()
    return stripped if stripped.endswith(stop) else text


def _response_text(tokenizer: Any, response: Answer, any_text: bool) -> str:
    if isinstance(response, str):
        return response
    if any_text and not has_thought(response):
        return header_of_answers(tokenizer) + str(response["content"])
    try:
        return answer_text(tokenizer, response)
    except RLHFError as error:
        if any_text and error.problems[0].code in ("D06", "T09"):
            return str(response["content"])
        raise


def stop_token_id(tokenizer: Any) -> int:
    """Return the token that the chat template writes after an assistant's text, or else the EOS token.

    Warns (T06) if the template writes none: a model trained on its output only would never learn to stop.
    """
    return _stop_token_id(tokenizer, tokenizer.chat_template, tokenizer.eos_token_id)


def closing_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that the chat template writes behind an answer's stop token, as ChatML its newline."""
    if not tokenizer.chat_template:
        return ()
    stop = stop_token_id(tokenizer)
    ids = tokenize(tokenizer, [answer_frame(tokenizer).after])[0]
    if stop not in ids:
        return ()
    return tuple(ids[ids.index(stop) + 1 :])


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of the special tokens, which decoded text leaves out."""
    added = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added.union(tokenizer.all_special_ids)


def decode_stream(tokenizer: Any, ids: Iterable[int], *, special: bool = False) -> Iterator[str]:
    """Yield the new text after each token, and finally any remaining text.

    A character of several tokens is yielded with the last of them. The pieces join to the decoded text, with or without
    its `special` tokens.
    """
    decoded_ids: list[int] = []
    text = ""
    start = 0
    for token in ids:
        decoded_ids.append(token)
        text = tokenizer.decode(decoded_ids, skip_special_tokens=not special)
        end = start if text.endswith("\N{REPLACEMENT CHARACTER}") else len(text)
        yield text[start:end]
        start = end
    yield text[start:]


def token_texts(tokenizer: Any, ids: Iterable[int]) -> list[str]:
    """Return the text of each token, special ones too; a character of several tokens goes to the last one."""
    *texts, last, rest = decode_stream(tokenizer, ids, special=True)
    return [*texts, last + rest]


def render(tokenizer: Any, conversation: Conversation, *, generation_prompt: bool, **variables: Any) -> str:
    """Render a conversation with values of the template's variables.

    Raises RLHFError D14 without a template, D06 if it rejects the turns, D19 if it does not write the conversation's
    tools, M01 beyond its limits.
    """
    if not tokenizer.chat_template:
        text = "the data contains conversations, but the tokenizer has no chat template"
        raise RLHFError("D14", text, hint="set model.chat_template to a Jinja file, or to chatml")
    if conversation and isinstance(conversation[0].get(TOOLS), list):
        _require_written_tools(tokenizer, tokenizer.chat_template)
        first = dict(conversation[0])
        variables[TOOLS] = first.pop(TOOLS)
        conversation = [first, *conversation[1:]]
    if _reads_parts(tokenizer, tokenizer.chat_template):
        conversation = [_in_parts(message) for message in conversation]
    return _render(tokenizer, conversation, generation_prompt, variables)


def _render(tokenizer: Any, conversation: Conversation, generation_prompt: bool, variables: Mapping[str, Any]) -> str:
    limit = _limit_of(tokenizer.chat_template)
    try:
        if limit is None:
            with cpu_time_limit(RENDER_TIMEOUT), memory_limit(RENDER_BYTES):
                options = {"tokenize": False, "add_generation_prompt": generation_prompt}
                return str(tokenizer.apply_chat_template(conversation, **options, **variables))
    except CPUTimeExceeded:
        limit = template_trial.TIME
    except MemoryError:
        limit = template_trial.MEMORY
    except RecursionError:
        limit = template_trial.DEPTH
    except Exception as error:  # a template may do anything; the sandbox limits `range`
        reason = str(error) if isinstance(error, TemplateError) else short_reason(error)
        hint = None
        if "system" in reason.casefold():
            hint = "without a system role in the template, put the text before the first user message's"
        raise RLHFError("D06", f"the chat template rejects the conversation: {reason}", hint=hint) from error
    problem = {
        template_trial.TIME: f"takes more than {RENDER_TIMEOUT:g} s for one conversation",
        template_trial.MEMORY: f"needs more than {format_bytes(RENDER_BYTES)} for one conversation",
        template_trial.DEPTH: "calls itself without end, or is nested too deeply",
    }[limit]
    hint = "set model.chat_template to another template, or to chatml"
    raise RLHFError("M01", f"the chat template {problem}", hint=hint)


@lru_cache(maxsize=8)
def _require_written_tools(tokenizer: Any, template: str) -> None:
    """Raise RLHFError D19 if the template writes no tools."""
    without = render(tokenizer, [_QUESTION], generation_prompt=True)
    written = render(tokenizer, [_QUESTION], generation_prompt=True, tools=[_SCHEMA])
    if written == without:
        text = 'the rows have "tools", which the chat template does not write'
        hint = "set model.chat_template to one that writes tools"
        raise RLHFError("D19", text, hint=f"{hint}, or put them into a system message and remove the column")


@lru_cache(maxsize=64)
def _limit_of(template: str) -> str | None:
    return template_trial.ends_by(template, seconds=RENDER_TIMEOUT, max_bytes=RENDER_BYTES)


def _in_parts(message: Message) -> Message:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


@lru_cache(maxsize=8)
def _reads_parts(tokenizer: Any, template: str) -> bool:
    """Return True if the template shows texts only as lists of parts, as that of a vision model may."""
    turns: Conversation = [{"role": "user", "content": _MARK}, _PLAIN_ANSWER]
    as_text = _count_marks(tokenizer, turns)
    as_parts = _count_marks(tokenizer, [_in_parts(message) for message in turns])
    return as_text < 2 and as_parts == 2


def _count_marks(tokenizer: Any, conversation: Conversation) -> int:
    """Return how often the template writes the mark of this conversation; 0 if it rejects the turns."""
    try:
        return _render(tokenizer, conversation, False, {}).count(_MARK)
    except RLHFError as error:
        if error.problems[0].code != "D06":
            raise
        return 0


# Answers


@dataclass(frozen=True)
class AnswerFrame:
    """What a chat template writes around a plain answer to a question, and of that question with a generation prompt.

    Qwen3.5: question "..<|im_end|>\\n", generation "..<|im_start|>assistant\\n<think>\\n", after "<|im_end|>\\n",
    before "..<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n".
    """

    question: str
    generation: str
    before: str
    after: str

    def of_answer(self, rendering: str) -> str:
        """Return the part of a rendering that comes from the answer."""
        if rendering.startswith(self.before):
            return rendering[len(self.before) :]
        return _differing_ends(self.generation, rendering)[1]

    def text_behind(self, body: str) -> str | None:
        """Return what a rendering without `after` has behind the generation prompt, None if it has another beginning.

        White space may differ. A generation prompt may also end with more than the template writes before an answer,
        unless that opens a thought, or closes one before the answer's own.
        """
        opening = self.generation.rstrip()
        if body.startswith(self.generation):
            return body[len(self.generation) :]
        if body.startswith(opening):
            return body[len(opening) :].lstrip()
        only_prompt, only_before = _differing_ends(self.generation, self.before)
        if only_before.strip() or not body.startswith(self.before):
            return None
        text = body[len(self.before) :]
        tags = _THOUGHT_TAG.findall(only_prompt)
        if not tags:
            return text
        closes_thought = "/" in tags[-1] or "end" in tags[-1].lower()
        has_another = _THOUGHT_TAG.search(text)
        return text if closes_thought and not has_another else None


def answer_text(tokenizer: Any, message: Message) -> str:
    """Return what the chat template writes of the assistant's message behind its generation prompt, up to the stop.

    Raises RLHFError T09 if the template leaves out a part of it, or begins it unlike its generation prompt.
    """
    frame = answer_frame(tokenizer)
    body = _answer_body(tokenizer, message, frame, {})
    if missing := _missing_part(body, message, frame):
        text = f"the chat template leaves out a part of the answer: {missing[:40]!r}"
        hint = "remove it from the answer, or set model.chat_template to a template that writes it"
        raise RLHFError("T09", text, hint=hint)
    text_behind = frame.text_behind(body)
    if text_behind is None:
        prompt_end, written = _differing_ends(frame.generation, body)
        text = f"the generation prompt ends with {prompt_end!r}, where the chat template writes {written[:40]!r}"
        raise RLHFError("T09", text, hint=variables_hint(tokenizer, thoughts=has_thought(message)))
    return text_behind


def _differing_ends(first: str, second: str) -> tuple[str, str]:
    """Return what two texts have after their common beginning."""
    length = common_prefix_length(first, second)
    return first[length:], second[length:]


def common_prefix_length(left: Any, right: Any) -> int:
    """Return the number of equal characters or messages at the beginning of both."""
    return sum(1 for _ in takewhile(lambda items: items[0] == items[1], zip(left, right, strict=False)))


def answer_frame(tokenizer: Any) -> AnswerFrame:
    """Return the frame of plain answers. Raises RLHFError T09 if the template leaves out the answer's text."""
    return _answer_frame(tokenizer, tokenizer.chat_template)


@lru_cache(maxsize=8)
def _answer_frame(tokenizer: Any, template: str | None) -> AnswerFrame:
    return _find_frame(tokenizer, {})


def _find_frame(tokenizer: Any, variables: Mapping[str, Any]) -> AnswerFrame:
    question = render(tokenizer, [_QUESTION], generation_prompt=False, **variables)
    generation = render(tokenizer, [_QUESTION], generation_prompt=True, **variables)
    rendering = render(tokenizer, [_QUESTION, _PLAIN_ANSWER], generation_prompt=False, **variables)
    before, mark, after = rendering.rpartition(_MARK)
    if not mark:
        text = "the chat template leaves out the assistant's text"
        raise RLHFError("T09", text, hint="set model.chat_template to another template, or to chatml")
    return AnswerFrame(question, generation, before, after)


def _answer_body(tokenizer: Any, message: Message, frame: AnswerFrame, variables: Mapping[str, Any]) -> str:
    """Render a question and the answer, up to what follows the answer's text.

    If the template leaves out the answer's thought, or opens another one before it, it is rendered as a separate field.
    Raises RLHFError T09 if the answer ends unlike others.
    """
    rendering = render(tokenizer, [_QUESTION, message], generation_prompt=False, **variables)
    max_thoughts = max(1, message["content"].count("<think>"))
    for spelled in _other_spellings(message):
        thoughts = rendering.removeprefix(frame.question).count("<think>")
        if thoughts <= max_thoughts and not _missing_part(rendering, message, frame):
            break
        with suppress(RLHFError):  # a template may refuse a field
            rendering = render(tokenizer, [_QUESTION, spelled], generation_prompt=False, **variables)
    if not rendering.endswith(frame.after):
        text = f"the chat template ends an answer with {frame.after!r}, but not this one: {rendering[-40:]!r}"
        raise RLHFError("T09", text, hint="remove what it treats in another way, or set model.chat_template")
    return rendering.removesuffix(frame.after)


def _other_spellings(message: Message) -> Iterator[Message]:
    """Yield the message with its thought in each field that a template may read."""
    content = message["content"]
    thoughts = _thoughts_of(message)
    own = _OWN_THOUGHT.fullmatch(content)
    if thoughts:
        thought = thoughts[0]
    elif own:
        thought = own[1].strip()
        content = own[2].lstrip()
    else:
        return
    for key in THOUGHT_KEYS:
        yield {"role": message["role"], "content": content, key: thought}


def _thoughts_of(message: Message) -> list[Any]:
    """Return the thoughts beside the content of an answer."""
    return [message[key] for key in THOUGHT_KEYS if message.get(key)]


def _missing_part(rendering: str, message: Message, frame: AnswerFrame) -> str:
    """Return the first text of the answer, of its thought and what stands around it, that a rendering lacks, or ""."""
    written = frame.of_answer(rendering)
    contents = re.split(r"</?think>", message["content"])
    calls = [call["function"]["name"] for call in message.get(TOOL_CALLS, ())]
    for part in (*_thoughts_of(message), *contents, *calls):
        text = str(part).strip()
        if not text:
            continue
        _, found, written = written.partition(text)
        if not found:
            return text
    return ""


def has_thought(message: Message) -> bool:
    """Return True if the answer brings its thought."""
    return "</think>" in message["content"] or bool(_thoughts_of(message))


def header_of_answers(tokenizer: Any) -> str:
    """Return what the chat template writes between its generation prompt and the text of a plain answer."""
    frame = answer_frame(tokenizer)
    return frame.text_behind(frame.before) or ""


def variables_hint(tokenizer: Any, *, thoughts: bool) -> str:
    """Return a hint with the variables of `fitting_variables`."""
    return _variables_hint(tokenizer, tokenizer.chat_template, thoughts)


@lru_cache(maxsize=8)
def _variables_hint(tokenizer: Any, template: str, thoughts: bool) -> str:
    variables = fitting_variables(tokenizer, thoughts=thoughts)
    if variables is None:
        return "set data.chat_template_kwargs or model.chat_template so that answers begin like the generation prompt"
    shown = ", ".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in variables.items())
    return f"set data.chat_template_kwargs: {{{shown}}}"


def fitting_variables(
    tokenizer: Any, *, thoughts: bool, first: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Find variables of the chat template with which the answers' own text follows the generation prompt.

    They are found by trying: `first`, none, each name about thoughts in the template with several values. For answers
    without `thoughts` the last resort is GENERATION_PROMPT. Return None if nothing helps.
    """
    names = sorted(set(re.findall(r"\b\w*(?:think|reason)\w*\b", tokenizer.chat_template)))
    values = (True,) if thoughts else (False, "none", True)
    tried = [{name: value} for value, name in product(values, names)]
    for variables in (first or {}, {}, *tried):
        if _fits(tokenizer, variables, thoughts):
            return dict(variables)
    if thoughts:
        return None
    frame = answer_frame(tokenizer)
    opening = frame.before.removeprefix(frame.question)
    return {GENERATION_PROMPT: opening} if opening != frame.before else None


def _fits(tokenizer: Any, variables: Mapping[str, Any], thoughts: bool) -> bool:
    message = _THOUGHT_ANSWER if thoughts else _PLAIN_ANSWER
    try:
        frame = _find_frame(tokenizer, variables)
        body = _answer_body(tokenizer, message, frame, variables)
    except RLHFError:  # the template rejects the value
        return False
    text = frame.text_behind(body)
    if text is None or _missing_part(body, message, frame):
        return False
    return thoughts or text.strip() == _MARK


@lru_cache(maxsize=8)
def _stop_token_id(tokenizer: Any, template: str | None, eos: int | None) -> int:
    if template:
        special = special_ids(tokenizer)
        for token in tokenize(tokenizer, [answer_frame(tokenizer).after])[0]:
            if token in special:
                return token
        text = f"the chat template does not end an answer with a stop token; {tokenizer.eos_token!r} is used"
        terminal.warn("T06", text)
    if eos is None:
        raise RLHFError("T06", "the tokenizer has no EOS token, so no response can end")
    return eos


def _encode_prompts(tokenizer: Any, prompts: Sequence[PromptText | None]) -> list[list[int]]:
    rendered = [render(tokenizer, prompt, generation_prompt=True) for prompt in prompts if isinstance(prompt, list)]
    chat_ids = iter(tokenize(tokenizer, rendered))  # the template adds its own special tokens

    plain = [prompt for prompt in prompts if isinstance(prompt, str)]
    suffix = len(_trailing_special_ids(tokenizer)) if plain else 0
    plain_ids = iter(tokenize(tokenizer, plain, special=True))

    encoded: list[list[int]] = []
    for prompt in prompts:
        if prompt is None:
            encoded.append([])
        elif isinstance(prompt, str):
            ids = next(plain_ids)
            encoded.append(ids[: len(ids) - suffix])
        else:
            encoded.append(next(chat_ids))
    return encoded


def _trailing_special_ids(tokenizer: Any) -> list[int]:
    """Return the special tokens that the tokenizer appends to a text."""
    plain = tokenize(tokenizer, ["a"])[0]
    with_special = tokenize(tokenizer, ["a"], special=True)[0]
    ends = range(len(plain), len(with_special) + 1)
    matches = [end for end in ends if with_special[end - len(plain) : end] == plain]
    return with_special[matches[-1] :]


def tokenize(tokenizer: Any, texts: list[str], special: bool = False) -> list[list[int]]:
    """Return the token ids of texts, with or without the `special` tokens that the tokenizer adds.

    Raises RLHFError M01, M06 for an id without embedding.
    """
    if not texts:
        return []
    # verbose=False: no warning of the library about long sequences; rlhf checks max_length itself.
    with translate_rust_panics("the tokenizer fails on a text"):
        batch = tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)
    unreadable = ids_without_embedding(tokenizer)
    if unreadable:
        for ids in batch["input_ids"]:
            for token in unreadable.intersection(ids):
                text = f"a text contains {tokenizer.convert_ids_to_tokens(token)}, for which the model has no embedding"
                raise RLHFError("M06", text, hint="remove the token from the texts and the chat template")
    return [intern_ids(ids) for ids in batch["input_ids"]]


def intern_ids(ids: list[int]) -> list[int]:
    """Return the ids with equal ids as one object: 8 bytes per token instead of 40."""
    return [_INTERNED_IDS.setdefault(token, token) for token in ids]


def encode_cached(
    tokenizer: Any, prompts: Sequence[PromptText | None], responses: Sequence[Answer | None]
) -> list[Encoded]:
    """Return `encode_many` of the rows, from the cache if they are many."""
    if len(prompts) < MIN_CACHED_ROWS or not tokenizer.is_fast:
        return encode_many(tokenizer, prompts, responses)
    path = cache_folder() / "tokens" / f"{_cache_key(tokenizer, prompts, responses)}.npz"
    cached_rows = _read_cache(path, len(prompts))
    if cached_rows is not None:
        terminal.say(f"data     {len(cached_rows)} tokenised rows read from the cache {path.parent}")
        return cached_rows
    rows = encode_many(tokenizer, prompts, responses)
    try:
        _write_cache(path, rows)
    except OSError as error:
        terminal.log_once(f"data     tokens are not cached: {error.strerror or error} ({path.parent})")
    return rows


def _cache_key(tokenizer: Any, prompts: Sequence[PromptText | None], responses: Sequence[Answer | None]) -> str:
    probe = ""  # a short question rendered by the chat template; some templates include today's date
    with suppress(RLHFError):  # no template, or one that rejects this conversation
        probe = render(tokenizer, [{"role": "user", "content": "?"}], generation_prompt=True)
    parts: list[Any] = [CACHE_VERSION, tokenizer.chat_template, tokenizer.eos_token_id, tokenizer.split_special_tokens]
    unreadable = ids_without_embedding(tokenizer)
    if unreadable:
        parts.append(sorted(unreadable))
    digest = sha256(repr((*parts, probe)).encode())
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    for prompt, response in zip(prompts, responses, strict=True):
        digest.update(f"{prompt!r}\0{response!r}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _write_cache(path: Path, rows: list[Encoded]) -> None:
    """Write the rows to the cache, and delete the files of it that were not used for the longest time."""
    lengths = np.array([[len(prompt), len(response)] for prompt, response in rows], dtype=np.int64)
    sequences = chain.from_iterable(rows)
    tokens = np.fromiter(chain.from_iterable(sequences), np.int32, int(lengths.sum()))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}-{os.getpid()}")
    with partial.open("wb") as file:
        np.savez(file, lengths=lengths, tokens=tokens)
    partial.replace(path)

    files = list(path.parent.glob("*.npz*"))
    files.sort(key=lambda cached: cached.stat().st_mtime, reverse=True)
    total = 0
    for cached in files:
        total += cached.stat().st_size
        if total > MAX_CACHE_BYTES:
            cached.unlink(missing_ok=True)


def _read_cache(path: Path, rows: int) -> list[Encoded] | None:
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            lengths = file["lengths"]
            tokens = file["tokens"]
        path.touch()
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):  # missing or damaged
        return None
    if lengths.shape != (rows, 2) or lengths.sum() != len(tokens):
        return None
    ends = lengths.reshape(-1).cumsum()
    ids = [intern_ids(part.tolist()) for part in np.split(tokens, ends[:-1])]
    return list(zip(ids[::2], ids[1::2], strict=True))
