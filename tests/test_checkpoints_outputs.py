"""The folder that a stage writes: what made it, whether that still holds, and the manifest that ends it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from fake_config import FakeConfig, make_stage, write_model

from rlhf_cli import runs, terminal
from rlhf_cli.config.sources import DataSource
from rlhf_cli.errors import RLHFError
from rlhf_cli.runs.locks import lock_folder, lock_owner, lock_path


def test_differences_read_like_a_changelog() -> None:
    old = {
        "config": {"ppo": {"kl_coef": 0.05, "whiten": True}, "rewards": {}, "gone": 1},
        "parents": {"models.sft": "a", "models.reward": "b"},
        "data": {"data.prompts": "c"},
    }
    new = {
        "config": {"ppo": {"kl_coef": 0.1, "whiten": False, "x": 3}, "rewards": {"short": {"weight": 1.0}}},
        "parents": {"models.sft": "z", "models.reward": "b", "models.value": "v"},
        "data": {"data.prompts": "y"},
    }
    assert set(runs.identity_difference(old, new)) == {
        "ppo.kl_coef 0.05 -> 0.1",
        "ppo.whiten true -> false",
        "ppo.x: new key 3",
        "gone: no longer set (was 1)",
        "rewards.short.weight: new key 1.0",
        "models.sft: other weights",
        "models.value: was not set",
        "data.prompts: other content",
    }
    assert runs.identity_difference(old, old) == []


def test_a_key_that_a_newer_version_brought_is_no_difference_at_its_default() -> None:
    old, new = {"config": {"ppo": {}}}, {"config": {"ppo": {"new": 0.5}}}
    assert runs.identity_difference(old, new, {"ppo.new": 0.5}.get) == []
    assert runs.identity_difference(old, new, {"ppo.new": 0.4}.get) == ["ppo.new: new key 0.5"]
    assert runs.identity_difference(new, old, {"ppo.new": 0.5}.get) == ["ppo.new: no longer set (was 0.5)"]


def test_identity_follows_content_and_not_dates(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("{}\n")
    config = FakeConfig(tmp_path)
    first = runs.compute_identity(config, {}, {"data.train": DataSource.of(data)})
    os.utime(data, (1, 1))
    assert runs.compute_identity(config, {}, {"data.train": DataSource.of(data)}) == first
    data.write_text("{} \n")
    assert runs.identity_difference(first, runs.compute_identity(config, {}, {"data.train": DataSource.of(data)})) == [
        "data.train: other content"
    ]


def test_missing_data_files_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(RLHFError) as caught:
        data = {
            "data.train": DataSource.of(tmp_path / "row.jsonl"),
            "data.eval": DataSource.of(tmp_path / "nothing-like-it"),
        }
        runs.compute_identity(FakeConfig(tmp_path), {}, data)
    assert [problem.code for problem in caught.value.problems] == ["D01", "D01"]
    assert f"did you mean {tmp_path}/rows.jsonl?" in str(caught.value)


def test_a_stage_begins_new_resumes_and_is_finished(tmp_path: Path) -> None:
    config = FakeConfig(tmp_path)
    wanted = runs.compute_identity(config, {}, {})
    assert runs.start_stage(config, wanted, {}, fresh=False) == "new"
    assert yaml.safe_load((tmp_path / "sft/config.yaml").read_text()) == {"run": "..", **config.settings}
    (tmp_path / "sft/state/checkpoint-12").mkdir(parents=True)
    assert runs.stage_status(config, wanted).step == 12
    assert runs.start_stage(config, wanted, {}, fresh=False) == "resume"
    write_model(tmp_path / "sft/model")
    runs.complete_stage(config, wanted, parents={}, fields={})
    assert runs.start_stage(config, wanted, {}, fresh=False) == "finished"


def test_a_start_clears_what_a_killed_process_left_anywhere(tmp_path: Path) -> None:
    """Also where no state is written any more, after the last step: else it lies there for good."""
    config = FakeConfig(tmp_path)
    wanted = runs.compute_identity(config, {}, {})
    runs.start_stage(config, wanted, {}, fresh=False)
    kept = [config.folder / name for name in ("state/checkpoint-2/model", "snapshots/step_000002/model")]
    litter = [
        config.folder / f"{place}/.{kind}-x-7/half" for place in ("state", "snapshots") for kind in ("tmp", "trash")
    ]
    for path in [*kept, *litter]:
        path.parent.mkdir(parents=True)
        path.touch()
    assert runs.start_stage(config, wanted, {}, fresh=False) == "resume"
    assert [path.exists() for path in kept] == [True, True]
    assert not any(path.parent.exists() for path in litter)


def test_a_start_that_came_to_nothing_holds_no_place(tmp_path: Path) -> None:
    """Bad data end a stage before its first step; with mended data, another identity, the same command must do."""
    config = FakeConfig(tmp_path)
    before, after = (
        {**runs.compute_identity(config, {}, {}), "data": {"data.train": sha}} for sha in ("bad", "mended")
    )
    assert runs.start_stage(config, before, {}, fresh=False) == "new"
    runs.release()
    assert runs.start_stage(config, after, {}, fresh=False) == "new"
    runs.release()
    (config.folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(RLHFError, match="other content"):
        runs.start_stage(config, before, {}, fresh=False)


def test_another_config_is_refused_until_fresh_moves_the_old_output_aside(tmp_path: Path) -> None:
    for n, rate in enumerate((1e-5, 2e-5, 3e-5)):
        config = FakeConfig(tmp_path, settings={"sft": {"learning_rate": rate}})
        wanted = runs.compute_identity(config, {}, {})
        if n:
            with pytest.raises(RLHFError) as caught:
                runs.start_stage(config, wanted, {}, fresh=False)
            assert caught.value.problems[0].code == "C15"
            assert f"sft.learning_rate {n}e-05 -> {n + 1}e-05" in str(caught.value)
            assert "--fresh" in str(caught.value)
        assert runs.start_stage(config, wanted, {}, fresh=True) == "new"
        (tmp_path / "sft/mark").write_text(str(rate))
    assert (tmp_path / ".old/sft-1/mark").read_text() == "1e-05"
    assert (tmp_path / ".old/sft-2/mark").read_text() == "2e-05"


def test_a_folder_of_unknown_origin_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()
    config = FakeConfig(tmp_path)
    wanted = runs.compute_identity(config, {}, {})
    assert runs.stage_status(config, wanted).state == "new"  # an empty folder is no output
    (tmp_path / "sft/thesis.tex").write_text("years of work")
    with pytest.raises(RLHFError, match="C15"):
        runs.start_stage(config, wanted, {}, fresh=False)


def test_a_model_card_may_be_edited(tmp_path: Path) -> None:
    """It says how a model came to be, and cannot change what it does."""
    folder = make_stage(tmp_path / "run", "sft")
    (folder / "model/README.md").write_text("My own words.")
    config = FakeConfig(tmp_path / "run")
    wanted = runs.compute_identity(config, {}, {})
    assert runs.start_stage(config, wanted, {}, fresh=False) == "finished"
    parent = runs.open_parent(str(folder), expect=("sft",), key="k", where="w")
    assert runs.start_stage(FakeConfig(tmp_path / "run", "reward"), wanted, {"k": parent}, fresh=False) == "new"


def test_a_finished_stage_keeps_no_more_states_than_it_was_told(tmp_path: Path) -> None:
    """One more is there where a process was killed between its last save and dropping the oldest."""
    config = FakeConfig(tmp_path / "run")
    wanted = runs.compute_identity(config, {}, {})
    runs.start_stage(config, wanted, {}, fresh=False)
    for step in (10, 20, 30):
        runs.commit_state(config.folder / "state", f"step_{step:06}", lambda path: (path / "w").touch(), keep=3)
    write_model(config.folder / "model")
    runs.complete_stage(config, wanted, parents={}, fields={})
    assert runs.state_steps(config.folder / "state") == [20, 30]


def test_a_finished_stage_whose_files_went_missing_says_so(tmp_path: Path) -> None:
    folder = make_stage(tmp_path, "sft")
    config = FakeConfig(tmp_path)
    wanted = runs.compute_identity(config, {}, {})
    (folder / "model/model.safetensors").unlink()
    with pytest.raises(RLHFError) as caught:
        runs.start_stage(config, wanted, {}, fresh=False)
    assert caught.value.problems[0].code == "M05"
    assert "model/model.safetensors is missing" in str(caught.value)


def test_the_manifest_tells_where_everything_came_from(tmp_path: Path) -> None:
    write_model(tmp_path / "base")
    data = tmp_path / "rows.jsonl"
    data.write_text("{}\n")
    config = FakeConfig(tmp_path / "run", seed=7)
    parents = {"model.path": runs.open_parent(str(tmp_path / "base"), expect=(), key="model.path", where="w")}
    wanted = runs.compute_identity(config, parents, {"data.train": DataSource.of(data)})
    runs.start_stage(config, wanted, {}, fresh=False)
    write_model(config.folder / "model")
    for name in ("state/checkpoint-1/optimizer.pt", "snapshots/step_000001/w", "report.html", "metrics.jsonl"):
        (config.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (config.folder / name).write_text(name)
    fields = {"metrics": {"loss": 1.0}, "git": "abc", "template_sha256": None}
    runs.complete_stage(config, wanted, parents=parents, fields=fields)
    manifest = json.loads((config.folder / "manifest.json").read_text())
    sha256 = parents["model.path"].sha256
    assert manifest["parents"] == {"model.path": {"path": "../../base", "stage": "foreign", "sha256": sha256}}
    assert manifest["data"] == {"data.train": runs.file_sha256(data)}
    assert (manifest["schema"], manifest["stage"], manifest["seed"]) == (2, "sft", 7)
    assert (manifest["metrics"], manifest["git"]) == ({"loss": 1.0}, "abc")
    assert manifest["template_sha256"] is None  # no template, which is something else than not knowing
    assert manifest["versions"].keys() >= {"rlhf", "python", "torch", "transformers", "trl"}
    assert sorted(manifest["files"]) == [
        "config.yaml",
        "identity.json",
        "metrics.jsonl",
        "model/README.md",
        "model/config.json",
        "model/model.safetensors",
        "snapshots/step_000001/w",
    ]
    assert manifest["files"]["model/model.safetensors"]["bytes"] == len(b"weights")


def test_a_bit_of_any_byte_of_a_manifest_is_missed(tmp_path: Path) -> None:
    manifest, config = make_stage(tmp_path, "sft") / "manifest.json", FakeConfig(tmp_path)
    wanted, whole = runs.compute_identity(config, {}, {}), manifest.read_bytes()
    assert runs.stage_status(config, wanted).state == "finished"
    for place in range(len(whole)):
        manifest.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert runs.stage_status(config, wanted).state == "damaged"
        with pytest.raises(RLHFError, match=r"M10.*models\.sft: .* is damaged: manifest\.json"):
            runs.open_parent(str(manifest.parent), expect=("sft",), key="models.sft", where="ppo.yaml:4")


def test_the_same_size_is_not_enough_when_a_stage_begins(tmp_path: Path) -> None:
    """Where many stages are looked at, it is: `rlhf run` would read every model on every start."""
    folder, config = make_stage(tmp_path, "sft"), FakeConfig(tmp_path)
    wanted, weights = runs.compute_identity(config, {}, {}), folder / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[::-1])
    assert runs.stage_status(config, wanted).state == "finished"
    with pytest.raises(RLHFError, match=r"M05.*model\.safetensors: its content is not what was written"):
        runs.start_stage(config, wanted, {}, fresh=False)


def test_deleted_snapshots_and_edited_logs_leave_a_stage_finished(tmp_path: Path) -> None:
    config = FakeConfig(tmp_path)
    wanted = runs.compute_identity(config, {}, {})
    runs.start_stage(config, wanted, {}, fresh=False)
    write_model(tmp_path / "sft/model")
    write_model(tmp_path / "sft/snapshots/step_000001")
    runs.complete_stage(config, wanted, parents={}, fields={})
    for path in (tmp_path / "sft/snapshots/step_000001").iterdir():
        path.unlink()
    (tmp_path / "sft/config.yaml").write_text("# a note of mine")
    assert runs.stage_status(config, wanted).state == "finished"


def test_e05_a_run_that_goes_on_elsewhere_says_so_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = FakeConfig(tmp_path / "run")
    wanted = runs.compute_identity(config, {}, {})
    runs.start_stage(config, wanted, {}, fresh=False, device="A GPU")
    (config.folder / "state/step_000004").mkdir(parents=True)
    runs.start_stage(config, wanted, {}, fresh=False, device="A GPU")
    assert capsys.readouterr().err == ""
    path = config.folder / "identity.json"
    told = json.loads(path.read_text())
    told["environment"]["versions"] |= {"torch": "1.0", "rlhf": "0.0"}
    path.write_text(json.dumps(told))
    for _ in range(2):
        terminal.reset()
        assert runs.start_stage(config, wanted, {}, fresh=False, device="cpu") == "resume"
    said = capsys.readouterr().err
    assert said.count("warning[E05]") == 1
    assert "device A GPU -> cpu" in said and "torch 1.0 -> " in said and "rlhf 0.0 -> " in said and "numpy" not in said


def test_a_run_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = FakeConfig(tmp_path / "file/run")
    with pytest.raises(RLHFError) as caught:
        runs.start_stage(config, runs.compute_identity(config, {}, {}), {}, fresh=False)
    first, hint = str(caught.value).splitlines()
    assert first == f"error[E03]: sft.yaml:3: {tmp_path}/file/run cannot be written: Not a directory"
    assert hint == "hint: set `run:` to another folder"


def test_a_second_process_may_not_write_the_same_folder(tmp_path: Path) -> None:
    holder = (
        "import sys, pathlib; from rlhf_cli.runs.locks import lock_folder;"
        "lock_folder(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    config = FakeConfig(tmp_path)
    wanted = runs.compute_identity(config, {}, {})
    command = [sys.executable, "-c", holder, str(config.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout and other.stdout.readline() == b"held\n"
        with pytest.raises(RLHFError) as caught:
            runs.start_stage(config, wanted, {}, fresh=False)
        assert caught.value.problems[0].code == "C15"
        assert f"another process is writing {config.folder}" in str(caught.value)
        other.kill()  # however the other one ends, its lock is gone
    assert runs.start_stage(config, wanted, {}, fresh=False) == "new"
    runs.release()


def test_a_lock_tells_who_holds_it_as_long_as_that_one_lives(tmp_path: Path) -> None:
    folder = tmp_path / "sft"
    assert lock_owner(folder) is None
    script = "import sys, pathlib; from rlhf_cli.runs.locks import lock_folder; lock_folder(pathlib.Path(sys.argv[1]));"
    command = [sys.executable, "-c", script + "print('held', flush=True); sys.stdin.read()", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout and other.stdout.readline() == b"held\n"
        lock = lock_path(folder)
        before = lock.read_bytes()
        found = lock_owner(folder)
        assert found and found.pid == other.pid and abs(found.since - time.time()) < 60
        with pytest.raises(RLHFError, match=f"is writing {folder}: process {other.pid}, for "):
            lock_folder(folder)
        assert lock.read_bytes() == before  # who is refused leaves the other's name there

        copy = lock_path(tmp_path / "copy")
        copy.write_bytes(before)
        assert lock_owner(tmp_path / "copy") is None  # a copied folder has nobody at work in it
        other.kill()
        deadline = time.monotonic() + 10
        while lock_owner(folder) and time.monotonic() < deadline:  # a zombie until it is waited for: it holds nothing
            time.sleep(0.01)
        assert lock_owner(folder) is None and lock.read_bytes() == before
    lock_folder(folder)
    mine = lock_owner(folder)
    assert mine and mine.pid == os.getpid()
    told = json.loads(lock.read_text())
    lock.write_text(json.dumps(told | {"started": 1.0}))  # the number of a process that is gone was given again
    assert lock_owner(folder) is None
    lock.write_text(json.dumps(told | {"host": "elsewhere", "pid": 2**22 + 1}))
    far = lock_owner(folder)
    assert far and str(far).startswith("process 4194305 on elsewhere, for ")
    runs.release()
    assert lock.read_bytes() == b"" and lock_owner(folder) is None
