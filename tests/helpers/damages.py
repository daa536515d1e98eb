"""Damages to files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def flip(path: Path) -> None:
    """Flip the lowest bit of four bytes: most JSON stays JSON, and one byte of a float32 is its exponent's."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    for place in range(middle, min(middle + 4, len(content))):
        content[place] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "4 bytes flipped": flip,
}
OTHER = "another's"  # the file of the same name of another step or run
ALL = (*DAMAGES, OTHER)


def damage(path: Path, how: str, other: Path) -> bool:
    """Damage a file; return False if it has the same bytes as `other`, which was to replace it."""
    before = path.read_bytes()
    if how == OTHER:
        path.write_bytes(other.read_bytes())
    else:
        DAMAGES[how](path)
    return not path.exists() or path.read_bytes() != before
