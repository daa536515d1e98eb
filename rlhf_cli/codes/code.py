"""What a code is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """One code: `exit` is the exit status of an error with it; 0 says that it only ever warns."""

    title: str
    exit: int
    meaning: str
    fix: str
