"""The output folder of a stage: its status, its old output and the manifest written last."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from fake_config import FakeConfig, begin, complete, make_stage, open_parent, write_model
from ppo_folder import rlhf

from rlhf_cli import runs, terminal
from rlhf_cli.config.sources import DataSource
from rlhf_cli.errors import RLHFError
from rlhf_cli.files import file_sha256
from rlhf_cli.runs import stage_folder
from rlhf_cli.runs.stage_folder import detect_moved_folder


def status(config: FakeConfig) -> runs.StageStatus:
    return runs.stage_status(config, runs.compute_identity(config, {}, {}))


def test_a_stage_is_new_then_resumes_then_is_finished(tmp_path: Path) -> None:
    config = FakeConfig(tmp_path)
    assert begin(config) == "new"
    assert yaml.safe_load((tmp_path / "sft/config.yaml").read_text()) == {"run": "..", **config.settings}
    runs.begin_state(tmp_path / "sft/state", "checkpoint-12")
    assert status(config).step == 12
    assert begin(config) == "resume"
    complete(config)
    assert begin(config) == "finished"


def test_a_start_deletes_the_leftovers_of_a_killed_process(tmp_path: Path) -> None:
    """Also after the last step, when no checkpoint is written any more."""
    config = FakeConfig(tmp_path)
    begin(config)
    kept = [config.folder / name for name in ("state/checkpoint-2/model", "snapshots/step_000002/model")]
    leftovers = [
        config.folder / f"{place}/.{kind}-x-7/half" for place in ("state", "snapshots") for kind in ("tmp", "trash")
    ]
    for path in [*kept, *leftovers]:
        path.parent.mkdir(parents=True)
        path.touch()
    assert begin(config) == "resume"
    assert all(path.exists() for path in kept) and not any(path.parent.exists() for path in leftovers)


def test_a_start_that_failed_early_is_not_a_run(tmp_path: Path) -> None:
    """Bad data end a stage before its first step; with corrected data the same command must work."""
    config = FakeConfig(tmp_path)
    identity = runs.compute_identity(config, {}, {})
    bad, good = ({**identity, "data": {"data.train": sha}} for sha in ("bad", "good"))
    for identity in (bad, good):
        assert runs.start_stage(config, identity, {}, fresh=False) == "new"
        runs.release()
    (config.folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(RLHFError, match="other content"):
        runs.start_stage(config, bad, {}, fresh=False)


def test_another_config_is_refused_until_fresh_moves_the_old_output(tmp_path: Path) -> None:
    for n, rate in enumerate((1e-5, 2e-5, 3e-5)):
        config = FakeConfig(tmp_path, settings={"sft": {"learning_rate": rate}})
        if n:
            with pytest.raises(RLHFError, match=rf"C15.*sft.learning_rate {n}e-05 -> {n + 1}e-05(?s:.*)--fresh"):
                begin(config)
        assert begin(config, fresh=True) == "new"
        (tmp_path / "sft/mark").write_text(str(rate))
    assert [(tmp_path / f".old/sft-{n}/mark").read_text() for n in (1, 2)] == ["1e-05", "2e-05"]


def test_a_folder_that_no_stage_wrote_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()
    assert status(FakeConfig(tmp_path)).state == "new"  # an empty folder is no output
    (tmp_path / "sft/thesis.tex").write_text("years of work")
    with pytest.raises(RLHFError, match="C15"):
        begin(FakeConfig(tmp_path))


def test_edited_cards_and_logs_and_deleted_snapshots_leave_a_stage_finished(tmp_path: Path) -> None:
    folder = make_stage(tmp_path / "run", "sft")
    (folder / "model/README.md").write_text("My own words.")
    assert begin(FakeConfig(tmp_path / "run")) == "finished"
    assert begin(FakeConfig(tmp_path / "run", "reward"), {"k": open_parent(folder, "sft", key="k")}) == "new"
    config = FakeConfig(tmp_path)
    begin(config)
    write_model(tmp_path / "sft/snapshots/step_000001")
    complete(config)
    for path in (tmp_path / "sft/snapshots/step_000001").iterdir():
        path.unlink()
    (tmp_path / "sft/config.yaml").write_text("# a note of mine")
    assert status(config).state == "finished"


def test_a_finished_stage_keeps_no_more_checkpoints_than_output_keep(tmp_path: Path) -> None:
    """One more exists if a process was killed between its last save and the deletion of the oldest."""
    config = FakeConfig(tmp_path / "run")
    begin(config)
    for step in (10, 20, 30):
        runs.commit_state(config.folder / "state", f"step_{step:06}", lambda path: (path / "w").touch(), keep=3)
    complete(config)
    assert runs.state_steps(config.folder / "state") == [20, 30]


def test_the_manifest_records_all_origins(tmp_path: Path) -> None:
    write_model(tmp_path / "base")
    data = tmp_path / "rows.jsonl"
    data.write_text("{}\n")
    config = FakeConfig(tmp_path / "run", seed=7)
    parents = {"model.path": open_parent(tmp_path / "base")}
    identity = runs.compute_identity(config, parents, {"data.train": DataSource.of(data)})
    runs.start_stage(config, identity, {}, fresh=False)
    write_model(config.folder / "model")
    for name in ("state/checkpoint-1/optimizer.pt", "snapshots/step_000001/w", "report.html", "metrics.jsonl"):
        (config.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (config.folder / name).write_text(name)
    fields = {"metrics": {"loss": 1.0}, "git": "abc", "template_sha256": None}
    runs.complete_stage(config, identity, parents=parents, fields=fields)
    manifest = json.loads((config.folder / "manifest.json").read_text())
    sha256 = parents["model.path"].sha256
    assert manifest["parents"] == {"model.path": {"path": "../../base", "stage": "foreign", "sha256": sha256}}
    assert manifest["data"] == {"data.train": file_sha256(data)}
    assert (manifest["schema"], manifest["stage"], manifest["seed"]) == (2, "sft", 7)
    assert (manifest["metrics"], manifest["git"]) == ({"loss": 1.0}, "abc")
    assert manifest["template_sha256"] is None  # no template; a missing key means unknown
    assert manifest["versions"].keys() >= {"rlhf", "python", "torch", "transformers", "trl"}
    model = ["model/README.md", "model/config.json", "model/model.safetensors"]
    listed = ["config.yaml", "identity.json", "metrics.jsonl", *model, "snapshots/step_000001/w"]
    assert sorted(manifest["files"]) == listed
    assert manifest["files"]["model/model.safetensors"]["bytes"] == len(b"weights")


@pytest.mark.full
def test_every_flipped_bit_of_a_manifest_is_found(tmp_path: Path) -> None:
    manifest, config = make_stage(tmp_path, "sft") / "manifest.json", FakeConfig(tmp_path)
    content = manifest.read_bytes()
    assert status(config).state == "finished"
    for place in range(len(content)):
        manifest.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert status(config).state == "damaged"
        with pytest.raises(RLHFError, match=r"M10.*models\.sft: .* is damaged: manifest\.json"):
            open_parent(manifest.parent, "sft", key="models.sft")


def test_a_start_compares_hashes_and_a_look_only_sizes(tmp_path: Path) -> None:
    """`rlhf run` would otherwise read every model on every start."""
    weights, config = make_stage(tmp_path, "sft") / "model/model.safetensors", FakeConfig(tmp_path)
    weights.write_bytes(weights.read_bytes()[::-1])
    assert status(config).state == "finished"
    with pytest.raises(
        RLHFError,
        match=r"M05.*model\.safetensors: its content is not what was written(?s:.*)--fresh runs the stage again",
    ):
        begin(config)
    weights.unlink()
    with pytest.raises(RLHFError, match=r"M05.*model/model\.safetensors is missing"):
        begin(config)


def test_e05_a_run_that_resumes_in_another_environment_warns_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = FakeConfig(tmp_path / "run")
    begin(config, device="A GPU")
    runs.begin_state(config.folder / "state", "step_000004")
    begin(config, device="A GPU")
    assert capsys.readouterr().err == ""
    path = config.folder / "identity.json"
    identity = json.loads(path.read_text())
    identity["environment"]["versions"] |= {"torch": "1.0", "rlhf": "0.0"}
    path.write_text(json.dumps(identity))
    for _ in range(2):
        terminal.reset()
        assert begin(config, device="cpu") == "resume"
    error = capsys.readouterr().err
    assert error.count("warning[E05]") == 1 and "numpy" not in error
    assert all(part in error for part in ("device A GPU -> cpu", "torch 1.0 -> ", "rlhf 0.0 -> "))


def test_a_run_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RLHFError) as caught:
        begin(FakeConfig(tmp_path / "file/run"))
    assert str(caught.value).splitlines() == [
        f"error[E03]: sft.yaml:3: {tmp_path}/file/run cannot be written: Not a directory",
        "hint: set `run:` to another folder",
    ]


def test_a_checkpoint_is_worth_it_if_it_is_short_or_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(stage_folder.time, "monotonic", lambda: now)

    def save(timer: stage_folder.CheckpointTimer, seconds: float) -> None:
        nonlocal now
        with timer.measure():
            now += seconds

    long, short = stage_folder.CheckpointTimer(), stage_folder.CheckpointTimer()
    assert long.is_worth_it(), "the first one tells how long they take"
    save(long, 3.0)
    assert not long.is_worth_it()
    now = 116.0
    assert not long.is_worth_it(), "6 s of 119 s are more than a twentieth"
    now = 117.0
    assert long.is_worth_it()

    save(short, 0.9)
    assert short.is_worth_it()


def test_e08_a_run_that_is_deleted_while_it_is_written(tmp_path: Path) -> None:
    config = FakeConfig(tmp_path)
    runs.start_stage(config, runs.compute_identity(config, {}, {}), {}, fresh=False)
    with pytest.raises(RLHFError, match=r"E08.*sft was moved or deleted while"), detect_moved_folder(config.folder):
        shutil.rmtree(config.folder)
        (config.folder / "metrics.jsonl").open("a")
    runs.release()
    with pytest.raises(FileNotFoundError), detect_moved_folder(config.folder):  # a folder that was never this process's
        (config.folder / "metrics.jsonl").open("a")


def test_old_with_other_names_and_old_that_is_a_file(tmp_path: Path) -> None:
    config = FakeConfig(tmp_path)
    identity = runs.compute_identity(config, {}, {})
    make_stage(tmp_path, "sft")
    for name in ("sft-backup2", "sft-2b", "sft-٣", "sft-7", "sft-"):
        (tmp_path / ".old" / name).mkdir(parents=True)
    runs.start_stage(config, identity, {}, fresh=True)
    assert (tmp_path / ".old/sft-8/manifest.json").is_file()
    shutil.rmtree(tmp_path / ".old")
    (tmp_path / ".old").write_text("mine")
    with pytest.raises(RLHFError, match=r"C15.*\.old is a file"):
        runs.start_stage(config, identity, {}, fresh=True)
    assert (tmp_path / ".old").read_text() == "mine" and (tmp_path / "sft/identity.json").is_file()


def test_s03_a_run_whose_name_is_too_long(folder: Path) -> None:
    for name in ("r" * 300, "é" * 130, "/".join(["deep"] * 800)):
        for command in (["check", "sft.yaml"], ["sft", "--config", "sft.yaml"]):
            result = rlhf(*command, "-s", f"run={name}")
            assert result.exit_code == 2 and result.stderr.startswith("error[S03]: --set run: "), result.output
    assert rlhf("check", "sft.yaml", "-s", f"run={'r' * 255}").exit_code == 0
