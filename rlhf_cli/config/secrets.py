"""Tokens and passwords have no place in a config: it is copied beside the weights, printed and logged."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from rlhf_cli.errors import Problem

TOKEN = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[A-Z0-9]{16})\b")
SECRET_KEY = re.compile(
    r"(.*_)?(hub_token|hf_token|auth_token|access_token|api_token|api_?key|secret|password)", re.IGNORECASE
)


def take_out(tree: dict[str, Any], where: Callable[[str], str]) -> list[Problem]:
    """C16 for each secret, which is removed from `tree`, so that no other message can repeat it."""
    problems = []
    for container, name, key in list(_secrets(tree, "")):
        container.pop(name)
        problems.append(
            Problem(
                "C16",
                f"{key} holds a secret",
                where(key),
                "take it out; put it in the environment, for example HF_TOKEN",
            )
        )
    return problems


def _secrets(node: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
    for name, value in list(node.items()) if isinstance(node, dict) else list(enumerate(node)):
        key = f"{path}.{name}" if path else str(name)
        if isinstance(value, dict | list):
            yield from _secrets(value, key)
        elif isinstance(value, str) and (TOKEN.search(value) or (value and SECRET_KEY.fullmatch(str(name)))):
            yield node, name, key
