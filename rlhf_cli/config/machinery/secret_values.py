"""Secrets in a config, by the names of keys and query parameters and by their form: a run copies its config."""

import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from rlhf_cli.errors import TOKEN, Problem, redact

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


def remove_secrets(tree: dict[str, Any], where: Callable[[str], str]) -> list[Problem]:
    """Remove each secret from `tree`, so that no message can repeat it; return a problem C16 for each."""
    secrets = list(_find_secrets(tree, ""))
    for container, name, *_ in reversed(secrets):  # from the end, so that list indices stay valid
        container.pop(name)
        if name == "url":  # without one, its section would be another problem
            container[name] = "http://removed"
    return [
        Problem("C16", f"{redact(key)} contains a secret{part}", where(key), hint) for _, _, key, part, hint in secrets
    ]


def _find_secrets(node: Any, path: str) -> Iterator[tuple[Any, Any, str, str, str]]:
    """Yield the container of each secret, its name there, its key, which part of the value it is, and what to do."""
    entries = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
    for name, value in entries:
        key = f"{path}.{name}" if path else str(name)
        text = value if isinstance(value, str) else ""
        if TOKEN.search(str(name)) or TOKEN.search(text) or (text and SECRET_KEY.fullmatch(str(name))):
            yield node, name, key, "", HINT
        elif part := _secret_part_of_urls(_with_scheme(str(name), text)):
            yield node, name, key, f": {part}", URL_HINT
        elif isinstance(value, dict | list):
            yield from _find_secrets(value, key)


def _secret_part_of_urls(text: str) -> str | None:
    """Return which part of a URL in the text is secret, or None."""
    parts = [_secret_part(*url.groups()) for url in URL.finditer(text)]
    return next(filter(None, parts), None)


def _with_scheme(name: str, text: str) -> str:
    """Return the value of a key, as a URL if the key is `url`: a message would show one without a scheme."""
    return f"://{text}" if name == "url" and "://" not in text else text


def _secret_part(scheme: str | None, host: str, rest: str) -> str | None:
    """Return which part of a URL is secret: a login, a parameter by its name, or random letters behind the host."""
    if "@" in host:
        return "a login before the host"
    for part in re.split("[/?&;#]", VARIABLE.sub("", rest)):
        name, _, value = _decoded(part).partition("=")
        if value and _names_secret(name, value):
            return f"the parameter {name[:40]!r}"
        if scheme and _is_random(_decoded(part)):
            return f"{len(_decoded(value or part))} letters and digits in no order"
    return None


def _decoded(text: str) -> str:
    return unquote(unquote(text))  # some encode it twice


def _names_secret(name: str, value: str) -> bool:
    """Return True for the name of a secret parameter, such as sig, X-Amz-Signature, accessToken or api_key."""
    words = {word.lower() for word in WORD.findall(name)}
    if not PLAIN_VALUE.fullmatch(value):
        words |= {"secret"} if words & MAYBE_SECRET_WORDS else set()
    return name.lower().endswith(SECRET_ENDS) or bool(words & SECRET_WORDS)


def _is_random(text: str) -> bool:
    """Return True for letters and digits in no order, as in the path of a web hook, but not for names and UUIDs."""
    for word in LONG_WORD.findall(text):
        mixed, capitals = len(LETTER_BESIDE_DIGIT.findall(word)), len(CAPITAL.findall(word))
        if mixed >= 4 or mixed + capitals >= 7:
            return True
    return False
