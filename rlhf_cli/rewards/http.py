"""`url:`: a reward behind an HTTP endpoint.

POST {"prompts": [...], "responses": [...]}, at most batch_size rows -> 200 {"scores": [...]}, a finite number per row.
"""

import asyncio
import json
import os
from asyncio import sleep
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx2

from rlhf_cli.config.ppo import RewardSource as RewardSection
from rlhf_cli.errors import RLHFError, collect_errors, redact, register_secrets
from rlhf_cli.progress import track_progress
from rlhf_cli.rewards.function import RewardContext

MAX_RESPONSE_BYTES = 16_000_000
MAX_RETRY_WAIT_S = 30.0
HTTP_TOO_MANY_REQUESTS = 429


@dataclass(frozen=True)
class HTTPReward:
    """An async reward function that posts to `url`, `batch_size` rows per request.

    Retried `retries` times: connection errors, no complete answer within `timeout` seconds, truncated answers, 429 and
    5xx. Redirects are not followed, because they would forward the headers to another host. Raises RLHFError R05 if the
    retries are used up, or the answer is not 200 with {"scores": [...]}, one per row.
    """

    url: str
    timeout: float = 60.0
    retries: int = 3
    batch_size: int = 64
    headers: Mapping[str, str] = field(default_factory=dict)

    async def __call__(self, prompts: list[str], responses: list[str]) -> list[Any]:
        scores: list[Any] = []
        for start in track_progress("score: request", range(0, len(prompts), self.batch_size)):
            rows = slice(start, start + self.batch_size)
            body = {"prompts": prompts[rows], "responses": responses[rows]}
            answer = await self._post_with_retries(json.dumps(body).encode())
            try:
                found = json.loads(answer)["scores"]
            except (ValueError, KeyError, TypeError, RecursionError):
                raise self._protocol_error(f"answered {_excerpt(answer)}") from None
            if not isinstance(found, list) or len(found) != len(prompts[rows]):
                count = f"{len(found)} scores" if isinstance(found, list) else "no list of scores"
                raise self._protocol_error(f"answered {count} for {len(prompts[rows])} responses")
            scores += found
        return scores

    async def _post_with_retries(self, body: bytes) -> bytes:
        """Return the answer's body of the first successful attempt."""
        problem = ""
        for wait in (0.0, *(min(MAX_RETRY_WAIT_S, 2.0**retry) for retry in range(self.retries))):
            await sleep(wait)
            try:
                answer, content = await self._post(body)
            except TimeoutError:
                problem = f"gave no answer: timed out after {self.timeout:g} s"
                continue
            except httpx2.HTTPError as error:
                problem = f"gave no answer: {error or type(error).__name__}"
                continue
            if answer.is_success:
                return content
            problem = f"answered {answer.status_code} {answer.reason_phrase}: {_excerpt(content)}"
            if answer.status_code != HTTP_TOO_MANY_REQUESTS and not answer.is_server_error:
                raise self._protocol_error(problem)
        hint = "once it answers, the same command resumes from the last checkpoint; timeout and retries may be raised"
        raise RLHFError("R05", f"{self.url} {problem} ({self.retries + 1} tries)", hint=hint)

    async def _post(self, body: bytes) -> tuple[httpx2.Response, bytes]:
        """Return the response and its body. Raises TimeoutError or httpx2.HTTPError without a complete answer."""
        fixed = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
        headers, content = httpx2.Headers({**fixed, **self.headers}, encoding="utf-8"), b""
        async with (
            httpx2.AsyncClient(timeout=None) as client,
            asyncio.timeout(self.timeout),  # of the complete answer; httpx2's own timeouts apply to each read
            client.stream("POST", self.url, content=body, headers=headers) as answer,
        ):
            async for chunk in answer.aiter_raw():
                content += chunk
                if len(content) > MAX_RESPONSE_BYTES:
                    raise self._protocol_error(f"answered more than {MAX_RESPONSE_BYTES:,} bytes")
        return answer, content

    def _protocol_error(self, problem: str) -> RLHFError:
        hint = 'it must answer {"scores": [...]}, one finite number per response'
        return RLHFError("R05", f"{self.url} {problem}", hint=hint)


def make(section: RewardSection, context: RewardContext) -> HTTPReward:
    """Build the reward of `url:` without contacting it. Raises RLHFError C17 for an invalid port or header."""
    assert section.url is not None
    headers = [partial(_check_header, name, variable, context) for name, variable in section.headers.items()]
    collect_errors(partial(_check_port, section.url, context), *headers)
    values = {name: os.environ[variable] for name, variable in section.headers.items()}
    register_secrets(*values.values())
    return HTTPReward(section.url, section.timeout, section.retries, section.batch_size, values)


def _check_port(url: str, context: RewardContext) -> None:
    try:
        urlsplit(url).port  # noqa: B018  the property parses the port
    except ValueError as error:
        raise RLHFError("C17", f"url: {url} is not a valid address: {error}", where=context.where("url")) from None


def _check_header(name: str, variable: str, context: RewardContext) -> None:
    where, value = context.where(f"headers.{name}"), os.environ.get(variable)
    if not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
        raise RLHFError("C17", f"headers: {name!r} is not a header name", where=where, hint="e.g. Authorization")
    if not value:
        text = f"headers.{name}: the environment variable {variable} is not set"
        raise RLHFError("C17", text, where=where, hint=f"export {variable}=... in the shell that starts the run")
    if not value.isprintable():
        text = f"headers.{name}: the environment variable {variable} holds a line break or another control character"
        raise RLHFError("C17", text, where=where, hint="remove it from the value")


def _excerpt(body: bytes) -> str:
    """Return the start of an answer as text, redacted before it is truncated: half a secret would not be recognised."""
    text = " ".join(redact(body.decode("utf-8", "replace")).split())
    return repr(text if len(text) <= 80 else text[:77] + "...") if text else "nothing"
