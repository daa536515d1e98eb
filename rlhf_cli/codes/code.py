"""What a code is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """One code: `exit` is the exit status of an error with it; 0 says that it only ever warns.

    `warns` says of a code that is an error too when it is no more than a warning.
    """

    title: str
    exit: int
    meaning: str
    fix: str
    warns: str = ""
