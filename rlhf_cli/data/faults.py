"""What can be wrong with a row."""


class BadRow(Exception):
    """Something is wrong with one row: a code, a text without the place, and perhaps a fix."""

    def __init__(self, code: str, text: str, hint: str | None = None) -> None:
        super().__init__(text)
        self.code, self.text, self.hint = code, text, hint
