"""The command of a stage: its file or its run, its overrides and options, and its lock after a failure."""

from pathlib import Path
from typing import Any

import pytest
from run_cli import python, rlhf

from rlhf_cli import runs
from rlhf_cli.cli import stage
from rlhf_cli.config.base import Options


@pytest.mark.parametrize("place", [".", "sft.yaml", "-c sft.yaml", "./sft.yaml -s sft.max_steps=1"])
def test_a_stage_takes_its_run_or_its_file(folder: Path, place: str) -> None:
    result = rlhf("sft", *place.split(), "seed=7", "--dry-run")
    assert result.exit_code == 0 and "seed: 7" in result.stdout, result.output


def test_overrides_and_options_reach_the_stage(folder: Path, stage_calls: list) -> None:
    arguments = ["-c", "sft.yaml", "-s", "sft.learning_rate=2e-5", "seed=4", "--set", "sft.max_length=9", "--fresh"]
    assert rlhf("sft", *arguments).exit_code == 0
    ((sft, options),) = stage_calls
    assert (sft.sft.learning_rate, sft.sft.max_length, sft.seed) == (2e-5, 9, 4)
    assert options == Options(fresh=True)
    rlhf("sft", "-c", "sft.yaml", "--trust-remote-code", "--debug")
    assert stage_calls[1][1] == Options(trust_remote_code=True, debug=True)


def test_a_failed_command_releases_its_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(sft: Any, _: Any) -> None:
        runs.start_stage(sft, runs.compute_identity(sft, {}, {}), {}, fresh=False)
        raise ZeroDivisionError

    monkeypatch.setattr(stage, "_runner", lambda name: run)
    assert rlhf("sft", "-c", "sft.yaml").exit_code == 1
    script = "import pathlib, sys; from rlhf_cli.runs.locks import lock_folder; lock_folder(pathlib.Path(sys.argv[1]))"
    assert python("-c", script, folder / "sft").returncode == 0
