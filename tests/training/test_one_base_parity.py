"""Four models on one base equal four separate copies: logits, scores, values and gradients, by family."""

import copy
from typing import Any

import pytest
import tiny
import torch

from rlhf_cli.config.common import Adapters
from rlhf_cli.models import load, lora, sharding
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.model import ModelReward

CPU = torch.device("cpu")
SETTINGS = {"num_mini_batches": 1, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}


def with_adapters(model: Any, seed: int, **settings: Any) -> Any:
    """Add adapters with random weights; in new ones B is zero."""
    adapters = Adapters(kind="lora", **{"r": 2, **settings})
    torch.manual_seed(seed)
    peft_model = lora.add_adapters(model, adapters, vocab_size=0, base="base", revision=None, device=CPU, bf16=False)
    for name, weight in peft_model.named_parameters():
        if weight.requires_grad:
            weight.data += 0.1 * torch.randn_like(weight)
        assert weight.requires_grad == any(part in name for part in lora.TRAINABLE)
    return lora.unwrap(peft_model)


def on_one_base(family: str, **settings: Any) -> dict[str, Any]:
    base = tiny.causal(family)
    models = {"ref": base, "policy": with_adapters(sharding.clone_sharing_weights(base), 1, **settings)}
    for seed, role in ((2, "value"), (3, "reward")):
        torch.manual_seed(seed)
        head = torch.nn.Linear(base.config.hidden_size, 1, bias=False)
        models[role] = with_adapters(
            load.reward_model_from_backbone(sharding.clone_sharing_weights(base), head), seed, **settings
        )
    return models


def trainer(models: dict[str, Any], **changes: Any) -> PPOTrainer:
    chosen = tiny.settings(**SETTINGS, **changes)
    engine = HFEngine(models["policy"], tiny.EOS, tiny.PAD, chosen.temperature)
    rewards = {"reward": ModelReward(models["reward"].requires_grad_(False), 4, packed=chosen.packing)}
    return PPOTrainer(models["policy"], models["ref"], models["value"], rewards, engine, chosen)


def relative_error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gpt_neox"])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_one_base_equals_four_separate_copies(family: str, packing: bool, checkpointing: bool) -> None:
    shared = on_one_base(family, use_dora=family == "qwen3")
    separate = {role: copy.deepcopy(model) for role, model in shared.items()}
    ones, others = ({p.data_ptr() for m in each.values() for p in m.parameters()} for each in (shared, separate))
    assert not ones & others and len(ones) < len(others)
    trainers = [trainer(m, packing=packing, gradient_checkpointing=checkpointing) for m in (shared, separate)]
    assert [each.model_runner.packed for each in trainers] == [packing, packing]
    one, other = (each.make_experience(tiny.rollout()) for each in trainers)
    for name in ("logprobs", "ref_logprobs", "values", "scores"):
        value, expected = getattr(one, name), getattr(other, name)
        assert expected.abs().max() > 1e-2 and torch.allclose(value, expected, atol=1e-5), name
    assert (one.logprobs - one.ref_logprobs).abs().max() > 1e-2  # the reference has no adapters
    gradients = [tiny.gradient(each, experience) for each, experience in zip(trainers, (one, other), strict=True)]
    assert gradients[1].norm() > 1e-3 and relative_error(*gradients) < 1e-5
    for role in ("ref", "reward"):
        assert all(weight.grad is None for weight in shared[role].parameters())
