"""Calls of an OpenAI-compatible endpoint: repeated for a bounded time, then one error with a code."""

import asyncio
import importlib.util
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.config.judges import OpenAIJudge
from rlhf_cli.errors import RLHFError, install_hint, register_secrets
from rlhf_cli.http_client import excerpt
from rlhf_cli.judges.question import RESPONSE_FORMAT

PLACEHOLDER = "none"  # sent as the key to an endpoint that needs none
DEFAULT_KEY_ENV = OpenAIJudge.model_fields["key_env"].default
FIRST_WAIT_S = 1.0  # before the second try; doubled before each further one
LONGEST_WAIT_S = 30.0  # between two tries, unless Retry-After asks for more
WAIT_AND_REPEAT = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS)
REFUSES_SCHEMA = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)
# What vLLM, OpenAI, SGLang, llama.cpp, TGI, Gemini and Anthropic say of a request that is longer than the context.
TOO_LONG = re.compile(
    r"context[ _](length|size|window)|(prompt|input) is too long|input token count|longer than the model's context"
    r"|`max_new_tokens` must be <=",
    re.IGNORECASE,
)
HINTS = {
    HTTPStatus.BAD_REQUEST: "parameters can replace fields of the request, such as {temperature: 1}, and add others",
    HTTPStatus.UNAUTHORIZED: "put the endpoint's key into the variable that key_env names",
    HTTPStatus.FORBIDDEN: "put the endpoint's key into the variable that key_env names",
    HTTPStatus.NOT_FOUND: "compare url and model with what the endpoint lists under /models",
    HTTPStatus.TOO_MANY_REQUESTS: "the account has no credit left",
}


@dataclass(frozen=True)
class Reply:
    """The text of a reply, and the tokens that the endpoint counted; 0 if it counts none."""

    text: str
    prompt_tokens: int
    completion_tokens: int


def api_key(settings: OpenAIJudge, where: Callable[[str], str]) -> str:
    """Return the key of the endpoint. Raises RLHFError C17 if a variable that the config names is not set."""
    name = settings.key_env
    value = os.environ.get(name, "") if name else ""
    if name and name != DEFAULT_KEY_ENV and not value:
        text = f"key_env: the environment variable {name} is not set"
        hint = f"export {name}=... in the shell that starts the run; key_env: null calls the endpoint without a key"
        raise RLHFError("C17", text, where=where("key_env"), hint=hint)
    if not value.isascii() or (value and not value.isprintable()):
        text = f"key_env: the environment variable {name} holds a character that no key has"
        raise RLHFError("C17", text, where=where("key_env"), hint="remove it from the value, also a line break")
    register_secrets(value)
    return value or PLACEHOLDER


def require_package(where: str) -> None:
    """Raise RLHFError E09 unless the openai package is installed."""
    if importlib.util.find_spec("openai") is None:
        text = "a judge of the kind openai needs the package openai, which is not installed"
        raise RLHFError("E09", text, where=where, hint=install_hint("judge"))


@dataclass
class Endpoint:
    """The endpoint of a judge.

    Raises RLHFError J03 if it gives no usable answer within `max_wait`, TooLongError if it refuses a text as too long.
    """

    name: str
    settings: OpenAIJudge
    key: str
    sends_schema: bool = True  # until the endpoint refuses it

    def client(self) -> Any:
        """Return the connections of one event loop, a context manager."""
        import openai  # takes a second

        return openai.AsyncOpenAI(base_url=self.settings.url, api_key=self.key, max_retries=0)

    async def ask(self, client: Any, message: str) -> Reply:
        """Return the reply to a message of the user."""
        deadline = time.monotonic() + self.settings.max_wait
        tries = 0
        while True:
            try:
                return await self._ask_once(client, message)
            except _BusyError as busy:
                wait = max(busy.retry_after, min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0**tries))
                tries += 1
                if time.monotonic() + wait > deadline:
                    raise self._gave_up(busy, tries) from None
                terminal.log_once(f"judge {self.name}: {busy}; trying again for {self.settings.max_wait:g} s")
            await asyncio.sleep(wait)

    async def _ask_once(self, client: Any, message: str) -> Reply:
        """Return the reply; raise _BusyError if another try may help."""
        import openai

        sends_schema = self.sends_schema
        try:
            async with asyncio.timeout(self.settings.timeout):  # of the whole answer; the client's is of each read
                raw = await client.chat.completions.with_raw_response.create(**self._request(message, sends_schema))
        except (TimeoutError, openai.APITimeoutError):
            raise _BusyError(f"gave no answer within {self.settings.timeout:g} s") from None
        except openai.APIConnectionError as error:
            reason = str(error.__cause__ or error).rstrip(".")
            raise _BusyError(f"cannot be reached: {reason}") from None
        except openai.APIStatusError as error:
            if TOO_LONG.search(f"{error.code} {_message(error)}"):
                raise TooLongError(_message(error)) from None
            if sends_schema and error.status_code in REFUSES_SCHEMA:
                return await self._ask_without_schema(client, message, error)
            raise self._status_error(error) from None
        return _read(raw.text)

    async def _ask_without_schema(self, client: Any, message: str, refusal: Any) -> Reply:
        """Ask again without a schema; if that is answered, the endpoint has no support for it."""
        self.sends_schema = False
        try:
            reply = await self._ask_once(client, message)
        except RLHFError:
            raise self._status_error(refusal) from None
        terminal.log_once(f"judge {self.name}: the endpoint refuses a JSON Schema, and is asked without one")
        return reply

    def _request(self, message: str, sends_schema: bool) -> dict[str, Any]:
        """Return the arguments of a call; `parameters` may replace the temperature."""
        schema = {"response_format": RESPONSE_FORMAT} if sends_schema else {}
        return {
            "model": self.settings.model,
            "messages": [{"role": "user", "content": message}],
            **schema,
            "extra_body": {"temperature": 0, **self.settings.parameters},
        }

    def _status_error(self, error: Any) -> Exception:
        """Return the error for a status: _BusyError if another try may help."""
        status = error.status_code
        problem = f"answered {status}: {excerpt(_message(error).encode())}"
        has_no_credit = error.code == "insufficient_quota"
        if (status in WAIT_AND_REPEAT or status >= HTTPStatus.INTERNAL_SERVER_ERROR) and not has_no_credit:
            return _BusyError(problem, _retry_after(error.response.headers))
        return self.error(problem, HINTS.get(status))

    def _gave_up(self, busy: "_BusyError", tries: int) -> RLHFError:
        asked = f", and asks to wait {busy.retry_after:g} s" if busy.retry_after else ""
        text = f"{busy}{asked} ({tries} {'try' if tries == 1 else 'tries'}, max_wait {self.settings.max_wait:g} s)"
        return self.error(text, "the answers so far are kept; the same command continues from them")

    def error(self, problem: str, hint: str | None = None) -> RLHFError:
        return RLHFError("J03", f"judge {self.name}: {self.settings.url} {problem}", hint=hint)


class TooLongError(Exception):
    """The endpoint refuses a request as longer than the context of its model."""


class _BusyError(Exception):
    """No answer now; another try may get one. `retry_after`: seconds that the endpoint asks to wait."""

    def __init__(self, problem: str, retry_after: float = 0.0) -> None:
        super().__init__(problem)
        self.retry_after = retry_after


def _message(error: Any) -> str:
    """Return what the endpoint says of an error, or else all that it sent."""
    message = error.body.get("message") if isinstance(error.body, dict) else None
    return str(message or error.response.text)


def _retry_after(headers: Any) -> float:
    """Return the seconds of Retry-After; 0 without the header, or if it holds a date."""
    text = headers.get("retry-after", "")
    return float(text) if text.isdecimal() else 0.0


def _read(body: str) -> Reply:
    """Return the reply in an answer; one of another form has no text."""
    try:
        answer = json.loads(body)
        text = answer["choices"][0]["message"]["content"]
        usage = dict(answer.get("usage") or {})
    except (ValueError, KeyError, IndexError, TypeError):
        return Reply("", 0, 0)
    return Reply(str(text or ""), _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))


def _count(usage: dict[str, Any], name: str) -> int:
    count = usage.get(name)
    return count if type(count) is int else 0
