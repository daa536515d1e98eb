"""`url:`: a reward behind an HTTP endpoint.

POST {"prompts": [...], "responses": [...]}, batch_size rows at most -> 200 {"scores": [...]}, one finite number a row.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException, IncompleteRead
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from rlhf_cli.errors import RLHFError, all_of
from rlhf_cli.ppo.rewards.deadline import PlainHandler, SecureHandler
from rlhf_cli.ppo.rewards.source import Failed, Place
from rlhf_cli.progress import counted
from rlhf_cli.redaction import keep_secret, redacted

MOST_BYTES = 16_000_000  # of an answer
LONGEST_WAIT = 30.0  # seconds between two tries
TOO_MANY = 429


@dataclass(frozen=True)
class Endpoint:
    """A text reward that asks `url`, `batch_size` rows at a time.

    Raises Failed where it does not answer 200 with {"scores": [...]}, one a row, after 1 + `retries` tries. Tried again
    is what may pass: no connection, no whole answer in `timeout` seconds, an answer that is cut off, 429 and 5xx.
    Redirects are not followed: they would take the headers elsewhere.
    """

    url: str
    timeout: float = 60.0
    retries: int = 3
    batch_size: int = 64
    headers: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, prompts: list[str], responses: list[str]) -> list[Any]:
        scores: list[Any] = []
        for first in counted("score: request", range(0, len(prompts), self.batch_size)):
            rows = slice(first, first + self.batch_size)
            scores += self._scores(prompts[rows], responses[rows])
        return scores

    def _scores(self, prompts: list[str], responses: list[str]) -> list[Any]:
        body = json.dumps({"prompts": prompts, "responses": responses}).encode()
        answer = self._answer(body)
        try:
            scores = json.loads(answer)["scores"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._odd(f"answered {_start(answer)}") from None
        if not isinstance(scores, list) or len(scores) != len(prompts):
            count = f"{len(scores)} scores" if isinstance(scores, list) else "no list of scores"
            raise self._odd(f"answered {count} for {len(prompts)} responses")
        return scores

    def _answer(self, body: bytes) -> bytes:
        """The body of the first try that succeeds."""
        said = ""
        for wait in self._waits():
            time.sleep(wait)
            try:
                status, reason, found = self._post(body)
            except (OSError, HTTPException) as error:  # URLError and timeouts are OSErrors
                said = f"gave no answer: {getattr(error, 'reason', None) or error or type(error).__name__}"
                continue
            if 200 <= status < 300:
                return found
            said = f"answered {status} {reason}: {_start(found)}"
            if status != TOO_MANY and status < 500:
                raise self._odd(said)
        hint = "once it answers, the same command goes on from the last state; timeout and retries may be raised for it"
        raise Failed(f"{self.url} {said} ({self.retries + 1} tries)", hint)

    def _waits(self) -> Iterator[float]:
        yield 0.0
        for again in range(self.retries):
            yield min(LONGEST_WAIT, 2.0**again)

    def _post(self, body: bytes) -> tuple[int, str, bytes]:
        """(status, reason, body) of an answer. Raises OSError or HTTPException where no whole one comes in time."""
        headers = {"Content-Type": "application/json", "Accept": "application/json", **self.headers}
        request = Request(self.url, data=body, headers=headers, method="POST")
        try:
            answer = build_opener(_NoRedirects, PlainHandler, SecureHandler).open(request, timeout=self.timeout)
        except HTTPError as error:
            answer = error
        with answer:
            found = answer.read(MOST_BYTES + 1)
            if len(found) > MOST_BYTES:
                raise self._odd(f"answered more than {MOST_BYTES:,} bytes")
            if answer.length:  # bytes that were announced and did not come: a bounded read does not mind
                raise IncompleteRead(found, answer.length)
            return answer.status, answer.reason, found

    def _odd(self, said: str) -> Failed:
        return Failed(f"{self.url} {said}", 'it must answer {"scores": [...]}, one finite number a response')


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """None makes urllib raise the redirect as an error."""


def make(section: Any, place: Place) -> Endpoint:
    """The endpoint of `url:`, which is not asked yet. Raises RLHFError C17 for an odd port, or a bad header."""
    headers = [partial(_check_header, name, variable, place) for name, variable in section.headers.items()]
    all_of(partial(_check_port, section.url, place), *headers)
    values = {name: os.environ[variable] for name, variable in section.headers.items()}
    keep_secret(*values.values())
    return Endpoint(section.url, section.timeout, section.retries, section.batch_size, values)


def _check_port(url: str, place: Place) -> None:
    try:
        urlsplit(url).port  # noqa: B018  it is read there
    except ValueError as error:
        raise RLHFError("C17", f"url: {url} is no address: {error}", where=place.where("url")) from None


def _check_header(name: str, variable: str, place: Place) -> None:
    where, value = place.where(f"headers.{name}"), os.environ.get(variable)
    if not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
        raise RLHFError("C17", f"headers: {name!r} is no name of a header", where=where, hint="e.g. Authorization")
    if not value:
        text = f"headers.{name}: the environment variable {variable} is not set"
        raise RLHFError("C17", text, where=where, hint=f"export {variable}=... in the shell that starts the run")
    if not value.isprintable():
        text = f"headers.{name}: the environment variable {variable} holds a line break or another control character"
        raise RLHFError("C17", text, where=where, hint="set it without")


def _start(body: bytes) -> str:
    """The beginning of what was answered, as text. Redacted before it is cut: half a secret would not be known."""
    text = " ".join(redacted(body.decode("utf-8", "replace")).split())
    return repr(text if len(text) <= 80 else text[:77] + "...") if text else "nothing"
