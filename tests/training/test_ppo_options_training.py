"""Options of training: learning rates, the value model's own options, shared layers."""

import math
from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest
import tiny
import torch

from rlhf_cli.config.ppo_algorithm import SCHEDULERS
from rlhf_cli.models import forward
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer


def steps(trainer, count: int):
    return [trainer.step(tiny.prompts(seed=step)) for step in range(count)]


def both(trainer):
    return tiny.weights(trainer.policy), tiny.weights(trainer.value)


# Learning rates


@pytest.mark.parametrize("policy_rate,value_rate", [(0.0, 1e-2), (1e-2, 0.0)])
def test_value_learning_rate_moves_only_the_value_model(policy_rate, value_rate):
    trainer = tiny.trainer(learning_rate=policy_rate, value_learning_rate=value_rate)
    before, stats = both(trainer), steps(trainer, 1)[0]
    unchanged = [torch.equal(old, new) for old, new in zip(before, both(trainer), strict=True)]
    assert unchanged == [policy_rate == 0.0, value_rate == 0.0]
    assert (stats["lr"], stats["value/lr"]) == (policy_rate, value_rate)


@pytest.mark.parametrize("rate", [1e-3, 4e-3])
def test_value_learning_rate_by_the_size_of_adams_first_step(rate):
    """AdamW's first step is the learning rate, whatever the gradient."""
    trainer, experience = tiny.trainer_and_experience(
        value_learning_rate=rate, learning_rate=1e-4, num_ppo_epochs=1, adam_epsilon=1e-12
    )
    before = both(trainer)
    trainer.update(experience)
    moves = [(after - start).abs().max().item() for after, start in zip(both(trainer), before, strict=True)]
    assert moves == pytest.approx([1e-4, rate], rel=1e-2)


PEAK, UPDATES, WARM, VALUE_WARM = 1e-3, 10, 2, 5


def decay(name: str, k: int, warm: int) -> float:
    """The share of the peak at update k, as transformers documents each schedule."""
    if name == "constant":
        return 1.0
    if k < warm:
        return k / warm
    left = (UPDATES - k) / (UPDATES - warm)
    half_wave = 0.5 * (1 + math.cos(math.pi * (1 - left)))
    return {
        "linear": left,
        "cosine": half_wave,
        "constant_with_warmup": 1.0,
        "polynomial": left + 1e-7 / PEAK * (1 - left),  # power 1, down to 1e-7
        "inverse_sqrt": math.sqrt(warm / k) if k else 1.0,
        "cosine_with_min_lr": 0.1 + 0.9 * half_wave,
    }[name]


@pytest.mark.parametrize("name", get_args(SCHEDULERS))
def test_every_lr_scheduler_type_with_a_separate_value_warmup(name):
    warm = {} if name == "constant" else {"warmup_steps": WARM, "value_warmup_steps": VALUE_WARM}
    trainer = tiny.trainer(total_episodes=80, learning_rate=PEAK, lr_scheduler_type=name, num_ppo_epochs=1, **warm)
    experience = trainer.make_experience(tiny.rollout())
    history = [trainer.update(experience) for _ in range(UPDATES)]
    for key, steps in (("lr", WARM), ("value/lr", VALUE_WARM)):
        expected = [PEAK * decay(name, k, steps) for k in range(UPDATES)]
        assert [stats[key] for stats in history] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("value_warmup,first", [(None, 0.0), (0, PEAK)])
def test_value_warmup_steps_none_is_the_policys_and_zero_is_none(value_warmup, first):
    schedule = {"lr_scheduler_type": "linear", "warmup_ratio": 0.5, "value_warmup_steps": value_warmup}
    stats = steps(tiny.trainer(learning_rate=PEAK, **schedule), 1)[0]
    assert (stats["lr"], stats["value/lr"]) == (0.0, first)


@pytest.mark.parametrize("rate", [0.0, 1e-8])
@pytest.mark.parametrize("name", ["linear", "polynomial", "cosine_with_min_lr"])
def test_a_tiny_learning_rate_is_accepted(name, rate):
    """transformers' polynomial schedule ends at 1e-7 and refuses to start below it."""
    trainer = tiny.trainer(learning_rate=rate, lr_scheduler_type=name)
    rates = [stats["lr"] for stats in steps(trainer, 2)]
    assert rates[0] == rate and 0 <= rates[1] <= rate


# The value model trained alone first


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("loss", [{}, {"kl_in": "loss", "kl_estimator": "full", "entropy_coef": 0.1}])
def test_value_only_updates_hold_the_policy_bit_by_bit(head, loss):
    trainer = tiny.trainer(value_only_updates=2, weight_decay=0.1, head=head, **loss)
    start = both(trainer)
    for step in range(2):
        before = both(trainer)
        stats = trainer.step(tiny.prompts(seed=step))
        assert torch.equal(start[0], tiny.weights(trainer.policy)) and stats["objective/kl"] == 0.0
        assert not torch.equal(before[1], tiny.weights(trainer.value)) and stats["policy/grad_norm"] == 0.0
        assert stats["policy/first_ratio_error"] == 0.0 and stats["val/ratio"] == 1.0
    trainer.step(tiny.prompts(seed=2))
    assert not torch.equal(start[0], tiny.weights(trainer.policy)), "then the policy moves"


def test_value_only_updates_leave_ptx_for_later():
    trainer = tiny.trainer(value_only_updates=1, ptx_coef=1.0, ptx=[([5], [6, 2])])
    before = tiny.weights(trainer.policy)
    assert "loss/ptx_avg" not in steps(trainer, 1)[0] and torch.equal(before, tiny.weights(trainer.policy))
    assert "loss/ptx_avg" in trainer.step(tiny.prompts(seed=1))


# A value head on the policy


def test_a_value_head_needs_no_extra_forward_pass():
    trainer, rows = tiny.trainer(head=True, num_ppo_epochs=3, micro_batch_tokens=12), tiny.rollout()
    parts, calls = len(trainer._make_minibatches(rows, 0)[0]), Counter()
    for name in ("policy", "ref", "value"):
        getattr(trainer, name).register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    experience = trainer.make_experience(rows, scores=torch.tensor(tiny.SCORES))
    assert parts > 1 and calls == {"policy": parts, "ref": parts, "value": parts}
    trainer.update(experience)
    assert calls == {"policy": 4 * parts, "ref": parts, "value": 4 * parts}
    assert [tuple(p.shape) for p in trainer.value.parameters()] == [(1, 32)], "not a copy of a model"


def test_a_value_head_starts_at_zero_and_learns():
    trainer = tiny.trainer(head=True)
    experience = trainer.make_experience(tiny.rollout(), scores=torch.tensor(tiny.SCORES))
    assert (experience.values == 0).all()
    first = trainer.update(experience)
    assert first["policy/first_ratio_error"] == 0.0 and first["val/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    later = [
        trainer.update(trainer.make_experience(tiny.rollout(), scores=torch.tensor(tiny.SCORES))) for _ in range(10)
    ]
    assert later[-1]["loss/value_avg"] < 0.5 * first["loss/value_avg"]


def test_a_value_head_reads_what_the_output_head_reads():
    """Values by hand: the last hidden state before each response token, times the head."""
    trainer = tiny.trainer(head=True)
    torch.nn.init.normal_(trainer.value.score.weight)
    experience = trainer.make_experience(tiny.rollout(), scores=torch.zeros(4))
    for row, (query, response) in enumerate(zip(tiny.QUERIES, tiny.RESPONSES, strict=True)):
        with torch.no_grad():
            hidden = trainer.policy.model(input_ids=torch.tensor([query + response])).last_hidden_state[0]
        expected = hidden[len(query) - 1 : -1] @ trainer.value.score.weight[0]
        torch.testing.assert_close(experience.values[row, : len(response)], expected, atol=1e-5, rtol=1e-5)


def test_the_value_gradient_reaches_the_trunk():
    """From the second step on: a head of zeros hands nothing back."""
    trainer, experience = tiny.trainer_and_experience(head=True, vf_coef=1.0, max_grad_norm=1e9)
    flat = replace(
        experience, advantages=torch.zeros_like(experience.advantages)
    )  # the policy itself has nothing to learn
    trunk = {}
    for scale in (0.0, 1.0):
        trainer.value.score.weight.data.fill_(scale)
        tiny.gradient(trainer, flat)
        trunk[scale] = torch.cat([p.grad.reshape(-1) for p in trainer.policy.model.parameters()]).norm().item()
        assert trainer.value.score.weight.grad.norm() > 1e-3
    assert trunk[0.0] == 0.0 and trunk[1.0] > 1e-3


# Shared layers


def trainer_of(policy, ref, layers: int, family: str = "llama") -> PPOTrainer:
    settings = tiny.settings(num_shared_layers=layers)
    engine = HFEngine(policy, tiny.EOS, tiny.PAD, settings.temperature)
    reward = {"r": lambda rollout: rollout.response_lengths.float()}
    return PPOTrainer(policy, ref, tiny.scorer(family), reward, engine, settings)


def logits(model) -> torch.Tensor:
    return forward.response_logits(model, tiny.rollout().micro_batch(torch.arange(4)))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=1e-5)  # kernels differ by the alignment of memory


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_num_shared_layers_freezes_and_shares_and_the_rest_trains(family):
    depth = {"n_layer": 3} if family == "gpt2" else {"num_hidden_layers": 3}
    policy, ref, alone = (tiny.causal(family, **depth) for _ in range(3))
    trainer = trainer_of(policy, ref, 2, family)
    assert same(logits(trainer.ref), logits(alone)), "sharing changed the reference"
    ours, theirs = (dict(model.named_parameters()) for model in (trainer.policy, trainer.ref))
    shared = {name for name in ours if ours[name] is theirs[name]}
    assert shared == {name for name in ours if not ours[name].requires_grad}
    assert any(".0." in name for name in shared) and any(".1." in name for name in shared)
    assert any("embed" in name or "wte" in name for name in shared) and not any(".2." in name for name in shared)
    before = {name: p.detach().clone() for name, p in ours.items()}
    first, *_ = steps(trainer, 3)
    assert first["objective/kl"] == 0.0 and first["policy/first_ratio_error"] == 0.0
    for name, parameter in trainer.policy.named_parameters():
        assert torch.equal(parameter, before[name]) is (name in shared), name
    assert same(logits(trainer.ref), logits(alone)), "training changed the reference"


def test_num_shared_layers_with_tied_embeddings_ties_the_references_head_too():
    policy, ref, alone = (tiny.causal(tie_word_embeddings=True) for _ in range(3))
    trainer = trainer_of(policy, ref, 1)
    assert ref.lm_head.weight is ref.model.embed_tokens.weight is policy.lm_head.weight
    steps(trainer, 2)
    assert same(logits(ref), logits(alone))


@pytest.mark.parametrize("layers", [2, 3])
def test_num_shared_layers_leaves_a_layer_to_train(layers):
    with pytest.raises(ValueError, match=f"num_shared_layers {layers} of 2 layers leaves none to train"):
        trainer_of(tiny.causal(), tiny.causal(), layers)


def test_num_shared_layers_of_models_that_differ_would_change_the_reference():
    with pytest.raises(ValueError, match="differ"):
        tiny.trainer(policy_seed=3, num_shared_layers=1)


def test_the_policys_schedule_starts_when_it_is_trained():
    """Six updates, two of them only for the value model: warm-up and decay of the policy span the other four."""
    schedule = {"warmup_steps": 1, "lr_scheduler_type": "linear", "learning_rate": 3e-3}
    history = steps(tiny.trainer(total_episodes=48, value_only_updates=2, **schedule), 6)
    assert [row["lr"] for row in history] == pytest.approx([0, 0, 0, 3e-3, 2e-3, 1e-3])
    assert [row["value/lr"] for row in history] == pytest.approx([0, 3e-3, 2.4e-3, 1.8e-3, 1.2e-3, 0.6e-3])


def test_the_kl_controller_waits_for_the_policy():
    trainer = tiny.trainer(total_episodes=32, value_only_updates=2, adap_kl_ctrl=True, horizon=100)
    coefs = [stats["objective/kl_coef"] for stats in steps(trainer, 4)]
    assert coefs[0] == coefs[1] == coefs[2] == 0.05 and coefs[3] == pytest.approx(0.05 * (1 - 0.2 * 8 / 100))


def test_responses_are_sampled_under_the_autocast_of_the_log_probs():
    trainer, enabled = tiny.trainer(bf16=True), []
    trainer.policy.register_forward_pre_hook(lambda *_: enabled.append(torch.is_autocast_enabled("cpu")))
    trainer.generate(tiny.prompts())
    assert enabled and all(enabled)
