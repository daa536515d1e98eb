"""The page of `rlhf label`: its requests, what it refuses, and a server killed at any moment."""

import asyncio
import json
import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from label_run import pairs, session
from run_cli import rlhf

from rlhf_cli import terminal
from rlhf_cli.commands.label import server
from rlhf_cli.commands.label.server import LabelServer
from rlhf_cli.commands.label.session import LabelSession, Pair
from rlhf_cli.commands.label.store import LabelStore
from rlhf_cli.data.labels import read_labels
from rlhf_cli.runs import locks

PAGE = (Path(server.__file__).parent / "page.html").read_text(encoding="utf-8")


class Client:
    """Requests to an application, without a socket."""

    def __init__(self, session: LabelSession, host: str = "127.0.0.1") -> None:
        self.server = LabelServer(session)
        self.host = host

    def request(self, method: str, path: str, **options: Any) -> httpx2.Response:
        async def send() -> httpx2.Response:
            transport = httpx2.ASGITransport(self.server.app())
            async with httpx2.AsyncClient(transport=transport, base_url=f"http://{self.host}:1") as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.request("POST", f"/{self.server.token}/{path}", json=body)

    def state(self) -> dict[str, Any]:
        return self.request("GET", f"/{self.server.token}/state").json()  # type: ignore[no-any-return]


def test_a_label_is_stored_and_the_next_pair_comes(tmp_path: Path) -> None:
    client = Client(session(tmp_path))
    before = client.state()
    assert before["shown"]["prompt"] == [{"role": "", "content": "prompt 0"}] and before["last"] is None
    after = client.post("label", pair="0:0-1", choice="2", seconds=3.5, tags=["clear"]).json()
    assert (after["done"], after["last"], after["shown"]["pair"]) == (1, "0:0-1", "1:0-1")
    (label,) = LabelStore(tmp_path).labels
    assert label.answers[0 if label.choice == "first" else 1] == before["shown"]["answers"][1]
    assert (label.seconds, label.tags) == (3.5, ["clear"])
    back = client.post("undo", pair="0:0-1").json()
    assert (back["done"], back["shown"]) == (0, before["shown"])


def test_nothing_that_is_sent_tells_who_wrote_an_answer(tmp_path: Path) -> None:
    text = json.dumps(Client(session(tmp_path)).state())
    assert "one 0" in text and "sft" not in text and "ppo" not in text


def test_without_the_token_there_is_one_line_and_nothing_else(tmp_path: Path) -> None:
    client = Client(session(tmp_path))
    for method, path in (("GET", "/"), ("GET", "/wrong/"), ("GET", "/wrong/state"), ("POST", "/wrong/label")):
        response = client.request(method, path)
        assert response.status_code == 403 and response.text == server.NOT_ALLOWED
    elsewhere = Client(session(tmp_path), host="evil.example")  # a name that resolves to 127.0.0.1
    assert elsewhere.request("GET", f"/{elsewhere.server.token}/").status_code == 400
    assert LabelStore(tmp_path).labels == []


@pytest.mark.parametrize(
    "body",
    [
        {"pair": "99:0-1", "choice": "1", "seconds": 1},
        {"pair": "0:0-1", "choice": "left", "seconds": 1},
        {"pair": "0:0-1", "choice": "1", "seconds": "NaN"},
        {"pair": "0:0-1", "choice": "1", "seconds": -1},
        {"pair": "0:0-1", "choice": "1", "seconds": 1, "tags": "clear"},
        {"pair": "0:0-1", "choice": "1", "seconds": 1, "tags": ["x" * 70000]},
        {},
    ],
)
def test_a_bad_request_is_refused_and_stores_nothing(tmp_path: Path, body: dict[str, Any]) -> None:
    response = Client(session(tmp_path)).post("label", **body)
    assert response.status_code == 409 and "\n" not in response.json()["error"]
    assert LabelStore(tmp_path).labels == []


def test_a_full_disk_is_said_on_the_page_and_the_server_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    client = Client(session(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        response = client.post("label", pair="0:0-1", choice="1", seconds=1)
    assert response.status_code == 507 and "No space left" in response.json()["error"]
    assert client.post("label", pair="0:0-1", choice="1", seconds=1).status_code == 200


@pytest.mark.parametrize("edit", [lambda path: path.write_bytes(path.read_bytes()[:-1]), Path.unlink])
def test_a_file_that_is_edited_while_it_is_labelled_is_not_written(tmp_path: Path, edit: Callable[[Path], Any]) -> None:
    client = Client(session(tmp_path))
    client.post("label", pair="0:0-1", choice="tie", seconds=1)
    path = tmp_path / "labels.jsonl"
    edit(path)
    left = path.read_bytes() if path.exists() else None
    response = client.post("label", pair="1:0-1", choice="tie", seconds=1)
    assert response.status_code == 507 and "\n" not in response.json()["error"]
    assert (path.read_bytes() if path.exists() else None) == left
    if left:
        assert [label.pair for label in LabelStore(tmp_path).labels] == ["0:0-1"]


def test_each_annotator_has_an_address(tmp_path: Path) -> None:
    client = Client(session(tmp_path, "a", "b"))
    addresses = client.server.addresses(7)
    assert addresses["b"] == f"http://127.0.0.1:7/{client.server.token}/?annotator=b"
    assert "?annotator=NAME" in client.state()["error"]
    path = f"/{client.server.token}/state"
    first = client.request("GET", path, params={"annotator": "a"}).json()
    second = client.request("GET", path, params={"annotator": "b"}).json()
    assert first["annotator"] == "a" and first["shown"]["pair"] != second["shown"]["pair"]


# The page


def test_the_page_loads_nothing_and_runs_only_its_own_script(tmp_path: Path) -> None:
    client = Client(session(tmp_path))
    response = client.request("GET", f"/{client.server.token}/")
    nonce = re.findall(r"'nonce-([\w-]+)'", response.headers["content-security-policy"])
    assert response.text.count(f'nonce="{nonce[0]}"') == 2 and "NONCE" not in response.text
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"(src|href)=\"(?!data:)|https?://|innerHTML", PAGE)


def test_every_key_has_a_button_that_names_it() -> None:
    for key in ("1", "2", "0", "b", "s", "u", "m", "?"):
        assert f'aria-keyshortcuts="{key}"' in PAGE and f"<kbd>{key}</kbd>" in PAGE
    identifiers = re.findall(r'\bid="([\w-]+)"', PAGE)
    assert len(set(identifiers)) == len(identifiers)
    assert set(re.findall(r'at\("([\w-]+)"\)', PAGE)) <= set(identifiers)
    assert set(re.findall(r'aria-labelledby="([\w-]+)"', PAGE)) <= set(identifiers)


def test_its_colours_have_the_contrast_of_wcag_aa() -> None:
    for block in re.findall(r":root \{(.*?)\}", PAGE, flags=re.DOTALL):
        colour = dict(re.findall(r"--([\w-]+): (#\w{6})", block))
        pairs_of_colours = [("ink", "ground"), ("ink", "card"), ("ink", "wash"), ("muted", "ground"), ("muted", "card")]
        pairs_of_colours += [("on-accent", "accent"), ("alarm", "ground"), ("accent", "card")]
        for text, ground in pairs_of_colours:
            assert contrast(colour[text], colour[ground]) >= 4.5, (text, ground)


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colours, WCAG 2.2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted([luminance(first), luminance(second)])
    return (high + 0.05) / (low + 0.05)


@contextmanager
def served(folder: Path, shown: Sequence[Pair]) -> Iterator[tuple[str, int]]:
    """Serve pairs from a fork of this process; yield the page's address and the process."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        with suppress(BaseException):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            terminal.error = lambda text, **_: os.write(writer, f"{text}\n".encode())  # type: ignore[assignment]
            locks.lock_folder(folder)
            server.serve(LabelSession(shown, LabelStore(folder), ["me"], overlap=0.0, seed=0), 0)
        os._exit(0)
    os.close(writer)
    try:
        with os.fdopen(reader) as lines:
            yield next(line.split()[-1] for line in lines if "http://" in line), process
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def kill_and_go_on(folder: Path, kills: int) -> None:
    """Label while the server is killed at random; no label that was acknowledged is lost, and none is doubled."""
    random_numbers = random.Random(0)
    acknowledged: dict[str, str] = {}
    for _ in range(kills):
        with served(folder, pairs(20 * kills)) as (page, process), httpx2.Client() as client:
            shown = client.get(f"{page}state").json()["shown"]
            threading.Timer(random_numbers.uniform(0.0, 0.08), os.kill, [process, signal.SIGKILL]).start()
            with suppress(httpx2.TransportError):
                while shown is not None:
                    assert shown["pair"] not in acknowledged
                    choice = random_numbers.choice(["tie", "bad", "skip"])
                    body = {"pair": shown["pair"], "choice": choice, "seconds": 1.0}
                    answer = client.post(f"{page}label", json=body)
                    assert answer.status_code == 200
                    acknowledged[body["pair"]] = choice
                    shown = answer.json()["shown"]

    stored = {label.pair: label.choice for _, label in read_labels(folder / "labels.jsonl").values()}
    assert len(acknowledged) > kills
    assert acknowledged.items() <= stored.items()
    assert len(stored) <= len(acknowledged) + kills  # written, and killed before the answer


@pytest.mark.full
def test_a_server_killed_at_random_loses_and_doubles_no_label(tmp_path: Path) -> None:
    kill_and_go_on(tmp_path, 6)


@pytest.mark.slow
def test_a_server_killed_a_hundred_times_loses_and_doubles_no_label(tmp_path: Path) -> None:
    kill_and_go_on(tmp_path, 100)


def test_ctrl_c_ends_it_and_a_second_server_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "people"
    folder.mkdir()
    with served(folder, pairs(3)) as (page, process):
        assert httpx2.get(page).status_code == 200
        with pytest.raises(Exception, match="C15"):
            locks.lock_folder(folder)
        os.kill(process, signal.SIGINT)
        assert os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT).si_status == 0  # type: ignore[union-attr]


def test_help_lists_the_options() -> None:
    assert "--terminal" in rlhf("label", "--help").stdout
