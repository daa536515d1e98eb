"""The limit curve in a world of three tokens, where SFT tilted by exp(score / beta) is summed exactly."""

import math
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import pytest

from rlhf_cli.evaluation import limit
from rlhf_cli.evaluation.report_text import overhead_sentence
from rlhf_cli.evaluation.responses import EvalResponses
from rlhf_cli.statistics import Clusters, best_of_n_kl

TOKENS = (0.5, 0.25, 0.25)  # probabilities; a response has two tokens
RESPONSES = [*product(range(3), repeat=2)]
PROBABILITIES = np.array([TOKENS[first] * TOKENS[second] for first, second in RESPONSES])
SCORES = np.array([[1.0, -2.0, 0.5, 3.0, 0.0, 1.5, -1.0, 2.0, 0.25], [0.0, 1.0, 2.0, 0.0, 1.0, 5.0, 0.0, 1.0, 2.0]])


def exact(beta: float) -> tuple[list[float], list[float]]:
    """KL and score of the tilted policy for both prompts, by the definition of the KL over all responses."""
    kls, means = [], []
    for scores in SCORES.tolist():
        tilted = [p * math.exp(s / beta) for p, s in zip(PROBABILITIES, scores, strict=True)]
        policy = [weight / sum(tilted) for weight in tilted]
        kls.append(sum(pi * math.log(pi / p) for pi, p in zip(policy, PROBABILITIES, strict=True)))
        means.append(sum(pi * s for pi, s in zip(policy, scores, strict=True)))
    return kls, means


def normal(prompts: int, samples: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(prompts, samples))


@pytest.mark.parametrize("beta", [0.3, 1.0, 4.0, 100.0])
def test_the_tilted_policy_is_exact_on_all_responses(beta: float) -> None:
    """Each response is a sample as often as in 16 draws: the estimate is the exact sum."""
    samples = np.repeat(SCORES, (16 * PROBABILITIES).astype(int), axis=1)
    assert samples.shape == (2, 16)
    kl, score, size = limit.tilt(samples, 1 / beta)
    assert (kl.tolist(), score.tolist()) == (pytest.approx(exact(beta)[0]), pytest.approx(exact(beta)[1]))
    weights = np.exp(samples / beta)
    assert size == pytest.approx(weights.sum(1) ** 2 / (weights**2).sum(1))


def test_the_estimated_curve_approaches_the_exact_one() -> None:
    drawn = np.random.default_rng(0).choice(9, size=(2, 20_000), p=PROBABILITIES)
    section = limit.make_limit(np.take_along_axis(SCORES, drawn, axis=1), {}, [])
    start, *points = section.points
    assert start.beta is None and start.kl == 0 and len(points) == limit.POINTS
    assert start.score == pytest.approx(float((SCORES @ PROBABILITIES).mean()), abs=0.02)
    for point in points:
        kl, score = exact(point.beta)
        assert point.kl == pytest.approx(np.mean(kl), rel=0.03) and point.score == pytest.approx(
            np.mean(score), abs=0.03
        )


def test_the_curve_ends_at_its_effective_sample_size_or_where_its_bias_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (limit.make_limit(normal(100, samples), {}, []).points[-1].kl for samples in (16, 128))
    assert few < 0.7 < many, "the bias shrinks with the samples"
    monkeypatch.setattr(limit, "MAX_BIAS", 1e9)
    for samples, bound in ((64, 10.0), (20, 10.0), (16, 8.0), (4, 2.0)):
        section = limit.make_limit(normal(50, samples), {}, [])
        sizes = [point.effective_samples for point in section.points]
        assert section.min_effective_samples == bound and sizes[0] == pytest.approx(samples)
        assert sizes == sorted(sizes, reverse=True) and sizes[-1] == pytest.approx(bound, rel=1e-6)
        kls = [point.kl for point in section.points]
        assert kls == sorted(kls) and kls[-1] < 1.5 * math.log(samples)
    ties = np.array([[0.0] * 20 + [1.0] * 20] * 3)  # tilted, 20 remain; the KL is at most log 2
    end = limit.make_limit(ties, {}, []).points[-1]
    assert end.kl == pytest.approx(0.999 * math.log(2)) and end.effective_samples > 20
    assert len(limit.make_limit(np.ones((3, 8)), {}, [2]).points) == 1, "equal scores: only SFT"


def test_the_needed_kl_is_interpolated() -> None:
    kl, path = np.array([0.0, 1.0, 4.0]), np.array([-1.0, 0.0, 1.0])
    clusters, paths = Clusters.of(4), np.tile(path, (4, 1))
    found = [limit.needed_kl(kl, paths, [target] * 4, clusters) for target in (-3.0, -1.0, 0.0, 0.5, 1.0, 1.1)]
    assert found == [(each, (each, each)) for each in (0.0, 0.0, 1.0, 2.25, 4.0, math.inf)]
    # by hand: the mean of +-0.2 over four prompts is known to within 3.18 * 0.2 / sqrt(3) = 0.367
    own = [0.3, 0.7, 0.3, 0.7]
    needed, (low, high) = limit.needed_kl(kl, paths, own, clusters)
    error = 3.18245 * 0.2 / math.sqrt(3)
    expected = [(1 + 0.5 - error) ** 2, (1 + 0.5 + error) ** 2]
    assert needed == pytest.approx(2.25) and [low, high] == pytest.approx(expected, rel=1e-4)
    assert limit.needed_kl(kl, paths, own, clusters, rest=0.1)[1] == pytest.approx(((1.4 - error) ** 2, high))


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_best_of_n_is_the_mean_over_all_subsets(n: int) -> None:
    scores = normal(3, 5)
    expected = [np.mean([max(subset) for subset in combinations(row, n)]) for row in scores.tolist()]
    assert limit.expected_best_of_n(scores, n) == pytest.approx(expected)


def test_the_overhead_is_the_ratio_to_the_tilted_policy() -> None:
    scores, n = normal(200, 64), 4
    kl, score, _ = limit.tilt(scores, 0.93)
    best = limit.expected_best_of_n(scores, n).tolist()
    far = (score + 1.0).tolist()
    policies = {
        "tilted": (score.tolist(), kl.tolist()),
        "three times": (score.tolist(), (3 * kl).tolist()),
        "sft": (normal(200, 1, seed=1)[:, 0].tolist(), [0.5] * 200),
        "worse": ((score - 2.0).tolist(), [9.0] * 200),
        "far": (far, [9.0] * 200),
        "beyond": ((score + 9.0).tolist(), [9.0] * 200),
        "best_of_4": (best, [best_of_n_kl(n)] * 200),
    }
    section = limit.make_limit(scores, policies, [2, 4, 8, 16, 32, 64])
    found = section.policies
    assert found["tilted"].overhead == pytest.approx(1, abs=0.03)
    assert found["three times"].overhead == pytest.approx(3 * found["tilted"].overhead)
    low, high = found["tilted"].needed_kl_ci95
    assert low < kl.mean() < high and high - low < 0.2 * kl.mean(), "the prompts of curve and policy are the same"
    assert 1 < found["best_of_4"].overhead < 1.3 and found["best_of_4"].kl_ci95 == [best_of_n_kl(4)] * 2
    for name in ("sft", "worse"):
        assert found[name].needed_kl_ci95[0] == 0 and found[name].overhead is None
        assert found[name].no_overhead == "its score is not above SFT's by more than noise"
    assert found["worse"].needed_kl == 0
    points = [(row.score, row.kl) for row in section.best_of]
    (low_score, low_kl), (high_score, high_kl) = next(
        pair for pair in pairwise(points) if pair[0][0] <= found["far"].score <= pair[1][0]
    )
    share = (found["far"].score - low_score) / (high_score - low_score)
    at_most = found["far"].needed_kl_at_most
    assert 1 < at_most / (low_kl + share * (high_kl - low_kl)) < 1.05, "by no more than noise"
    assert found["far"].overhead_at_least == pytest.approx(9 / at_most)
    assert found["far"].needed_kl_at_least <= section.points[-1].kl < at_most
    for name in ("far", "beyond"):
        assert found[name].no_overhead == "its score is above the end of the curve" and found[name].overhead is None
    assert found["beyond"].needed_kl_at_most is None
    texts = {name: overhead_sentence(row) for name, row in found.items()}
    assert texts["three times"] == (
        f"PPO pays {3 * kl.mean():.2f} nats for a score that {found['tilted'].needed_kl:.2f} "
        f"[{low:.2f}, {high:.2f}] nats could buy: overhead {found['three times'].overhead:.1f}"
    )
    assert texts["far"] == (
        f"PPO pays 9.00 nats for a score that at most {at_most:.2f} nats could buy: overhead at least {9 / at_most:.1f}"
    )
    assert texts["beyond"] == (
        "PPO pays 9.00 nats; it has no KL overhead, since its score is above the end of the curve"
    )


def test_where_deviations_differ_the_overhead_is_bounded() -> None:
    """A curve that is too low asks for too much KL, so the ratio is too small."""
    deviations = np.exp(np.linspace(-1.5, 1.5, 40))[:, None]
    scores = deviations * normal(40, 64)
    policy = {"ppo": ((scores.mean(axis=1) + 0.8).tolist(), [2.0] * 40)}
    bounded = limit.make_limit(scores, policy, [2, 4, 8]).policies["ppo"]
    even = limit.make_limit(scores / deviations, policy, [2, 4, 8]).policies["ppo"]
    assert even.overhead is not None and bounded.overhead is None
    assert bounded.needed_kl_at_most == bounded.needed_kl_ci95[1] > bounded.needed_kl
    assert bounded.overhead_at_least == pytest.approx(2 / bounded.needed_kl_at_most)
    assert overhead_sentence(bounded).endswith(f"overhead at least {bounded.overhead_at_least:.1f}")


def test_a_policy_at_the_end_of_the_curve_has_an_open_interval() -> None:
    """Some resamples are beyond the last value of beta."""
    scores = normal(30, 64)
    end = limit.make_limit(scores, {}, []).points[-1].score
    noisy = end - 0.01 + 3 * normal(30, 1, seed=2)[:, 0]
    noisy += end - 0.01 - noisy.mean()
    found = limit.make_limit(scores, {"ppo": (noisy.tolist(), [5.0] * 30)}, [2]).policies["ppo"]
    low, high = found.needed_kl_ci95
    assert high is None and 0 <= low < found.needed_kl


def responses(model: str, scores: list[float], ended: list[bool], **fields: Any) -> EvalResponses:
    count = len(scores)
    given = {"mode": "sampled", "kl": None} | fields
    return EvalResponses(model=model, prompts=[""] * count, responses=[""] * count, ended=ended, lengths=[1] * count,
                         scores={"reward": scores}, **given)  # fmt: skip


def test_scores_have_the_penalty_of_ppo() -> None:
    draws = [responses("sft", [float(draw), 1.0], [draw != 3, True]) for draw in range(4)]
    ppo = responses("ppo", [2.0, 4.0], [True, False], kl=[1.0, 2.0], step=7)
    others = [
        responses("sft", [0.0, 0.0], [True] * 2, kl=[0.0, 0.0]),
        replace(ppo, model="dpo", step=None),
        replace(ppo, mode="greedy", kl=None),
        responses("best_of_3", [9.0, 9.0], [True] * 2),
    ]
    section = limit.build_limit(draws, [ppo, *others], 1.5)
    assert (section.samples, section.missing_eos_penalty) == (4, 1.5)
    assert section.points[0].score == pytest.approx(((0 + 1 + 2 + 3 - 1.5) / 4 + 1) / 2)
    assert section.policies.keys() == {"ppo", "dpo", "best_of_3"}
    found = section.policies["ppo"]
    assert (found.step, found.kl, found.score) == (7, 1.5, 2.25) and section.policies["dpo"].step is None
    assert [row.n for row in section.best_of] == [2, 3, 4]
    # the maxima of three of 0, 1, 2 and 1.5 are 2, 2, 2 and 1.5; the second prompt has 1
    assert section.policies["best_of_3"].score == pytest.approx((7.5 / 4 + 1) / 2) == section.best_of[1].score
    assert limit.build_limit(draws, [ppo], 0.0).missing_eos_penalty is None
