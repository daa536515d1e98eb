"""What must never be shown or written: tokens by their form, passwords in addresses, and the environment's secrets."""

import os
import re

TOKEN = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[A-Z0-9]{16})\b")
LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")  # https://LOGIN@host
SECRET_VARIABLE = re.compile(r".*(TOKEN|(API|ACCESS|PRIVATE)_?KEY|SECRET|PASSWORD)", re.IGNORECASE)
SHORTEST = 8  # a shorter value may well be an ordinary word
_declared: set[str] = set()


def keep_secret(*values: str) -> None:
    """Have `redacted` take out these values, and each of their words: the key of "Bearer KEY" as well."""
    _declared.update(part for value in values for part in (value, *value.split()) if len(part) >= SHORTEST)


def redacted(text: str) -> str:
    """The text with `[secret]` in place of tokens, of logins in addresses, and of the values of secret variables and
    of `keep_secret`.
    """
    for value in sorted(_declared, key=len, reverse=True):
        text = text.replace(value, "[secret]")
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and value in text and SECRET_VARIABLE.fullmatch(name):
            text = text.replace(value, "[secret]")
    return LOGIN.sub("[secret]", TOKEN.sub("[secret]", text))
