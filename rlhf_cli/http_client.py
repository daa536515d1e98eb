"""HTTP requests with retries: for rewards and for rollout servers."""

import asyncio
import ssl
from asyncio import sleep
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import httpx2

from rlhf_cli.errors import redact

MAX_RESPONSE_BYTES = 16_000_000
MAX_RETRY_WAIT_S = 30.0
HTTP_TOO_MANY_REQUESTS = 429


class NoAnswerError(Exception):
    """The server gave no usable answer, and the retries are used up. The text follows the URL in a message."""


class RefusalError(Exception):
    """The server answered with a `status` that no other attempt will change. The text follows the URL in a message."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class HTTPClient:
    """Sends requests. Retried `retries` times, after 1, 2, 4, ... seconds: connection errors, no complete answer within
    `timeout` seconds, truncated answers, 429 and 5xx.

    Redirects are not followed, because they would forward the headers to another host.
    """

    timeout: float = 60.0
    retries: int = 3
    headers: Mapping[str, str] = field(default_factory=dict)

    def connections(self) -> httpx2.AsyncClient:
        """Return the connections of one event loop, a context manager."""
        unlimited = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        return httpx2.AsyncClient(timeout=None, limits=unlimited, verify=_ssl_context())

    async def request(self, connections: httpx2.AsyncClient, url: str, body: bytes | None = None) -> bytes:
        """Return the answer's body of the first successful attempt: of a POST of the JSON `body`, or a GET without it.

        Raises NoAnswerError, or RefusalError for any other status than 2xx and for an answer of over 16 MB.
        """
        problem = ""
        for wait in (0.0, *(min(MAX_RETRY_WAIT_S, 2.0**retry) for retry in range(self.retries))):
            await sleep(wait)
            try:
                answer, content = await self._request_once(connections, url, body)
            except TimeoutError:
                problem = f"gave no answer: timed out after {self.timeout:g} s"
                continue
            except httpx2.HTTPError as error:
                problem = f"gave no answer: {error or type(error).__name__}"
                continue
            if answer.is_success:
                return content
            problem = f"answered {answer.status_code} {answer.reason_phrase}: {excerpt(content)}"
            if answer.status_code != HTTP_TOO_MANY_REQUESTS and not answer.is_server_error:
                raise RefusalError(problem, answer.status_code)
        raise NoAnswerError(f"{problem} ({self.retries + 1} tries)")

    async def _request_once(
        self, connections: httpx2.AsyncClient, url: str, body: bytes | None
    ) -> tuple[httpx2.Response, bytes]:
        """Return the response and its body. Raises TimeoutError or httpx2.HTTPError without a complete answer."""
        fixed = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
        headers = httpx2.Headers({**fixed, **self.headers}, encoding="utf-8")
        content = b""
        method = "GET" if body is None else "POST"
        async with (
            asyncio.timeout(self.timeout),  # of the complete answer; httpx2's own timeouts apply to each read
            connections.stream(method, url, content=body, headers=headers) as answer,
        ):
            async for chunk in answer.aiter_raw():
                content += chunk
                if len(content) > MAX_RESPONSE_BYTES:
                    raise RefusalError(f"answered more than {MAX_RESPONSE_BYTES:,} bytes", answer.status_code)
        return answer, content


@cache
def _ssl_context() -> ssl.SSLContext:
    """Return the certificates of this machine; reading them takes 40 ms, longer than many requests."""
    return httpx2.create_ssl_context()


def excerpt(body: bytes) -> str:
    """Return the start of an answer as text, redacted before it is truncated: half a secret would not be recognised."""
    text = " ".join(redact(body.decode("utf-8", "replace")).split())
    return repr(text if len(text) <= 80 else text[:77] + "...") if text else "nothing"
