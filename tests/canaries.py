"""Secrets in a command's environment, and whether they stay anywhere; files that are pickles."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECRETS = {
    "HF_TOKEN": "hf_" + "CanaryOne0123456789abcdefghijklmn",
    "HUGGING_FACE_HUB_TOKEN": "hf_" + "CanaryTwo0123456789abcdefghijklmn",
    "WANDB_API_KEY": "ca4a41e5" * 5,
    "HUB_TOKEN": "a-canary-without-a-form",
}
# What transformers keeps to resume from, read by torch as numbers alone.
PICKLES = re.compile(r"(sft|reward)/state/checkpoint-\d+/(optimizer\.pt|scheduler\.pt|rng_state\.pth)")


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command with secrets in its environment, none of which it may print.

    It is called in the folder that holds `home`, where lies what it would leave elsewhere, in caches say.
    """
    home.mkdir(exist_ok=True)
    environment = {**os.environ, **SECRETS, "PYTHONPATH": str(ROOT), "HOME": str(home), "TMPDIR": str(home)}
    environment |= {"RLHF_CACHE": str(home / "cache"), "XDG_CACHE_HOME": str(home / "xdg")}
    environment.pop("HF_HOME", None)
    command = [sys.executable, "-P", *arguments]
    done = subprocess.run(command, cwd=home.parent, env=environment, capture_output=True, text=True, check=False)
    assert not any(secret in done.stdout + done.stderr for secret in SECRETS.values())
    return done


def leaks(*places: Path) -> list[str]:
    """The files below `places` that hold one of the secrets, in their bytes or packed."""
    found = []
    for path in (path for place in places for path in place.rglob("*") if path.is_file()):
        content = path.read_bytes()
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as packed:
                content += b"".join(packed.read(name) for name in packed.namelist())
        found += [str(path) for secret in SECRETS.values() if secret.encode() in content]
    return found


def is_pickle(content: bytes) -> bool:
    """Whether bytes are a pickle (protocol 2 and later), or torch's zip around one, by what they begin with."""
    return (content[:1] == b"\x80" and content[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")) or content[:2] == b"PK"
