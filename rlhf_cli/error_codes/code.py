"""Type of an error or warning code."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """Error or warning code. `exit` is the exit status of its error; 0 means that it is only ever a warning.

    `warns` says when a code that can be an error is only a warning.
    """

    title: str
    exit: int
    meaning: str
    fix: str
    warns: str = ""
