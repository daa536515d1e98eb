"""Compiled layers train and draw as plain ones."""

from dataclasses import replace
from functools import cache

import pytest
import tiny
import torch

from rlhf_cli.models import compiled, packing
from rlhf_cli.ppo import fused_logprobs, rollout
from rlhf_cli.ppo.graph_engine import GraphEngine


@pytest.mark.full
@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"gradient_checkpointing": True, "entropy_coef": 0.1}, marks=pytest.mark.slow)]
)
def test_compiled_layers_train_as_plain_ones_and_the_first_ratio_is_1(changes, compiled_without_code):
    plain, trainer = (tiny.trainer(family="qwen2", **changes) for _ in range(2))
    trainer.engine.compiles = True
    for model in (*trainer.model_runner.trained_backbones, trainer.ref, trainer.rewards["reward"].model):
        compiled.enable(model)
    for _ in range(2):
        expected, stats = (each.step(tiny.prompts()) for each in (plain, trainer))
        for name in stats.keys() - {"tokens_per_s", *(name for name in stats if name.startswith("time/"))}:
            assert stats[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name
        assert stats["policy/first_ratio_error"] == 0
    assert compiled_without_code == {"_layer_forward", "logprobs_and_entropy", "logits_gradient", "sample"}
    assert "forward" not in vars(trainer.policy.model.layers[0]), "rollouts and checkpoints see the plain layers"


@pytest.mark.full
def test_a_compiled_token_step_draws_the_same_tokens_by_one_function_for_all_layers_and_batches(compiled_without_code):
    policy = tiny.causal("qwen2", num_hidden_layers=4)
    packing.enable([policy])
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()

    for rows in (8, 3, 5):
        prompts = replace(tiny.prompts(rows), seeds=tuple(range(rows)), response_length=20)
        plain = GraphEngine(policy, 5, 0, bf16=False).generate(prompts)
        fast = GraphEngine(policy, 5, 0, bf16=False, compiles=True).generate(prompts)
        assert torch.equal(plain.ids, fast.ids)
        assert torch.allclose(plain.logprobs, fast.logprobs, atol=1e-5)

    assert "_layer_forward" in compiled_without_code
    assert counters["unique_graphs"] <= 2 + 2, "of the layers and of sampling: for the first batch, and for any other"
    assert "forward" not in vars(policy.model.layers[0])


@pytest.mark.full
def test_a_compiled_token_step_keeps_the_cache_in_bfloat16_beside_weights_in_float32(compiled_without_code):
    """As with adapters on a GPU, where the engine samples from the policy itself."""
    policy = tiny.causal("llama")
    packing.enable([policy])
    prompts = replace(tiny.prompts(4), seeds=tuple(range(4)), response_length=6)
    plain = GraphEngine(policy, None, 0, bf16=True).generate(prompts)
    fast = GraphEngine(policy, None, 0, bf16=True, compiles=True).generate(prompts)
    assert torch.equal(plain.ids, fast.ids)
    assert torch.allclose(plain.logprobs, fast.logprobs, atol=0.02)


@pytest.fixture
def compiled_without_code(monkeypatch):
    """Compile by tracing alone, which takes a second and not a minute; return the names of what is compiled."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    made, names = compiled.compiled.__wrapped__, set()
    cached = cache(made)

    def recorded(function):
        names.add(function.__name__)
        return cached(function)

    for module in (compiled, fused_logprobs, rollout):
        monkeypatch.setattr(module, "compiled", recorded)
    return names
