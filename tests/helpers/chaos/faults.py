"""Fail points, found and not listed: every call that writes, flushes, renames or deletes in a run's folder.

In a forked run these calls are wrapped. Each has a name, `write state/step_#/structure.json`, without digits; a
recording run counts them. `install` then ends the process at one of them, or lets the disk be full from there on.
"""

import builtins
import errno
import io
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILLING = ("write", "save", "fsync", "rename", "mkdir")  # calls that a full disk refuses


@dataclass(frozen=True)
class Point:
    """The nth call of `name` and a moment: before, half, after; or full: the disk is full from there on.

    For points that only a resumed run reaches, an earlier process must die at the point `lead`.
    """

    name: str
    moment: str
    nth: int = 1
    lead: "Point | None" = None


class Calls:
    """The wrapped calls of one process. Without a point they are only counted."""

    def __init__(self, folder: Path, point: Point | None = None) -> None:
        self.folder, self.point, self.seen, self.full = folder, point, Counter[str](), False

    def name(self, kind: str, path: Any) -> str | None:
        """Return the name of a call; None for a file outside the stage's folder."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        try:
            inside = Path(os.path.abspath(os.fspath(path))).relative_to(self.folder)
        except (ValueError, TypeError):
            return None
        return f"{kind} {re.sub(r'[0-9a-f]{16}|[0-9]+', '#', inside.as_posix())}"

    def around(self, kind: str, path: Any, call: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        """Make a call, or die before, in the middle of or after it, or raise what a full disk raises."""
        name = self.name(kind, path)
        if name is None:
            return call()
        self.seen[name] += 1
        point = self.point
        moment = point.moment if point and (point.name, point.nth) == (name, self.seen[name]) else None
        self.full |= moment == "full"
        if self.full and kind in FILLING:
            raise _disk_full(kind, path)
        if moment == "before":
            _die()
        if moment == "half" and half:
            half()
            _die()
        try:
            result = call()
        except (FileNotFoundError, FileExistsError):  # nothing was done
            self.seen[name] -= 1
            raise
        if moment == "after":
            _die()
        return result


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _disk_full(kind: str, path: Any) -> Exception:
    if kind == "save" and Path(path).suffix in (".pt", ".pth"):  # torch's error
        return RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), None if isinstance(path, int) else os.fspath(path))


def install(folder: Path, point: Point | None = None) -> Calls:
    """Wrap the calls of this process that change files below `folder`."""
    import safetensors.torch
    import torch
    from transformers import PreTrainedTokenizerBase

    calls = Calls(folder, point)
    for name, kind, place in (
        ("fsync", "fsync", 0), ("rename", "rename", 1), ("replace", "rename", 1), ("truncate", "truncate", 0),
        ("mkdir", "mkdir", 0), ("unlink", "unlink", 0),
    ):  # fmt: skip
        _wrap(calls, os, name, kind, place)
    _wrap(calls, shutil, "rmtree", "remove", 0, _remove_half)
    for owner, name in (
        (safetensors.torch, "serialize_file"),
        (torch, "save"),
        (PreTrainedTokenizerBase, "save_pretrained"),
    ):
        _wrap(calls, owner, name, "save", 1, _save_half)
    _wrap_open(calls)
    return calls


def _wrap(calls: Calls, owner: Any, name: str, kind: str, place: int, half: Callable[..., Any] | None = None) -> None:
    plain = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is not None:
            return plain(*args, **kwargs)
        path = args[place] if len(args) > place else kwargs.get("f") or kwargs.get("filename")
        halved = (lambda: half(plain, *args, **kwargs)) if half else None
        return calls.around(kind, path, lambda: plain(*args, **kwargs), halved)

    setattr(owner, name, wrapped)


def _remove_half(plain: Callable[..., Any], folder: Any, *args: Any, **kwargs: Any) -> None:
    """Delete every second file."""
    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file())[::2]:
        os.remove(path)


def _save_half(plain: Callable[..., Any], content: Any, path: Any, *args: Any, **kwargs: Any) -> None:
    """Write a file, or a tokenizer's folder, and truncate it."""
    plain(content, path, *args, **kwargs)
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    os.truncate(file, file.stat().st_size // 2)


def _wrap_open(calls: Calls) -> None:
    """Wrap io.open, which Path.open, Path.write_text and open share, and the writes of files opened for writing."""
    plain = io.open

    def wrapped(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not set(mode) & set("wax+") or calls.name("", file) is None:
            return plain(file, mode, *args, **kwargs)
        opened = calls.around("open", file, lambda: plain(file, mode, *args, **kwargs))
        write = opened.write

        def flushed(text: Any) -> Any:
            written = write(text)
            opened.flush()
            return written

        opened.write = lambda text: calls.around(
            "write", file, lambda: flushed(text), lambda: flushed(text[: len(text) // 2])
        )
        return opened

    io.open = builtins.open = wrapped  # type: ignore[assignment]
