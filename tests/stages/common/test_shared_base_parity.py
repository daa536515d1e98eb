"""Four models on one base equal four separate copies: logits, scores, values and gradients, by family."""

import copy
from itertools import product
from typing import Any

import pytest
import tiny
import torch

from rlhf_cli.config.sections import Adapters
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


def on_one_base(base: Any, **settings: Any) -> dict[str, Any]:
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


def test_four_models_on_one_4_bit_base_equal_four_on_the_dequantized_base() -> None:
    """In float32: the same weights, once packed and once as plain matrices."""
    import bitsandbytes as bnb

    sizes = {"hidden_size": 64, "intermediate_size": 128}
    models = []
    for packed in (True, False):
        base = tiny.causal(**sizes)
        lora.quantize(base, CPU, bf16=False)
        quantized = [(owner, name, layer) for owner, name, layer in lora.linear_layers(base)]
        assert len(quantized) == 14 and all(layer.weight.dtype == torch.uint8 for _, _, layer in quantized)
        if not packed:
            for owner, name, layer in quantized:
                plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
                plain.weight.data = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
                setattr(owner, name, plain)
            del base.is_loaded_in_4bit
        models.append(on_one_base(base))
    assert all(lora.is_quantized(model) for model in models[0].values())
    weights = [{id(w): w.nbytes for m in each.values() for w in m.parameters()} for each in models]
    assert sum(weights[0].values()) < 0.6 * sum(weights[1].values())
    one, other = (trainer(each) for each in models)
    experiences = [each.make_experience(tiny.rollout()) for each in (one, other)]
    for name in ("logprobs", "ref_logprobs", "values", "scores"):
        value, expected = (getattr(experience, name) for experience in experiences)
        assert expected.abs().max() > 1e-2 and torch.allclose(value, expected, atol=1e-4), name
    gradients = [tiny.gradient(each, made) for each, made in zip((one, other), experiences, strict=True)]
    assert gradients[1].norm() > 1e-3 and relative_error(*gradients) < 1e-3


def relative_error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "packing", "checkpointing"),
    [
        *product(("llama", "gpt2", "qwen3", "gpt_neox"), (True, False), (False,)),
        *product(("llama", "qwen3"), (True, False), (True,)),
    ],
)
def test_one_base_equals_four_separate_copies(family: str, packing: bool, checkpointing: bool) -> None:
    shared = on_one_base(tiny.causal(family), use_dora=family == "qwen3")
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
