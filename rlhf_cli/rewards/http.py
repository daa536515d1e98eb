"""`url:`: a reward behind an HTTP endpoint.

POST {"prompts": [...], "responses": [...]}, at most batch_size rows -> 200 {"scores": [...]}, a finite number per row.
"""

import json
import os
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from rlhf_cli.config.ppo import RewardSource as RewardSection
from rlhf_cli.errors import RLHFError, collect_errors, register_secrets
from rlhf_cli.http_client import HTTPClient, NoAnswerError, RefusalError, excerpt
from rlhf_cli.progress import track_progress
from rlhf_cli.rewards.function import RewardContext


@dataclass(frozen=True)
class HTTPReward:
    """An async reward function that posts to `url`, `batch_size` rows per request.

    Raises RLHFError R05 if the client's retries are used up, or the answer is not 200 with {"scores": [...]}, one per
    row.
    """

    url: str
    client: HTTPClient
    batch_size: int = 64

    async def __call__(self, prompts: list[str], responses: list[str]) -> list[Any]:
        scores: list[Any] = []
        async with self.client.connections() as connections:
            for start in track_progress("score: request", range(0, len(prompts), self.batch_size)):
                rows = slice(start, start + self.batch_size)
                body = {"prompts": prompts[rows], "responses": responses[rows]}
                scores += self._read(await self._post(connections, body), len(prompts[rows]))
        return scores

    async def _post(self, connections: Any, body: Any) -> bytes:
        try:
            return await self.client.request(connections, self.url, json.dumps(body).encode())
        except RefusalError as error:
            raise self._protocol_error(str(error)) from None
        except NoAnswerError as error:
            hint = "once it answers, the same command resumes from the last checkpoint; "
            hint += "timeout and retries may be raised"
            raise RLHFError("R05", f"{self.url} {error}", hint=hint) from None

    def _read(self, answer: bytes, count: int) -> list[Any]:
        try:
            found = json.loads(answer)["scores"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._protocol_error(f"answered {excerpt(answer)}") from None
        if not isinstance(found, list) or len(found) != count:
            problem = f"{len(found)} scores" if isinstance(found, list) else "no list of scores"
            raise self._protocol_error(f"answered {problem} for {count} responses")
        if None in found:
            raise self._protocol_error(f"answered null for row {found.index(None)}")
        return found

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
    return HTTPReward(section.url, HTTPClient(section.timeout, section.retries, values), section.batch_size)


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
