"""What must be the same after any kill: every byte that a finished stage leaves, except times."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch

# Keys of JSON that hold times, or hashes and positions of files whose lines hold times.
IGNORED = re.compile(r".*_s|time/.*|.*runtime|.*per_second|sha256|bytes|logs?")


def fingerprint(folder: Path) -> dict[str, str]:
    """Return {name: hash} of all files and folders of a finished stage, hidden ones too."""
    return {
        path.relative_to(folder).as_posix(): _sha(_plain(path)) if path.is_file() else "a folder"
        for path in sorted(folder.rglob("*"))
    }


def differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _plain(path: Path) -> str | bytes:
    """Return the content of a file without times."""
    if path.name == "report.html":  # made of files that are compared
        return b""
    if path.suffix in (".pt", ".pth"):
        return _canonical(torch.load(path, map_location="cpu", weights_only=False))
    if path.name == "metrics.jsonl":
        return "\n".join(_plain_line(line) for line in path.read_text(encoding="utf-8").split("\n"))
    if path.name in ("manifest.json", "state.json", "trainer_state.json", "structure.json"):
        return _plain_line(path.read_text(encoding="utf-8"))
    return path.read_bytes()


def _plain_line(line: str) -> str:
    try:
        return json.dumps(_timeless(json.loads(line)), sort_keys=True)
    except ValueError:  # the end of the file, or torn
        return line


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(item) for key, item in value.items() if not IGNORED.fullmatch(key)}
    if isinstance(value, list):  # structure.json has its dictionaries as pairs
        return [_timeless(item) for item in value if not (isinstance(item, list) and item[:1] == ["logs"])]
    return value


def _canonical(value: Any) -> str:
    """Return nested state as text, equal where every bit of it is."""
    if isinstance(value, torch.Tensor):
        value = value.contiguous().numpy()
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):
        return f"{value.dtype}{value.shape}{_sha(value.tobytes())}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{_canonical(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_canonical, value)) + "]"
    return repr(value)


def _sha(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()
