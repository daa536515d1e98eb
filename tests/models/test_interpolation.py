"""SFT + share * (PPO - SFT): by-hand weights, tied weights, the two ends, and adapters."""

from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch

from rlhf_cli.config.sections import Adapters
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import lora
from rlhf_cli.models.interpolation import interpolate
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.stages.eval.policy_evaluator import sequence_kl

IDS = torch.randint(3, tiny.VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


@torch.no_grad()
def filled(value: float, **options: Any) -> Any:
    model = tiny.causal(**options)
    for weight in model.parameters():
        weight.fill_(value)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_weight_moves_once(dtype: torch.dtype, *, tied: bool) -> None:
    """From 3 towards 1; a tied head that moved twice would be at 1.5."""
    sft, policy = (filled(value, tie_word_embeddings=tied).to(dtype) for value in (1.0, 3.0))
    interpolate(policy, sft, 0.5)
    assert all((weight == 2.0).all() and weight.dtype == dtype for weight in policy.parameters())
    assert (policy.lm_head.weight is policy.model.embed_tokens.weight) == tied and (policy.lm_head.weight == 2).all()
    assert all((weight == 1.0).all() for weight in sft.parameters()), "the SFT model stays"
    policy = filled(257.0, tie_word_embeddings=tied)
    interpolate(policy, filled(1.0, tie_word_embeddings=tied).to(dtype), 0.25)
    assert all((weight == 65.0).all() for weight in policy.parameters())


@pytest.mark.parametrize(("family", "share"), [("llama", 0.3), ("llama", 1.3), ("gpt2", 0.3), ("qwen3", 0.3)])
def test_the_logits_are_those_of_a_model_built_by_hand(family: str, share: float) -> None:
    sft, policy, built = (tiny.causal(family, seed) for seed in (0, 1, 2))
    ours, theirs = policy.state_dict(), sft.state_dict()
    built.load_state_dict({name: theirs[name] + share * (ours[name].double() - theirs[name]) for name in ours})
    before = logits(policy)
    interpolate(policy, sft, share)
    assert torch.allclose(logits(policy), logits(built), atol=1e-5) and not torch.allclose(logits(policy), before)


def test_the_ends_are_sft_with_no_kl_and_ppo_with_its_kl() -> None:
    """All on PPO's answers: two policies that are nearly equal may draw others."""
    prompts = replace(tiny.prompts(), seeds=tuple(range(8)), response_length=8)
    rollout = HFEngine(tiny.causal(seed=1), tiny.EOS, tiny.PAD, 0.7, 8).generate(prompts)
    kls = {}
    for share in (None, 0.0, 1e-4, 1 - 1e-4, 1.0):
        sft, policy = (tiny.causal(seed=seed) for seed in (0, 1))
        if share is not None:
            interpolate(policy, sft, share)
        kls[share] = sequence_kl(policy, sft, rollout, 0.7, max_rows=8)
    assert kls[1.0] == kls[None] and kls[0.0] == [0.0] * 8 and sum(kls[1.0]) > 1
    assert kls[1 - 1e-4] == pytest.approx(kls[1.0], rel=0.02, abs=0.02)
    assert kls[1e-4] == pytest.approx(kls[0.0], abs=0.02)


def test_scaled_adapters_equal_the_interpolation_of_merged_weights() -> None:
    adapted = []
    for _ in range(2):
        options: dict[str, Any] = {"vocab_size": 0, "base": "b", "revision": None, "device": torch.device("cpu")}
        model = lora.add_adapters(tiny.causal(), Adapters(kind="lora", r=3), bf16=False, **options).eval()
        generator = torch.Generator().manual_seed(1)
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                weight.data = torch.randn(weight.shape, generator=generator) / 4
        adapted.append(model)
    scaled, policy = adapted[0], lora.merge_and_unload(adapted[1])
    before = logits(policy)
    lora.scale_adapters(scaled, 0.3)
    interpolate(policy, tiny.causal(), 0.3)
    assert torch.allclose(logits(scaled), logits(policy), atol=1e-4) and not torch.allclose(before, logits(policy), 0.1)
    assert torch.allclose(logits(lora.merge_and_unload(scaled)), logits(policy), atol=1e-4)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"vocab_size": 20}, r"model.embed_tokens.weight is \[20, 32\], in the SFT model \[16, 32\]"),
        ({"num_hidden_layers": 1}, "layers.1.self_attn.q_proj.weight is missing, in the SFT model .32, 32."),
        ({"tie_word_embeddings": True}, "lm_head.weight is missing, in the SFT model"),
    ],
)
def test_other_weights_are_refused(other: dict[str, Any], text: str) -> None:
    with pytest.raises(RLHFError, match=text) as error:
        interpolate(tiny.causal(**other), tiny.causal(), 0.5)
    assert error.value.problems[0].code == "C17"
