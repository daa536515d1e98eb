"""Text to tokens, for all stages: prompt + response + stop token, and nothing after it. Nobody else tokenises."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from jinja2 import TemplateError

from rlhf_cli import terminal
from rlhf_cli.data.hub import cache_folder
from rlhf_cli.errors import RLHFError, translate_rust_panics
from rlhf_cli.progress import Progress
from rlhf_cli.system import CPUTimeExceeded, cpu_time_limit

Conversation = list[dict[str, Any]]
Encoded = tuple[list[int], list[int]]  # ids of a prompt and of a response
AT_ONCE = 4096  # rows
RENDERING = 10.0  # seconds; a template takes milliseconds
_ONE_OF_EACH: dict[int, int] = {}
_MARK = "assistant-text-ends-here"


def encode(tokenizer: Any, prompt: str | Conversation, response: str | None) -> Encoded:
    """Token ids (prompt, response) of one row; the response ends in the stop token, once, and is [] for None.

    A string keeps the special tokens that the tokenizer begins a text with (BOS), never those that it ends one with.
    A conversation is rendered by the chat template up to where the assistant's text begins.
    Raises RLHFError D14 where that template is missing.
    """
    return encode_many(tokenizer, [prompt], [response])[0]


def encode_many(
    tokenizer: Any, prompts: Sequence[str | Conversation | None], responses: Sequence[str | None]
) -> list[Encoded]:
    """`encode` of many rows: the same ids, several times faster; a fast tokenizer works on all cores at once.

    A prompt that is None has no ids: a response's do not depend on it. Shows progress where that takes a while.
    """
    encoded: list[Encoded] = []
    with Progress("data", len(prompts), "row", brief=True) as bar:
        for first in range(0, len(prompts), AT_ONCE):
            rows = slice(first, first + AT_ONCE)
            encoded += _encode_batch(tokenizer, prompts[rows], responses[rows])
            bar.advance(len(encoded) - first, note="tokenised")
    return encoded


def _encode_batch(
    tokenizer: Any, prompts: Sequence[str | Conversation | None], responses: Sequence[str | None]
) -> list[Encoded]:
    texts = [text for text in responses if text is not None]
    stop = stop_token_id(tokenizer) if texts else -1
    answers = iter(_tokenize(tokenizer, texts))
    encoded = []
    for prompt_ids, text in zip(_encode_prompts(tokenizer, prompts), responses, strict=True):
        ids = [] if text is None else next(answers)
        if text is not None and ids[-1:] != [stop]:
            ids.append(stop)
        encoded.append((prompt_ids, ids))
    return encoded


def stop_token_id(tokenizer: Any) -> int:
    """The token that ends a response: what the chat template writes after an assistant's text, else the EOS.

    Warns (T06) of a template that writes none: a model trained on its rendering alone would never learn to stop.
    """
    return _stop_token_id(tokenizer, tokenizer.chat_template, tokenizer.eos_token_id)


def pieces(tokenizer: Any, ids: Iterable[int], *, special: bool = False) -> Iterator[str]:
    """A response's text while its tokens come: a piece for each token, and at the end what was held back.

    A character of several tokens comes whole, with the last of them. All pieces together are the decoded text, with or
    without its `special` tokens.
    """
    seen: list[int] = []
    text, done = "", 0
    for token in ids:
        seen.append(token)
        text = tokenizer.decode(seen, skip_special_tokens=not special)
        end = done if text.endswith("\N{REPLACEMENT CHARACTER}") else len(text)
        yield text[done:end]
        done = end
    yield text[done:]


def render(tokenizer: Any, conversation: Conversation, *, generation_prompt: bool) -> str:
    """The chat template's text.

    Raises RLHFError D14 without a template, D06 where the template refuses the conversation, M01 for one that does not
    end: a template is a program of others.
    """
    if not tokenizer.chat_template:
        raise RLHFError(
            "D14",
            "the data contains conversations, but the tokenizer has no chat template",
            hint="set model.chat_template to a Jinja file, or to chatml",
        )
    try:
        with cpu_time_limit(RENDERING):
            return tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=generation_prompt)
    except CPUTimeExceeded as error:
        text = f"the chat template takes more than {RENDERING:g} s for one conversation"
        raise RLHFError("M01", text, hint="set model.chat_template to another template, or to chatml") from error
    except (TemplateError, OverflowError) as error:  # the sandbox bounds `range`
        raise RLHFError("D06", f"the chat template rejects the conversation: {error}") from error


@lru_cache(maxsize=8)
def _stop_token_id(tokenizer: Any, template: str | None, eos: int | None) -> int:
    if template:
        turns = [{"role": "user", "content": "text"}, {"role": "assistant", "content": _MARK}]
        tail = render(tokenizer, turns, generation_prompt=False).rpartition(_MARK)[2]
        special = set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        for token in _tokenize(tokenizer, [tail])[0]:
            if token in special:
                return token
        terminal.warn(
            "T06", f"the chat template does not end an answer with a stop token; {tokenizer.eos_token!r} is used"
        )
    if eos is None:
        raise RLHFError("T06", "the tokenizer has no EOS token, so no response can end")
    return eos


def _encode_prompts(tokenizer: Any, prompts: Sequence[str | Conversation | None]) -> list[list[int]]:
    plain = [prompt for prompt in prompts if isinstance(prompt, str)]
    chats = [render(tokenizer, prompt, generation_prompt=True) for prompt in prompts if isinstance(prompt, list)]
    suffix = len(_suffix(tokenizer)) if plain else 0
    strings = iter(ids[: len(ids) - suffix] for ids in _tokenize(tokenizer, plain, special=True))
    rendered = iter(_tokenize(tokenizer, chats))  # the template has written its own special tokens
    return [[] if p is None else next(strings) if isinstance(p, str) else next(rendered) for p in prompts]


def _suffix(tokenizer: Any) -> list[int]:
    """The special tokens that the tokenizer puts after a text."""
    bare = _tokenize(tokenizer, ["a"])[0]
    full = _tokenize(tokenizer, ["a"], special=True)[0]
    start = next(i for i in range(len(full) - len(bare), -1, -1) if full[i : i + len(bare)] == bare)
    return full[start + len(bare) :]


def _tokenize(tokenizer: Any, texts: list[str], special: bool = False) -> list[list[int]]:
    if not texts:
        return []
    # verbose: no "longer than the maximum sequence length" from the library, max_length is checked here.
    with translate_rust_panics("M01", "the tokenizer fails on a text"):
        batch = tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)
    return [shared(ids) for ids in batch["input_ids"]]


def shared(ids: list[int]) -> list[int]:
    """The ids, equal ones as one object: 8 bytes a token then, where the tokenizer's own take 40."""
    return [_ONE_OF_EACH.setdefault(token, token) for token in ids]


LEAST = 10_000  # rows; fewer are tokenised as fast as they are looked up
MOST = 5e9  # bytes kept; beyond, what was used longest ago goes
VERSION = 1  # of what `encode_many` makes; a change of the tokens it makes needs another


def encoded(
    tokenizer: Any,
    prompts: Sequence[str | Conversation | None],
    responses: Sequence[str | None],
    make: Callable[[], list[Encoded]],
) -> list[Encoded]:
    """What `make` returns, (prompt ids, response ids) of each row, from the cache where it is there."""
    if len(prompts) < LEAST or not tokenizer.is_fast:
        return make()
    path = cache_folder() / "tokens" / f"{_key(tokenizer, prompts, responses)}.npz"
    found = _read(path, len(prompts))
    if found is not None:
        terminal.say(f"data     {len(found)} tokenised rows read from the cache {path.parent}")
        return found
    made = make()
    try:
        _write(path, made)
        _prune(path.parent)
    except OSError as error:
        terminal.log_once(f"data     tokens are not cached: {error.strerror or error} ({path.parent})")
    return made


def _key(tokenizer: Any, prompts: Sequence[str | Conversation | None], responses: Sequence[str | None]) -> str:
    told = (VERSION, tokenizer.chat_template, tokenizer.eos_token_id, tokenizer.split_special_tokens, _today(tokenizer))
    total = sha256(repr(told).encode())
    total.update(tokenizer.backend_tokenizer.to_str().encode())
    for prompt, response in zip(prompts, responses, strict=True):
        total.update(f"{prompt!r}\0{response!r}\n".encode("utf-8", "surrogatepass"))
    return total.hexdigest()


def _today(tokenizer: Any) -> str:
    """What the chat template makes of a short question: some templates write the day's date."""
    try:
        return render(tokenizer, [{"role": "user", "content": "?"}], generation_prompt=True)
    except RLHFError:  # no template, or one that wants more
        return ""


def _write(path: Path, rows: list[Encoded]) -> None:
    lengths = np.array([[len(prompt), len(response)] for prompt, response in rows], dtype=np.int64)
    tokens = np.fromiter(chain.from_iterable(chain.from_iterable(rows)), np.int32, int(lengths.sum()))
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}-{os.getpid()}")
    with scratch.open("wb") as file:
        np.savez(file, lengths=lengths, tokens=tokens)
    scratch.replace(path)


def _read(path: Path, rows: int) -> list[Encoded] | None:
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            lengths, tokens = file["lengths"], file["tokens"]
        path.touch()
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):  # not there, or damaged
        return None
    if lengths.shape != (rows, 2) or lengths.sum() != len(tokens):
        return None
    parts = iter(np.split(tokens, lengths.reshape(-1).cumsum()[:-1]))
    return [(shared(prompt.tolist()), shared(response.tolist())) for prompt, response in zip(parts, parts, strict=True)]


def _prune(folder: Path) -> None:
    files = sorted(folder.glob("*.npz*"), key=lambda path: path.stat().st_mtime, reverse=True)
    total = 0
    for path in files:
        total += path.stat().st_size
        if total > MOST:
            path.unlink(missing_ok=True)
