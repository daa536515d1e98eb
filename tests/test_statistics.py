"""Intervals against published or exact values."""

import math

import pytest

from rlhf_cli.statistics import best_of_n_kl, bootstrap_mean, wilson, win_rate


@pytest.mark.parametrize(
    "wins,n,low,high",
    [(0, 10, 0.0, 0.2775), (8, 10, 0.4902, 0.9433), (50, 100, 0.4038, 0.5962), (10, 10, 0.7225, 1.0)],
)
def test_wilson_by_the_tables(wins: float, n: int, low: float, high: float) -> None:
    assert wilson(wins, n) == pytest.approx((low, high), abs=1e-4)


def test_win_rate_counts_a_tie_as_half() -> None:
    found = win_rate([1.0, 2.0, 3.0, 0.0], [0.0, 2.0, 1.0, 5.0])
    assert (found["value"], found["ties"], found["n"]) == (2.5 / 4, 1, 4)
    assert found["ci95"] == list(wilson(2.5, 4))


def test_bootstrap_is_near_the_normal_interval_and_repeats() -> None:
    values = [math.sin(7 * i) for i in range(400)]  # spread evenly, mean near 0, deviation near 0.707
    low, high = bootstrap_mean(values, seed=1)
    mean = sum(values) / len(values)
    error = 1.96 * math.sqrt(sum((x - mean) ** 2 for x in values) / len(values) ** 2)
    assert (low, high) == pytest.approx((mean - error, mean + error), abs=0.01)
    assert bootstrap_mean(values, seed=1) == (low, high) != bootstrap_mean(values, seed=2)
    assert bootstrap_mean([0.5] * 9) == (0.5, 0.5)


def test_best_of_n_bound() -> None:
    assert best_of_n_kl(1) == 0.0
    assert best_of_n_kl(2) == pytest.approx(math.log(2) - 0.5)
    assert best_of_n_kl(4) == pytest.approx(0.6363, abs=1e-4)
