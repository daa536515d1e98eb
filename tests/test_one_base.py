"""`models.adapters` of PPO: four models on one base, what learns, what is left, read again, resumed, replayed."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ppo_folder
import pytest
import torch
from adapter_folder import run, widen, write
from bad_inputs import replace, rlhf
from conftest import World
from safetensors.torch import load_file

from rlhf_cli import runs
from rlhf_cli.config.base import Options
from rlhf_cli.config.loading import load
from rlhf_cli.models import save
from rlhf_cli.models.batch import Prompts
from rlhf_cli.models.load import load_causal_lm, load_reward_model
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.stages import hardware
from rlhf_cli.stages.ppo_setup import PPOComponents, load_components

pytestmark = [pytest.mark.training, pytest.mark.usefixtures("no_page")]
LORA = ("-s", "models.adapters={kind: lora, r: 3}", "-s", "ppo.learning_rate=1e-2")
LONG = (*LORA, "-s", "ppo.total_episodes=40", "-s", "output.save_steps=2", "-s", "output.snapshots=2")
FILES = ("model/adapter_model.safetensors", "value/adapter_model.safetensors")


@pytest.fixture(scope="module")
def trained(adapters_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose PPO trained adapters too, five updates long. Not to be changed."""
    folder = shutil.copytree(adapters_run, tmp_path_factory.mktemp("one-base") / "run")
    run(folder, "ppo", *LONG)
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that run elsewhere, in which the test stands."""
    monkeypatch.chdir(shutil.copytree(trained, tmp_path / "moved"))
    return tmp_path / "moved"


def loaded(folder: Path, *changes: str) -> PPOComponents:
    """The run's models as `rlhf ppo` has them before the first update."""
    config = load("ppo", folder / "ppo.yaml", ["models.adapters={kind: lora, r: 3}", *changes])
    return load_components(config, Options(), runs.open_parents(config))


def lines(folder: Path) -> list[dict[str, Any]]:
    return ppo_folder.untimed(folder / "ppo/metrics.jsonl")


def some_ids() -> torch.Tensor:
    return torch.randint(2, 300, (3, 12), generator=torch.Generator().manual_seed(0))


# What learns


def four(parts: PPOComponents) -> dict[str, Any]:
    trainer = parts.trainer
    (reward,) = trainer.rewards.values()
    return {"policy": trainer.policy, "ref": trainer.ref, "value": trainer.value, "reward": reward.model}


def learners(model: Any) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("value", ["reward", "policy_head"])
def test_adapters_and_the_value_head_learn_and_nothing_else(adapters_copy: Path, value: str) -> None:
    parts = loaded(adapters_copy, f"models.value={value}", "ppo.learning_rate=1e-2", "ppo.num_ppo_epochs=1")
    models, trainer = four(parts), parts.trainer
    before = {
        role: {name: weight.detach().clone() for name, weight in model.named_parameters()}
        for role, model in models.items()
    }
    heads = {"score.modules_to_save.default.weight", "score.weight"}
    assert learners(models["ref"]) == learners(models["reward"]) == set()
    assert len(learners(models["policy"])) == 2 * 7 * 2 and all(".lora_" in n for n in learners(models["policy"]))
    assert len(learners(models["value"]) & heads) == 1
    assert len(learners(models["value"]) - heads) == (0 if value == "policy_head" else 2 * 7 * 2)
    held = {id(weight) for group in trainer.optimizer.param_groups for weight in group["params"]}
    for name in ("policy", "value"):
        groups = [each for each in trainer.optimizer.param_groups if each["name"].startswith(name)]
        wanted = [weight for weight in models[name].parameters() if weight.requires_grad]
        assert {id(weight) for group in groups for weight in group["params"]} == {id(weight) for weight in wanted}
    assert len(held) == len(learners(models["policy"])) + len(learners(models["value"]))
    for _ in range(2):  # at the first step A has no gradient: B is zero
        trainer.step(Prompts.from_lists([prompt.ids for prompt in parts.prompts[:8]]))
    for role, model in models.items():
        for name, weight in model.named_parameters():
            learns = name in learners(model)
            assert (weight.grad is not None) == learns and torch.equal(weight, before[role][name]) != learns, name


def test_the_first_kl_is_exactly_0_and_the_policy_moves(trained: Path) -> None:
    first, *_, last = lines(trained)
    assert first["objective/kl"] == first["objective/kl_k1"] == first["policy/first_ratio_error"] == 0.0
    assert last["objective/kl_k1"] > 0.05 and last["policy/first_ratio_error"] == 0.0


def test_whole_models_unless_adapters_are_asked_for(adapters_copy: Path) -> None:
    config = load("ppo", adapters_copy / "ppo.yaml")
    assert config.models.adapters is None
    parts = load_components(config, Options(), runs.open_parents(config))
    trainer = parts.trainer
    assert all(weight.requires_grad for model in (trainer.policy, trainer.value) for weight in model.parameters())
    kept = {name for name, _ in trainer.policy.named_parameters()}
    assert kept <= trainer.state_dict()["policy"].keys() == trainer.policy.state_dict().keys()


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


def test_the_four_take_little_more_than_one(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured, and by `rlhf plan`: the same bytes."""
    monkeypatch.chdir(wide)
    models = four(loaded(wide, "models.adapters.r=1"))
    one, all_four = weights_of([models["ref"]]), weights_of(models.values())
    assert one < all_four <= 1.15 * one
    assert weights_of([models["policy"], models["ref"]]) < all_four
    told = ("ppo.yaml", "models.adapters={kind: lora, r: 1}", "--json", "--flops", "1e9")
    result = ppo_folder.rlhf("plan", *told)
    (plan,) = json.loads(result.stdout)["stages"]
    held = {phase["name"]: phase["bytes"] for phase in plan["phases"]}
    heads = 4 * models["ref"].config.hidden_size  # peft keeps a head as it was, too
    buffers = 4 * 4 * models["ref"].model.rotary_emb.inv_freq.numel() * 2
    assert plan["mode"] == "one-base"
    assert abs(held["judge"]["weights"] - all_four) <= 2 * heads + buffers
    learns = sum(p.numel() for m in (models["policy"], models["value"]) for p in m.parameters() if p.requires_grad)
    assert held["judge"]["gradients"] == 4 * learns


def test_the_base_is_counted_once_before_a_run(adapters_copy: Path) -> None:
    numbers = sum(tensor.numel() for tensor in load_file("model/model.safetensors").values())
    config = load("ppo", adapters_copy / "ppo.yaml", ["models.adapters={kind: lora}"])
    assert hardware._count_trained_and_frozen(config, runs.open_parents(config)) == (0, numbers)


# What PPO leaves


def test_ppo_leaves_adapters_beside_the_sft_model(trained: Path) -> None:
    manifest = json.loads((trained / "ppo/manifest.json").read_text())
    snapshots = sorted((trained / "ppo/snapshots").iterdir())
    for folder, base in (
        (trained / "ppo/model", "../../sft/model"),
        (trained / "ppo/value", "../../sft/model"),
        *((path, "../../../sft/model") for path in snapshots),
    ):
        names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert names >= {"adapter_config.json", "adapter_model.safetensors", "merged/config.json", "tokenizer.json"}
        assert "model.safetensors" not in names and "config.json" not in names
        told = json.loads((folder / "adapter_config.json").read_text())
        assert told["base_model_name_or_path"] == base and told["target_modules"] == sorted(told["target_modules"])
        assert told["r"] == (4 if folder.name == "value" else 3)  # the value model's is a copy of the reward model's
    assert {path.name for path in snapshots} >= {"step_000002", "step_000005"}  # 0 too where it was the best
    assert manifest["parents"]["models.sft"]["path"] == "../sft" and manifest["model_sha256"]
    assert str(trained) not in "".join(path.read_text() for path in (trained / "ppo").rglob("*.json"))


def test_the_hash_of_the_policy_covers_its_base(trained: Path) -> None:
    from rlhf_cli.runs.adapters import sha256_with_base

    manifest = json.loads((trained / "ppo/manifest.json").read_text())
    parents = manifest["parents"]
    assert manifest["model_sha256"] == sha256_with_base(manifest["files"], parents)
    other = {**parents, "models.sft": {**parents["models.sft"], "sha256": "0" * 64}}
    assert manifest["model_sha256"] != sha256_with_base(manifest["files"], other)


def test_a_state_holds_what_learns_alone(trained: Path) -> None:
    state = save.load_tree(runs.state_at(trained / "ppo/state", 5))["trainer"]
    assert all(".lora_" in name for name in state["policy"]) and len(state["policy"]) == 28
    heads = {name for name in state["value"] if ".lora_" not in name}
    assert heads == {"score.modules_to_save.default.weight"} and len(state["value"]) == 29
    assert len(state["optimizer"]["state"]) == 28 + 29


@pytest.mark.parametrize("value", ["reward", "policy_head"])
def test_what_is_read_is_what_was_trained(adapters_copy: Path, value: str) -> None:
    """The sums of base and adapter on the disk, against the four models as they stood."""
    told = (*LORA, "-s", f"models.value={value}")
    run(adapters_copy, "ppo", *told)
    parts = loaded(adapters_copy, f"models.value={value}")
    parts.trainer.load_state_dict(save.load_tree(runs.state_at(Path("ppo/state"), 2))["trainer"])
    models, ids = four(parts), some_ids()
    with torch.no_grad():
        theirs = models["policy"](input_ids=ids)
        ours = load_causal_lm("ppo/model").eval()(input_ids=ids).logits
        assert torch.allclose(ours, theirs.logits, atol=1e-5)
        assert not torch.allclose(ours, models["ref"](input_ids=ids).logits, atol=1e-2)
        scorer = load_reward_model("ppo/value").eval()
        hidden = scorer.base_model(input_ids=ids).last_hidden_state
        if value == "policy_head":
            values = models["value"](models["policy"].base_model(input_ids=ids).last_hidden_state)
        else:
            values = models["value"].score(models["value"].base_model(input_ids=ids).last_hidden_state)[..., 0]
        assert values.abs().max() > 1e-3 and torch.allclose(scorer.score(hidden)[..., 0], values, atol=1e-5)
        read = load_reward_model("reward/model").eval()(input_ids=ids).logits
        assert torch.allclose(models["reward"](input_ids=ids).logits, read, atol=1e-5)


def test_the_best_policy_is_brought_back_where_a_run_is_stopped(adapters_copy: Path) -> None:
    result = rlhf("ppo", *LONG, "-s", "ppo.kl_stop=0.001", "-s", "output.snapshots=0")
    assert result.exit_code == 1 and "error[R04]" in result.stderr, result.stderr
    made = json.loads(Path("ppo/manifest.json").read_text())
    (kept,) = Path("ppo/snapshots").glob("step_*")
    assert kept.name == f"step_{made['step']:06d}" and made["model_is"] == "the best step"
    assert made["step"] < lines(adapters_copy)[-1]["step"]  # by then it has moved on
    name = "adapter_model.safetensors"
    assert (kept / name).read_bytes() == (adapters_copy / "ppo/model" / name).read_bytes()


# A kill and a resume


@pytest.mark.parametrize("value", ["reward", "policy_head"])
def test_a_stopped_run_ends_in_the_bytes_of_a_straight_one(
    adapters_run: Path, trained: Path, tmp_path: Path, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [shutil.copytree(adapters_run, tmp_path / name) for name in ("straight", "stopped")]
    told = (*LONG, "-s", f"models.value={value}")
    whole = run(folders[0], "ppo", *told)
    real = PPOTrainer.step

    def step(self: Any, prompts: Any) -> Any:
        stats = real(self, prompts)
        if self.updates == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return stats

    with monkeypatch.context() as patched:
        patched.setattr(PPOTrainer, "step", step)
        assert rlhf("ppo", "-c", str(folders[1] / "ppo.yaml"), *told).exit_code == 143
    again = run(folders[1], "ppo", *told)
    for folder in (folders[0], trained) if value == "reward" else folders[:1]:
        for name in (*FILES, "samples.jsonl"):
            assert (folder / "ppo" / name).read_bytes() == (folders[1] / "ppo" / name).read_bytes(), name
        assert lines(folder) == lines(folders[1])
    assert again["model_sha256"] == whole["model_sha256"] and again["metrics"] == whole["metrics"]


# Formats


def test_in_bfloat16_the_base_is_and_what_learns_is_not(adapters_copy: Path) -> None:
    run(adapters_copy, "ppo", *LORA, "-s", "ppo.bf16=true", "-s", "models.dtype=bfloat16")
    first, last = lines(adapters_copy)
    assert first["objective/kl"] == 0.0 < last["objective/kl_k1"]
    for name in FILES:
        assert {tensor.dtype for tensor in load_file(f"ppo/{name}").values()} == {torch.float32}
    parts = loaded(adapters_copy, "models.dtype=bfloat16")
    assert {weight.dtype for weight in parts.trainer.ref.parameters()} == {torch.bfloat16}
    learns = [p for m in (parts.trainer.policy, parts.trainer.value) for p in m.parameters() if p.requires_grad]
    assert {weight.dtype for weight in learns} == {torch.float32}


# What later stages read


def test_evaluation_and_replay_read_it(copied: Path) -> None:
    run(copied, "eval")
    report = json.loads(Path("eval/report.json").read_text())
    assert abs(report["models"]["sft"]["kl"]) < 1e-3 < report["models"]["ppo"]["kl"]
    assert len(report["frontier"]) >= 2  # each snapshot was read too
    for step in ("1", "5"):
        result = ppo_folder.rlhf("verify", copied, "--step", step, "--json")
        told = json.loads(result.stdout)
        assert result.exit_code == 0 and told["exact"] and told["agrees"], told["told"]
        counts = {each["name"]: each["count"] for each in told["quantities"]}
        assert counts["policy weights, change"] == 3 * sum(
            tensor.shape[tensor.shape.index(4) - 1]
            for tensor in load_file("sft/model/adapter_model.safetensors").values()
        )


def snapshots(folder: Path) -> Iterator[Path]:
    yield from sorted(path.relative_to(folder) for path in (folder / "ppo/snapshots").iterdir())


def test_a_snapshot_is_evaluated_beside_its_base(copied: Path) -> None:
    told = ("-s", "eval.temperature=1.0", "-s", "eval.response_length=6", "-s", "eval.n=4")
    *_, last = snapshots(copied)
    result = rlhf("eval", *told, "-s", f"models.ppo={last}")
    assert result.exit_code == 0, result.stderr
    assert json.loads(Path("eval/report.json").read_text())["models"]["ppo"]["kl"] > 1e-3


def test_m04_a_snapshot_whose_base_is_another_by_now(copied: Path) -> None:
    run(copied, "sft", "--fresh", "-s", "seed=1")
    *_, last = snapshots(copied)
    refused = rlhf("eval", "-s", f"models.ppo={last}")
    assert refused.exit_code == 2 and "error[M04]" in refused.stderr and "has changed since" in refused.stderr


# Models that are no adapters of the SFT model


def test_a_whole_reward_model_is_held_once_more_and_said(adapters_copy: Path) -> None:
    replace("reward.yaml", ", adapters: {kind: lora, r: 4}", "")
    run(adapters_copy, "reward", "--fresh")
    result = rlhf("ppo", *LORA)
    assert result.exit_code == 0 and result.stderr.count("is a whole model: 117.5 kB of memory more") == 1
    told = json.loads(Path("ppo/value/adapter_config.json").read_text())
    assert (told["base_model_name_or_path"], told["r"]) == ("../../reward/model", 3)
    parts = loaded(adapters_copy)
    models = four(parts)
    assert weights_of([models["value"], models["reward"]]) < 1.3 * weights_of([models["reward"]])
    ids = some_ids()
    with torch.no_grad():
        assert torch.equal(models["value"](input_ids=ids).logits, models["reward"](input_ids=ids).logits)
        parts.trainer.load_state_dict(save.load_tree(runs.state_at(Path("ppo/state"), 2))["trainer"])
        read = load_reward_model("ppo/value").eval()(input_ids=ids).logits
        assert torch.allclose(models["value"](input_ids=ids).logits, read, atol=1e-5)
        assert not torch.allclose(read, models["reward"](input_ids=ids).logits, atol=1e-3)
    numbers = sum(tensor.numel() for tensor in load_file("model/model.safetensors").values())
    config = load("ppo", adapters_copy / "ppo.yaml", ["models.adapters={kind: lora}"])
    assert hardware._count_trained_and_frozen(config, runs.open_parents(config)) == (0, 2 * numbers)


def test_a_reward_adapter_of_the_base_below_is_another_model(adapters_copy: Path) -> None:
    replace("reward.yaml", "path: sft", "path: model")
    run(adapters_copy, "reward", "--fresh")
    result = rlhf("ppo", *LORA)
    assert result.exit_code == 0 and "is an adapter of other weights than models.sft's: " in result.stderr
    assert load_reward_model("ppo/value").score.weight.abs().max() > 0


def test_without_an_sft_stage_the_base_is_the_one_that_is_named(adapters_copy: Path) -> None:
    """As configs/instruct: reward adapters and policy on a model that we did not train; an ensemble on it, too."""
    replace("reward.yaml", "path: sft", "path: model")
    run(adapters_copy, "reward", "--fresh")
    shutil.copytree("reward", "second")
    changes = ["models.sft=model", "models.value=second", "rewards={both: {models: {a: reward, b: second}}}"]
    told = [text for change in changes for text in ("-s", change)]
    manifest = run(adapters_copy, "ppo", *LORA, *told)
    assert manifest["parents"]["models.sft"]["stage"] == "foreign"
    assert json.loads(Path("ppo/model/adapter_config.json").read_text())["base_model_name_or_path"] == "../../model"
    trainer = loaded(adapters_copy, *changes).trainer
    members = [member.model for member in trainer.rewards["both"].members.values()]
    assert members[0] is not members[1]
    one, all_five = weights_of([trainer.ref]), weights_of([trainer.ref, trainer.policy, trainer.value, *members])
    adapters = sum(
        weight.nbytes
        for model in (trainer.policy, trainer.value, *members)
        for name, weight in model.named_parameters()
        if ".lora_" in name or "score" in name
    )
    assert all_five == one + adapters
    assert load_causal_lm("ppo/model").num_parameters() == trainer.ref.num_parameters()
