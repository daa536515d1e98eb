"""Options of training: learning rates, the value model's own options, shared layers."""

from collections import Counter

import pytest
import tiny
import torch

from rlhf_cli.models import forward
from rlhf_cli.ppo import rollout


def steps(trainer, count: int):
    return [trainer.step(tiny.prompts(seed=step)) for step in range(count)]


def both(trainer):
    return tiny.weights(trainer.policy), tiny.weights(trainer.value)


# Learning rates


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


# Shared layers


def logits(model) -> torch.Tensor:
    return forward.response_logits(model, tiny.rollout().micro_batch(torch.arange(4)))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=1e-5)  # kernels differ by the alignment of memory


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_num_shared_layers_freezes_and_shares_and_the_rest_trains(family):
    depth = {"n_layer": 3} if family == "gpt2" else {"num_hidden_layers": 3}
    policy, ref, alone = (tiny.causal(family, **depth) for _ in range(3))
    trainer = tiny.trainer_of(policy, tiny.settings(num_shared_layers=2), ref=ref, value=tiny.scorer(family))
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
    trainer = tiny.trainer_of(policy, tiny.settings(num_shared_layers=1), ref=ref)
    assert ref.lm_head.weight is ref.model.embed_tokens.weight is policy.lm_head.weight
    steps(trainer, 2)
    assert same(logits(ref), logits(alone))


@pytest.mark.parametrize(
    ("policy_seed", "layers", "says"),
    [(0, 2, "2 of 2 layers leaves none to train"), (0, 3, "3 of 2 layers leaves none"), (3, 1, "differ")],
)
def test_num_shared_layers_leaves_a_layer_to_train_and_changes_no_reference(policy_seed, layers, says):
    with pytest.raises(ValueError, match=says):
        tiny.trainer(policy_seed=policy_seed, num_shared_layers=layers)


def test_responses_and_cache_have_the_autocast_of_the_log_probs(monkeypatch):
    trainer, enabled = tiny.trainer(bf16=True), []
    trainer.policy.register_forward_pre_hook(lambda *_: enabled.append(torch.is_autocast_enabled("cpu")))
    trainer.generate(tiny.prompts())
    assert enabled and all(enabled)
    trainer, dtypes = tiny.trainer(bf16=True), set()
    update = rollout._AutocastCache.update
    monkeypatch.setattr(
        rollout._AutocastCache, "update",
        lambda *args, **kwargs: (both := update(*args, **kwargs), dtypes.update(each.dtype for each in both))[0],
    )  # fmt: skip
    half = trainer.generate(tiny.prompts())
    assert dtypes == {torch.bfloat16}
    monkeypatch.setattr(rollout, "_AutocastCache", rollout.DynamicCache)
    assert torch.equal(trainer.generate(tiny.prompts()).ids, half.ids)


def test_no_gradient_takes_memory_after_an_update():
    trainer, _ = tiny.one_step()
    assert all(weight.grad is None for model in (trainer.policy, trainer.value) for weight in model.parameters())
