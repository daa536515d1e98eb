"""Kill tests: the short form of `make chaos`, and tests of its harness."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from chaos.__main__ import report
from chaos.fingerprint import differences, fingerprint
from chaos.kills import Kill, Outcome

HELPERS = Path(__file__).parents[1] / "helpers"
ENVIRONMENT = {"PYTHONPATH": f"{HELPERS}:{HELPERS.parents[1]}", "HF_HUB_OFFLINE": "1", "CHAOS_STEPS": "12"}


@pytest.mark.slow
@pytest.mark.parametrize("chains", [0, 1])  # `rlhf run` starts new processes
def test_killed_starved_and_stopped_runs_end_in_the_same_bytes(tmp_path: Path, chains: int) -> None:
    """3 kills a stage, one fail point in 128, some troubles, and the planted faults, which must be found."""
    command = [sys.executable, "-W", "ignore", "-m", "chaos", "--jobs", "2", "--out", str(tmp_path / "runs")]
    command += ["--kills", "3", "--every", "128", "--troubles", "3", "--chains", str(chains)]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr


# The harness itself


def test_kills_that_show_nothing_are_reported() -> None:
    def faults(kills: int, inside: int, steps: int) -> list[str]:
        outcome = Outcome("run", [Kill(1 + i % steps, i < inside) for i in range(kills)])
        return report({"sft: kills": [outcome]}, 200)

    assert faults(200, 20, 20) == []
    assert faults(200, 19, 20) == ["sft: kills: 19 of 200 kills landed inside a write: vacuous"]
    assert faults(200, 20, 19) == ["sft: kills: 200 kills hit 19 of 24 steps: vacuous"]
    assert faults(159, 30, 24) == ["sft: kills: 159 of 200 kills hit a run: vacuous"]


def test_all_differences_are_reported() -> None:
    outcomes = {
        "ppo: fail points": [Outcome("after x", wrong=["a log", "a file"])],
        "troubles": [Outcome("y", [], ["z"])],
    }
    assert report(outcomes, 0) == ["after x: a log", "after x: a file", "y: z"]


def test_a_fingerprint_ignores_times_only(tmp_path: Path) -> None:
    def log(text: str) -> dict[str, str]:
        (tmp_path / "metrics.jsonl").write_text(text)
        return fingerprint(tmp_path)

    plain = log('{"step": 1, "loss": 2.0, "time_s": 1.5, "time/update_s": 3}\n')
    assert differences(plain, log('{"step": 1, "loss": 2.0, "time_s": 9.5, "time/update_s": 4}\n')) == []
    for changed in ('{"step": 1, "loss": 2.1}\n', '{"step": 1, "loss": 2.0', '{"step": 1, "loss": 2.0}\n' * 2):
        assert differences(plain, log(changed)) == ["metrics.jsonl"]
    log('{"step": 1, "loss": 2.0}\n')
    (tmp_path / ".tmp-x").mkdir()
    assert differences(plain, fingerprint(tmp_path)) == [".tmp-x"]
