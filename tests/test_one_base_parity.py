"""One base against four separate copies with the same adapters: logits, scores, values and gradients, by family."""

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from rlhf_cli.config.adapters import Adapters
from rlhf_cli.models import load, lora, save, sharding
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.model import ModelReward

CPU = torch.device("cpu")
SETTINGS = {"num_mini_batches": 1, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}


def with_adapters(model: Any, seed: int, **told: Any) -> Any:
    """The plain model with adapters that do something: B is zero in a fresh one."""
    ours = Adapters(kind="lora", **{"r": 2, **told})
    torch.manual_seed(seed)
    made = lora.add_adapters(model, ours, vocab_size=0, base="base", revision=None, device=CPU, bf16=False)
    for name, weight in made.named_parameters():
        if weight.requires_grad:
            weight.data += 0.1 * torch.randn_like(weight)
        assert weight.requires_grad == any(part in name for part in lora.TRAINABLE)
    return lora.unwrap(made)


def on_one_base(family: str, **told: Any) -> dict[str, Any]:
    base = tiny.causal(family)
    found = {"ref": base, "policy": with_adapters(sharding.clone_sharing_weights(base), 1, **told)}
    for seed, role in ((2, "value"), (3, "reward")):
        torch.manual_seed(seed)
        head = torch.nn.Linear(base.config.hidden_size, 1, bias=False)
        found[role] = with_adapters(
            load.reward_model_from_backbone(sharding.clone_sharing_weights(base), head), seed, **told
        )
    return found


def trainer(models: dict[str, Any], **changes: Any) -> PPOTrainer:
    chosen = tiny.settings(**SETTINGS, **changes)
    engine = HFEngine(models["policy"], tiny.EOS, tiny.PAD, chosen.temperature)
    rewards = {"reward": ModelReward(models["reward"].requires_grad_(False), 4, packed=chosen.packing)}
    return PPOTrainer(models["policy"], models["ref"], models["value"], rewards, engine, chosen)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gpt_neox"])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_one_base_is_four_separate_copies(family: str, packing: bool, checkpointing: bool) -> None:
    shared = on_one_base(family, use_dora=family == "qwen3")
    separate = {role: copy.deepcopy(model) for role, model in shared.items()}
    ones, others = ({p.data_ptr() for m in each.values() for p in m.parameters()} for each in (shared, separate))
    assert not ones & others and len(ones) < len(others)
    made = [trainer(m, packing=packing, gradient_checkpointing=checkpointing) for m in (shared, separate)]
    assert [each.model_runner.packed for each in made] == [packing, packing]
    one, other = (each.make_experience(tiny.rollout()) for each in made)
    for name in ("logprobs", "ref_logprobs", "values", "scores"):
        found, wanted = getattr(one, name), getattr(other, name)
        assert wanted.abs().max() > 1e-2 and torch.allclose(found, wanted, atol=1e-5), name
    assert (one.logprobs - one.ref_logprobs).abs().max() > 1e-2  # the reference has no adapters
    gradients = [tiny.gradient(each, experience) for each, experience in zip(made, (one, other), strict=True)]
    assert gradients[1].norm() > 1e-3 and apart(*gradients) < 1e-5
    for role in ("ref", "reward"):
        assert all(weight.grad is None for weight in shared[role].parameters())


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_one_base_is_the_sums_that_others_read(family: str) -> None:
    """Each of the four against base and adapter added up by peft, in a model of its own."""
    ids = torch.randint(3, tiny.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    shared = on_one_base(family)
    before = {role: model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits for role, model in shared.items()}
    for role, model in shared.items():
        alone = copy.deepcopy(model)
        for layer in alone.modules():
            if hasattr(layer, "merge") and hasattr(layer, "lora_A"):
                layer.merge()
                layer.lora_A.clear()
        read = alone(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        assert torch.allclose(read, before[role], atol=1e-5), role
    assert not torch.allclose(before["policy"], before["ref"], atol=1e-2)


def test_a_twin_has_modules_of_its_own_over_the_same_tensors() -> None:
    model = tiny.causal()
    other = sharding.clone_sharing_weights(model)
    assert not {id(m) for m in model.modules()} & {id(m) for m in other.modules()} and model.config is not other.config
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert all(a is b for a, b in zip(model.buffers(), other.buffers(), strict=True))
    other.model.layers[0] = torch.nn.Identity()
    assert not isinstance(model.model.layers[0], torch.nn.Identity)


def test_adapters_of_a_folder_stay_apart_and_are_its_numbers(tmp_path: Path) -> None:
    """`load_adapter` against `merge_adapter`, which adds the same into the weights."""
    base = tiny.causal()
    head = torch.nn.Linear(32, 1, bias=False)
    told = {"vocab_size": 0, "revision": None, "device": CPU, "bf16": False}
    made = lora.add_adapters(
        load.reward_model_from_backbone(sharding.clone_sharing_weights(base), head),
        Adapters(kind="lora", r=2),
        base=tmp_path / "base",
        **told,
    )
    made.get_base_model().config.reward_mean = 0.5
    for name, weight in made.named_parameters():
        weight.data += 0.1 if ".lora_" in name or ".modules_to_save." in name else 0
    made.save_pretrained(tmp_path / "reward")
    save.save_config(made.get_base_model(), tmp_path / "reward")
    config = load.read_config(tmp_path / "reward")
    torch.manual_seed(5)
    room = torch.nn.Linear(32, 1, bias=False)
    after = torch.random.get_rng_state()
    read = lora.load_adapter(
        load.reward_model_from_backbone(sharding.clone_sharing_weights(base), room),
        tmp_path / "reward",
        config,
        "hub/base",
    )
    assert torch.equal(torch.random.get_rng_state(), after)
    assert read.get_base_model().config.reward_mean == 0.5
    learns = {name for name, weight in read.named_parameters() if weight.requires_grad}
    assert len(learns) == 2 * 7 * 2 + 1 and not any(weight.requires_grad for weight in base.model.parameters())
    whole = load.reward_model_from_backbone(copy.deepcopy(base), torch.nn.Linear(32, 1, bias=False))
    lora.merge_adapter(whole, tmp_path / "reward", config)
    assert lora.head_weights(tmp_path / "reward") == {"score.weight"}
    ids = torch.randint(3, tiny.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    ours, theirs = (each.eval()(input_ids=ids).logits for each in (read.get_base_model(), whole))
    assert torch.allclose(ours, theirs, atol=1e-5) and torch.allclose(ours, made.eval()(input_ids=ids).logits)
    read.save_pretrained(tmp_path / "again")
    one, two = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("reward", "again"))
    assert one == two and '"hub/base"' in (tmp_path / "again/adapter_config.json").read_text()
