"""What stages leave on disk: parents that are believed, outputs that are whole, states that survive a crash."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import yaml

from rlhf_cli import checkpoints, terminal
from rlhf_cli.checkpoints import Parent
from rlhf_cli.errors import RLHFError


@dataclass
class FakeConfig:
    """What checkpoints asks of a config, with nothing of the schema behind it."""

    model_fields: ClassVar[dict[str, Any]] = {}

    run: Path
    stage: str = "sft"
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=lambda: {"sft": {"learning_rate": 1e-05}})
    model: Any = field(default_factory=lambda: SimpleNamespace(path=None, revision=None))

    @property
    def file(self) -> Path:
        return self.run / f"{self.stage}.yaml"

    @property
    def folder(self) -> Path:
        return self.run / self.stage

    def where(self, key: str) -> str:
        return f"{self.stage}.yaml:3"

    def identity(self) -> dict[str, Any]:
        return self.settings

    def dump(self, relative_to: Path | None = None) -> dict[str, Any]:
        return {"run": os.path.relpath(self.run, relative_to), **self.settings}


def write_model(folder: Path, weights: bytes = b"weights") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "README.md").write_text("a card")


def make_stage(run: Path, stage: str, weights: bytes = b"weights", **fields: Any) -> Path:
    """A finished stage folder, made through begin and finish."""
    run.mkdir(exist_ok=True)
    config = FakeConfig(run, stage)
    wanted = checkpoints.identity(config, {}, {})
    assert checkpoints.begin(config, wanted, fresh=False) == "new"
    write_model(config.folder / "model", weights)
    checkpoints.finish(config, wanted, parents={}, fields=fields)
    return config.folder


def refusal(path: Path | str, *expect: str) -> RLHFError:
    with pytest.raises(RLHFError) as caught:
        checkpoints.open_parent(str(path), expect=expect, key="models.reward", where="ppo.yaml:4")
    return caught.value


# Parents


def test_a_finished_stage_is_a_parent(tmp_path: Path) -> None:
    folder = make_stage(tmp_path, "sft", tokenizer_sha256="aa")
    parent = checkpoints.open_parent(str(folder), expect=("sft",), key="models.sft", where="ppo.yaml:3")
    assert (parent.stage, parent.model, parent.key) == ("sft", folder / "model", "models.sft")
    assert parent.sha256 == parent.manifest["model_sha256"]
    assert parent.manifest["tokenizer_sha256"] == "aa"


def test_an_unfinished_stage_is_refused_with_the_command_that_finishes_it(tmp_path: Path) -> None:
    folder = make_stage(tmp_path, "reward")
    (folder / "manifest.json").unlink()
    (tmp_path / "reward.yaml").write_text("")
    error = refusal(folder, "reward")
    assert error.exit_code == 2
    assert str(error).startswith("error[M10]: ppo.yaml:4: models.reward: ")
    assert f"rlhf reward --config {tmp_path}/reward.yaml" in str(error)


def test_a_folder_with_nothing_but_states_is_unfinished(tmp_path: Path) -> None:
    (tmp_path / "reward/state/checkpoint-3").mkdir(parents=True)
    assert "is not finished" in str(refusal(tmp_path / "reward", "reward"))


def test_the_wrong_stage_is_refused_and_the_right_one_beside_it_named(tmp_path: Path) -> None:
    wrong, right = make_stage(tmp_path, "sft"), make_stage(tmp_path, "reward")
    error = refusal(wrong, "reward")
    assert error.problems[0].code == "M10"
    assert "written by the sft stage, not by reward" in str(error)
    assert f"hint: set models.reward to {right}" in str(error)


@pytest.mark.parametrize("harm", ["shorter", "missing"])
def test_a_damaged_parent_is_refused(tmp_path: Path, harm: str) -> None:
    folder = make_stage(tmp_path, "reward")
    weights = folder / "model/model.safetensors"
    weights.write_bytes(b"weig") if harm == "shorter" else weights.unlink()
    error = refusal(folder, "reward")
    assert error.problems[0].code == "M10"
    assert "model/model.safetensors" in str(error)


def test_files_beside_the_model_do_not_spoil_a_parent(tmp_path: Path) -> None:
    folder = make_stage(tmp_path, "reward")
    (folder / "config.yaml").unlink()
    assert checkpoints.open_parent(str(folder), expect=("reward",), key="k", where="w").stage == "reward"


def test_the_inside_of_a_stage_is_refused_and_the_stage_named(tmp_path: Path) -> None:
    folder = make_stage(tmp_path, "reward")
    assert f"hint: set models.reward to {folder}" in str(refusal(folder / "model", "reward"))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "model/../../secret"])
def test_a_manifest_entry_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    folder = make_stage(tmp_path / "run", "reward")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"sha256": "", "bytes": 0}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    error = refusal(folder, "reward")
    assert (error.problems[0].code, error.exit_code) == ("S03", 2)


def test_a_link_that_leads_out_is_refused(tmp_path: Path) -> None:
    folder = make_stage(tmp_path / "run", "reward")
    (tmp_path / "elsewhere").write_bytes(b"weights")
    (folder / "model/model.safetensors").unlink()
    (folder / "model/model.safetensors").symlink_to(tmp_path / "elsewhere")
    assert refusal(folder, "reward").problems[0].code == "S03"


def test_a_plain_folder_is_foreign_and_has_the_hash_of_the_same_model_in_a_stage(tmp_path: Path) -> None:
    folder = make_stage(tmp_path, "sft")
    write_model(tmp_path / "plain")
    (tmp_path / "plain/README.md").write_text("another card")
    parent = checkpoints.open_parent(str(tmp_path / "plain"), expect=("sft",), key="k", where="w")
    assert (parent.stage, parent.model, parent.manifest) == ("foreign", tmp_path / "plain", {})
    assert parent.sha256 == json.loads((folder / "manifest.json").read_text())["model_sha256"]
    write_model(tmp_path / "plain", b"weightz")
    assert checkpoints.open_parent(str(tmp_path / "plain"), expect=("sft",), key="k", where="w").sha256 != parent.sha256


def test_nothing_there_names_what_is_near_or_the_stage_to_run(tmp_path: Path) -> None:
    write_model(tmp_path / "my-reward")
    assert f"did you mean {tmp_path}/my-reward?" in str(refusal(tmp_path / "my_reward", "reward"))
    (tmp_path / "reward.yaml").write_text("")
    error = refusal(tmp_path / "reward", "reward")
    assert error.problems[0].code == "M01"
    assert f"rlhf reward --config {tmp_path}/reward.yaml" in str(error)


def test_an_empty_folder_and_an_uncached_hub_id_hold_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "empty", "reward").problems[0].code == "M01"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("nobody/no-such-model", "not:an:id"):
        error = refusal(name, "reward")
        assert error.problems[0].code == "M01"
        assert "not a cached hub id" in str(error)


def test_a_cached_hub_id_is_a_foreign_parent_at_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for revision in ("a" * 40, "b" * 40):
        write_model(tmp_path / "models--some--model/snapshots" / revision, revision.encode())
    (tmp_path / "models--some--model/refs").mkdir()
    (tmp_path / "models--some--model/refs/main").write_text("a" * 40)
    found = [
        checkpoints.open_parent("some/model", expect=("sft",), key="models.sft", where="w", revision=revision)
        for revision in (None, "b" * 40)
    ]
    assert [parent.model.name for parent in found] == ["a" * 40, "b" * 40]
    assert {(parent.stage, parent.hub) for parent in found} == {("foreign", "some/model")}
    assert found[0].sha256 != found[1].sha256
    with pytest.raises(RLHFError, match="at revision cccc"):
        checkpoints.open_parent("some/model", expect=(), key="models.sft", where="w", revision="cccc")


# Which models a config names


def ppo_config(run: Path, value: str = "reward", **rewards: SimpleNamespace) -> Any:
    models = SimpleNamespace(sft=str(run / "sft"), reward=str(run / "reward"), value=value, revision=None)
    return SimpleNamespace(
        stage="ppo", models=models, rewards=rewards, folder=run / "ppo", where=lambda key: f"ppo.yaml:{key}"
    )


def test_ppo_needs_the_reward_model_only_where_something_reads_it(tmp_path: Path) -> None:
    function = SimpleNamespace(model=None, function="a.b:c")
    foreign = SimpleNamespace(model="/models/x", function=None)
    unnamed = SimpleNamespace(model=None, function=None)

    def keys(config: Any) -> list[str]:
        return [reference.key for reference in checkpoints.references(config)]

    assert keys(ppo_config(tmp_path)) == ["models.sft", "models.reward"]
    assert keys(ppo_config(tmp_path, short=function)) == ["models.sft", "models.reward"]
    assert keys(ppo_config(tmp_path, value="/v", short=function)) == ["models.sft", "models.value"]
    assert keys(ppo_config(tmp_path, value="/v", reward=unnamed)) == ["models.sft", "models.reward", "models.value"]
    assert keys(ppo_config(tmp_path, other=foreign)) == ["models.sft", "models.reward", "rewards.other.model"]


def test_judges_that_are_functions_are_no_parents(tmp_path: Path) -> None:
    models = SimpleNamespace(sft="/s", ppo="/p", reward="/r", base=None)
    config = SimpleNamespace(stage="eval", models=models, judges={"gold": "rlhf_cli.demo.gold:judge", "other": "/o"})
    keys = [reference.key for reference in checkpoints.references(config)]
    assert keys == ["models.sft", "models.ppo", "models.reward", "judges.other"]
    models.base = "/b"
    assert "models.base" in [reference.key for reference in checkpoints.references(config)]


def test_all_parents_that_are_wrong_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as caught:
        checkpoints.open_parents(ppo_config(tmp_path))
    assert [problem.where for problem in caught.value.problems] == ["ppo.yaml:models.sft", "ppo.yaml:models.reward"]


def test_a_stage_is_not_its_own_parent(tmp_path: Path) -> None:
    folder = make_stage(tmp_path, "sft")
    config = FakeConfig(tmp_path, "sft", model=SimpleNamespace(path=str(folder), revision=None))
    with pytest.raises(RLHFError, match="names the folder that this stage writes"):
        checkpoints.open_parents(config)


# Tokenizers


def parent(key: str, **manifest: Any) -> Parent:
    stage = "reward" if manifest else "foreign"
    return Parent(key, Path("/runs") / key, stage, Path("/m"), "0" * 64, manifest)


def test_parents_with_other_tokenizers_or_templates_are_refused_with_both_hashes() -> None:
    a = parent("models.sft", tokenizer_sha256="a" * 64, template_sha256="1" * 64)
    b = parent("models.reward", tokenizer_sha256="b" * 64, template_sha256="1" * 64)
    c = parent("models.reward", tokenizer_sha256="a" * 64, template_sha256="2" * 64)
    for other, code, hashes in ((b, "T04", ("a" * 12, "b" * 12)), (c, "T05", ("1" * 12, "2" * 12))):
        with pytest.raises(RLHFError) as caught:
            checkpoints.check_same_tokenizer(a, other, where="ppo.yaml:5")
        assert caught.value.problems[0].code == code
        assert caught.value.problems[0].where == "ppo.yaml:5"
        assert all(sha in str(caught.value) for sha in hashes)
    checkpoints.check_same_tokenizer(a, a, where="ppo.yaml:5")


def test_a_template_on_one_side_only_differs_between_stages_of_ours() -> None:
    a = parent("models.sft", tokenizer_sha256="a", template_sha256="1")
    b = parent("models.reward", tokenizer_sha256="a", template_sha256=None)
    with pytest.raises(RLHFError, match="T05"):
        checkpoints.check_same_tokenizer(a, b, where="w")


def test_foreign_parents_are_compared_by_what_the_caller_found() -> None:
    a, foreign = parent("models.sft", tokenizer_sha256="a", template_sha256="1"), parent("models.reward")
    checkpoints.check_same_tokenizer(a, foreign, where="w")  # nobody knows
    known = {"models.reward": {"tokenizer_sha256": "a", "template_sha256": None}}
    checkpoints.check_same_tokenizer(a, foreign, where="w", foreign=known)
    known = {"models.reward": {"tokenizer_sha256": "b", "template_sha256": None}}
    with pytest.raises(RLHFError, match="T04"):
        checkpoints.check_same_tokenizer(a, foreign, where="w", foreign=known)


# Identity and outputs


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
    assert set(checkpoints.difference(old, new)) == {
        "ppo.kl_coef 0.05 -> 0.1",
        "ppo.whiten true -> false",
        "ppo.x: new key 3",
        "gone: no longer set (was 1)",
        "rewards.short.weight: new key 1.0",
        "models.sft: other weights",
        "models.value: was not set",
        "data.prompts: other content",
    }
    assert checkpoints.difference(old, old) == []


def test_a_key_that_a_newer_version_brought_is_no_difference_at_its_default() -> None:
    old, new = {"config": {"ppo": {}}}, {"config": {"ppo": {"new": 0.5}}}
    assert checkpoints.difference(old, new, {"ppo.new": 0.5}.get) == []
    assert checkpoints.difference(old, new, {"ppo.new": 0.4}.get) == ["ppo.new: new key 0.5"]
    assert checkpoints.difference(new, old, {"ppo.new": 0.5}.get) == ["ppo.new: no longer set (was 0.5)"]


def test_identity_follows_content_and_not_dates(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("{}\n")
    config = FakeConfig(tmp_path)
    first = checkpoints.identity(config, {}, {"data.train": data})
    os.utime(data, (1, 1))
    assert checkpoints.identity(config, {}, {"data.train": data}) == first
    data.write_text("{} \n")
    assert checkpoints.difference(first, checkpoints.identity(config, {}, {"data.train": data})) == [
        "data.train: other content"
    ]


def test_missing_data_files_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(RLHFError) as caught:
        data = {"data.train": tmp_path / "row.jsonl", "data.eval": tmp_path / "nothing-like-it"}
        checkpoints.identity(FakeConfig(tmp_path), {}, data)
    assert [problem.code for problem in caught.value.problems] == ["D01", "D01"]
    assert f"did you mean {tmp_path}/rows.jsonl?" in str(caught.value)


def test_a_stage_begins_new_resumes_and_is_finished(tmp_path: Path) -> None:
    config = FakeConfig(tmp_path)
    wanted = checkpoints.identity(config, {}, {})
    assert checkpoints.begin(config, wanted, fresh=False) == "new"
    assert yaml.safe_load((tmp_path / "sft/config.yaml").read_text()) == {"run": "..", **config.settings}
    (tmp_path / "sft/state/checkpoint-12").mkdir(parents=True)
    assert checkpoints.examine(config, wanted).step == 12
    assert checkpoints.begin(config, wanted, fresh=False) == "resume"
    write_model(tmp_path / "sft/model")
    checkpoints.finish(config, wanted, parents={}, fields={})
    assert checkpoints.begin(config, wanted, fresh=False) == "finished"


def test_a_start_that_came_to_nothing_holds_no_place(tmp_path: Path) -> None:
    """Bad data end a stage before its first step; with mended data, another identity, the same command must do."""
    config = FakeConfig(tmp_path)
    before, after = ({**checkpoints.identity(config, {}, {}), "data": {"data.train": sha}} for sha in ("bad", "mended"))
    assert checkpoints.begin(config, before, fresh=False) == "new"
    checkpoints.release()
    assert checkpoints.begin(config, after, fresh=False) == "new"
    checkpoints.release()
    (config.folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(RLHFError, match="other content"):
        checkpoints.begin(config, before, fresh=False)


def test_another_config_is_refused_until_fresh_moves_the_old_output_aside(tmp_path: Path) -> None:
    for n, rate in enumerate((1e-5, 2e-5, 3e-5)):
        config = FakeConfig(tmp_path, settings={"sft": {"learning_rate": rate}})
        wanted = checkpoints.identity(config, {}, {})
        if n:
            with pytest.raises(RLHFError) as caught:
                checkpoints.begin(config, wanted, fresh=False)
            assert caught.value.problems[0].code == "C15"
            assert f"sft.learning_rate {n}e-05 -> {n + 1}e-05" in str(caught.value)
            assert "--fresh" in str(caught.value)
        assert checkpoints.begin(config, wanted, fresh=True) == "new"
        (tmp_path / "sft/mark").write_text(str(rate))
    assert (tmp_path / ".old/sft-1/mark").read_text() == "1e-05"
    assert (tmp_path / ".old/sft-2/mark").read_text() == "2e-05"


def test_a_folder_of_unknown_origin_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()
    config = FakeConfig(tmp_path)
    wanted = checkpoints.identity(config, {}, {})
    assert checkpoints.examine(config, wanted).state == "new"  # an empty folder is no output
    (tmp_path / "sft/thesis.tex").write_text("years of work")
    with pytest.raises(RLHFError, match="C15"):
        checkpoints.begin(config, wanted, fresh=False)


def test_a_finished_stage_whose_files_went_missing_says_so(tmp_path: Path) -> None:
    folder = make_stage(tmp_path, "sft")
    config = FakeConfig(tmp_path)
    wanted = checkpoints.identity(config, {}, {})
    (folder / "model/model.safetensors").unlink()
    with pytest.raises(RLHFError) as caught:
        checkpoints.begin(config, wanted, fresh=False)
    assert caught.value.problems[0].code == "M05"
    assert "model/model.safetensors is missing" in str(caught.value)


def test_the_manifest_tells_where_everything_came_from(tmp_path: Path) -> None:
    write_model(tmp_path / "base")
    data = tmp_path / "rows.jsonl"
    data.write_text("{}\n")
    config = FakeConfig(tmp_path / "run", seed=7)
    parents = {"model.path": checkpoints.open_parent(str(tmp_path / "base"), expect=(), key="model.path", where="w")}
    wanted = checkpoints.identity(config, parents, {"data.train": data})
    checkpoints.begin(config, wanted, fresh=False)
    write_model(config.folder / "model")
    for name in ("state/checkpoint-1/optimizer.pt", "snapshots/step_000001/w", "report.html", "metrics.jsonl"):
        (config.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (config.folder / name).write_text(name)
    fields = {"metrics": {"loss": 1.0}, "git": "abc", "template_sha256": None}
    checkpoints.finish(config, wanted, parents=parents, fields=fields)
    manifest = json.loads((config.folder / "manifest.json").read_text())
    sha256 = parents["model.path"].sha256
    assert manifest["parents"] == {"model.path": {"path": "../../base", "stage": "foreign", "sha256": sha256}}
    assert manifest["data"] == {"data.train": checkpoints.file_sha256(data)}
    assert (manifest["schema"], manifest["stage"], manifest["seed"]) == (1, "sft", 7)
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


def test_deleted_snapshots_and_edited_logs_leave_a_stage_finished(tmp_path: Path) -> None:
    config = FakeConfig(tmp_path)
    wanted = checkpoints.identity(config, {}, {})
    checkpoints.begin(config, wanted, fresh=False)
    write_model(tmp_path / "sft/model")
    write_model(tmp_path / "sft/snapshots/step_000001")
    checkpoints.finish(config, wanted, parents={}, fields={})
    for path in (tmp_path / "sft/snapshots/step_000001").iterdir():
        path.unlink()
    (tmp_path / "sft/config.yaml").write_text("# a note of mine")
    assert checkpoints.examine(config, wanted).state == "finished"


def test_a_run_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = FakeConfig(tmp_path / "file/run")
    with pytest.raises(RLHFError) as caught:
        checkpoints.begin(config, checkpoints.identity(config, {}, {}), fresh=False)
    assert str(caught.value) == f"error[E03]: sft.yaml:3: {tmp_path}/file/run cannot be written: Not a directory"


def test_a_second_process_may_not_write_the_same_folder(tmp_path: Path) -> None:
    holder = (
        "import sys, pathlib; from rlhf_cli.checkpoints.locks import hold;"
        "hold(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    config = FakeConfig(tmp_path)
    wanted = checkpoints.identity(config, {}, {})
    command = [sys.executable, "-c", holder, str(config.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout and other.stdout.readline() == b"held\n"
        with pytest.raises(RLHFError) as caught:
            checkpoints.begin(config, wanted, fresh=False)
        assert caught.value.problems[0].code == "C15"
        assert f"another process is writing {config.folder}" in str(caught.value)
        other.kill()  # however the other one ends, its lock is gone
    assert checkpoints.begin(config, wanted, fresh=False) == "new"
    checkpoints.release()


# States


def put(text: str) -> Any:
    return lambda folder: (folder / "weights").write_text(text)


def test_states_are_kept_newest_first_and_pruned(tmp_path: Path) -> None:
    for step in (5, 10, 15, 100):
        checkpoints.commit_state(tmp_path, f"step_{step:06}", put(f"{step:06}"), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000015", "step_000100"]
    latest = checkpoints.latest_state(tmp_path)
    assert latest == tmp_path / "step_000100"
    assert (latest / "weights").read_text() == "000100"


def test_no_states_are_no_state(tmp_path: Path) -> None:
    assert checkpoints.latest_state(tmp_path / "state") is None
    assert checkpoints.newest_step(tmp_path / "state") is None


def harm(state: Path, how: str) -> None:
    weights = state / "weights"
    content = bytearray(weights.read_bytes())
    content[0] ^= 1
    {
        "flipped": lambda: weights.write_bytes(content),
        "shorter": lambda: weights.write_bytes(content[:-1]),
        "missing": weights.unlink,
        "no manifest": (state / "state.json").unlink,
        "half a manifest": lambda: (state / "state.json").write_text('{"files": {'),
    }[how]()


@pytest.mark.parametrize("how", ["flipped", "shorter", "missing", "no manifest", "half a manifest"])
def test_a_damaged_state_is_passed_over_with_a_warning(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal.forget_warnings()
    for step in (1, 2):
        checkpoints.commit_state(tmp_path, f"step_{step:06}", put(f"state {step}"), keep=2)
    harm(tmp_path / "step_000002", how)
    assert checkpoints.latest_state(tmp_path) == tmp_path / "step_000001"
    said = capsys.readouterr().err
    assert said.startswith("warning[M05]: ")
    assert "step_000002" in said and "resuming from step_000001" in said
    harm(tmp_path / "step_000001", how)
    assert checkpoints.latest_state(tmp_path) is None
    assert "starting from the beginning" in capsys.readouterr().err


def test_a_state_that_cannot_be_written_leaves_the_older_ones_alone(tmp_path: Path) -> None:
    checkpoints.commit_state(tmp_path, "step_000001", put("one"), keep=2)

    def fail(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        checkpoints.commit_state(tmp_path, "step_000002", fail, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_the_same_step_can_be_written_again(tmp_path: Path) -> None:
    for text in ("first", "second"):
        checkpoints.commit_state(tmp_path, "step_000001", put(text), keep=2)
    latest = checkpoints.latest_state(tmp_path)
    assert latest and (latest / "weights").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_what_a_killed_process_left_is_cleared_and_never_a_candidate(tmp_path: Path) -> None:
    for name in (".tmp-step_000009-1", ".trash-step_000001-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("half")
    assert checkpoints.latest_state(tmp_path) is None
    checkpoints.commit_state(tmp_path, "step_000002", put("two"), keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]


@pytest.mark.parametrize("name", ["../step_000001", "a/b", "", ".hidden", "x" * 65])
def test_a_state_name_that_could_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RLHFError, match="S03"):
        checkpoints.commit_state(tmp_path / "state", name, put("x"), keep=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["write", "describe", "rename"])
def test_a_kill_at_any_moment_leaves_a_whole_state(tmp_path: Path, moment: str) -> None:
    """A child process dies inside its second commit: the first state, or the whole second one, is what is found."""
    script = f"""
import os, sys, pathlib
from rlhf_cli.checkpoints import states
folder = pathlib.Path(sys.argv[1])
states.commit_state(folder, "step_000001", lambda path: (path / "weights").write_text("1"), keep=1)
def die(*a, **k): os._exit(137)
write = lambda path: (path / "weights").write_text("2")
if {moment!r} == "write": write = die
if {moment!r} == "describe": states.describe = die
if {moment!r} == "rename": states.sync = die
states.commit_state(folder, "step_000002", write, keep=1)
"""
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == 137
    latest = checkpoints.latest_state(tmp_path)
    assert latest and latest.name == ("step_000002" if moment == "rename" else "step_000001")
