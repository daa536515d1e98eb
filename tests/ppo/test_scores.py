"""Scores of a rollout: running moments, scaling, and rows without a score."""

import math
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch

from rlhf_cli.errors import RLHFError
from rlhf_cli.ppo.scores import RunningMeanStd
from rlhf_cli.rewards.function import FunctionReward
from tests.rewards.test_signature import RECORDS


def test_merged_moments_are_those_of_all_scores_together():
    generator = np.random.default_rng(0)
    batches = [generator.normal(100.0, 1e-2, size) for size in (1, 7, 64, 3)]  # a mean that swamps a sum of squares
    moments = RunningMeanStd()
    for count in range(1, 5):
        moments, scores = moments + RunningMeanStd.of(torch.tensor(batches[count - 1])), np.concatenate(batches[:count])
        deviation = scores.std(ddof=1) if len(scores) > 1 else 0.0
        assert (moments.count, moments.mean) == (len(scores), pytest.approx(scores.mean(), rel=1e-12))
        assert moments.std == pytest.approx(deviation, rel=1e-9)
        error = deviation / len(scores) ** 0.5 if count > 1 else np.inf
        assert moments.standard_error == pytest.approx(error, rel=1e-9)


@pytest.mark.parametrize("norm", [False, True])
def test_equal_scores_are_not_scaled(norm):
    trainer = tiny.trainer(use_score_scaling=True, use_score_norm=norm)
    for _ in range(3):
        experience = trainer.make_experience(tiny.rollout(), scores=torch.full((4,), 0.1))
        assert experience.scores.tolist() == pytest.approx([0.1] * 4)
        trainer.update(experience)


def skipping(**scores: list[float | None]) -> dict[str, FunctionReward]:
    return {name: FunctionReward(name, lambda x, y, s=s: s, tiny.Words()) for name, s in scores.items()}


def test_none_takes_a_source_out_of_the_sum_of_that_row() -> None:
    sources = skipping(a=[1.0, None, 3.0, None], b=[10.0, 20.0, None, 40.0], judge=[None] * 4)
    trainer = tiny.trainer(rewards=sources, missing_eos_penalty=None)
    trainer.reward_weights, trainer.reward_clips = {"a": 2.0, "b": 1.0, "judge": 0.0}, {"b": 15.0}
    experience = trainer.make_experience(tiny.rollout())
    assert experience.scores.tolist() == [2 + 10, 15, 6, 15]
    metrics = experience.metrics(kl_in_reward=True)
    found = {name.removeprefix("objective/"): each for name, each in metrics.items() if name[10:14] in ("scor", "unsc")}
    shares = {"unscored/a": 0.5, "unscored/b": 0.25, "unscored/judge": 1.0}
    assert found == pytest.approx({"scores": 48 / 4, "score/a": 2.0, "score/b": 70 / 3, **shares})
    assert experience.histograms()["rollout/score/a"] == [1.0, 3.0]


def test_r05_a_row_without_any_score() -> None:
    """A judge of weight 0 is none that counts."""
    trainer = tiny.trainer(rewards=skipping(a=[1.0, None, 3.0, 4.0], judge=[1.0] * 4))
    trainer.reward_weights = {"a": 1.0, "judge": 0.0}
    rollout = replace(tiny.rollout(), records=(RECORDS[1], RECORDS[0]) * 2)
    with pytest.raises(RLHFError, match=r"R05.* no reward has a score for row 1: .*\(prompt: 'One'\)"):
        trainer.make_experience(rollout)
    with pytest.raises(RLHFError, match=r"R05.* returned nan for row 1"):
        skipping(a=[1.0, math.nan, 3.0, 4.0])["a"](rollout)
    trainer.rewards["model"], trainer.reward_weights["model"] = (lambda rollout: torch.full((4,), torch.nan)), 1.0
    with pytest.raises(RLHFError, match=r"R01.*score `model`"):
        trainer.make_experience(rollout)
