"""`url:`: a reward behind an HTTP endpoint.

POST {"prompts": [...], "responses": [...]}, at most batch_size rows -> 200 {"scores": [...]}, a finite number per row.
"""

import io
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from rlhf_cli.errors import RLHFError, collect_errors, redact, register_secrets
from rlhf_cli.progress import track_progress
from rlhf_cli.rewards.source import RewardContext, RewardError

MAX_RESPONSE_BYTES = 16_000_000
MAX_RETRY_WAIT_S = 30.0
HTTP_TOO_MANY_REQUESTS = 429


@dataclass(frozen=True)
class HTTPReward:
    """A reward function that posts to `url`, `batch_size` rows per request.

    Retried `retries` times: connection errors, no complete answer within `timeout` seconds, truncated answers, 429 and
    5xx. Redirects are not followed, because they would forward the headers to another host. Raises RewardError if the
    retries are used up, or the answer is not 200 with {"scores": [...]}, one per row.
    """

    url: str
    timeout: float = 60.0
    retries: int = 3
    batch_size: int = 64
    headers: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, prompts: list[str], responses: list[str]) -> list[Any]:
        scores: list[Any] = []
        for start in track_progress("score: request", range(0, len(prompts), self.batch_size)):
            rows = slice(start, start + self.batch_size)
            scores += self._request_scores(prompts[rows], responses[rows])
        return scores

    def _request_scores(self, prompts: list[str], responses: list[str]) -> list[Any]:
        answer = self._post_with_retries(json.dumps({"prompts": prompts, "responses": responses}).encode())
        try:
            scores = json.loads(answer)["scores"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._protocol_error(f"answered {_excerpt(answer)}") from None
        if not isinstance(scores, list) or len(scores) != len(prompts):
            count = f"{len(scores)} scores" if isinstance(scores, list) else "no list of scores"
            raise self._protocol_error(f"answered {count} for {len(prompts)} responses")
        return scores

    def _post_with_retries(self, body: bytes) -> bytes:
        """Return the answer's body of the first successful attempt."""
        problem = ""
        for wait in self._retry_waits():
            time.sleep(wait)
            try:
                status, reason, content = self._post(body)
            except (OSError, HTTPException) as error:  # URLError and timeouts are OSErrors
                problem = f"gave no answer: {getattr(error, 'reason', None) or error or type(error).__name__}"
                continue
            if 200 <= status < 300:
                return content
            problem = f"answered {status} {reason}: {_excerpt(content)}"
            if status != HTTP_TOO_MANY_REQUESTS and status < 500:
                raise self._protocol_error(problem)
        hint = "once it answers, the same command goes on from the last state; timeout and retries may be raised for it"
        raise RewardError(f"{self.url} {problem} ({self.retries + 1} tries)", hint)

    def _retry_waits(self) -> Iterator[float]:
        """Yield the seconds to wait before each attempt."""
        yield 0.0
        for retry in range(self.retries):
            yield min(MAX_RETRY_WAIT_S, 2.0**retry)

    def _post(self, body: bytes) -> tuple[int, str, bytes]:
        """Return (status, reason, body). Raises OSError or HTTPException without a complete answer in time."""
        headers = {"Content-Type": "application/json", "Accept": "application/json", **self.headers}
        request = Request(self.url, data=body, headers=headers, method="POST")
        opener = build_opener(_NoRedirects, _DeadlineHTTPHandler, _DeadlineHTTPSHandler)
        try:
            answer = opener.open(request, timeout=self.timeout)
        except HTTPError as error:
            answer = error
        with answer:
            content = answer.read(MAX_RESPONSE_BYTES + 1)
            if len(content) > MAX_RESPONSE_BYTES:
                raise self._protocol_error(f"answered more than {MAX_RESPONSE_BYTES:,} bytes")
            if answer.length:  # announced bytes that did not arrive: a bounded read does not raise by itself
                raise IncompleteRead(content, answer.length)
            return answer.status, answer.reason, content

    def _protocol_error(self, problem: str) -> RewardError:
        return RewardError(f"{self.url} {problem}", 'it must answer {"scores": [...]}, one finite number a response')


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Return None, so that urllib raises the redirect as an error."""


def make(section: Any, context: RewardContext) -> HTTPReward:
    """Build the reward of `url:` without contacting it. Raises RLHFError C17 for an invalid port or header."""
    headers = [partial(_check_header, name, variable, context) for name, variable in section.headers.items()]
    collect_errors(partial(_check_port, section.url, context), *headers)
    values = {name: os.environ[variable] for name, variable in section.headers.items()}
    register_secrets(*values.values())
    return HTTPReward(section.url, section.timeout, section.retries, section.batch_size, values)


def _check_port(url: str, context: RewardContext) -> None:
    try:
        urlsplit(url).port  # noqa: B018  the property parses the port
    except ValueError as error:
        raise RLHFError("C17", f"url: {url} is no address: {error}", where=context.where("url")) from None


def _check_header(name: str, variable: str, context: RewardContext) -> None:
    where, value = context.where(f"headers.{name}"), os.environ.get(variable)
    if not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
        raise RLHFError("C17", f"headers: {name!r} is no name of a header", where=where, hint="e.g. Authorization")
    if not value:
        text = f"headers.{name}: the environment variable {variable} is not set"
        raise RLHFError("C17", text, where=where, hint=f"export {variable}=... in the shell that starts the run")
    if not value.isprintable():
        text = f"headers.{name}: the environment variable {variable} holds a line break or another control character"
        raise RLHFError("C17", text, where=where, hint="set it without")


def _excerpt(body: bytes) -> str:
    """Return the start of an answer as text, redacted before it is truncated: half a secret would not be recognised."""
    text = " ".join(redact(body.decode("utf-8", "replace")).split())
    return repr(text if len(text) <= 80 else text[:77] + "...") if text else "nothing"


# One deadline for a complete answer: connection, headers and body. http.client's own timeout applies to each read.


class _DeadlineMixin:
    """Mixin for connections: `timeout` limits the time from the start to the last byte of the body.

    Name resolution has the operating system's own limit.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline = time.monotonic() + self.timeout  # type: ignore[attr-defined]  # the connection's
        self.response_class = partial(_DeadlineResponse, remaining_s=self._remaining_s)
        self._create_connection = self._connect_socket  # http.client's hook for the socket

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        self.sock.settimeout(self._remaining_s())  # type: ignore[attr-defined]

    def _remaining_s(self) -> float:
        """Return the seconds until the deadline, more than 0. Raises TimeoutError."""
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("timed out")
        return remaining

    def _connect_socket(self, address: tuple[str, int], timeout: float, source: Any) -> socket.socket:
        """Connect to the first address of the host that accepts; all of them share the time."""
        resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        *addresses, last = [(str(target[0]), int(target[1])) for *_, target in resolved]
        for candidate in addresses:
            try:
                return socket.create_connection(candidate, self._remaining_s() / 2, source)
            except OSError:
                continue
        return socket.create_connection(last, self._remaining_s(), source)


class _DeadlineResponse(HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, remaining_s: Callable[[], float], **options: Any) -> None:
        super().__init__(sock, *args, **options)
        assert isinstance(self.fp, io.BufferedReader)
        self.fp = io.BufferedReader(_DeadlineReader(self.fp.detach(), sock, remaining_s))


class _DeadlineReader(io.RawIOBase):
    """A socket's stream whose reads time out at the deadline."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, remaining_s: Callable[[], float]) -> None:
        self._raw, self._sock, self._remaining_s = raw, sock, remaining_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._remaining_s())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _DeadlineHTTPConnection(_DeadlineMixin, HTTPConnection):  # type: ignore[misc]
    pass


class _DeadlineHTTPSConnection(_DeadlineMixin, HTTPSConnection):  # type: ignore[misc]
    pass


class _DeadlineHTTPHandler(HTTPHandler):
    def http_open(self, request: Any) -> Any:
        return self.do_open(_DeadlineHTTPConnection, request)


class _DeadlineHTTPSHandler(HTTPSHandler):
    def https_open(self, request: Any) -> Any:
        return self.do_open(_DeadlineHTTPSConnection, request)
