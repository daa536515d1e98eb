"""The brakes of an update, early_stopping and ratio_threshold, bit for bit."""

import math
from dataclasses import replace

import pytest
import tiny
import torch


def recorded(**changes):
    """A trainer after an update; the policykl of each of its optimizer steps; its metrics."""
    trainer, experience = tiny.trainer_and_experience(
        learning_rate=3e-3, ratio_threshold=None, **{"num_ppo_epochs": 6, **changes}
    )
    steps, plain = [], trainer._train_minibatch
    trainer._train_minibatch = lambda *args: (steps.append(plain(*args)), steps[-1])[1]
    stats = trainer.update(experience)
    return trainer, [step["policy/policykl"] for step in steps], stats


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
