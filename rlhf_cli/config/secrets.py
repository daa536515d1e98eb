"""Tokens and passwords have no place in a config: it is copied beside the weights, printed and logged."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from rlhf_cli.errors import Problem
from rlhf_cli.redaction import TOKEN, redacted

PASSWORD = re.compile(r"://[^/\s@:]*:[^/\s@]+@")  # https://name:PASSWORD@host
QUERY = re.compile(r"://[^\s#]*[?&][\w-]*(token|key|secret|password|signature)=[^&\s]", re.IGNORECASE)
SECRET_KEY = re.compile(
    r"(.*_)?(hub_token|hf_token|auth_token|access_token|api_token|api_?key|secret|password)", re.IGNORECASE
)


def take_out(tree: dict[str, Any], where: Callable[[str], str]) -> list[Problem]:
    """C16 for each secret, which is removed from `tree`, so that no other message can repeat it."""
    found = list(_secrets(tree, ""))
    for container, name, _ in reversed(found):  # from the end of a list: the indices before it stay what they are
        container.pop(name)
    hint = "remove it, and set it in the environment, e.g. HF_TOKEN"
    return [Problem("C16", f"{redacted(key)} contains a secret", where(key), hint) for _, _, key in found]


def _secrets(node: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
    for name, value in list(node.items()) if isinstance(node, dict) else list(enumerate(node)):
        key = f"{path}.{name}" if path else str(name)
        if TOKEN.search(str(name)) or (isinstance(value, str) and _is_secret(str(name), value)):
            yield node, name, key
        elif isinstance(value, dict | list):
            yield from _secrets(value, key)


def _is_secret(name: str, value: str) -> bool:
    named_so = value != "" and SECRET_KEY.fullmatch(name) is not None
    return named_so or TOKEN.search(value) is not None or any(form.search(value) for form in (PASSWORD, QUERY))
