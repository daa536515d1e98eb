"""Parents: the folders that a stage starts from. Only finished and undamaged folders of the right kind are accepted."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_config import FakeConfig, begin, make_stage, open_parent, write_model

from rlhf_cli.errors import RLHFError
from rlhf_cli.runs.manifest import Manifest


def refusal(path: Path | str, *expect: str) -> tuple[str, str]:
    """Return the code and the text of the error."""
    with pytest.raises(RLHFError) as caught:
        open_parent(path, *expect, key="models.reward")
    assert caught.value.exit_code == 2
    return caught.value.problems[0].code, str(caught.value)


def test_a_finished_stage_is_a_parent(tmp_path: Path) -> None:
    folder = make_stage(tmp_path, "sft", tokenizer_sha256="aa")
    (folder / "config.yaml").unlink()  # files beside the model do not matter
    parent = open_parent(folder, "sft", key="models.sft")
    assert (parent.stage, parent.model, parent.key) == ("sft", folder / "model", "models.sft")
    assert parent.sha256 == parent.manifest.model_sha256 and parent.manifest.tokenizer_sha256 == "aa"


def unfinished(run: Path) -> Path:
    (make_stage(run, "reward") / "manifest.json").unlink()
    (run / "reward.yaml").write_text("")
    return run / "reward"


def wrong_stage(run: Path) -> Path:
    make_stage(run, "reward")
    return make_stage(run, "sft")


def value_model(run: Path) -> Path:
    folder = make_stage(run, "ppo") / "value"
    write_model(folder)
    return folder


def similar_name(run: Path) -> Path:
    write_model(run / "my-reward")
    return run / "my_reward"


def write_at(run: Path, name: str, text: str = "") -> Path:
    """Write a file into RUN/<name>, and return RUN/reward."""
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text(text)
    return run / "reward"


def change_weights(run: Path, change: Any) -> Path:
    change(make_stage(run, "reward") / "model/model.safetensors")
    return run / "reward"


@pytest.mark.parametrize(
    ("make", "code", "says"),
    [
        (unfinished, "M10", ["ppo.yaml:4: models.reward: ", "rlhf reward --config RUN/reward.yaml"]),
        (lambda run: write_at(run, "reward/state/checkpoint-3/w"), "M10", ["is not finished"]),
        (wrong_stage, "M10", ["written by the sft stage, not by reward", "hint: set models.reward to RUN/reward"]),
        (lambda run: change_weights(run, lambda path: path.write_bytes(b"weig")), "M10", ["model/model.safetensors"]),
        (lambda run: change_weights(run, Path.unlink), "M10", ["model/model.safetensors"]),
        (lambda run: make_stage(run, "reward") / "model", "M10", ["hint: set models.reward to RUN/reward"]),
        (value_model, "M10", ["hint: set models.reward to the folder of a finished reward stage"]),
        (similar_name, "M01", ["did you mean RUN/my-reward?"]),
        (lambda run: write_at(run, "reward.yaml"), "M01", ["rlhf reward --config RUN/reward.yaml"]),
        (lambda run: write_at(run, "reward/notes.txt"), "M01", ["holds no model"]),
    ],
)
def test_a_folder_that_is_not_a_parent_is_refused(tmp_path: Path, make: Any, code: str, says: list[str]) -> None:
    found, text = refusal(make(tmp_path), "reward")
    assert found == code and all(part.replace("RUN", str(tmp_path)) in text for part in says), text


def test_a_stage_refuses_weights_of_the_right_size_that_their_stage_did_not_write(tmp_path: Path) -> None:
    folders = [make_stage(tmp_path / name, "reward") for name in ("a", "b")]
    paths = {"models.reward": folders[0], "models.value": folders[1], "rewards.x.model": folders[1]}
    parents = {key: open_parent(folder, "reward", key=key) for key, folder in paths.items()}
    config = FakeConfig(tmp_path / "run", "ppo")
    for folder in folders:
        (folder / "model/model.safetensors").write_bytes(b"weigHts")
    with pytest.raises(RLHFError) as caught:
        begin(config, parents)
    assert [problem.code for problem in caught.value.problems] == ["M10", "M10"]
    assert "model/model.safetensors: its content is not what was written (sha256 differs)" in str(caught.value)
    for folder in folders:
        (folder / "model/model.safetensors").write_bytes(b"weights")
    assert begin(config, parents) == "new"


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "model/../../secret"])
def test_a_manifest_entry_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    folder = make_stage(tmp_path / "run", "reward")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["schema"] = 1  # without a checksum: anybody can write one
    manifest["files"][name] = {"sha256": "", "bytes": 0}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert refusal(folder, "reward")[0] == "S03"


def test_a_link_that_leads_out_is_refused(tmp_path: Path) -> None:
    weights = make_stage(tmp_path / "run", "reward") / "model/model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    assert refusal(tmp_path / "run/reward", "reward")[0] == "S03"


def test_a_plain_folder_is_foreign_and_has_the_hash_of_the_same_model_in_a_stage(tmp_path: Path) -> None:
    folder = make_stage(tmp_path, "sft")
    write_model(tmp_path / "plain")
    (tmp_path / "plain/README.md").write_text("another card")
    parent = open_parent(tmp_path / "plain", "sft")
    assert (parent.stage, parent.model, parent.manifest) == ("foreign", tmp_path / "plain", Manifest())
    assert parent.sha256 == json.loads((folder / "manifest.json").read_text())["model_sha256"]
    write_model(tmp_path / "plain", b"weightz")
    assert open_parent(tmp_path / "plain", "sft").sha256 != parent.sha256


def test_a_cached_hub_id_is_a_foreign_parent_at_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("nobody/no-such-model", "not:an:id"):
        code, text = refusal(name, "reward")
        assert code == "M01" and "not a cached hub id" in text
    for revision in ("a" * 40, "b" * 40):
        write_model(tmp_path / "models--some--model/snapshots" / revision, revision.encode())
    (tmp_path / "models--some--model/refs").mkdir()
    (tmp_path / "models--some--model/refs/main").write_text("a" * 40)
    parents = [open_parent("some/model", "sft", revision=revision) for revision in (None, "b" * 40)]
    assert [parent.model.name for parent in parents] == ["a" * 40, "b" * 40]
    assert {(parent.stage, parent.hub) for parent in parents} == {("foreign", "some/model")}
    assert parents[0].sha256 != parents[1].sha256
    with pytest.raises(RLHFError, match="at revision cccc"):
        open_parent("some/model", revision="cccc")
