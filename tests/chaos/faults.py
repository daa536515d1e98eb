"""Fail points, found and not listed: whatever a run writes, forces to the disk, renames or deletes in its folder.

In a forked run the calls that change files are wrapped. Each has a name, `write state/step_#/structure.json`, digits
left out; a recording run tells which there are. `install` then ends the process at one of them, or lets the disk be
full from there on. The product knows nothing of this.
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

MOMENTS = ("before", "half", "after")
HALVES = ("write", "save", "remove")  # what can be left half done
FILLING = ("write", "save", "fsync", "rename", "mkdir")  # what a full disk refuses


@dataclass(frozen=True)
class Point:
    """Where a process is hit: at the nth time that it comes to `name`. Moment "full": the disk is, from there on."""

    name: str
    moment: str
    nth: int = 1


class Calls:
    """The wrapped calls of one process. Without a point they are only counted."""

    def __init__(self, folder: Path, point: Point | None = None) -> None:
        self.folder, self.point, self.seen, self.full = folder, point, Counter[str](), False

    def name(self, kind: str, path: Any) -> str | None:
        """The name of a call; None where it is about no file of the stage's folder."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        try:
            inside = Path(os.path.abspath(os.fspath(path))).relative_to(self.folder)
        except (ValueError, TypeError):
            return None
        return f"{kind} {re.sub(r'[0-9]+', '#', inside.as_posix())}"

    def around(self, kind: str, path: Any, call: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        """Make a call, or die before, in the middle of or after it, or tell that the disk is full."""
        name = self.name(kind, path)
        if name is None:
            return call()
        self.seen[name] += 1
        point = self.point
        here = point is not None and point.name == name and self.seen[name] == point.nth
        moment = point.moment if here and point else None
        self.full |= moment == "full"
        if self.full and kind in FILLING:
            raise _full(kind, path)
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


def _full(kind: str, path: Any) -> Exception:
    """What the libraries raise on a full disk: torch says it in words of its own."""
    if kind == "save" and Path(path).suffix in (".pt", ".pth"):
        return RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), None if isinstance(path, int) else os.fspath(path))


def install(folder: Path, point: Point | None = None) -> Calls:
    """Wrap the calls of this process that change files below `folder`."""
    calls = Calls(folder, point)
    _wrap(calls, os, "fsync", "fsync")
    for name in ("rename", "replace"):
        _wrap(calls, os, name, "rename", place=1)
    _wrap(calls, os, "truncate", "truncate")
    _wrap(calls, os, "mkdir", "mkdir")
    _wrap(calls, os, "unlink", "unlink", unless="dir_fd")
    _wrap(calls, shutil, "rmtree", "remove", half=_remove_half)
    _wrap_open(calls)
    _wrap_saving(calls)
    return calls


def _wrap(
    calls: Calls,
    module: Any,
    name: str,
    kind: str,
    *,
    place: int = 0,
    unless: str = "",
    half: Callable[..., Any] | None = None,
) -> None:
    plain = getattr(module, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if unless and kwargs.get(unless) is not None:
            return plain(*args, **kwargs)
        path = args[place] if len(args) > place else kwargs.get("f") or kwargs.get("filename")
        halved = (lambda: half(plain, *args, **kwargs)) if half else None
        return calls.around(kind, path, lambda: plain(*args, **kwargs), halved)

    setattr(module, name, wrapped)


def _remove_half(plain: Callable[..., Any], folder: Any, *args: Any, **kwargs: Any) -> None:
    """Every second file goes."""
    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file())[::2]:
        os.remove(path)


def _wrap_open(calls: Calls) -> None:
    """What Path.open, Path.write_text and open share: a file opened for writing, whose writes are calls too."""
    plain = io.open

    def wrapped(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not set(mode) & set("wax+") or calls.name("", file) is None:
            return plain(file, mode, *args, **kwargs)
        opened = calls.around("open", file, lambda: plain(file, mode, *args, **kwargs))
        write = opened.write

        def half(text: Any) -> None:
            write(text[: len(text) // 2])
            opened.flush()

        def flushed(text: Any) -> Any:
            written = write(text)
            opened.flush()
            return written

        opened.write = lambda text: calls.around("write", file, lambda: flushed(text), lambda: half(text))
        return opened

    io.open = builtins.open = wrapped  # type: ignore[assignment]


def _wrap_saving(calls: Calls) -> None:
    """Writers that open their files below Python."""
    import safetensors.torch
    import torch
    from transformers import PreTrainedTokenizerBase

    def half(plain: Callable[..., Any], content: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        plain(content, path, *args, **kwargs)
        os.truncate(path, os.path.getsize(path) // 2)

    def half_a_tokenizer(plain: Callable[..., Any], tokenizer: Any, folder: Any, *args: Any, **kwargs: Any) -> None:
        plain(tokenizer, folder, *args, **kwargs)
        path = Path(folder) / "tokenizer.json"
        os.truncate(path, path.stat().st_size // 2)

    _wrap(calls, safetensors.torch, "serialize_file", "save", place=1, half=half)
    _wrap(calls, torch, "save", "save", place=1, half=half)
    _wrap(calls, PreTrainedTokenizerBase, "save_pretrained", "save", place=1, half=half_a_tokenizer)
