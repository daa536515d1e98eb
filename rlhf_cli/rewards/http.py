"""`url:`: a reward behind an HTTP endpoint, asked by one of the protocols that PROTOCOLS names.

scores    POST {"prompts": [...], "responses": [...], "columns": {...}} -> {"scores": [...]}, a finite number per row
pooling   vLLM's POST /pooling {"input": [...]} -> {"data": [{"index": 0, "data": [...]}, ...]}
classify  vLLM's POST /classify {"input": [...]} -> {"data": [{"index": 0, "probs": [...]}, ...]}
rerank    text-embeddings-inference's POST /rerank {"query": ..., "texts": [...]} -> [{"index": 0, "score": ...}, ...]

The last three answer with a sigmoid of a reward model's score unless they are asked not to. `ScoringServer` asks, and
checks by a probe that it was heard.
"""

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from rlhf_cli.config.machinery.secret_values import VARIABLE
from rlhf_cli.config.ppo import RewardSourceSettings
from rlhf_cli.data.texts import joined
from rlhf_cli.errors import RLHFError, collect_errors, register_secrets
from rlhf_cli.http_client import HTTPClient, NoAnswerError, RefusalError, excerpt
from rlhf_cli.jsonl import values_of
from rlhf_cli.progress import track_progress
from rlhf_cli.rewards.function import RewardContext
from rlhf_cli.rewards.signature import RewardFn

Body = dict[str, Any]
PROBES = [
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is the capital of France?", "no no no no no no no no"),
    ("Write a polite reply.", "Thank you very much for your message. I will gladly help you tomorrow."),
    ("Write a polite reply.", ""),
    ("Count to five.", "1, 2, 3, 4, 5"),
    ("Count to five.", "The weather was bad, and everybody stayed at home."),
]


@dataclass(frozen=True)
class Endpoint:
    """An address that bodies are posted to, at most `concurrency` at the same time.

    Raises RLHFError R05 if the client's retries are used up, or the answer is not 200 with what `read` accepts.
    """

    url: str  # as in the config, for messages
    address: str  # with the values of its variables
    client: HTTPClient
    batch_size: int = 64
    concurrency: int = 8

    async def ask(self, bodies: Sequence[Body], read: Callable[[Any, Body], list[Any]]) -> list[Any]:
        """Post the bodies; return the concatenated results of `read(answer, body)`, which raises ValueError."""
        free = asyncio.Semaphore(self.concurrency)
        async with self.client.connections() as connections:

            async def post(body: Body) -> list[Any]:
                async with free:
                    return self._read(await self._post(connections, body), body, read)

            tasks = [asyncio.create_task(post(body)) for body in bodies]
            try:
                answers = [await task for task in track_progress("score: request", tasks)]
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return list(chain.from_iterable(answers))

    async def _post(self, connections: Any, body: Body) -> bytes:
        try:
            return await self.client.request(connections, self.address, json.dumps(body).encode())
        except RefusalError as error:
            raise self.error(str(error)) from None
        except NoAnswerError as error:
            hint = "once it answers, the same command resumes from the last checkpoint"
            hint = f"{hint}; timeout and retries may be raised"
            raise RLHFError("R05", f"{self.url} {error}", hint=hint) from None

    def _read(self, answer: bytes, body: Body, read: Callable[[Any, Body], list[Any]]) -> list[Any]:
        try:
            return read(json.loads(answer), body)
        except (KeyError, TypeError, IndexError, RecursionError, json.JSONDecodeError):
            raise self.error(f"answered {excerpt(answer)}") from None
        except ValueError as error:
            raise self.error(f"answered {error}") from None

    def error(self, problem: str, hint: str = "docs/reward-endpoints.md describes what it must answer") -> RLHFError:
        return RLHFError("R05", f"{self.url} {problem}", hint=hint)


@dataclass(frozen=True)
class HTTPReward:
    """An async reward function by the protocol `scores`, `batch_size` rows a request, with the columns of the data."""

    endpoint: Endpoint

    async def __call__(self, prompts: list[str], responses: list[str], **columns: list[Any]) -> list[Any]:
        bodies = []
        columns = values_of(columns, columns)
        size = self.endpoint.batch_size
        for start in range(0, len(prompts), size):
            rows = slice(start, start + size)
            body: Body = {"prompts": prompts[rows], "responses": responses[rows]}
            if columns:
                body["columns"] = {name: values[rows] for name, values in columns.items()}
            bodies.append(body)
        return await self.endpoint.ask(bodies, _scores)


def _scores(answer: Any, body: Body) -> list[Any]:
    found = answer["scores"]
    count = len(body["responses"])
    if not isinstance(found, list):
        raise ValueError(f"no list of scores for {count} responses")
    if len(found) != count:
        raise ValueError(f"{len(found)} scores for {count} responses")
    if None in found:
        raise ValueError(f"null for row {found.index(None)}")
    for row, score in enumerate(found):
        if isinstance(score, bool):
            raise RLHFError("R05", f"the server returned {score} for row {row}", hint="answer with finite numbers")
    return found


@dataclass
class ScoringServer:
    """An async reward function by vLLM's or text-embeddings-inference's protocol, for a model with one label.

    With `activation` the scores are those of the server's sigmoid, which flattens large ones. Without, the first call
    probes whether the server heard: a few answers are scored both ways. Raises RLHFError R05 if all are the same and
    within 0 and 1.
    """

    endpoint: Endpoint
    protocol: str
    activation: bool = False
    probed: bool = field(default=False, init=False)

    async def __call__(self, prompts: list[Any], completions: list[Any]) -> list[Any]:
        if not (self.probed or self.activation):
            asked, replies = zip(*PROBES, strict=True)
            plain = await self._ask(asked, replies, activation=False)
            squashed = await self._ask(asked, replies, activation=True)
            if plain == squashed and all(0 <= score <= 1 for score in plain):
                text = "answers with probabilities, with and without being asked for them: large scores become equal"
                hint = "serve the model without an activation, or set output: probability to train with them"
                raise self.endpoint.error(text, hint)
            self.probed = True
        return await self._ask(prompts, completions, activation=self.activation)

    async def _ask(self, prompts: Sequence[Any], completions: Sequence[Any], *, activation: bool) -> list[Any]:
        rows = list(zip(prompts, completions, strict=True))
        if self.protocol == "rerank":
            bodies = [{**body, "raw_scores": not activation} for body in self._queries(rows)]
            return await self.endpoint.ask(bodies, _reranked)
        bodies = [{**body, "use_activation": activation} for body in self._inputs(rows)]
        key = "probs" if self.protocol == "classify" else "data"
        return await self.endpoint.ask(bodies, partial(_pooled, key))

    def _inputs(self, rows: list[tuple[Any, Any]]) -> Iterator[Body]:
        """Yield the bodies of vLLM's requests, which have one conversation at most."""
        for are_conversations, part in groupby(rows, key=lambda row: isinstance(row[0], list)):
            texts = [prompt + completion for prompt, completion in part]
            if are_conversations:
                for messages in texts:
                    yield {"messages": messages, "add_generation_prompt": False}
            else:
                for batch in self._batches(texts):
                    yield {"input": batch}

    def _queries(self, rows: list[tuple[Any, Any]]) -> Iterator[Body]:
        """Yield a body for each run of rows with the same prompt; a conversation is the text of its messages."""
        texts = [(joined(prompt), joined(completion)) for prompt, completion in rows]
        for query, part in groupby(texts, key=lambda row: row[0]):
            for batch in self._batches([text for _, text in part]):
                yield {"query": query, "texts": batch}

    def _batches(self, texts: list[Any]) -> Iterator[list[Any]]:
        size = self.endpoint.batch_size
        for start in range(0, len(texts), size):
            yield texts[start : start + size]


def _pooled(key: str, answer: Any, body: Body) -> list[float]:
    """Return the score of each input: the only number, or that of the last token."""
    rows = sorted(answer["data"], key=lambda row: row["index"])
    count = len(body["input"]) if "input" in body else 1
    if len(rows) != count:
        raise ValueError(f"{len(rows)} rows for {count} inputs")
    scores = []
    for row in rows:
        numbers = row[key]
        while isinstance(numbers[-1], list):  # one list per token
            numbers = numbers[-1]
        if len(numbers) != 1:
            raise ValueError(f"{len(numbers)} numbers for one text: a reward model has one label")
        scores += numbers
    return scores


def _reranked(answer: Any, body: Body) -> list[float]:
    scores = {row["index"]: row["score"] for row in answer}
    if sorted(scores) != list(range(len(body["texts"]))) or len(answer) != len(scores):
        raise ValueError(f"{len(answer)} rows for {len(body['texts'])} texts")
    return [scores[index] for index in range(len(scores))]


def make(section: RewardSourceSettings, context: RewardContext) -> RewardFn:
    """Build the reward of `url:` without contacting it. Raises RLHFError C17 for an invalid port or header."""
    assert section.url is not None
    in_url = [partial(_check_variable, variable, "url", context) for variable in VARIABLE.findall(section.url)]
    in_headers = [partial(_check_header, name, variable, context) for name, variable in section.headers.items()]
    collect_errors(*in_url, partial(_check_port, section.url, context), *in_headers)

    headers = {name: os.environ[variable] for name, variable in section.headers.items()}
    register_secrets(*headers.values())
    client = HTTPClient(section.timeout, section.retries, headers)
    endpoint = Endpoint(section.url, _address(section.url), client, section.batch_size, section.concurrency)
    if section.protocol == "scores":
        return HTTPReward(endpoint)
    return ScoringServer(endpoint, section.protocol, section.output == "probability")


def _address(url: str) -> str:
    """Return the URL with the values of its variables, which are never shown."""
    for variable in VARIABLE.findall(url):
        value = os.environ[variable]
        quoted = quote(value, safe="")
        register_secrets(value, quoted)
        url = url.replace(f"{{{variable}}}", quoted)
    return url


def _check_port(url: str, context: RewardContext) -> None:
    if VARIABLE.search(urlsplit(url).netloc):
        text = "url: a variable stands for a part of the path or a value behind the host, not for the host or its port"
        raise RLHFError("C17", text, where=context.where("url"), hint="write host and port")
    try:
        urlsplit(url).port  # noqa: B018  the property parses the port
    except ValueError as error:
        raise RLHFError("C17", f"url: {url} is not a valid address: {error}", where=context.where("url")) from None


def _check_header(name: str, variable: str, context: RewardContext) -> None:
    if not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
        text = f"headers: {name!r} is not a header name"
        raise RLHFError("C17", text, where=context.where(f"headers.{name}"), hint="e.g. Authorization")
    _check_variable(variable, f"headers.{name}", context)


def _check_variable(variable: str, key: str, context: RewardContext) -> None:
    where = context.where(key)
    value = os.environ.get(variable)
    if not value:
        text = f"{key}: the environment variable {variable} is not set"
        raise RLHFError("C17", text, where=where, hint=f"export {variable}=... in the shell that starts the run")
    if key == "url" and unquote(value) != value:
        text = f"url: the value of {variable} is percent-encoded, and would be encoded once more"
        raise RLHFError("C17", text, where=where, hint="put the decoded value into the variable")
    if not value.isprintable():
        text = f"{key}: the environment variable {variable} holds a line break or another control character"
        raise RLHFError("C17", text, where=where, hint="remove it from the value")
