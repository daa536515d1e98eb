"""A reward behind HTTP, against a real server: slow, failing, wrong, gone; and that the run goes on afterwards."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ppo_folder import PPO, lines, ppo, rlhf, write

from rlhf_cli import errors
from rlhf_cli.errors import RLHFError
from rlhf_cli.rewards import http
from rlhf_cli.rewards.function import score_texts
from rlhf_cli.rewards.source import RewardContext, make_reward_fn

Answer = tuple[int, bytes]


def good(asked: dict[str, list[str]]) -> Answer:
    return 200, json.dumps({"scores": [len(text) for text in asked["responses"]]}).encode()


class Server:
    """Answers by `plan`, one function a request, the last one for all that follow."""

    def __init__(self) -> None:
        self.plan: list[Callable[[dict[str, list[str]]], Answer]] = [good]
        self.asked: list[tuple[dict[str, Any], dict[str, str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append((body, dict(self.headers)))
                answer = outer.plan.pop(0) if len(outer.plan) > 1 else outer.plan[0]
                code, text = answer(body)
                try:
                    self.send_response(code)
                    if code in (302, 307):
                        self.send_header("Location", text.decode())
                    self.send_header("Content-Length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text)
                except OSError:
                    pass  # the asker had no more patience

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}/score"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture(autouse=True)
def by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy, and no secret of another test."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(errors, "_registered", set())


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between tries, which are not made."""
    found: list[float] = []
    monkeypatch.setattr(http.time, "sleep", found.append)
    return found


def ask(address: str, rows: int = 2, **changes: Any) -> list[float]:
    how = {"url": address, "timeout": 5.0, "retries": 2, "batch_size": 64, "headers": {}, **changes}
    asked = make_reward_fn("url", SimpleNamespace(**how), RewardContext(Path(), lambda key: f"ppo.yaml:{key}"))
    return score_texts("far", asked, ["p"] * rows, ["x" * row for row in range(rows)])


def says(code: int, text: str) -> Callable[[Any], Answer]:
    return lambda _: (code, text.encode())


def test_the_protocol_and_the_batches(server: Server) -> None:
    assert ask(server.address, rows=5, batch_size=2) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [body for body, _ in server.asked] == [
        {"prompts": ["p", "p"], "responses": ["", "x"]},
        {"prompts": ["p", "p"], "responses": ["xx", "xxx"]},
        {"prompts": ["p"], "responses": ["xxxx"]},
    ]
    assert server.asked[0][1]["Content-Type"] == "application/json"


@pytest.mark.parametrize("trouble", [says(500, "oh"), says(503, ""), says(429, "slowly")])
def test_what_may_pass_is_tried_again_after_longer_and_longer(
    server: Server, waits: list[float], trouble: Callable[[Any], Answer]
) -> None:
    server.plan = [trouble] * 7 + [good]
    assert ask(server.address, retries=7) == [0.0, 1.0] and len(server.asked) == 8
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_a_slow_answer_is_not_waited_for(server: Server, waits: list[float]) -> None:
    real = threading.Event()
    server.plan = [lambda _: (real.wait(1.0), (200, b"late"))[1], good]
    assert ask(server.address, timeout=0.1, retries=1) == [0.0, 1.0]
    server.plan = [lambda _: (real.wait(1.0), (200, b"late"))[1]]
    with pytest.raises(RLHFError, match=r"R05.*reward `far`.*gave no answer: .*timed out.*\(1 tries\)"):
        ask(server.address, timeout=0.1, retries=0)


class Raw:
    """Sends what it is given in `pieces`, one each `pause` seconds, to each that connects, and hangs up."""

    def __init__(self, pieces: list[bytes], pause: float = 0.0) -> None:
        self.asked = 0
        self.pieces, self.pause = pieces, pause
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}/score"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                asker = self.socket.accept()[0]
            except OSError:
                return  # closed
            self.asked += 1
            threading.Thread(target=self._answer, args=(asker,), daemon=True).start()

    def _answer(self, asker: socket.socket) -> None:
        closing = threading.Event()
        with asker:
            asker.recv(65536)
            try:
                for piece in self.pieces:
                    asker.sendall(piece)
                    closing.wait(self.pause)  # time.sleep is the test's
                asker.shutdown(socket.SHUT_WR)
                asker.recv(65536)
            except OSError:
                pass  # the asker had no more patience


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
def test_the_timeout_is_of_the_whole_answer(waits: list[float], pieces: list[bytes]) -> None:
    """Each piece comes well within the timeout, the answer does not."""
    slow = Raw(pieces, pause=0.05)
    begun = time.monotonic()
    with slow.socket, pytest.raises(RLHFError, match=r"R05.*gave no answer: .*timed out.*\(2 tries\)"):
        ask(slow.address, timeout=0.3, retries=1)
    assert slow.asked == 2 and time.monotonic() - begun < 3.0  # 4.5 and more for one whole answer


def test_an_answer_that_is_cut_off_is_tried_again(waits: list[float]) -> None:
    cut = Raw([HEAD + b'{"sc'])
    with cut.socket, pytest.raises(RLHFError, match=r"gave no answer: .*4 bytes read, 96 more expected.*\(3 tries\)"):
        ask(cut.address)
    assert cut.asked == 3 and waits == [0.0, 1.0, 2.0]


def test_a_declared_header_is_not_repeated(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, without its first word, and where the answer is cut for the message."""
    secret = "s3cr3tvalue1234567890"
    monkeypatch.setenv("REWARD_AUTH", f"Bearer {secret}")
    for told in (f'{{"debug": "Bearer {secret}"}}', f"key {secret}", "x" * 66 + f" Bearer {secret}"):
        server.plan = [says(200, told)]
        with pytest.raises(RLHFError) as refused:
            ask(server.address, headers={"X-Key": "REWARD_AUTH"})
        assert "[sec" in str(refused.value) and "s3cr" not in str(refused.value)
    assert server.asked[0][1]["X-Key"] == f"Bearer {secret}"
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
        (says(200, '{"scores": [1, null]}'), "returned None for row 1", 1),
        (says(200, '{"scores": [1, true]}'), "returned True for row 1", 1),
        (says(200, '{"scores": [1, "2"]}'), "returned '2' for row 1", 1),
        (says(200, f'{{"scores": [1, 1{"0" * 400}]}}'), r"returned 1000+\.\.\.0+ for row 1", 1),
        (says(200, " " * 200), "more than 100 bytes", 1),
        (says(302, "http://127.0.0.1:1/elsewhere"), "answered 302", 1),
        (says(307, "http://127.0.0.1:1/elsewhere"), "answered 307", 1),
    ],
)
def test_r05_an_answer_of_no_use(
    server: Server, waits: list[float], monkeypatch: pytest.MonkeyPatch, answer: Any, wrong: str, tries: int
) -> None:
    monkeypatch.setattr(http, "MAX_RESPONSE_BYTES", 100 if wrong.startswith("more") else 1000)
    server.plan = [answer]
    with pytest.raises(RLHFError, match=f"R05.*reward `far`.*{wrong}"):
        ask(server.address)
    assert len(server.asked) == tries


def test_r05_nobody_there(server: Server, waits: list[float]) -> None:
    server.http.server_close()
    with pytest.raises(RLHFError, match=r"R05.*reward `far`.*gave no answer: .*refused.*3 tries"):
        ask(server.address)
    assert waits == [0.0, 1.0, 2.0]


def test_header_values_come_from_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAR_AUTHORIZATION", "Bearer of news")
    ask(server.address, headers={"Authorization": "FAR_AUTHORIZATION"})
    assert server.asked[0][1]["Authorization"] == "Bearer of news"


def test_what_is_wrong_with_an_endpoint_is_found_before_the_run(run_folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TWO_LINES", "a\nb")
    headers = {"Authorization": "NOT_SET_ANYWHERE", "X-Two": "TWO_LINES", "a b": "HOME"}
    write(run_folder, "ppo", {**PPO, "rewards": {"far": {"url": "http://here:99999/x", "headers": headers}}})
    for refused in (rlhf("check", run_folder / "ppo.yaml"), ppo(run_folder)):
        assert refused.exit_code == 2 and refused.stderr.count("error[C17]") == 4
        assert "NOT_SET_ANYWHERE is not set" in refused.stderr and "Port out of range" in refused.stderr
    write(run_folder, "ppo", {**PPO, "rewards": {"far": {"url": "http://here/x", "headers": {"A": "Bearer abc"}}}})
    refused = ppo(run_folder)
    assert refused.exit_code == 2 and "error[C16]" in refused.stderr and "abc" not in refused.output


def test_the_run_goes_on_from_its_state_once_the_endpoint_is_back(
    run_folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is learned of the update that failed, and no zero stands in: the end is that of an undisturbed run."""
    far = {"url": server.address, "retries": 0}
    write(run_folder, "ppo", {**PPO, "rewards": {"far": far}})
    monkeypatch.setenv("FAR", "secret value")
    assert ppo(run_folder).exit_code == 0
    wanted = (run_folder / "ppo/model/model.safetensors").read_bytes()
    calls = len(server.asked)
    server.plan = [good] * (calls // 2) + [says(503, "gone")]
    failed = ppo(run_folder, "--fresh")
    assert failed.exit_code == 1 and "error[R05]: reward `far`: http://127" in failed.stderr
    assert list((run_folder / "ppo/state").glob("step_*")) and not (run_folder / "ppo/manifest.json").exists()
    assert all(row["objective/score/far"] > 0 for row in lines(run_folder / "ppo/metrics.jsonl"))
    server.plan = [good]
    patient = {**far, "timeout": 30.0, "retries": 1, "headers": {"X-Me": "FAR"}}
    write(run_folder, "ppo", {**PPO, "rewards": {"far": patient}})
    again = ppo(run_folder)
    assert again.exit_code == 0 and "resumes at step" in again.stderr, again.output
    assert (run_folder / "ppo/model/model.safetensors").read_bytes() == wanted
    assert not any(b"secret value" in path.read_bytes() for path in (run_folder / "ppo").rglob("*") if path.is_file())
