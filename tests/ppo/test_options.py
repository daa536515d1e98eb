"""Keys of `ppo:` by hand and bit for bit: those of the work, of scores, of training; a default that is written out.

tests/commands/test_verify.py compares the options that change numbers with an independent implementation.
"""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch

from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.ppo import rollout


def test_writing_out_a_default_leaves_the_run_bit_identical():
    """Each alone gives the same settings, and all of them together the same run."""
    plain = tiny.settings()
    defaults = plain.model_dump()
    assert all(tiny.settings(**{key: value}) == plain for key, value in defaults.items())
    (one, expected), (other, stats) = tiny.one_step(), tiny.one_step(**defaults)
    assert torch.equal(tiny.weights(one.policy), tiny.weights(other.policy)) and stats == expected


# How much


def test_batch_arithmetic():
    sizes = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "num_samples_per_prompt": 4}
    settings = PPOSettings(total_episodes=200, **sizes)
    assert (settings.episodes_per_update, settings.prompts_per_update, settings.num_updates()) == (64, 16, 4)
    assert PPOSettings(num_train_epochs=2.0, **sizes).num_updates(prompt_count=40) == 5
    with pytest.raises(ValueError, match="number of prompts"):
        PPOSettings(num_train_epochs=2.0).num_updates()


@pytest.mark.full
@pytest.mark.parametrize("minibatches,epochs", [(1, 4), (2, 3), (4, 1)])
def test_num_mini_batches_and_num_ppo_epochs_make_the_optimizer_steps(minibatches, epochs):
    trainer = tiny.trainer(num_mini_batches=minibatches, num_ppo_epochs=epochs)
    steps: list[int] = []
    trainer.optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    trainer.step(tiny.prompts())
    assert len(steps) == minibatches * epochs


def test_num_samples_per_prompt_gives_adjacent_rows_with_different_responses():
    rollout = tiny.trainer(num_samples_per_prompt=4).generate(tiny.prompts(2))
    assert len(rollout) == 8 and [rollout.prompt_tokens(row) for row in range(4)] == [rollout.prompt_tokens(0)] * 4
    assert len({tuple(rollout.response_tokens(row)) for row in range(4)}) > 1


@pytest.mark.full
@pytest.mark.parametrize("tokens,packing", [("auto", False), (12, False), (12, True)])
def test_micro_batch_tokens_bounds_the_forward_passes(tokens, packing, monkeypatch):
    trainer = tiny.trainer(micro_batch_tokens=tokens, num_ppo_epochs=2, packing=packing, response_length=3)
    rollout = trainer.generate(tiny.prompts())
    shapes = tiny.spy_on_shapes(monkeypatch)
    experience = trainer.make_experience(rollout, torch.zeros(8))
    trainer.update(experience)
    micro_batches = experience.minibatches[0]
    assert len(shapes) == 7 * len(micro_batches), "scoring: policy, value and reference; two models in two epochs"
    assert all(len(rows) <= 4 for rows in micro_batches)
    assert all(rows * width <= 12 or rows == 1 for rows, width in shapes) is (tokens == 12)
    if packing:
        assert {rows for rows, _ in shapes} == {1} and max(width for _, width in shapes) <= 12
        assert max(len(rows) for rows in micro_batches) > 1


# Rollouts


def test_response_length_range_is_sampled_for_each_update():
    assert tiny.trainer(response_length=5, stop_token="none").generate(tiny.prompts()).response_mask.shape == (8, 5)
    trainer, widths = tiny.trainer(response_length={"min": 2, "max": 6}, stop_token="none"), []
    for step in range(12):
        trainer.updates = step
        widths.append(trainer.generate(tiny.prompts()).response_mask.shape[1])
    assert set(widths) <= set(range(2, 7)) and len(set(widths)) > 2


# Precision


@pytest.mark.full
def test_bf16_changes_the_numbers_a_little_and_keeps_the_weights_float32():
    (_, a), (half, b) = tiny.one_step(), tiny.one_step(bf16=True)
    assert all(p.dtype == torch.float32 for p in half.policy.parameters())
    assert a["objective/entropy"] != b["objective/entropy"]
    assert b["objective/entropy"] == pytest.approx(a["objective/entropy"], rel=0.05)


# Running moments


def frozen_state(trainer):
    """Everything that make_experience could change, copied."""
    state = trainer.state_dict()
    weights = [tiny.weights(model) for model in (trainer.policy, trainer.value, trainer.ref)]
    return weights, state["moments"], state["updates"], state["kl_coef"], torch.get_rng_state()


def test_make_experience_changes_nothing_and_update_commits():
    trainer = tiny.trainer(use_score_scaling=True, adap_kl_ctrl=True)
    before = frozen_state(trainer)
    experience = trainer.make_experience(tiny.rollout(), scores=torch.tensor(tiny.SCORES))
    trainer.make_experience(tiny.rollout(), scores=torch.tensor([100.0, 0.0, 0.0, 0.0]))  # shown, not trained on
    after = frozen_state(trainer)
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert before[1:4] == after[1:4] and torch.equal(before[4], after[4])
    trainer.update(experience)
    assert (trainer.score_moments.count, trainer.score_moments.mean) == (4, pytest.approx(0.625))
    assert trainer.score_moments.std == pytest.approx(np.std(tiny.SCORES, ddof=1))


# The adaptive KL coefficient


def test_adap_kl_ctrl_by_hand_over_three_updates():
    """target 6, horizon 100, four episodes per update: a factor of 1 + 4/100 x the clipped error.

    12 nats: twice the target, clipped to +0.2. 0 nats: clipped to -0.2. 6.6 nats: +0.1, inside.
    """
    trainer = tiny.trainer(adap_kl_ctrl=True, kl_coef=0.2, target=6.0, horizon=100)
    coefficients = []
    for nats in (12.0, 0.0, 6.6):
        experience = trainer.make_experience(tiny.rollout(), scores=torch.zeros(4))
        kl = torch.zeros_like(experience.kl).index_fill(1, torch.tensor(0), nats)
        stats = trainer.update(replace(experience, kl=kl))
        coefficients.append(trainer.kl_coef)
        assert stats["objective/kl"] == pytest.approx(nats) and stats["objective/kl_coef"] == experience.kl_coef
    assert coefficients == pytest.approx([0.2016, 0.1999872, 0.2007871488], rel=1e-6)


# Learning rates, the value model's own options


def steps(trainer, count: int):
    return [trainer.step(tiny.prompts(seed=step)) for step in range(count)]


def both(trainer):
    return tiny.weights(trainer.policy), tiny.weights(trainer.value)


# Learning rates


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "rate"), [("linear", 0.0), ("polynomial", 0.0), ("polynomial", 1e-8), ("cosine_with_min_lr", 1e-8)]
)
def test_a_tiny_learning_rate_is_accepted(name, rate):
    """transformers' polynomial schedule ends at 1e-7 and refuses to start below it."""
    trainer = tiny.trainer(learning_rate=rate, lr_scheduler_type=name)
    rates = [stats["lr"] for stats in steps(trainer, 2)]
    assert rates[0] == rate and 0 <= rates[1] <= rate


# The value model trained alone first


@pytest.mark.full
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


@pytest.mark.full
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


# Precision and memory


def test_responses_and_cache_have_the_autocast_of_the_log_probs(monkeypatch):
    trainer, enabled = tiny.trainer(bf16=True), []
    trainer.generate(tiny.prompts())  # tries the cache, in float32
    trainer.policy.register_forward_pre_hook(lambda *_: enabled.append(torch.is_autocast_enabled("cpu")))
    trainer.generate(tiny.prompts())
    assert enabled and all(enabled)
    dtypes = set()
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


# The brakes of an update, bit for bit


def recorded(**changes):
    """A trainer after an update; the policykl of each of its optimizer steps; its metrics."""
    trainer, experience = tiny.trainer_and_experience(
        learning_rate=3e-3, ratio_threshold=None, **{"num_ppo_epochs": 6, **changes}
    )
    steps, plain = [], trainer._train_minibatch
    trainer._train_minibatch = lambda *args: (steps.append(plain(*args)), steps[-1])[1]
    stats = trainer.update(experience)
    return trainer, [step.metrics["policy/policykl"] for step in steps], stats


@pytest.mark.full
@pytest.mark.parametrize("minibatches", [1, 2])
def test_early_stopping_ends_the_epochs_after_the_last_minibatch_of_one(minibatches):
    free, steps, stats = recorded(num_mini_batches=minibatches)
    assert stats["policy/epochs"] == 6 and len(steps) == 6 * minibatches
    ends = steps[minibatches - 1 :: minibatches]
    limit = (max(ends[:-1]) + sorted(ends[:-1])[-2]) / 2  # exceeded by one of the first five epochs
    assert limit > 0
    stop = next(epoch for epoch, kl in enumerate(ends, 1) if kl > limit)
    stopped, trainer, stats = recorded(num_mini_batches=minibatches, early_stopping=True, target_kl=limit / 1.5)
    assert 1 < stop < 6 and stats["policy/epochs"] == stop and trainer == steps[: stop * minibatches]
    short, _, _ = recorded(num_ppo_epochs=stop, num_mini_batches=minibatches)
    assert torch.equal(tiny.weights(stopped.policy), tiny.weights(short.policy))
    assert not torch.equal(tiny.weights(stopped.policy), tiny.weights(free.policy))
    assert recorded(early_stopping=True, target_kl=100.0)[2]["policy/epochs"] == 6


def off_by(experience, rows, shift: float = 5.0):
    """The experience with the old log-probs of some rows lowered: their ratios are e^5, about 148."""
    old = experience.logprobs.clone()
    old[rows] -= shift
    return replace(experience, logprobs=old)


@pytest.mark.parametrize("threshold,skipped", [(10.0, 8), (None, 0)])  # two minibatches, four epochs
def test_ratio_threshold_lets_no_weight_change(threshold, skipped):
    trainer, experience = tiny.trainer_and_experience(num_mini_batches=2, ratio_threshold=threshold)
    before = tiny.weights(trainer.policy), tiny.weights(trainer.value)
    stats = trainer.update(off_by(experience, torch.arange(4)))
    assert stats["policy/skipped_minibatches"] == skipped
    assert torch.equal(before[0], tiny.weights(trainer.policy)) is torch.equal(before[1], tiny.weights(trainer.value))
    assert torch.equal(before[0], tiny.weights(trainer.policy)) is bool(skipped)
    assert not skipped or stats["val/ratio"] == pytest.approx(math.exp(5.0), rel=1e-3)


def test_ratio_threshold_skips_the_one_minibatch_that_exceeds_it():
    def after(threshold, *which):
        """An update of one epoch on the minibatches `which`, of which the first one is off."""
        trainer, experience = tiny.trainer_and_experience(
            num_mini_batches=2, num_ppo_epochs=1, ratio_threshold=threshold
        )
        experience = off_by(experience, torch.cat(experience.minibatches[0]))
        return trainer, trainer.update(replace(experience, minibatches=tuple(experience.minibatches[i] for i in which)))

    (trainer, stats), (alone, second) = after(10.0, 0, 1), after(10.0, 1)
    assert stats["policy/skipped_minibatches"] == 1
    assert torch.equal(tiny.weights(trainer.policy), tiny.weights(alone.policy)), "as if it did not exist"
    assert stats["val/ratio"] == second["val/ratio"] == pytest.approx(1.0), "nor is it in the averages"
    assert after(200.0, 0, 1)[1]["policy/skipped_minibatches"] == 0
