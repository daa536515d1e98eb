"""Tokens of large data, kept by content: the same texts and the same tokenizer are never tokenised twice."""

import os
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_cli import terminal
from rlhf_cli.data.tokens import Conversation
from rlhf_cli.sources.folders import cache_folder

LEAST = 10_000  # rows; fewer are tokenised as fast as they are looked up
MOST = 5e9  # bytes kept; beyond, what was used longest ago goes
VERSION = 1  # of what `encode_many` makes; a change of the tokens it makes needs another
Encoded = list[tuple[list[int], list[int]]]


def encoded(
    tokenizer: Any,
    prompts: Sequence[str | Conversation],
    responses: Sequence[str | None],
    make: Callable[[], Encoded],
) -> Encoded:
    """What `make` returns, (prompt ids, response ids) of each row, from the cache where it is there."""
    if len(prompts) < LEAST or not tokenizer.is_fast:
        return make()
    path = cache_folder() / "tokens" / f"{_key(tokenizer, prompts, responses)}.npz"
    found = _read(path)
    if found is not None:
        terminal.say(f"data     {len(found)} rows tokenised before, taken from {path.parent}")
        return found
    made = make()
    try:
        _write(path, made)
        _prune(path.parent)
    except OSError as error:
        terminal.say(f"data     tokens are not cached: {error.strerror or error} ({path.parent})")
    return made


def _key(tokenizer: Any, prompts: Sequence[str | Conversation], responses: Sequence[str | None]) -> str:
    total = sha256(repr((VERSION, tokenizer.chat_template, tokenizer.eos_token_id)).encode())
    total.update(tokenizer.backend_tokenizer.to_str().encode())
    for prompt, response in zip(prompts, responses, strict=True):
        total.update(f"{prompt!r}\0{response!r}\n".encode("utf-8", "surrogatepass"))
    return total.hexdigest()


def _write(path: Path, rows: Encoded) -> None:
    lengths = np.array([[len(prompt), len(response)] for prompt, response in rows], dtype=np.int64)
    tokens = np.fromiter((token for pair in rows for ids in pair for token in ids), np.int32, int(lengths.sum()))
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}-{os.getpid()}")
    with scratch.open("wb") as file:
        np.savez(file, lengths=lengths, tokens=tokens)
    scratch.replace(path)


def _read(path: Path) -> Encoded | None:
    try:
        with np.load(path, allow_pickle=False) as file:
            lengths, tokens = file["lengths"], file["tokens"].tolist()
        path.touch()
    except (OSError, ValueError, KeyError, EOFError):  # not there, or half written by another system
        return None
    ends = lengths.reshape(-1).cumsum().tolist()
    if (ends[-1] if ends else 0) != len(tokens):
        return None
    starts = [0, *ends]
    return [
        (tokens[starts[row] : ends[row]], tokens[starts[row + 1] : ends[row + 1]]) for row in range(0, len(ends), 2)
    ]


def _prune(folder: Path) -> None:
    files = sorted(folder.glob("*.npz"), key=lambda path: path.stat().st_mtime, reverse=True)
    total = 0
    for path in files:
        total += path.stat().st_size
        if total > MOST:
            path.unlink(missing_ok=True)
