"""Tokens of large data, kept by content: the same texts and the same tokenizer are never tokenised twice."""

import os
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from rlhf_cli import terminal
from rlhf_cli.data.tokens import Conversation, Encoded, render, shared
from rlhf_cli.errors import RLHFError
from rlhf_cli.sources.hub import cache_folder

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
        terminal.say_once(f"data     tokens are not cached: {error.strerror or error} ({path.parent})")
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
