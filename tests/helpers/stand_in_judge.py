"""A stand-in for an OpenAI-compatible endpoint with a model that judges by a rule, and the faults of real ones."""

import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from serving import serving

from rlhf_cli import jsonl

MODEL = "stand-in"
TEXTS = re.compile(
    r"<prompt>\n(.*)\n</prompt>\n\n<answer_1>\n(.*)\n</answer_1>\n\n<answer_2>\n(.*)\n</answer_2>", re.DOTALL
)
Answer = tuple[int, bytes, dict[str, str]]  # status, body, headers
Rule = Callable[[str, str, str], str]  # prompt, first, second -> winner

RUN_PROMPTS = ("tell me about", "what is a ")  # how the prompts of the tests' runs begin


def sensible(prompt: str, first: str, second: str) -> str:
    """Prefer the answer that shares a long word with the prompt, then the one that begins with a capital letter."""

    def quality(answer: str) -> tuple[int, bool, bool]:
        words = {word.strip(".,?").lower() for word in answer.split()}
        shared = [word for word in re.findall(r"[a-z]{4,}", prompt.lower()) if word.rstrip("s") in words | {""}]
        return len(shared), answer[:1].isupper(), answer.endswith(".")

    ours, theirs = quality(first), quality(second)
    return "tie" if ours == theirs else "1" if ours > theirs else "2"


def longer(prompt: str, first: str, second: str) -> str:
    """Prefer the longer answer to a prompt of the tests' runs; of the probe's texts the sensible one."""
    if not prompt.startswith(RUN_PROMPTS):
        return sensible(prompt, first, second)
    return "tie" if len(first) == len(second) else "1" if len(first) > len(second) else "2"


class StandIn(ThreadingHTTPServer):
    """Answers by `rule`. `faults`: answers of the next requests in place of the right ones, None for the right one.

    `every`: a fault of all requests. A fault that raises ConnectionError closes the connection without an answer.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, rule: Rule = sensible) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rule = rule
        self.faults: list[Callable[[Any], Answer | None]] = []
        self.every: Callable[[Any], Answer | None] | None = None
        self.lock = threading.Lock()
        self.requests: list[Any] = []
        self.keys: set[str] = set()
        self.running = 0
        self.most_at_once = 0
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def answer(self, body: Any, key: str) -> Answer:
        with self.lock:
            self.requests.append(body)
            self.keys.add(key)
            fault = self.faults.pop(0) if self.faults else self.every
        faulty = fault(body) if fault else None
        return faulty or reply(json.dumps({"winner": self.winner(body)}))

    def winner(self, body: Any) -> str:
        found = TEXTS.search(body["messages"][0]["content"])
        assert found, "the default rubric"
        return self.rule(*found.groups())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing when a client disconnects."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        assert self.path == "/v1/chat/completions", self.path
        with server.lock:
            server.running += 1
            server.most_at_once = max(server.most_at_once, server.running)
        try:
            status, content, headers = server.answer(body, self.headers["Authorization"].removeprefix("Bearer "))
        except ConnectionError:
            self.close_connection = True
            return
        finally:
            with server.lock:
                server.running -= 1
        with suppress(OSError):  # the client has timed out
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


def reply(text: str) -> Answer:
    """Return the answer of a model that says this."""
    usage = {"prompt_tokens": 200, "completion_tokens": 8, "total_tokens": 208}
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    body = {"id": "1", "object": "chat.completion", "created": 0, "model": MODEL, "choices": [choice], "usage": usage}
    return 200, json.dumps(body).encode(), {}


def failure(status: int, text: str, code: str | None = None, **headers: str) -> Answer:
    """Return an error; headers: `retry_after` is Retry-After."""
    named = {name.replace("_", "-").title(): value for name, value in headers.items()}
    return status, json.dumps({"error": {"message": text, "code": code}}).encode(), named


# The faults


def nonsense(body: Any) -> Answer:
    return reply('{"winner": ')


def prose(body: Any) -> Answer:
    return reply("Both answers have their merits, but the first one is a little clearer.")


def same_slot(body: Any) -> Answer:
    return reply('{"winner": "1"}')


def busy(body: Any) -> Answer:
    return failure(429, "rate limit reached", retry_after="0")


def busy_for_an_hour(body: Any) -> Answer:
    return failure(429, "rate limit reached", retry_after="3600")


def broken(body: Any) -> Answer:
    return failure(500, "internal error")


def slow(body: Any) -> Answer:
    time.sleep(0.5)
    return reply('{"winner": "1"}')


def closed(body: Any) -> Answer:
    raise ConnectionError


def without_schema(body: Any) -> Answer | None:
    return failure(400, "response_format is not supported") if "response_format" in body else None


def too_long(body: Any, characters: int = 1300) -> Answer | None:
    """Refuse messages of more characters, in vLLM's words."""
    if len(body["messages"][0]["content"]) <= characters:
        return None
    words = "This model's maximum context length is 300 tokens. However, your request has 301 input tokens."
    return failure(400, words)


def other_model(body: Any) -> Answer | None:
    return None if body["model"] == MODEL else failure(404, f"The model `{body['model']}` does not exist.")


def answered(run: Path) -> list[Any]:
    """Return the lines of the answers of the judge `llm` that name a winner."""
    rows = [row for _, row in jsonl.read_jsonl(run / "judges/llm.jsonl")]
    return [row for row in rows if row["winner"]]


def stand_in(rule: Rule = sensible) -> AbstractContextManager[StandIn]:
    """Return a context in which the endpoint runs."""
    return serving(StandIn(rule))
