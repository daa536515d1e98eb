"""Kill tests: the short form of `make chaos`, and planted faults that it must find."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chaos import troubles
from chaos.__main__ import Found, report
from chaos.fingerprint import differences, fingerprint
from chaos.trials import Kill, Outcome, Tried, writing

HELPERS = Path(__file__).parents[1] / "helpers"
ENVIRONMENT = {"PYTHONPATH": f"{HELPERS}:{HELPERS.parents[1]}", "HF_HUB_OFFLINE": "1", "CHAOS_STEPS": "12"}
EVERY = 128


def python(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-W", "ignore", *map(str, arguments)]
    environment = {**os.environ, **ENVIRONMENT}
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=1200, check=False)


def chaos(folder: Path, *options: object) -> dict[str, Any]:
    """Return the results of `python -m chaos`."""
    done = python("-m", "chaos", *options, "--jobs", 2, "--out", folder / "runs", "--json", folder / "found.json")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr
    found = json.loads((folder / "found.json").read_text())
    assert found["faults"] == []
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """3 kills a stage, one fail point in 128, some troubles, and the planted faults, in one world."""
    short = ("--kills", 3, "--every", EVERY, "--troubles", 3, "--chain-kills", 0, "--straight")
    return chaos(tmp_path_factory.mktemp("chaos"), *short, "--planted")


@pytest.mark.training
def test_killed_starved_and_stopped_runs_end_in_the_same_bytes(found: dict[str, Any]) -> None:
    for stage in ("sft", "reward", "ppo"):
        assert sum(len(outcome["kills"]) for outcome in found["killed"][stage]) >= 3
        assert sum(part["hit"] for part in found["tried"][stage]) == -(-found["names"][stage] // EVERY)
        assert found["names"][stage] > 150  # the number of writes: something was wrapped
    assert len(found["troubles"]) == 3


@pytest.mark.training
def test_planted_faults_are_found(found: dict[str, Any]) -> None:
    seen = dict(found["planted"])
    assert seen.pop("none") == []
    assert {name for name, wrong in seen.items() if wrong} == set(troubles.FAULTS)
    assert {"model/model.safetensors", "metrics.jsonl"} <= set(seen["random numbers forgotten"])
    assert any("optimizer" in name or "structure" in name for name in seen["scheduler forgotten"])
    assert seen["log not cut"] == ["metrics.jsonl"]


@pytest.mark.slow
def test_a_killed_chain_ends_in_the_same_bytes(tmp_path: Path) -> None:
    """test_pipeline.py kills `rlhf run` with stages that take no time."""
    (chain,) = chaos(tmp_path, "--kills", 1, "--every", 1000, "--troubles", 1, "--chain-kills", 3)["chains"]
    assert chain["kills"] and chain["wrong"] == []


# The harness itself


@pytest.mark.parametrize(
    ("kills", "inside", "steps", "fault"),
    [
        (200, 20, 20, None),
        (200, 19, 20, "19 of 200 kills landed inside a write: vacuous"),
        (200, 20, 19, "200 kills hit 19 of 24 steps: vacuous"),
        (199, 30, 24, "199 kills hit, 200 were requested"),
    ],
)
def test_kills_that_show_nothing_are_reported(
    kills: int, inside: int, steps: int, fault: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = Outcome("run", [Kill(1 + i % steps, i < inside) for i in range(kills)])
    assert report(Found({"sft": [outcome]}), 200) == ([f"sft: {fault}"] if fault else [])
    assert f"{steps} of 24" in capsys.readouterr().out


def test_all_differences_are_reported() -> None:
    found = Found(
        {"sft": [Outcome("sft 3", wrong=["metrics.jsonl"])]},
        {"ppo": 300},
        {"ppo": [Tried(hit=1, runs=1, wrong=["ppo: after x"], different=1)]},
        [Outcome("a full disk", wrong=["a traceback"])],
        [Outcome("rlhf run 0", wrong=["ppo/model"])],
    )
    faults = ["sft 3: metrics.jsonl", "rlhf run 0: ppo/model", "ppo: after x", "a full disk: a traceback"]
    assert report(found, 0) == faults


def test_a_fingerprint_ignores_times_only(tmp_path: Path) -> None:
    def log(text: str) -> dict[str, str]:
        (tmp_path / "metrics.jsonl").write_text(text)
        return fingerprint(tmp_path)

    plain = log('{"step": 1, "loss": 2.0, "time_s": 1.5, "time/update_s": 3}\n')
    assert differences(plain, log('{"step": 1, "loss": 2.0, "time_s": 9.5, "time/update_s": 4}\n')) == []
    for changed in ('{"step": 1, "loss": 2.1}\n', '{"step": 1, "loss": 2.0', '{"step": 1, "loss": 2.0}\n' * 2):
        assert differences(plain, log(changed)) == ["metrics.jsonl"]
    log('{"step": 1, "loss": 2.0}\n')
    (tmp_path / ".tmp-x").touch()
    assert differences(plain, fingerprint(tmp_path)) == [".tmp-x", "files"]


def test_unfinished_writes_are_known_by_their_traces(tmp_path: Path) -> None:
    assert writing(tmp_path) == set()
    checkpoint = tmp_path / "state/checkpoint-3"
    for folder in (checkpoint, tmp_path / "model", tmp_path / "state/.trash-checkpoint-1-77"):
        folder.mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    names = {"checkpoint-3", "metrics.jsonl", "model", ".trash-checkpoint-1-77"}
    assert {name for name, _ in writing(tmp_path)} == names
    (checkpoint / "state.json").touch()
    (tmp_path / "manifest.json").touch()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert {name for name, _ in writing(tmp_path)} == {".trash-checkpoint-1-77"}


WRITE = """
import os, sys
from pathlib import Path
from chaos import faults
folder, *points = sys.argv[1:]
for number, point in enumerate(points):
    here = Path(folder) / str(number)
    here.mkdir()
    if os.fork() == 0:
        calls = faults.install(here, faults.Point(*point.split("|")))
        try:
            (here / "a1.txt").write_text("whole")
            os.rename(here / "a1.txt", here / "b")
        except OSError as error:
            os._exit(error.errno)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_fail_point_is_hit_at_its_line(tmp_path: Path) -> None:
    left = {
        "write a#.txt|before": {"a1.txt": ""},
        "write a#.txt|half": {"a1.txt": "wh"},
        "write a#.txt|after": {"a1.txt": "whole"},
        "rename b|after": {"b": "whole"},
        "write a#.txt|full": {"a1.txt": ""},
    }
    done = python("-c", "import torch, transformers" + WRITE, tmp_path, *left)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(-signal.SIGKILL)] * 4 + [str(errno.ENOSPC)]
    for number, files in enumerate(left.values()):
        assert {path.name: path.read_text() for path in (tmp_path / str(number)).iterdir()} == files
