"""Secrets in a config, by the names of keys and query parameters and by their form: a run copies its config."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from rlhf_cli.config.machinery.section import Where
from rlhf_cli.errors import TOKEN, Problem, redact
from rlhf_cli.trees import Tree

SECRET_KEY = re.compile(
    r"(.*_)?(hub_token|hf_token|auth_token|access_token|api_token|api_?key|secret|password)", re.IGNORECASE
)
URL = re.compile(r"(https?)?://([^\s/?#]*)([^\s]*)", re.IGNORECASE)  # scheme, host, and all that follows
VARIABLE = re.compile(r"\{([A-Za-z_]\w*)\}", re.ASCII)  # in a URL: {NAME} is the value of an environment variable
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
SECRET_WORDS = {
    "accesskey", "accesskeyid", "apikey", "auth", "authorization", "bearer", "cookie", "cred", "creds", "credential",
    "credentials", "hmac", "jsessionid", "jwt", "oauth", "otp", "passphrase", "passwd", "password", "pat", "privatekey",
    "psw", "pw", "pwd", "secret", "secretkey", "sessionid", "sid", "sig", "signature", "ticket", "token",
}  # fmt: skip
SECRET_ENDS = ("token", "secret", "password", "signature")
MAYBE_SECRET_WORDS = {"code", "key", "pass", "pin", "session", "sign"}  # unless the value is a plain word
PLAIN_VALUE = re.compile(r"[a-z_]{1,16}|[0-9]{1,3}")
LONG_WORD = re.compile(r"[A-Za-z0-9]{16,}")
LETTER_BESIDE_DIGIT = re.compile(r"(?<=[A-Za-z])(?=[0-9])|(?<=[0-9])(?=[A-Za-z])")
CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")
HINT = "remove it, and set it in the environment, e.g. HF_TOKEN"
URL_HINT = (
    "put it in a header from the environment (headers: {Authorization: VARIABLE}); "
    "or write {VARIABLE} in its place in the URL"
)


@dataclass(frozen=True)
class Secret:
    """A secret in the tree of a config: container[name], whose full key is `key`."""

    container: Any
    name: Any
    key: str
    hint: str
    part: str = ""  # what is secret in it, if not all of it


def remove_secrets(tree: Tree, where: Where) -> list[Problem]:
    """Remove each secret from `tree`, so that no message can repeat it; return a problem C16 for each."""
    secrets = list(_find_secrets(tree))
    for secret in reversed(secrets):  # from the end, so that list indices stay valid
        secret.container.pop(secret.name)
        if secret.name == "url":  # without one, its section would be another problem
            secret.container["url"] = "http://removed"
    return [
        Problem("C16", f"{redact(secret.key)} contains a secret{secret.part}", where(secret.key), secret.hint)
        for secret in secrets
    ]


def _find_secrets(node: Any, prefix: str = "") -> Iterator[Secret]:
    entries = node.items() if isinstance(node, dict) else enumerate(node)
    for name, value in entries:
        key = f"{prefix}{name}"
        text = value if isinstance(value, str) else ""
        if _is_secret(str(name), text):
            yield Secret(node, name, key, HINT)
            continue
        if isinstance(value, dict | list):
            yield from _find_secrets(value, f"{key}.")
            continue
        part = _secret_part_of_urls(text, is_url=name == "url")
        if part:
            yield Secret(node, name, key, URL_HINT, f": {part}")


def _is_secret(name: str, text: str) -> bool:
    """Return True if the name of a key says that its text is a secret, or one of both looks like a token."""
    if text and SECRET_KEY.fullmatch(name):
        return True
    return bool(TOKEN.search(name) or TOKEN.search(text))


def _secret_part_of_urls(text: str, *, is_url: bool) -> str | None:
    """Return which part of a URL in the text is secret, or None. `is_url` for a key that holds a URL."""
    if is_url and "://" not in text:  # a message would show it without a scheme
        text = f"://{text}"
    for scheme, host, rest in URL.findall(text):
        if part := _secret_part(scheme, host, rest):
            return part
    return None


def _secret_part(scheme: str, host: str, rest: str) -> str | None:
    """Return which part of a URL is secret: a login, a parameter by its name, or random letters behind the host."""
    if "@" in host:
        return "a login before the host"
    for part in re.split("[/?&;#]", VARIABLE.sub("", rest)):
        text = unquote(unquote(part))  # some encode it twice
        name, _, value = text.partition("=")
        if value and _names_secret(name, value):
            return f"the parameter {name[:40]!r}"
        if scheme and _is_random(text):
            return f"{len(value or text)} letters and digits in no order"
    return None


def _names_secret(name: str, value: str) -> bool:
    """Return True for the name of a secret parameter, such as sig, X-Amz-Signature, accessToken or api_key."""
    if name.lower().endswith(SECRET_ENDS):
        return True
    words = {word.lower() for word in WORD.findall(name)}
    if words & SECRET_WORDS:
        return True
    return bool(words & MAYBE_SECRET_WORDS) and not PLAIN_VALUE.fullmatch(value)


def _is_random(text: str) -> bool:
    """Return True for letters and digits in no order, as in the path of a web hook, but not for names and UUIDs."""
    for word in LONG_WORD.findall(text):
        mixed = len(LETTER_BESIDE_DIGIT.findall(word))
        capitals = len(CAPITAL.findall(word))
        if mixed >= 4 or mixed + capitals >= 7:
            return True
    return False
