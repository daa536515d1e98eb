"""Runs that an earlier version made open, resume, export and report.

data/run_of_round_one.tar.gz was made by the code of November 2026, before its modules and names changed: `finished/` is
a run of all four stages; `stopped/STAGE` is that stage of the same run, stopped by SIGTERM.
"""

import json
import shutil
import tarfile
from pathlib import Path

import pytest
from ppo_folder import lines, must_succeed, rlhf
from safetensors.torch import load_file

ARCHIVE = Path(__file__).parents[1] / "data/run_of_round_one.tar.gz"


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path / "finished")
    return tmp_path


def test_a_finished_run_opens(old: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in old.rglob("*.safetensors")}
    ran = rlhf("run", ".")
    assert ran.exit_code == 0 and ran.stdout.count("up to date") == 4, ran.stdout
    assert {path: path.stat().st_mtime_ns for path in old.rglob("*.safetensors")} == before
    stages = {stage["stage"]: stage["state"] for stage in json.loads(rlhf("status", ".", "--json").stdout)["stages"]}
    assert stages == dict.fromkeys(("sft", "reward", "ppo", "eval"), "finished")
    assert rlhf("report", ".").exit_code == 0 and (old / "finished/eval/report.html").stat().st_size > 50_000
    assert rlhf("export", ".", "--out", "copy", "--step", "2").exit_code == 0
    exported, kept = load_file("copy/model.safetensors"), load_file("ppo/snapshots/step_000002/model.safetensors")
    assert exported.keys() == kept.keys() and all(exported[name].equal(kept[name]) for name in kept)
    replayed = rlhf("replay", ".", "--step", "4")
    assert "update 4 agrees to" in replayed.output  # the last bit of the numbers may differ on another processor
    assert rlhf("chat", ".", input="What is a good soup?\n").exit_code == 0


@pytest.mark.training
@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_a_stopped_stage_resumes(old: Path, stage: str) -> None:
    finished, folder = lines(old / "finished" / stage / "metrics.jsonl"), old / "finished" / stage
    shutil.rmtree(folder)
    shutil.copytree(old / "stopped" / stage, folder)
    before = (folder / "metrics.jsonl").read_text()
    must_succeed(rlhf(stage, "--config", f"{stage}.yaml"), "resumes")
    assert (folder / "metrics.jsonl").read_text().startswith(before)
    assert (folder / "manifest.json").is_file()
    last, expected = lines(folder / "metrics.jsonl")[-1], finished[-1]
    new = {"rollout/logprob_gap", "rollout/logprob_gap_p99"} if stage == "ppo" else set()
    assert last.keys() == expected.keys() | new
    same = {key: value for key, value in expected.items() if not key.endswith(("_s", "_per_s"))}
    assert {key: last[key] for key in same} == pytest.approx(same, rel=1e-3, abs=1e-3)
