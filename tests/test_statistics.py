"""Intervals against published or exact values."""

import math
import random

import numpy as np
import pytest
from scipy.special import stdtrit

from rlhf_cli.statistics import (
    Z95,
    Clusters,
    best_of_n_kl,
    bonferroni_z,
    length_controlled,
    mean_interval,
    paired_difference,
    selection_weights,
    share_interval,
    wilson,
    wilson_difference,
    win_rate,
    within_noise,
    without_bias,
)


@pytest.mark.parametrize(
    "wins,n,low,high",
    [(0, 10, 0.0, 0.2775), (8, 10, 0.4902, 0.9433), (50, 100, 0.4038, 0.5962), (10, 10, 0.7225, 1.0)],
)
def test_wilson_by_the_tables(wins: float, n: int, low: float, high: float) -> None:
    assert wilson(wins, n) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("ours", "theirs", "low", "high"),
    [
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((10, 10), (0, 20), 0.6791, 1.0),
        ((5, 56), (0, 29), -0.0381, 0.1926),
    ],
)
def test_the_difference_of_two_shares_by_newcombes_table(
    ours: tuple[int, int], theirs: tuple[int, int], low: float, high: float
) -> None:
    """Newcombe 1998, table II, method 10."""
    shares = [(wins / n, n) for wins, n in (ours, theirs)]
    assert wilson_difference(*shares) == pytest.approx((low, high), abs=1e-4)
    assert wilson_difference(*shares[::-1]) == pytest.approx((-high, -low), abs=1e-4)


def test_simultaneous_intervals_are_wider() -> None:
    assert bonferroni_z(1) == Z95 and bonferroni_z(5) == pytest.approx(2.5758, abs=1e-4)
    assert bonferroni_z(10) == pytest.approx(2.8070, abs=1e-4), "Bonferroni, by the normal table"


def test_win_rate_counts_a_tie_as_half() -> None:
    found = win_rate([1.0, 2.0, 3.0, 0.0], [0.0, 2.0, 1.0, 5.0])
    assert (found["value"], found["ties"], found["n"]) == (2.5 / 4, 1, 4)
    # the mean's variance is that of 4 * (0.625 * 0.375) / ((2 * 0.375^2 + 0.125^2 + 0.625^2) / 4) rows without ties
    assert found["ci95"] == pytest.approx(wilson(0.625 * 60 / 11, 60 / 11))
    assert win_rate([1, 1, 0], [0, 0, 1])["ci95"] == pytest.approx(wilson(2, 3)), "no ties"
    assert win_rate([1, 1], [1, 1])["ci95"] == pytest.approx(wilson(1, 2)), "only ties"


def test_many_ties_do_not_hide_a_difference() -> None:
    """46 of 61 decided rows are wins, a sign test has p < 0.001; without a difference 1 in 20 intervals errs."""
    low, high = win_rate([1.0] * 46 + [0.0] * 466, [0.0] * 46 + [1.0] * 15 + [0.0] * 451)["ci95"]
    assert 0.5 < low < 0.53 < high < 0.55
    draw, zeros = random.Random(0), [0.0] * 512
    rates = [win_rate(draw.choices([1.0, 0.0, -1.0], [6, 88, 6], k=512), zeros)["ci95"] for _ in range(400)]
    assert 8 <= sum(not low <= 0.5 <= high for low, high in rates) <= 32


def test_rows_of_one_group_count_together() -> None:
    assert share_interval([1, 1, 0, 0], "abcd") == pytest.approx(wilson(2, 4)) == share_interval([1, 1, 0, 0])
    # by hand: without one group the mean is 0 or 1, of variance (2 * 0.5^2) / 2 = 0.25; Student's t of 1 is 12.7
    assert share_interval([1, 1, 0, 0], "aabb") == pytest.approx(wilson(0.5, 1, 12.7062047))
    assert share_interval([1, 1, 1], "aaa") == pytest.approx(wilson(1, 1))
    assert share_interval([1, 0, 1, 0], "aabb") == pytest.approx(wilson(2, 4, 12.7062047)), "at most all rows"
    alone = share_interval([1, 1, 1, 0] + [0] * 36, [row // 4 for row in range(40)])
    assert alone == pytest.approx(wilson(0.75, 10, 2.2621572)), "one prompt differs: prompts count; Student's t of 9"
    draw, inside = random.Random(1), 0
    for _ in range(300):  # 20 prompts with 10 pairs each; a prompt is easy (0.9) or hard (0.3)
        easy = [draw.choice([0.9, 0.3]) for _ in range(20)]
        points = [float(draw.random() < share) for share in easy for _ in range(10)]
        low, high = share_interval(points, [row // 10 for row in range(200)])
        inside += low <= 0.6 <= high
    assert 0.91 <= inside / 300 <= 0.99


def test_wins_against_losses_of_prompts_with_ties() -> None:
    """By hand: 10 of 40 rows are wins and 10 are losses, of correlation -1/3, the same in each prompt."""
    prompts = [row // 4 for row in range(40)]
    low, high = share_interval([1, 0.5, 0.5, 0] * 10, prompts)
    least, most = wilson(10, 40, 2.2621572)  # Student's t of 9
    below, above = 0.25 - least, most - 0.25
    half = math.sqrt(below**2 + above**2 + 2 / 3 * below * above) / 2
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half))
    low, high = share_interval([1, 0.5, 0.5, 0.5] * 3 + [0.5] * 28, prompts)
    assert high - low < 0.27, "nearly all rows are ties"
    mirrored = share_interval([0, 0.5, 0.5, 0.5] * 3 + [0.5] * 28, prompts)
    assert mirrored == pytest.approx((1 - high, 1 - low))


def test_few_prompts_with_most_of_the_variance_have_a_wider_interval() -> None:
    """By hand: one of 10 prompts has all of it, so that 2 V^2 / Var(V) is 2.2 degrees of freedom instead of 9."""
    clusters = Clusters.of(40, [row // 4 for row in range(40)])
    one = np.repeat([9.0] + [-1.0] * 9, 4)
    squares = np.array([81.0] + [1.0] * 9)
    freedom = 2 * squares.sum() ** 2 / (10 * squares.var(ddof=1))
    assert clusters.quantile_of(clusters.deviations(one)) == pytest.approx(stdtrit(freedom, 0.975)) and freedom < 3
    both = np.repeat([1.0, -1.0] * 5, 4)
    assert clusters.quantile_of(clusters.deviations(both)) == clusters.quantile == pytest.approx(2.2621572)


def test_the_interval_of_a_mean() -> None:
    """Student's interval for symmetric values; that of a skewed sample reaches further to its long side."""
    values = [math.sin(7 * i) for i in range(400)]  # spread evenly, mean near 0, deviation near 0.707
    mean = sum(values) / len(values)
    error = 1.9659 * math.sqrt(sum((x - mean) ** 2 for x in values) / 399 / 400)
    assert mean_interval(values) == pytest.approx((mean - error, mean + error), abs=1e-4)
    skewed = [math.exp(2 * value) for value in values]
    low, high = mean_interval(skewed) or (0, 0)
    middle = sum(skewed) / 400
    assert high - middle > 1.02 * (middle - low) and mean_interval([-value for value in skewed]) == (-high, -low)
    twice = [value for value in values for _ in range(2)]
    low, high = mean_interval(twice, [row // 2 for row in range(800)]) or (0, 0)
    assert (low, high) == pytest.approx(mean_interval(values)), "a row twice is one row"


def test_a_mean_without_a_variance_has_no_interval() -> None:
    assert mean_interval([0.5] * 9) is None and mean_interval([3.0]) is None
    assert mean_interval([5.0] * 96 + [1.0, 2.0, 4.0, 4.0]) is None, "only four differ"
    assert mean_interval([5.0] * 95 + [1.0, 2.0, 4.0, 4.0, 4.0]) is not None
    assert mean_interval([1.0, 2.0]) is not None and mean_interval([1.0, 2.0, 3.0], "aaa") is None


def test_best_of_n_bound() -> None:
    assert best_of_n_kl(1) == 0.0
    assert best_of_n_kl(2) == pytest.approx(math.log(2) - 0.5)
    assert best_of_n_kl(4) == pytest.approx(0.6363, abs=1e-4)


def test_a_difference_is_paired() -> None:
    """Prompts that are hard for both widen the means' intervals, not the difference's."""
    theirs = [math.sin(7 * i) for i in range(400)]
    ours = [x + 0.02 + 0.05 * math.sin(11 * i) for i, x in enumerate(theirs)]
    difference, interval = paired_difference(ours, theirs)
    low, high = interval or (0, 0)
    assert difference == pytest.approx(0.02, abs=1e-3)
    own_low, own_high = mean_interval(ours) or (0, 0)
    assert 0.01 < low < high < 0.03 and high - low < 0.2 * (own_high - own_low)
    assert paired_difference([1.0, 2.0, 4.0], [1.0, 1.0, 1.0])[0] == pytest.approx(4 / 3)
    low, high = win_rate([1.0] * 9 + [0.0], [1.0] * 5 + [0.0] * 5)["ci95"]
    shares = paired_difference([1.0] * 9 + [0.0], [1.0] * 5 + [0.0] * 5)
    assert shares == (0.4, pytest.approx((2 * low - 1, 2 * high - 1)))
    assert paired_difference([3.0, 2.0], [3.0, 2.0]) == (0.0, None)


# Length-controlled win rates


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def scores_with(chances: list[float], seed: int = 0) -> tuple[list[float], list[float]]:
    """Scores of which ours is above theirs with the chance of each row."""
    draw = random.Random(seed)
    return [float(draw.random() < chance) for chance in chances], [0.5] * len(chances)


def length_differences(n: int, mean: float, deviation: float, seed: int = 0) -> list[int]:
    """Differences of length, in tokens."""
    draw = random.Random(1000 + seed)
    return [round(draw.gauss(mean, deviation)) for _ in range(n)]


def controlled_rate(ours: list[float], theirs: list[float], longer: list[int]) -> tuple[float, tuple[float, float]]:
    found = length_controlled(ours, theirs, longer)
    assert found
    return found


@pytest.mark.full
@pytest.mark.parametrize("by_length", [False, True])
def test_the_fit_is_the_maximum_of_likelihood_and_prior(by_length: bool) -> None:
    """Compared with a grid search: log-likelihood, and a Cauchy prior of scale 2.5."""
    longer = length_differences(48, 4, 6)
    ours, theirs = scores_with([0.9, 0.7, 0.6, 0.4, 0.8, 0.3] * 8, seed=3)
    if by_length:
        ours = [float(d > 1) for d in longer]  # the slope grows as far as the prior lets it
    mean = sum(longer) / 48
    spread = math.sqrt(sum((d - mean) ** 2 for d in longer) / 48)
    xs = [math.tanh(d / spread) for d in longer]

    def worth(a: float, b: float) -> float:
        chances = [logistic((a + b * x) * (1 if won else -1)) for x, won in zip(xs, ours, strict=True)]
        return sum(map(math.log, chances)) - math.log(1 + (b / 2.5) ** 2)

    slopes = range(10, 200) if by_length else range(-20, 21)
    grid = [(worth(a / 50, b / 10), a / 50) for a in range(-250, 75) for b in slopes]
    assert controlled_rate(ours, theirs, longer)[0] == pytest.approx(logistic(max(grid)[1]), abs=0.006)


@pytest.mark.parametrize("seed", range(5))
def test_a_judge_that_likes_length_alone(seed: int) -> None:
    """Ours is mostly longer and so mostly wins; at equal lengths neither does. With a judge of length and nothing else
    the two sides are parted without a rest, which a fit without a prior does not survive."""
    longer = length_differences(400, 7, 6, seed)
    for chances in ([logistic(0.8 * d) for d in longer], [0.5 * ((d > 0) + (d >= 0)) for d in longer]):
        ours, theirs = scores_with(chances, seed)
        if 0.5 in chances:
            ours = [0.5 if chance == 0.5 else score for chance, score in zip(chances, ours, strict=True)]
        controlled, (low, high) = controlled_rate(ours, theirs, longer)
        assert win_rate(ours, theirs)["value"] > 0.8
        assert low <= controlled <= high and low - 0.1 < 0.5 < high + 0.1 and abs(controlled - 0.5) < 0.25


def test_quality_that_has_nothing_to_do_with_length() -> None:
    """The rate stays the plain one, and the interval covers the truth as often as it should: 38 of 40."""
    covered = 0
    for seed in range(40):
        ours, theirs = scores_with([0.8] * 300, seed)
        controlled, (low, high) = controlled_rate(ours, theirs, length_differences(300, 3, 8, seed))
        assert controlled == pytest.approx(win_rate(ours, theirs)["value"], abs=0.06) and high - low < 0.15
        covered += low < 0.8 < high
    assert covered >= 35


def test_the_two_sides_change_places_and_a_tie_is_a_half() -> None:
    ours, theirs = scores_with([0.7] * 60)
    longer = length_differences(60, 4, 5)
    there = controlled_rate(ours, theirs, longer)[0]
    assert controlled_rate(theirs, ours, [-d for d in longer])[0] == pytest.approx(1 - there, abs=1e-6)
    assert controlled_rate([1.0] * 60, [1.0] * 60, longer)[0] == pytest.approx(0.5, abs=1e-9)


@pytest.mark.parametrize(
    ("ours", "longer"),
    [([1.0, 1.0, 0.0, 0.5], [0, 0, 0, 0]), ([1.0] * 4, [1, -5, 2, 0]), ([0.0] * 4, [1, -5, 2, 0]), ([1.0], [0])],
)
def test_where_lengths_explain_nothing_it_is_the_plain_rate(ours: list[float], longer: list[int]) -> None:
    plain = win_rate(ours, [0.5] * len(ours))
    value, bounds = controlled_rate(ours, [0.5] * len(ours), longer)
    assert value == plain["value"] and list(bounds) == plain["ci95"]


@pytest.mark.parametrize("longer", [[3] * 40, [3] * 37 + [-1] * 3, [-3] * 37 + [0] * 3])
def test_lengths_of_one_sign_are_not_extrapolated(longer: list[int]) -> None:
    ours, theirs = scores_with([0.7] * 40)
    assert length_controlled(ours, theirs, longer) is None
    assert length_controlled(ours, theirs, [*longer[:-4], *[-each for each in longer[:4]]]) is not None


def test_the_best_of_many_is_overestimated() -> None:
    """Ten candidates of the same worth, in truth: the best mean is above it by 1.54 standard errors on the mean."""
    errors, reported = [], []
    for seed in range(40):
        scores = np.random.default_rng(seed).normal(size=(10, 100))
        weights = selection_weights(dict(enumerate(scores)))
        assert weights.shape == (100, 10) and weights.sum(axis=1) == pytest.approx(np.ones(100))
        errors.append(scores.mean(axis=1).max())
        reported.append(scores.mean(axis=1).max() - (weights * scores.T).sum(axis=1).mean())
    assert np.mean(reported) == pytest.approx(0.154, abs=0.04) and np.mean(errors) == pytest.approx(0.154, abs=0.03)
    assert selection_weights({1: [0.3] * 9}).tolist() == [[1.0]] * 9
    assert selection_weights({1: [0.3] * 9, 2: [0.3] * 9}).tolist() == [[1.0, 0.0]] * 9, "the first of equal ones"


def test_a_row_is_judged_by_other_groups() -> None:
    """A candidate that is best on one prompt alone, whose rows are in the same fold, is not selected for them."""
    scores = {"usual": [0.0] * 12, "lucky": [9.0] * 4 + [-0.1] * 8}
    weights = selection_weights(scores, [row // 4 for row in range(12)])
    assert weights[:4, 0] == pytest.approx(np.ones(4)) and weights[4:, 1] == pytest.approx(np.ones(8))


def test_the_interval_without_a_bias_is_shifted_and_wider() -> None:
    assert without_bias(0.7, [0.4, 1.1], 0.4) == (pytest.approx(0.3), pytest.approx([-0.2, 0.3 + math.hypot(0.4, 0.4)]))
    assert without_bias(0.7, None, 0.1) == (pytest.approx(0.6), None)


def test_candidates_that_may_be_as_good_as_the_best() -> None:
    draw = random.Random(3)
    hard = [draw.gauss(0, 1) for _ in range(200)]
    worth = {"first": 0.0, "second": 0.3, "third": 0.32, "far": -2.0}
    scores = {name: [each + mean + draw.gauss(0, 0.5) for each in hard] for name, mean in worth.items()}
    assert within_noise(scores) == within_noise(scores) == ["second", "third"]
    assert within_noise({"a": [1.0] * 5, "b": [1.0] * 5, "c": [0.0] * 5}) == ["a", "b"]
    assert within_noise({"alone": [0.5]}) == ["alone"]
    assert within_noise({1: [0.1], 2: [0.9]}) == [1, 2], "one row distinguishes nothing"
