"""Tokenisation for all stages: prompt + response + stop token, nothing after it, with an on-disk cache."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from jinja2 import TemplateError

from rlhf_cli import terminal
from rlhf_cli.data.sources import cache_folder
from rlhf_cli.errors import RLHFError, translate_rust_panics
from rlhf_cli.progress import Progress
from rlhf_cli.system import CPUTimeExceeded, cpu_time_limit

Conversation = list[dict[str, Any]]
Encoded = tuple[list[int], list[int]]  # ids of a prompt and of a response
BATCH_ROWS = 4096  # rows
RENDER_TIMEOUT = 10.0  # seconds; a template takes milliseconds
MIN_CACHED_ROWS = 10_000  # fewer rows are tokenised as fast as they are looked up
MAX_CACHE_BYTES = 5e9  # above it, the least recently used files are deleted
CACHE_VERSION = 2  # increase it if `encode_many` returns different tokens
_INTERNED_IDS: dict[int, int] = {}
_END_MARK = "assistant-text-ends-here"
WITHOUT_EMBEDDING = "rlhf_without_embedding"  # attribute of a tokenizer: ids of special tokens its model cannot read


def ids_without_embedding(tokenizer: Any) -> frozenset[int] | None:
    """Return the ids set by `set_ids_without_embedding`, None before it."""
    return getattr(tokenizer, WITHOUT_EMBEDDING, None)


def encode(tokenizer: Any, prompt: str | Conversation, response: str | None) -> Encoded:
    """Return the token ids (prompt, response) of one row; the response ends in one stop token, and is [] for None.

    A string prompt keeps the special tokens that the tokenizer prepends (BOS), not those that it appends.
    A conversation is rendered by the chat template up to the start of the assistant's text.
    Raises RLHFError D14 without a template.
    """
    return encode_many(tokenizer, [prompt], [response])[0]


def encode_many(
    tokenizer: Any, prompts: Sequence[str | Conversation | None], responses: Sequence[str | None]
) -> list[Encoded]:
    """Encode many rows as `encode` does, but several times faster; fast tokenizers use all cores.

    A None prompt gets no ids; the ids of a response do not depend on its prompt. Shows progress if it takes long.
    """
    encoded: list[Encoded] = []
    with Progress("data", len(prompts), "row", brief=True) as bar:
        for first in range(0, len(prompts), BATCH_ROWS):
            rows = slice(first, first + BATCH_ROWS)
            response_ids = _encode_responses(tokenizer, responses[rows])
            encoded += zip(_encode_prompts(tokenizer, prompts[rows]), response_ids, strict=True)
            bar.advance(len(encoded) - first, note="tokenised")
    return encoded


def _encode_responses(tokenizer: Any, responses: Sequence[str | None]) -> list[list[int]]:
    texts = [text for text in responses if text is not None]
    if not texts:
        return [[] for _ in responses]
    stop = stop_token_id(tokenizer)
    stop_text = tokenizer.decode([stop])
    tokenized = iter(tokenize(tokenizer, [_without_space_after(stop_text, text) for text in texts]))
    ids = [[] if text is None else next(tokenized) for text in responses]
    for text, row in zip(responses, ids, strict=True):
        if text is not None and row[-1:] != [stop]:
            row.append(stop)
    return ids


def _without_space_after(stop: str, text: str) -> str:
    """Return a text that ends in the stop token without the white space after it: one stop token ends the answer."""
    return text.rstrip() if text.rstrip().endswith(stop) else text


def stop_token_id(tokenizer: Any) -> int:
    """Return the token that the chat template writes after an assistant's text, or else the EOS token.

    Warns (T06) if the template writes none: a model trained on its output only would never learn to stop.
    """
    return _stop_token_id(tokenizer, tokenizer.chat_template, tokenizer.eos_token_id)


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of the special tokens, which decoded text leaves out."""
    return set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}


def decode_stream(tokenizer: Any, ids: Iterable[int], *, special: bool = False) -> Iterator[str]:
    """Yield the new text after each token, and finally any remaining text.

    A character of several tokens is yielded with the last of them. The pieces join to the decoded text, with or without
    its `special` tokens.
    """
    decoded_ids: list[int] = []
    text, start = "", 0
    for token in ids:
        decoded_ids.append(token)
        text = tokenizer.decode(decoded_ids, skip_special_tokens=not special)
        end = start if text.endswith("\N{REPLACEMENT CHARACTER}") else len(text)
        yield text[start:end]
        start = end
    yield text[start:]


def render(tokenizer: Any, conversation: Conversation, *, generation_prompt: bool) -> str:
    """Render a conversation. Raises RLHFError D14 without a template, D06 if it rejects the turns, M01 on a timeout."""
    if not tokenizer.chat_template:
        text = "the data contains conversations, but the tokenizer has no chat template"
        raise RLHFError("D14", text, hint="set model.chat_template to a Jinja file, or to chatml")
    try:
        with cpu_time_limit(RENDER_TIMEOUT):
            options = {"tokenize": False, "add_generation_prompt": generation_prompt}
            return str(tokenizer.apply_chat_template(conversation, **options))
    except CPUTimeExceeded as error:
        text = f"the chat template takes more than {RENDER_TIMEOUT:g} s for one conversation"
        raise RLHFError("M01", text, hint="set model.chat_template to another template, or to chatml") from error
    except (TemplateError, OverflowError, TypeError, ValueError) as error:  # the sandbox limits `range`
        text, hint = f"the chat template rejects the conversation: {error}", None
        if any(message["role"] == "system" for message in conversation):
            hint = "without a system role in the template, put the text before the first user message's"
        raise RLHFError("D06", text, hint=hint) from error


@lru_cache(maxsize=8)
def _stop_token_id(tokenizer: Any, template: str | None, eos: int | None) -> int:
    if template:
        turns = [{"role": "user", "content": "text"}, {"role": "assistant", "content": _END_MARK}]
        tail = render(tokenizer, turns, generation_prompt=False).rpartition(_END_MARK)[2]
        special = special_ids(tokenizer)
        for token in tokenize(tokenizer, [tail])[0]:
            if token in special:
                return token
        text = f"the chat template does not end an answer with a stop token; {tokenizer.eos_token!r} is used"
        terminal.warn("T06", text)
    if eos is None:
        raise RLHFError("T06", "the tokenizer has no EOS token, so no response can end")
    return eos


def _encode_prompts(tokenizer: Any, prompts: Sequence[str | Conversation | None]) -> list[list[int]]:
    plain = [prompt for prompt in prompts if isinstance(prompt, str)]
    chats = [render(tokenizer, prompt, generation_prompt=True) for prompt in prompts if isinstance(prompt, list)]
    suffix = len(_trailing_special_ids(tokenizer)) if plain else 0
    strings = iter(ids[: len(ids) - suffix] for ids in tokenize(tokenizer, plain, special=True))
    rendered = iter(tokenize(tokenizer, chats))  # the template adds its own special tokens
    return [[] if p is None else next(strings) if isinstance(p, str) else next(rendered) for p in prompts]


def _trailing_special_ids(tokenizer: Any) -> list[int]:
    """Return the special tokens that the tokenizer appends to a text."""
    plain = tokenize(tokenizer, ["a"])[0]
    with_special = tokenize(tokenizer, ["a"], special=True)[0]
    ends = range(len(with_special), len(plain) - 1, -1)
    return with_special[next(end for end in ends if with_special[end - len(plain) : end] == plain) :]


def tokenize(tokenizer: Any, texts: list[str], special: bool = False) -> list[list[int]]:
    """Return the token ids of texts, with or without the `special` tokens that the tokenizer adds.

    Raises RLHFError M01, M06 for an id without embedding.
    """
    if not texts:
        return []
    # verbose=False: no warning of the library about long sequences; rlhf checks max_length itself.
    with translate_rust_panics("M01", "the tokenizer fails on a text"):
        batch = tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)
    if unreadable := ids_without_embedding(tokenizer):
        for ids in batch["input_ids"]:
            for token in unreadable.intersection(ids):
                text = f"a text contains {tokenizer.convert_ids_to_tokens(token)}, for which the model has no embedding"
                raise RLHFError("M06", text, hint="remove the token from the texts and the chat template")
    return [intern_ids(ids) for ids in batch["input_ids"]]


def intern_ids(ids: list[int]) -> list[int]:
    """Return the ids with equal ids as one object: 8 bytes per token instead of 40."""
    return [_INTERNED_IDS.setdefault(token, token) for token in ids]


def encode_cached(
    tokenizer: Any, prompts: Sequence[str | Conversation | None], responses: Sequence[str | None]
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


def _cache_key(tokenizer: Any, prompts: Sequence[str | Conversation | None], responses: Sequence[str | None]) -> str:
    probe = ""  # a short question rendered by the chat template; some templates include today's date
    with suppress(RLHFError):  # no template, or one that rejects this conversation
        probe = render(tokenizer, [{"role": "user", "content": "?"}], generation_prompt=True)
    special: tuple[Any, ...] = (tokenizer.chat_template, tokenizer.eos_token_id, tokenizer.split_special_tokens)
    if unreadable := ids_without_embedding(tokenizer):
        special = (*special, sorted(unreadable))
    digest = sha256(repr((CACHE_VERSION, *special, probe)).encode())
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    for prompt, response in zip(prompts, responses, strict=True):
        digest.update(f"{prompt!r}\0{response!r}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _write_cache(path: Path, rows: list[Encoded]) -> None:
    """Write the rows to the cache, and delete the files of it that were not used for the longest time."""
    lengths = np.array([[len(prompt), len(response)] for prompt, response in rows], dtype=np.int64)
    tokens = np.fromiter(chain.from_iterable(chain.from_iterable(rows)), np.int32, int(lengths.sum()))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}-{os.getpid()}")
    with partial.open("wb") as file:
        np.savez(file, lengths=lengths, tokens=tokens)
    partial.replace(path)
    files = sorted(path.parent.glob("*.npz*"), key=lambda path: path.stat().st_mtime, reverse=True)
    total = 0
    for file_path in files:
        total += file_path.stat().st_size
        if total > MAX_CACHE_BYTES:
            file_path.unlink(missing_ok=True)


def _read_cache(path: Path, rows: int) -> list[Encoded] | None:
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            lengths, tokens = file["lengths"], file["tokens"]
        path.touch()
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):  # missing or damaged
        return None
    if lengths.shape != (rows, 2) or lengths.sum() != len(tokens):
        return None
    parts = iter(np.split(tokens, lengths.reshape(-1).cumsum()[:-1]))
    ids = (intern_ids(part.tolist()) for part in parts)
    return list(zip(ids, ids, strict=True))
