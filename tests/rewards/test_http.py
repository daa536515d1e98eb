"""A reward behind HTTP, against a real server: slow, failing, wrong or missing; and the run that resumes afterwards.

Modules: `http_client.py`.
"""

import json
import math
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ppo_folder import PPO, fails, lines, must_succeed, ppo, rlhf, steps, weights, write

from rlhf_cli import errors, http_client
from rlhf_cli.errors import RLHFError
from rlhf_cli.rewards.function import RewardContext, make_reward_fn, score_texts
from rlhf_cli.rewards.signature import TextRows

Answer = tuple[int, bytes]
Plan = Callable[[dict[str, list[str]]], Answer]


def good(request: dict[str, list[str]]) -> Answer:
    return 200, json.dumps({"scores": [len(text) for text in request["responses"]]}).encode()


class Server:
    """Answers by `plan`, one function per request, the last one for all later requests."""

    def __init__(self) -> None:
        self.plan: list[Plan] = [good]
        self.requests: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.paths: set[str] = set()
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append((body, dict(self.headers)))
                outer.paths.add(self.path)
                with outer.lock:
                    plan = outer.plan.pop(0) if len(outer.plan) > 1 else outer.plan[0]
                code, text = plan(body)
                try:
                    self.send_response(code)
                    if code in (302, 307):
                        self.send_header("Location", text.decode())
                    self.send_header("Content-Length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text)
                except OSError:
                    pass  # the client has timed out

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}/score"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy, and no secret of another test."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(errors, "_registered", set())


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between attempts, which are recorded in place of sleeping."""
    waits: list[float] = []

    async def record(wait: float) -> None:
        waits.append(wait)

    monkeypatch.setattr(http_client, "sleep", record)
    return waits


def ask(address: str, rows: int = 2, **changes: Any) -> list[float]:
    reward = source(address, **changes)
    return score_texts("far", reward, TextRows(["p"] * rows, ["x" * row for row in range(rows)]))


def source(address: str, **changes: Any) -> Any:
    options = {"url": address, "timeout": 5.0, "retries": 2, "batch_size": 64, "headers": {}, "concurrency": 1}
    options |= {"protocol": "scores", "output": "logit", **changes}
    section: Any = SimpleNamespace(**options)
    return make_reward_fn("url", section, RewardContext(Path(), lambda key: f"ppo.yaml:{key}"))


def says(code: int, text: str) -> Plan:
    return lambda _: (code, text.encode())


def test_the_protocol_and_the_batches(server: Server) -> None:
    assert ask(server.address, rows=5, batch_size=2) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [body for body, _ in server.requests] == [
        {"prompts": ["p", "p"], "responses": ["", "x"]},
        {"prompts": ["p", "p"], "responses": ["xx", "xxx"]},
        {"prompts": ["p"], "responses": ["xxxx"]},
    ]
    assert server.requests[0][1]["Content-Type"] == "application/json"


@pytest.mark.parametrize("trouble", [says(500, "oh"), says(503, ""), says(429, "slowly")])
def test_transient_failures_are_retried_with_growing_waits(server: Server, waits: list[float], trouble: Plan) -> None:
    server.plan = [trouble] * 7 + [good]
    assert ask(server.address, retries=7) == [0.0, 1.0] and len(server.requests) == 8
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


class Raw:
    """Sends `pieces`, one each `pause` seconds, to each client, and closes the connection."""

    def __init__(self, pieces: list[bytes], pause: float = 0.0) -> None:
        self.connections = 0
        self.pieces, self.pause = pieces, pause
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}/score"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client = self.socket.accept()[0]
                self.connections += 1
                threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with client, suppress(OSError):  # the client has timed out
            client.recv(65536)
            for piece in self.pieces:
                client.sendall(piece)
                time.sleep(self.pause)
            client.shutdown(socket.SHUT_WR)
            client.recv(65536)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"
FAULT = b"HTTP/1.1 503 Busy\r\nContent-Length: 100\r\n\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([HEAD, *[b" "] * 100], id="body"),
        pytest.param([b"HTTP/1.1 200 OK\r\n", *[b"A: b\r\n"] * 90], id="headers"),
        pytest.param([FAULT, *[b" "] * 100], id="the body of an error"),
    ],
)
def test_the_timeout_applies_to_the_complete_answer(waits: list[float], pieces: list[bytes]) -> None:
    """Each piece arrives well within the timeout, the answer does not."""
    slow = Raw(pieces, pause=0.05)
    begun = time.monotonic()
    with slow.socket, pytest.raises(RLHFError, match=r"R05.*gave no answer: .*timed out.*\(2 tries\)"):
        ask(slow.address, timeout=0.3, retries=1)
    assert slow.connections == 2 and time.monotonic() - begun < 3.0  # 4.5 and more for one complete answer


def test_a_truncated_answer_is_retried(waits: list[float]) -> None:
    cut = Raw([HEAD + b'{"sc'])
    with cut.socket, pytest.raises(RLHFError, match=r"gave no answer: .*received 4 bytes, expected 100.*\(3 tries\)"):
        ask(cut.address)
    assert cut.connections == 3 and waits == [0.0, 1.0, 2.0]


def test_the_value_of_a_header_is_redacted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete, without its first word, and where the message truncates the answer."""
    secret = "s3cr3tvalue1234567890"
    monkeypatch.setenv("REWARD_AUTH", f"Bearer {secret}")
    for answer in (f'{{"debug": "Bearer {secret}"}}', f"key {secret}", "x" * 66 + f" Bearer {secret}"):
        server.plan = [says(200, answer)]
        with pytest.raises(RLHFError) as refused:
            ask(server.address, headers={"X-Key": "REWARD_AUTH"})
        assert "[sec" in str(refused.value) and "s3cr" not in str(refused.value)
    assert server.requests[0][1]["X-Key"] == f"Bearer {secret}"
    assert errors.redact(f"loss 1, {secret}!") == "loss 1, [secret]!"


@pytest.mark.parametrize(
    ("answer", "wrong", "tries"),
    [
        (says(500, "a fault"), "answered 500 .*'a fault' .*3 tries", 3),
        (says(404, "no such page"), "answered 404", 1),
        (says(401, "who are you"), "answered 401", 1),
        (says(200, "<html>"), "answered '<html>'", 1),
        (says(200, ""), "answered nothing", 1),
        (says(200, "[1, 2]"), "answered", 1),
        (says(200, '{"score": [1, 2]}'), "answered", 1),
        (says(200, '{"scores": 3}'), "no list of scores for 2", 1),
        (says(200, '{"scores": [1]}'), "1 scores for 2", 1),
        (says(200, '{"scores": [1, 2, 3]}'), "3 scores for 2", 1),
        (says(200, '{"scores": [1, NaN]}'), "returned nan for row 1", 1),
        (says(200, '{"scores": [Infinity, 1]}'), "returned inf for row 0", 1),
        (says(200, '{"scores": [1, null]}'), "answered null for row 1", 1),
        (says(200, '{"scores": [1, true]}'), "returned True for row 1", 1),
        (says(200, '{"scores": [1, "2"]}'), "returned '2' for row 1", 1),
        (says(200, f'{{"scores": [1, 1{"0" * 400}]}}'), r"returned 1000+\.\.\.0+ for row 1", 1),
        (says(200, " " * 200), "more than 100 bytes", 1),
        (says(302, "http://127.0.0.1:1/elsewhere"), "answered 302", 1),
        (says(307, "http://127.0.0.1:1/elsewhere"), "answered 307", 1),
    ],
)
def test_r05_an_unusable_answer(
    server: Server, waits: list[float], monkeypatch: pytest.MonkeyPatch, answer: Plan, wrong: str, tries: int
) -> None:
    monkeypatch.setattr(http_client, "MAX_RESPONSE_BYTES", 100 if wrong.startswith("more") else 1000)
    server.plan = [answer]
    with pytest.raises(RLHFError, match=f"R05.*reward `far`.*{wrong}"):
        ask(server.address)
    assert len(server.requests) == tries


def test_r05_no_server(server: Server, waits: list[float]) -> None:
    server.http.server_close()
    with pytest.raises(RLHFError, match=r"R05.*reward `far`.*gave no answer: .*connection.*3 tries"):
        ask(server.address)
    assert waits == [0.0, 1.0, 2.0]


# Many requests at once, columns, and the protocols of servers


def test_requests_run_at_once_up_to_the_limit_and_keep_their_order(server: Server) -> None:
    at_once, most, lock = 0, 0, threading.Lock()

    def slow(request: dict[str, list[str]]) -> Answer:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.02 + 0.02 * (len(request["responses"][0]) % 3))
        with lock:
            at_once -= 1
        return good(request)

    server.plan = [slow]
    assert ask(server.address, rows=24, batch_size=1, concurrency=4) == [float(row) for row in range(24)]
    assert most == 4
    server.plan = [says(404, "gone")]
    with pytest.raises(RLHFError, match=r"R05.*answered 404"):
        ask(server.address, rows=24, batch_size=1, concurrency=4)


def test_the_columns_of_the_data_are_in_each_request(server: Server) -> None:
    records = tuple({"prompt": "p", "answer": row, "day": date(2026, 11, row + 1)} for row in range(3))
    rows = TextRows(["p"] * 3, ["a", "b", "c"], (), records)
    score_texts("far", source(server.address, batch_size=2), rows)
    assert [body["columns"] for body, _ in server.requests] == [
        {"answer": [0, 1], "day": ["2026-11-01", "2026-11-02"]},
        {"answer": [2], "day": ["2026-11-03"]},
    ]


def serve(body: dict[str, Any], activates: str) -> Answer:
    """Answer like a server whose score is the length of the text less 10; `activates`: asked, always or never."""
    wants = body["use_activation"] if "use_activation" in body else not body["raw_scores"]
    sigmoid = {"asked": wants, "always": True, "never": False}[activates]
    if "query" in body:
        texts = [body["query"] + text for text in body["texts"]]
    else:
        chat = "".join(message["content"] for message in body.get("messages", []))
        texts = body.get("input", [chat])
    scores = [1 / (1 + math.exp(10 - len(text))) if sigmoid else len(text) - 10.0 for text in texts]
    fields = [{"score": score, "probs": [score], "data": [[0.0], [score]]} for score in scores]
    rows = [{"index": row, **each} for row, each in enumerate(fields)]
    return 200, json.dumps(rows[::-1] if "query" in body else {"data": rows[::-1]}).encode()


CHAT = [{"role": "user", "content": "How?"}]
MIXED = TextRows(["", ""], ["yes", "no no"], [[1], [2]], ({"prompt": "Why?"}, {"prompt": CHAT}))


@pytest.mark.parametrize("protocol", ["pooling", "classify", "rerank"])
def test_the_protocol_of_a_server_and_the_probe_of_its_activation(server: Server, protocol: str) -> None:
    def scores(activates: str, **changes: Any) -> list[float]:
        server.plan, server.requests = [lambda body: serve(body, activates)], []
        return score_texts("far", source(server.address, protocol=protocol, **changes), MIXED)

    assert scores("asked") == scores("never") == [len("Why?yes") - 10, len("How?no no") - 10]
    bodies = [body for body, _ in server.requests][-2:]
    if protocol == "rerank":
        assert bodies[0] == {"query": "Why?", "texts": ["yes"], "raw_scores": True}
    else:
        assert bodies[0] == {"input": ["Why?yes"], "use_activation": False}
        chat = [*CHAT, {"role": "assistant", "content": "no no"}]
        assert bodies[1] == {"messages": chat, "add_generation_prompt": False, "use_activation": False}
    with pytest.raises(RLHFError, match=r"R05.*answers with probabilities(.|\n)*output: probability"):
        scores("always")
    assert scores("always", output="probability") == pytest.approx([1 / (1 + math.exp(3)), 1 / (1 + math.exp(1))])
    assert len(server.requests) == 2  # no probe


@pytest.mark.parametrize(
    ("protocol", "answer", "wrong"),
    [
        ("pooling", '{"data": []}', "0 rows for 1 inputs"),
        ("pooling", '{"data": [{"index": 0, "data": [1, 2]}]}', "2 numbers for one text"),
        ("pooling", '{"data": [{"index": 0, "data": []}]}', "answered"),
        ("classify", '{"data": [{"index": 0, "probs": 1}]}', "answered"),
        ("classify", '{"data": [{"index": 0, "probs": ["a"]}]}', "returned 'a' for row 0"),
        ("rerank", '[{"index": 1, "score": 1.0}]', "1 rows for 1 texts"),
        ("rerank", '[{"index": 0, "score": NaN}]', "returned nan for row 0"),
        ("rerank", "{}", "0 rows for 1 texts"),
    ],
)
def test_r05_a_wrong_answer_of_a_server(server: Server, protocol: str, answer: str, wrong: str) -> None:
    server.plan = [says(200, answer)]
    with pytest.raises(RLHFError, match=f"R05.*{wrong}"):
        ask(server.address, rows=1, protocol=protocol, output="probability")


def test_c17_c16_a_wrong_endpoint_is_rejected_before_the_run(run_folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TWO_LINES", "a\nb")
    headers = {"Authorization": "NOT_SET_ANYWHERE", "X-Two": "TWO_LINES", "a b": "HOME"}
    write(run_folder, "ppo", {**PPO, "rewards": {"far": {"url": "http://here:99999/x", "headers": headers}}})
    for result in (rlhf("check", run_folder / "ppo.yaml"), ppo(run_folder)):
        fails(result, "C17", "NOT_SET_ANYWHERE is not set", "Port out of range")
        assert result.stderr.count("error[C17]") == 4
    write(run_folder, "ppo", {**PPO, "rewards": {"far": {"url": "http://here/x", "headers": {"A": "Bearer abc"}}}})
    result = ppo(run_folder)
    fails(result, "C16")
    assert "abc" not in result.output


@pytest.mark.full
@pytest.mark.usefixtures("waits")
def test_the_run_resumes_once_the_endpoint_is_back(
    run_folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is trained in the update that failed: the end is that of an undisturbed run.

    Secrets of the URL and of headers come from the environment, may change on the way, and are written nowhere.
    """
    far = {"url": f"{server.address}/hooks/{{HOOK}}?code={{FUNCTION_CODE}}", "headers": {"X-Me": "FAR"}}
    tracked = {**PPO, "output": {**PPO["output"], "report_to": ["tensorboard"]}}
    write(run_folder, "ppo", {**tracked, "rewards": {"far": far}})
    fails(rlhf("check", run_folder / "ppo.yaml"), "C17", "url: the environment variable HOOK is not set", "export HOOK")
    secrets = {"FAR": "secret value", "HOOK": "T0AB12/B9/Zx3Yw8Vu5Ts2", "FUNCTION_CODE": "a+planted=code"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    outputs = [must_succeed(ppo(run_folder)).output]
    expected = weights(run_folder)
    assert server.paths == {"/score/hooks/T0AB12%2FB9%2FZx3Yw8Vu5Ts2?code=a%2Bplanted%3Dcode"}
    gone = says(503, "gone: T0AB12/B9/Zx3Yw8Vu5Ts2 a%2Bplanted%3Dcode")
    shutil.rmtree(run_folder / "ppo")
    server.plan = [lambda request: (gone if steps(run_folder / "ppo/state") else good)(request)]
    failed = ppo(run_folder)
    fails(failed, "R05", f"error[R05]: reward `far`: {far['url']} answered 503", exit_code=1)
    assert steps(run_folder / "ppo/state") == {2} and not (run_folder / "ppo/manifest.json").exists()
    assert all(row["objective/score/far"] > 0 for row in lines(run_folder / "ppo/metrics.jsonl"))
    server.plan = [good]
    monkeypatch.setenv("HOOK", "T0AB12/B9/another8Vu5Ts2")
    outputs += [failed.output, must_succeed(ppo(run_folder), "resumes at step").output]
    assert weights(run_folder) == expected
    outputs.append(must_succeed(rlhf("export", run_folder, "--out", run_folder / "out")).output)
    must_succeed(rlhf("report", run_folder))
    written = [path for path in run_folder.rglob("*") if path.is_file()]
    assert {"report.html", "config.yaml", "model.safetensors"} <= {path.name for path in written}
    assert any(path.name.startswith("events.out.tfevents") for path in written)
    planted = ["secret value", "Zx3Yw8Vu5Ts2", "another8Vu5Ts2", "planted"]
    for content in (*(path.read_bytes() for path in written), "".join(outputs).encode()):
        assert not any(secret.encode() in content for secret in planted)
