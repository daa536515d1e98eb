"""Runs that an earlier version made open, resume, export and report.

Each archive in runs/ was made by the code of its day: of November 23, before modules and names changed; of November 27,
before manifests and reports were objects, with DPO, adapters on one base, a limit and a third policy in the evaluation.
`finished/` is a run of all its stages; `stopped/STAGE` is that stage of the same run, stopped by SIGTERM.
"""

import json
import shutil
import tarfile
from pathlib import Path

import pytest
from ppo_folder import lines, must_succeed, rlhf
from safetensors.torch import load_file

DATA = Path(__file__).with_name("runs")
STOPPED = {"november_23": ("sft", "reward", "ppo"), "november_27": ("dpo", "ppo")}


def unpacked(day: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(DATA / f"run_of_{day}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path / "finished")
    return tmp_path


@pytest.mark.full
@pytest.mark.usefixtures("figures")
@pytest.mark.parametrize("day", STOPPED)
def test_a_finished_run_opens(day: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = unpacked(day, tmp_path, monkeypatch)
    expected = [stage for stage in ("sft", "reward", "dpo", "ppo", "eval") if Path(f"{stage}.yaml").is_file()]
    before = {path: path.stat().st_mtime_ns for path in old.rglob("*.safetensors")}
    ran = rlhf("run", ".")
    assert ran.exit_code == 0 and ran.stdout.count("up to date") == len(expected), ran.stdout
    assert {path: path.stat().st_mtime_ns for path in old.rglob("*.safetensors")} == before
    stages = {stage["stage"]: stage["state"] for stage in json.loads(rlhf("status", ".", "--json").stdout)["stages"]}
    assert stages == dict.fromkeys(expected, "finished")
    assert rlhf("report", ".").exit_code == 0 and (old / "finished/eval/report.html").stat().st_size > 50_000
    replayed = json.loads(rlhf("replay", ".", "--step", "4", "--json").stdout)
    for quantity in replayed["quantities"]:  # the last bits may differ on another processor
        assert quantity["recorded"] <= 1e-4 * max(1.0, quantity["largest"]), quantity["name"]
    assert rlhf("chat", ".", input="What is a good soup?\n").exit_code == 0


@pytest.mark.full
@pytest.mark.parametrize("day", STOPPED)
def test_a_snapshot_is_exported(day: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked(day, tmp_path, monkeypatch)
    assert rlhf("export", ".", "--out", "copy", "--step", "2").exit_code == 0
    exported = load_file("copy/model.safetensors")
    snapshot = Path("ppo/snapshots/step_000002")
    if (snapshot / "adapter_config.json").is_file():  # export adds the adapter to its base
        base = load_file("sft/model/model.safetensors")
        assert exported.keys() == base.keys()
        assert not all(exported[name].equal(base[name]) for name in base)
    else:
        kept = load_file(snapshot / "model.safetensors")
        assert exported.keys() == kept.keys()
        assert all(exported[name].equal(kept[name]) for name in kept)


@pytest.mark.full
@pytest.mark.parametrize(("day", "stage"), [(day, stage) for day, stages in STOPPED.items() for stage in stages])
def test_a_stopped_stage_resumes(day: str, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = unpacked(day, tmp_path, monkeypatch)
    finished, folder = lines(old / "finished" / stage / "metrics.jsonl"), old / "finished" / stage
    shutil.rmtree(folder)
    shutil.copytree(old / "stopped" / stage, folder)
    before = (folder / "metrics.jsonl").read_text()
    must_succeed(rlhf(stage, "--config", f"{stage}.yaml"), "resumes")
    assert (folder / "metrics.jsonl").read_text().startswith(before)
    assert (folder / "manifest.json").is_file()
    last, expected = lines(folder / "metrics.jsonl")[-1], finished[-1]
    new = {"rollout/logprob_gap", "rollout/logprob_gap_p99"} if (day, stage) == ("november_23", "ppo") else set()
    assert last.keys() == expected.keys() | new
    same = {key: value for key, value in expected.items() if not key.endswith(("_s", "_per_s"))}
    assert {key: last[key] for key in same} == pytest.approx(same, rel=1e-3, abs=1e-3)
