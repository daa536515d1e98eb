"""Secrets in a command's environment, a search for them in files, and pickle detection."""

import os
import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from run_cli import forked, python

SECRETS = {
    "HF_TOKEN": "hf_" + "CanaryOne0123456789abcdefghijklmn",
    "HUGGING_FACE_HUB_TOKEN": "hf_" + "CanaryTwo0123456789abcdefghijklmn",
    "WANDB_API_KEY": "ca4a41e5" * 5,
    "HUB_TOKEN": "a-canary-without-a-form",
}
# transformers' checkpoints, which torch reads as tensors only.
PICKLES = re.compile(r"(sft|reward)/state/checkpoint-\d+/(optimizer\.pt|scheduler\.pt|rng_state\.pth)")


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with secrets in its environment, which it must not print; `home` gets its caches."""
    environment = {**os.environ, **_variables(home)}
    environment.pop("HF_HOME", None)
    return _silent(python("-P", *arguments, cwd=home.parent, env=environment))


def rlhf(home: Path, *arguments: str, before: Callable[[], object] = lambda: None) -> subprocess.CompletedProcess[str]:
    """The same of `rlhf` in a fork of this process, in its working directory."""
    return _silent(forked(*arguments, before=before, **_variables(home)))


def _variables(home: Path) -> dict[str, str]:
    home.mkdir(exist_ok=True)
    places = {"HOME": home, "TMPDIR": home, "RLHF_CACHE": home / "cache", "XDG_CACHE_HOME": home / "xdg"}
    return SECRETS | {name: str(place) for name, place in places.items()}


def _silent(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert not any(secret in done.stdout + done.stderr for secret in SECRETS.values())
    return done


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def leaks(*places: Path) -> list[str]:
    """Return the files below `places` that contain a secret, also compressed."""
    leaking = []
    for path in (path for place in places for path in place.rglob("*") if path.is_file()):
        content = path.read_bytes()
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as packed:
                content += b"".join(packed.read(name) for name in packed.namelist())
        leaking += [str(path) for secret in SECRETS.values() if secret.encode() in content]
    return leaking


def is_pickle(content: bytes) -> bool:
    """Return True if bytes begin like a pickle (protocol 2 and later), or torch's zip of one."""
    return (content[:1] == b"\x80" and content[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")) or content[:2] == b"PK"
