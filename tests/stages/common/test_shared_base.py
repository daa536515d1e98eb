"""`models.adapters` of PPO: four models on one base are trained, saved, loaded, resumed and verified."""

import json
import shutil
from pathlib import Path
from typing import Any

import ppo_folder
import pytest
import torch
from adapter_folder import adapter_settings, run, some_ids, widen, write
from bad_inputs import replace, rlhf
from safetensors.torch import load_file

from rlhf_cli import runs
from rlhf_cli.config.base import Options
from rlhf_cli.config.loading import load
from rlhf_cli.models import save
from rlhf_cli.models.load import load_causal_lm, load_reward_model
from rlhf_cli.runs.manifest import ParentEntry
from rlhf_cli.runs.parents import sha256_with_base
from rlhf_cli.stages.common import model_loading
from rlhf_cli.stages.common.shared_base import SharedBaseModels
from rlhf_cli.stages.ppo.setup import PPOComponents, load_components
from tests.conftest import World
from tests.reference.comparison import compare_run, disagreements

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_page")]
LORA = ("-s", "models.adapters={kind: lora, r: 3}", "-s", "ppo.learning_rate=1e-2")
LONG = (*LORA, "-s", "ppo.total_episodes=40", "-s", "output.save_steps=2", "-s", "output.snapshots=2")
FILES = ("model/adapter_model.safetensors", "value/adapter_model.safetensors")


@pytest.fixture(scope="module")
def trained(adapters_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose PPO trained adapters for five updates. Read only."""
    folder = shutil.copytree(adapters_run, tmp_path_factory.mktemp("one-base") / "run")
    run(folder, "ppo", *LONG)
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that run, which is the working directory."""
    monkeypatch.chdir(shutil.copytree(trained, tmp_path / "moved"))
    return tmp_path / "moved"


def loaded(folder: Path, *changes: str) -> PPOComponents:
    """Return the run's models before the first update of `rlhf ppo`."""
    config = load("ppo", folder / "ppo.yaml", ["models.adapters={kind: lora, r: 3}", *changes])
    return load_components(config, Options(), runs.open_parents(config))


def lines(folder: Path) -> list[dict[str, Any]]:
    return ppo_folder.untimed(folder / "ppo/metrics.jsonl")


# Trainable weights


def four(parts: PPOComponents) -> dict[str, Any]:
    trainer = parts.trainer
    (reward,) = trainer.rewards.values()
    return {"policy": trainer.policy, "ref": trainer.ref, "value": trainer.value, "reward": reward.model}


def test_the_first_kl_is_0_the_policy_moves_and_a_checkpoint_contains_only_trained_weights(trained: Path) -> None:
    first, *_, last = lines(trained)
    assert first["objective/kl"] == first["objective/kl_k1"] == first["policy/first_ratio_error"] == 0.0
    assert last["objective/kl_k1"] > 0.05 and last["policy/first_ratio_error"] == 0.0
    state = save.load_tree(runs.state_at(trained / "ppo/state", 5))["trainer"]
    assert all(".lora_" in name for name in state["policy"]) and len(state["policy"]) == 28
    heads = {name for name in state["value"] if ".lora_" not in name}
    assert heads == {"score.modules_to_save.default.weight"} and len(state["value"]) == 29
    assert len(state["optimizer"]["state"]) == 28 + 29


# Memory


def weights_of(models: Any) -> int:
    """Bytes of the distinct storages behind the weights of several models."""
    storages = [weight.untyped_storage() for model in models for weight in model.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.fixture(scope="module")
def wide(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wider model, beside which adapters of rank 1 are small."""
    folder = write(tmp_path_factory.mktemp("wide") / "run", world)
    widen(folder, world)
    for stage in ("sft", "reward"):
        run(folder, stage, "-s", "model.adapters.r=1", "-s", f"{stage}.max_steps=1")
    return folder


def test_four_models_take_little_more_memory_than_one(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rlhf plan` computes the measured bytes."""
    monkeypatch.chdir(wide)
    models = four(loaded(wide, "models.adapters.r=1"))
    one, all_four = weights_of([models["ref"]]), weights_of(models.values())
    assert one < all_four <= 1.15 * one
    assert weights_of([models["policy"], models["ref"]]) < all_four
    words = ("ppo.yaml", "models.adapters={kind: lora, r: 1}", "--json", "--flops", "1e9")
    result = ppo_folder.rlhf("plan", *words)
    (plan,) = json.loads(result.stdout)["stages"].values()
    memory = {phase["name"]: phase["bytes"] for phase in plan["phases"]}
    heads = 4 * models["ref"].config.hidden_size  # peft keeps a head as it was, too
    buffers = 4 * 4 * models["ref"].model.rotary_emb.inv_freq.numel() * 2
    assert plan["mode"] == "lora"
    assert abs(memory["judge"]["weights"] - all_four) <= 2 * heads + buffers
    trained = sum(p.numel() for m in (models["policy"], models["value"]) for p in m.parameters() if p.requires_grad)
    assert memory["update"]["optimizer"] == 8 * trained


# The files of the stage


def test_ppo_writes_adapters_of_the_sft_model(trained: Path) -> None:
    manifest = json.loads((trained / "ppo/manifest.json").read_text())
    snapshots = sorted((trained / "ppo/snapshots").iterdir())
    for folder, base in (
        (trained / "ppo/model", "../../sft/model"),
        (trained / "ppo/value", "../../sft/model"),
        *((path, "../../../sft/model") for path in snapshots),
    ):
        rank = 4 if folder.name == "value" else 3  # copied from the reward model
        assert adapter_settings(folder, base)["r"] == rank
    assert {path.name for path in snapshots} >= {"step_000002", "step_000005"}  # and 0 if it is the best
    assert manifest["parents"]["models.sft"]["path"] == "../sft"
    read, _ = runs.read_manifest(trained / "ppo")
    assert read.model_sha256 == sha256_with_base(read.files, read.parents)
    other = {"models.sft": ParentEntry(path="../sft", stage="sft", sha256="0" * 64)}
    assert read.model_sha256 != sha256_with_base(read.files, read.parents | other)
    assert str(trained) not in "".join(path.read_text() for path in (trained / "ppo").rglob("*.json"))


@pytest.mark.parametrize("value", ["reward", "policy_head"])
def test_the_saved_models_equal_the_trained_ones(adapters_copy: Path, value: str) -> None:
    """The merged models on disk equal the four models in memory."""
    changes = (*LORA, "-s", f"models.value={value}")
    run(adapters_copy, "ppo", *changes)
    parts = loaded(adapters_copy, f"models.value={value}")
    parts.trainer.load_state_dict(save.load_tree(runs.state_at(Path("ppo/state"), 2))["trainer"])
    models, ids = four(parts), some_ids()
    with torch.no_grad():
        trained_output = models["policy"](input_ids=ids)
        saved_logits = load_causal_lm("ppo/model").eval()(input_ids=ids).logits
        assert torch.allclose(saved_logits, trained_output.logits, atol=1e-5)
        assert not torch.allclose(saved_logits, models["ref"](input_ids=ids).logits, atol=1e-2)
        scorer = load_reward_model("ppo/value").eval()
        hidden = scorer.base_model(input_ids=ids).last_hidden_state
        if value == "policy_head":
            values = models["value"](models["policy"].base_model(input_ids=ids).last_hidden_state)
        else:
            values = models["value"].score(models["value"].base_model(input_ids=ids).last_hidden_state)[..., 0]
        assert values.abs().max() > 1e-3 and torch.allclose(scorer.score(hidden)[..., 0], values, atol=1e-5)
        read = load_reward_model("reward/model").eval()(input_ids=ids).logits
        assert torch.allclose(models["reward"](input_ids=ids).logits, read, atol=1e-5)


# Resume


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("reward", "qlora"),
        ("policy_head", "lora"),
        pytest.param("reward", "lora", marks=pytest.mark.slow),
        pytest.param("none", "lora", marks=pytest.mark.slow),
    ],
)
def test_resume_equals_a_straight_run(adapters_run: Path, trained: Path, tmp_path: Path, value: str, kind: str) -> None:
    folders = [shutil.copytree(adapters_run, tmp_path / name) for name in ("straight", "stopped")]
    changes = (*LONG, "-s", f"models.value={value}", "-s", f"models.adapters.kind={kind}")
    files, samples = FILES, ("-s", "ppo.advantage=grpo", "-s", "ppo.num_samples_per_prompt=2")
    if value == "none":
        changes, files = (*changes, *samples), FILES[:1]
    if (source := "average" if value == "policy_head" else "policy") == "average":
        changes = (*changes, "-s", "ppo.average=0.5")
    straight = run(folders[0], "ppo", *changes)
    ppo_folder.stop_in_update(folders[1], 3, *changes)
    resumed = run(folders[1], "ppo", *changes)
    for folder in (folders[0], trained) if (value, kind) == ("reward", "lora") else folders[:1]:
        for name in (*files, "samples.jsonl"):
            assert (folder / "ppo" / name).read_bytes() == (folders[1] / "ppo" / name).read_bytes(), name
        assert lines(folder) == lines(folders[1])
    assert resumed["model_sha256"] == straight["model_sha256"] and resumed["metrics"] == straight["metrics"]
    kept = save.load_tree(folders[1] / "ppo/state/step_000005")["trainer"][source]
    saved = load_file(folders[1] / "ppo" / files[0])
    assert all(torch.equal(saved[f"base_model.model.{n.replace('.default.', '.')}"], w) for n, w in kept.items())
    assert (folders[1] / "ppo/value").exists() is (value != "none")
    if value == "none":
        ppo_folder.must_succeed(ppo_folder.rlhf("verify", folders[1]))
        assert disagreements(compare_run(folders[1])) == {}
        run(folders[1], "eval")


# Dtypes


def test_bfloat16_applies_to_the_base_and_not_to_trained_weights(adapters_copy: Path) -> None:
    run(adapters_copy, "ppo", *LORA, "-s", "ppo.bf16=true", "-s", "models.dtype=bfloat16")
    first, last = lines(adapters_copy)
    assert first["objective/kl"] == 0.0 < last["objective/kl_k1"]
    for name in FILES:
        assert {tensor.dtype for tensor in load_file(f"ppo/{name}").values()} == {torch.float32}
    parts = loaded(adapters_copy, "models.dtype=bfloat16")
    assert {weight.dtype for weight in parts.trainer.ref.parameters()} == {torch.bfloat16}
    trained = [p for m in (parts.trainer.policy, parts.trainer.value) for p in m.parameters() if p.requires_grad]
    assert {weight.dtype for weight in trained} == {torch.float32}


# Later stages


def test_an_evaluation_loads_one_base_and_gives_the_numbers_of_merged_models(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, plain = [], model_loading.load_model

    def load_model(loader: Any, *args: Any, **options: Any) -> Any:
        loads.append(loader.__name__)
        return plain(loader, *args, **options)

    monkeypatch.setattr(model_loading, "load_model", load_model)
    reports = []
    for whole in (False, True):
        if whole:
            monkeypatch.setattr(SharedBaseModels, "own_weights_reason", lambda *_: "for this test")
        run(copied, "eval", "--fresh")
        reports.append(json.loads(Path("eval/report.json").read_text())["models"])
        assert (loads == ["load_causal_lm"]) is not whole and len(loads) <= 8
        loads.clear()
    for name in ("sft", "ppo"):
        one, other = (report[name] for report in reports)
        assert one["reward_mean"] == pytest.approx(other["reward_mean"], rel=1e-4)
        assert one["kl"] == pytest.approx(other["kl"], rel=1e-3, abs=1e-5)


def test_eval_and_verify_read_adapters(copied: Path) -> None:
    run(copied, "eval")
    report = json.loads(Path("eval/report.json").read_text())
    assert abs(report["models"]["sft"]["kl"]) < 1e-3 < report["models"]["ppo"]["kl"]
    assert len(report["frontier"]) >= 2  # each snapshot was read too
    for step in ("1", "5"):
        result = ppo_folder.rlhf("verify", copied, "--step", step, "--json")
        verified = json.loads(result.stdout)
        assert result.exit_code == 0 and verified["exact"] and verified["agrees"], verified["told"]
        assert disagreements(compare_run(copied, int(step))) == {}
    counts = {each["name"]: each["count"] for each in verified["quantities"]}  # of step 5, with a checkpoint after it
    shapes = [tensor.shape for tensor in load_file("sft/model/adapter_model.safetensors").values()]
    assert counts["policy weights"] == 3 * sum(shape[shape.index(4) - 1] for shape in shapes)


def test_a_snapshot_of_adapters_is_evaluated_until_its_base_changes(copied: Path) -> None:
    snapshot = max(path.relative_to(copied) for path in (copied / "ppo/snapshots").iterdir())
    changes = ("eval.temperature=1.0", "eval.response_length=6", "eval.n=4", f"models.ppo={snapshot}")
    result = rlhf("eval", *(word for change in changes for word in ("-s", change)))
    assert result.exit_code == 0, result.stderr
    assert json.loads(Path("eval/report.json").read_text())["models"]["ppo"]["kl"] > 1e-3
    run(copied, "sft", "--fresh", "-s", "seed=1")
    refused = rlhf("eval", "-s", f"models.ppo={snapshot}")
    assert refused.exit_code == 2 and "error[M04]" in refused.stderr and "has changed since" in refused.stderr


# Reward models that are not adapters of the SFT model


def test_a_reward_adapter_of_another_base_is_reported(adapters_copy: Path) -> None:
    replace("reward.yaml", "path: sft", "path: model")
    run(adapters_copy, "reward", "--fresh")
    result = rlhf("ppo", *LORA)
    assert result.exit_code == 0 and "is an adapter of other weights than models.sft's: " in result.stderr
    assert load_reward_model("ppo/value").score.weight.abs().max() > 0
