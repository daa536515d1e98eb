"""What one command has told already, in whichever of its processes: `rlhf run` starts one for each stage."""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf_cli import processes

FILE = "RLHF_TOLD"  # names to the children the file with a hash a line of what was told before
_here: set[str] = set()


@contextmanager
def together() -> Iterator[None]:
    """Within, what one process tells is not told again by those that are started after it."""
    before = os.environ.get(FILE)
    with tempfile.TemporaryDirectory(prefix="rlhf-", ignore_cleanup_errors=True) as folder:
        os.environ[FILE] = str(Path(folder, "told"))
        try:
            yield
        finally:
            os.environ.pop(FILE)
            if before is not None:
                os.environ[FILE] = before


def is_new(text: str) -> bool:
    """Whether the command has not told this text yet; from now on it has. Of several processes the first one tells."""
    if not processes.is_first():
        return False
    line = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()
    if line in _here or line in _before():
        return False
    _here.add(line)
    with suppress(OSError):  # the disk is full: it is told twice
        if file := os.environ.get(FILE):
            with open(file, "a", encoding="ascii") as lines:
                lines.write(f"{line}\n")
    return True


def _before() -> list[str]:
    """What processes before this one told."""
    try:
        return Path(os.environ[FILE]).read_text(encoding="ascii").split()
    except (KeyError, OSError):  # this command has one process, or none of them told anything yet
        return []


def forget() -> None:
    """Starts a new command in the same process."""
    _here.clear()
