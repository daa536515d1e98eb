"""What must be the same after any kill: every byte that a finished stage leaves, times aside."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch

TIMES = re.compile(r".*_s|time/.*|.*runtime|.*per_second")
TIMED = ("metrics.jsonl", "state.json")  # files that hold times, or hashes of such


def fingerprint(folder: Path) -> dict[str, str]:
    """{what: hash} of a finished stage's folder."""
    found = {"files": _sha("\n".join(sorted(_names(folder))))}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith("state/"):
            found[name] = _sha(_plain(path))
    for state in sorted((folder / "state").glob("*")):
        found |= {f"state/{state.name}/{name}": content for name, content in _of_state(state).items()}
    return found


def differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """What is not the same."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _names(folder: Path) -> list[str]:
    """All names, hidden ones too: a run that was killed may leave no litter."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*")]


def _plain(path: Path) -> Any:
    if path.name == "report.html":  # holds times, in words and in pictures; what it is made of is compared itself
        return b""
    if path.name == "metrics.jsonl":
        return "\n".join(_plain_line(line) for line in path.read_text(encoding="utf-8").split("\n"))
    if path.name in ("manifest.json", "state.json"):
        return json.dumps(_unhashed(json.loads(path.read_text(encoding="utf-8"))), sort_keys=True)
    return path.read_bytes()


def _plain_line(line: str) -> str:
    try:
        return json.dumps(_timeless(json.loads(line)))
    except ValueError:  # the end of the file, or torn
        return line


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(item) for key, item in value.items() if not TIMES.fullmatch(str(key))}
    return [_timeless(item) for item in value] if isinstance(value, list) else value


def _unhashed(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest without its own hash, and those of files that hold times: those files are compared themselves."""
    content = manifest["files"].items()
    files = {name: None if name.endswith(TIMED) else entry for name, entry in content}
    return {key: value for key, value in manifest.items() if key != "sha256"} | {"files": files}


def _of_state(state: Path) -> dict[str, str]:
    """A state's content. Marks of logs go: they hash lines that hold times, and the lines are compared themselves."""
    found = {}
    for path in sorted(state.rglob("*")):
        name = path.relative_to(state).as_posix()
        if path.suffix in (".pt", ".pth"):
            found[name] = _sha(_canonical(torch.load(path, map_location="cpu", weights_only=False)))
        elif name == "trainer_state.json":
            content = json.loads(path.read_text(encoding="utf-8"))
            content["stateful_callbacks"]["Follower"]["attributes"].pop("log")
            found[name] = _sha(json.dumps(_timeless(content)))
        elif name == "structure.json":
            tree = json.loads(path.read_text(encoding="utf-8"))
            tree["dict"] = [pair for pair in tree["dict"] if pair[0] != "logs"]
            found[name] = _sha(json.dumps(tree))
        elif path.is_file() and name != "state.json":
            found[name] = _sha(path.read_bytes())
    return found


def _canonical(value: Any) -> str:
    """Nested state as text: equal where every bit of it is."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{_sha(value.contiguous().numpy().tobytes())}"
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):
        return f"{value.dtype}{value.shape}{_sha(value.tobytes())}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{_canonical(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_canonical, value)) + "]"
    return repr(value)


def _sha(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()
