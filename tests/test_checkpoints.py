"""Parents: the folders that a stage starts from, believed only when they are finished and of the right kind."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_config import FakeConfig, make_stage, write_model

from rlhf_cli import runs
from rlhf_cli.errors import RLHFError
from rlhf_cli.runs.parents import Parent


def refusal(path: Path | str, *expect: str) -> RLHFError:
    with pytest.raises(RLHFError) as caught:
        runs.open_parent(str(path), expect=expect, key="models.reward", where="ppo.yaml:4")
    return caught.value


# Parents


def test_a_finished_stage_is_a_parent(tmp_path: Path) -> None:
    folder = make_stage(tmp_path, "sft", tokenizer_sha256="aa")
    parent = runs.open_parent(str(folder), expect=("sft",), key="models.sft", where="ppo.yaml:3")
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


def test_a_stage_trusts_no_weights_that_their_stage_did_not_write(tmp_path: Path) -> None:
    """Of the right size, so that the look at the chain takes them; what loads them does not."""
    folders = [make_stage(tmp_path / name, "reward") for name in ("a", "b")]
    parents = {
        key: runs.open_parent(str(folder), expect=("reward",), key=key, where="w")
        for key, folder in zip(
            ("models.reward", "models.value", "rewards.x.model"), [*folders, folders[1]], strict=True
        )
    }
    config = FakeConfig(tmp_path / "run", "ppo")
    wanted = runs.compute_identity(config, parents, {})
    for folder in folders:
        (folder / "model/model.safetensors").write_bytes(b"weigHts")
    with pytest.raises(RLHFError) as caught:
        runs.start_stage(config, wanted, parents, fresh=False)
    assert [problem.code for problem in caught.value.problems] == ["M10", "M10"]
    assert "model/model.safetensors: its content is not what was written (sha256 differs)" in str(caught.value)
    for folder in folders:
        (folder / "model/model.safetensors").write_bytes(b"weights")
    assert runs.start_stage(config, wanted, parents, fresh=False) == "new"


def test_files_beside_the_model_do_not_spoil_a_parent(tmp_path: Path) -> None:
    folder = make_stage(tmp_path, "reward")
    (folder / "config.yaml").unlink()
    assert runs.open_parent(str(folder), expect=("reward",), key="k", where="w").stage == "reward"


def test_the_inside_of_a_stage_is_refused_and_the_stage_named(tmp_path: Path) -> None:
    folder = make_stage(tmp_path, "reward")
    assert f"hint: set models.reward to {folder}" in str(refusal(folder / "model", "reward"))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "model/../../secret"])
def test_a_manifest_entry_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    folder = make_stage(tmp_path / "run", "reward")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["schema"] = 1  # which has no hash of itself: anybody can write one
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
    parent = runs.open_parent(str(tmp_path / "plain"), expect=("sft",), key="k", where="w")
    assert (parent.stage, parent.model, parent.manifest) == ("foreign", tmp_path / "plain", {})
    assert parent.sha256 == json.loads((folder / "manifest.json").read_text())["model_sha256"]
    write_model(tmp_path / "plain", b"weightz")
    assert runs.open_parent(str(tmp_path / "plain"), expect=("sft",), key="k", where="w").sha256 != parent.sha256


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
        runs.open_parent("some/model", expect=("sft",), key="models.sft", where="w", revision=revision)
        for revision in (None, "b" * 40)
    ]
    assert [parent.model.name for parent in found] == ["a" * 40, "b" * 40]
    assert {(parent.stage, parent.hub) for parent in found} == {("foreign", "some/model")}
    assert found[0].sha256 != found[1].sha256
    with pytest.raises(RLHFError, match="at revision cccc"):
        runs.open_parent("some/model", expect=(), key="models.sft", where="w", revision="cccc")


# Which models a config names


def ppo_config(run: Path, value: str = "reward", **rewards: SimpleNamespace) -> Any:
    models = SimpleNamespace(sft=str(run / "sft"), reward=str(run / "reward"), value=value, revision=None)
    return SimpleNamespace(
        stage="ppo", models=models, rewards=rewards, folder=run / "ppo", where=lambda key: f"ppo.yaml:{key}"
    )


def test_ppo_needs_the_reward_model_only_where_something_reads_it(tmp_path: Path) -> None:
    function = SimpleNamespace(model=None, models={}, pipeline=None)
    foreign = SimpleNamespace(model="/models/x", models={}, pipeline=None)
    vote = SimpleNamespace(model=None, models={"a": "/models/x", "b": "/models/y"}, pipeline=None)
    classifier = SimpleNamespace(model=None, models={}, pipeline="/models/z")

    def keys(config: Any) -> list[str]:
        return [reference.key for reference in runs.references(config)]

    assert keys(ppo_config(tmp_path)) == ["models.sft", "models.reward"]
    assert keys(ppo_config(tmp_path, short=function)) == ["models.sft", "models.reward"]
    assert keys(ppo_config(tmp_path, value="/v", short=function)) == ["models.sft", "models.value"]
    assert keys(ppo_config(tmp_path, value="/v", r=classifier)) == ["models.sft", "models.value", "rewards.r.pipeline"]
    assert keys(ppo_config(tmp_path, other=foreign)) == ["models.sft", "models.reward", "rewards.other.model"]
    members = ["rewards.vote.models.a", "rewards.vote.models.b"]
    assert keys(ppo_config(tmp_path, value="/v", vote=vote)) == ["models.sft", "models.value", *members]


def test_judges_that_are_functions_are_no_parents(tmp_path: Path) -> None:
    models = SimpleNamespace(sft="/s", ppo="/p", reward="/r", base=None)
    config = SimpleNamespace(stage="eval", models=models, judges={"gold": "rlhf_cli.demo.gold:judge", "other": "/o"})
    keys = [reference.key for reference in runs.references(config)]
    assert keys == ["models.sft", "models.ppo", "models.reward", "judges.other"]
    models.base = "/b"
    assert "models.base" in [reference.key for reference in runs.references(config)]


def test_all_parents_that_are_wrong_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as caught:
        runs.open_parents(ppo_config(tmp_path))
    assert [problem.where for problem in caught.value.problems] == ["ppo.yaml:models.sft", "ppo.yaml:models.reward"]


def test_a_stage_is_not_its_own_parent(tmp_path: Path) -> None:
    folder = make_stage(tmp_path, "sft")
    config = FakeConfig(tmp_path, "sft", model=SimpleNamespace(path=str(folder), revision=None))
    with pytest.raises(RLHFError, match="names the folder that this stage writes"):
        runs.open_parents(config)


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
            runs.check_same_tokenizer(a, other, where="ppo.yaml:5")
        assert caught.value.problems[0].code == code
        assert caught.value.problems[0].where == "ppo.yaml:5"
        assert all(sha in str(caught.value) for sha in hashes)
    runs.check_same_tokenizer(a, a, where="ppo.yaml:5")


def test_a_template_on_one_side_only_differs_between_stages_of_ours() -> None:
    a = parent("models.sft", tokenizer_sha256="a", template_sha256="1")
    b = parent("models.reward", tokenizer_sha256="a", template_sha256=None)
    with pytest.raises(RLHFError, match="T05"):
        runs.check_same_tokenizer(a, b, where="w")


def test_foreign_parents_are_compared_by_what_the_caller_found() -> None:
    a, foreign = parent("models.sft", tokenizer_sha256="a", template_sha256="1"), parent("models.reward")
    runs.check_same_tokenizer(a, foreign, where="w")  # nobody knows
    known = {"models.reward": {"tokenizer_sha256": "a", "template_sha256": None}}
    runs.check_same_tokenizer(a, foreign, where="w", foreign=known)
    known = {"models.reward": {"tokenizer_sha256": "b", "template_sha256": None}}
    with pytest.raises(RLHFError, match="T04"):
        runs.check_same_tokenizer(a, foreign, where="w", foreign=known)
