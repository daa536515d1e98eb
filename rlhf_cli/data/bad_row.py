"""What can be wrong with a row."""

from typing import Any


class BadRow(Exception):
    """Something is wrong with one row: a code, a text without the place, and perhaps a fix."""

    def __init__(self, code: str, text: str, hint: str | None = None) -> None:
        super().__init__(text)
        self.code, self.text, self.hint = code, text, hint


def described(value: Any) -> str:
    """A value of JSON in words."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return f"the number {value}"
    return "text" if isinstance(value, str) else "a list" if isinstance(value, list) else "an object"
