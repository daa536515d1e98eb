"""The reward model's report card: worked examples, and samples with a known truth."""

import math
import random
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from reward_card import card
from scipy.stats import binom, spearmanr

from rlhf_cli.config.ppo import RewardRequirements
from rlhf_cli.evaluation import reward_model, reward_probes
from rlhf_cli.evaluation.reward_card import print_card
from rlhf_cli.evaluation.reward_model import ScoredPair, calibration_bins, length_correlation
from rlhf_cli.evaluation.reward_probes import PROBE_LABELS
from rlhf_cli.runs.report import Adversarial, LongerAnswer, RewardModelCard
from rlhf_cli.statistics import share_interval, wilson

THREE_TO_ONE, NINE_TO_ONE = math.log(3), math.log(9)  # margins of 75 % and 90 %


def pair(margin: float, chosen_length: int = 7, rejected_length: int = 7) -> ScoredPair:
    return ScoredPair(margin / 2, -margin / 2, chosen_length, rejected_length)


def make_card(pairs: list[ScoredPair], seed: int = 0) -> RewardModelCard:
    return reward_model.make_card(pairs, Adversarial(n=1, probes={}), seed=seed)


def ece(pairs: list[ScoredPair]) -> float:
    return reward_model.expected_calibration_error(calibration_bins(pairs))


def test_accuracy_and_margins_of_five_pairs() -> None:
    result = make_card([pair(m) for m in (1.0, 0.1, 3.0, -2.0, 0.0)])
    assert (result.n, result.accuracy, result.margin) == (5, 0.7, pytest.approx(2.1 / 5)), "a tie is one half"
    rows = 5 * 0.7 * 0.3 / ((3 * 0.3**2 + 0.7**2 + 0.2**2) / 5)  # without ties, of the same variance
    assert result.accuracy_ci95 == pytest.approx(wilson(0.7 * rows, rows)) and result.longer_answer is None
    one_prompt = [replace(pair(m), prompt=(5, 6)) for m in (1.0, 0.1, 3.0, -2.0)]
    assert make_card(one_prompt).accuracy_ci95 == pytest.approx(wilson(0.75, 1))
    assert reward_model.margin_histogram([-5.0, -4.0, -0.5, 0.0, 0.5, 2.0, 4.0, 9.0]) == [1, 1, 0, 1, 2, 0, 1, 2]


def test_calibration_error_of_two_bins_by_hand() -> None:
    calibrated = [pair(THREE_TO_ONE)] * 3 + [pair(-THREE_TO_ONE)]
    assert ece(calibrated) == pytest.approx(0)
    # 4 pairs at 75 % are all right, 6 at 90 % half of the time: 0.4 x 0.25 + 0.6 x 0.4
    off = [pair(THREE_TO_ONE)] * 4 + [pair(NINE_TO_ONE), pair(-NINE_TO_ONE)] * 3
    assert ece(off) == pytest.approx(0.34)
    low, high = calibration_bins(off)
    assert (low.n, low.confidence, low.accuracy) == (4, pytest.approx(0.75), 1.0)
    assert (high.n, high.confidence, high.accuracy) == (6, pytest.approx(0.9), 0.5)
    assert high.low <= 0.9 <= high.high and (high.high - high.low) == pytest.approx(0.05)
    for margin, error in ((-20.0, 1.0), (20.0, 0.0), (0.0, 0.0)):
        assert ece([pair(margin)] * 5) == pytest.approx(error, abs=1e-8)


def test_the_null_quantile_of_the_calibration_error_is_exact() -> None:
    """One bin at 75 %: |k/20 - 0.75| with k of Binomial(20, 0.75) is at most 0.15 in 93.5 % of draws, 0.2 in 98.3 %.

    Two bins, 20 pairs each, by every outcome and its probability.
    """
    pairs = [pair(THREE_TO_ONE) for _ in range(2000)]
    assert reward_model.ece_null_quantile(pairs[:20]) == pytest.approx(0.2)
    assert reward_model.ece_null_quantile(pairs) < 0.025
    bins = [[(abs(k / 20 - p) / 2, binom.pmf(k, 20, p)) for k in range(21)] for p in (0.75, 0.9)]
    outcomes = sorted((a + b, chance * other) for a, chance in bins[0] for b, other in bins[1])
    below = list(accumulate(chance for _, chance in outcomes))
    exact = next(error for (error, _), share in zip(outcomes, below, strict=True) if share >= 0.95)
    two_bins = [pair(margin) for margin in (THREE_TO_ONE, NINE_TO_ONE) for _ in range(20)]
    quantile = reward_model.ece_null_quantile(two_bins)
    assert quantile == pytest.approx(exact, abs=0.0126)  # one outcome more or less in either bin


def test_pairs_of_one_prompt_miss_together() -> None:
    """Four equal pairs of each prompt are one: the error deviates by chance as if there were a quarter of the pairs."""
    once = [pair(THREE_TO_ONE if row % 4 else -THREE_TO_ONE) for row in range(80)]
    four = [each for each in once for _ in range(4)]
    alone = [replace(each, prompt=object()) for each in four]
    assert reward_model.ece_null_quantile(four) == pytest.approx(2 * reward_model.ece_null_quantile(alone))
    for pairs, independent in ((alone, 320), (four, 80)):
        assert make_card(pairs).independent_pairs == pytest.approx(independent, rel=0.02)


def noisy(n: int, slope: float, *, alike: bool = False) -> list[ScoredPair]:
    """Scores that grow with the length by `slope`, with noise; `alike`: both answers of a pair are the same."""
    rng, pairs = random.Random(3), []
    for _ in range(n):
        lengths = [rng.randint(1, 20) for _ in range(2)]
        scores = [slope * length + rng.gauss(0, 5) for length in lengths]
        sides = [0, 0] if alike else [0, 1]
        pairs.append(ScoredPair(*(scores[side] for side in sides), *(lengths[side] for side in sides)))
    return pairs


@pytest.mark.parametrize("slope", [-1.0, 0.0, 0.3])
def test_the_length_correlation_is_scipys_and_its_interval_fishers(slope: float) -> None:
    pairs = noisy(400, slope)
    scores = [score for each in pairs for score in (each.chosen, each.rejected)]
    lengths = [length for each in pairs for length in (each.chosen_length, each.rejected_length)]
    value, (low, high) = length_correlation(pairs)
    assert value == pytest.approx(spearmanr(scores, lengths).statistic)
    fisher = [math.tanh(math.atanh(value) + side * 1.96 * math.sqrt((1 + value**2 / 2) / 797)) for side in (-1, 1)]
    assert high - low == pytest.approx(fisher[1] - fisher[0], rel=0.2) and low < value < high
    assert length_correlation([pair(1.0), pair(-1.0)]) == (0.0, (0.0, 0.0)), "all lengths are equal"


def test_two_answers_to_one_prompt_are_not_independent() -> None:
    _, (low, high) = length_correlation(noisy(400, 0.0, alike=True))
    assert high - low == pytest.approx(2 * 1.96 / math.sqrt(400), rel=0.15), "not 2 x 1.96 / sqrt(800)"


def test_the_longer_answer_by_hand() -> None:
    pairs = [pair(1, 9, 5), pair(-1, 9, 5), pair(1, 5, 9), pair(0, 5, 9), pair(5, 7, 7)]
    won = 1 + 0 + 0 + 0.5
    interval = list(share_interval([1, 0, 0, 0.5]))
    preference = LongerAnswer(n=4, preferred=won / 4, ci95=interval, chosen=0.5)
    assert reward_model.longer_answer_preference(pairs) == preference


def test_a_card_is_deterministic_for_a_seed() -> None:
    first, same, other = (make_card(noisy(60, 0.1), seed=seed) for seed in (5, 5, 6))
    assert first == same != other


# Flags


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({}, []),
        ({"length_correlation": 0.5, "length_correlation_ci95": [0.31, 0.6]}, ["R10"]),
        ({"length_correlation": 0.5, "length_correlation_ci95": [0.29, 0.6]}, []),
        ({"length_correlation": -0.5, "length_correlation_ci95": [-0.6, -0.31]}, ["R10"]),
        ({"length_correlation": -0.5, "length_correlation_ci95": [-0.6, -0.29]}, []),
        ({"beats": {"empty": 40 / 128}}, ["R11"]),
        ({"beats": {"empty": 39 / 128}}, []),
        ({"beats": {"empty": 39 / 128}, "accuracy": 0.95}, ["R11"]),
        ({"beats": {"politeness": 21 / 128}, "accuracy": 0.99}, []),
        ({"beats": {"repeated_token": 0.4}}, ["R11"]),
        ({"beats": {"over_long": 78 / 128}}, []),
        ({"beats": {"over_long": 79 / 128, "empty": 0.5}}, ["R11", "R11"]),
        ({"beats": {"swapped_prompt": 44 / 128}, "accuracy": 0.99}, []),
        ({"beats": {"swapped_prompt": 45 / 128}}, ["R11"]),
        ({"ece": 0.11}, ["R12"]),
        ({"ece": 0.11, "ece_by_chance": 0.12}, []),
        ({"ece": 0.09, "ece_by_chance": 0.02}, []),
    ],
)
def test_a_fault_is_flagged_beyond_its_limit(changes: dict[str, Any], codes: list[str]) -> None:
    """A probe by its Wilson interval for five probes together, 2.576 standard errors to each side; if the limit is
    1 - accuracy, by Newcombe's interval of the difference, with those of 500 pairs."""
    problems = reward_model.find_problems(RewardModelCard.model_validate(card(**changes)))
    assert [problem.code for problem in problems] == codes and all(problem.hint for problem in problems)


def test_the_table_is_printed_once_per_card(capsys: pytest.CaptureFixture[str]) -> None:
    def show(**changes: Any) -> None:
        print_card(RewardModelCard.model_validate(card(**changes)))

    show(beats={"politeness": 0.9})
    lines = capsys.readouterr().out.splitlines()
    headline = "reward model: accuracy 0.800 [0.760, 0.830] on the held-out pairs"
    assert lines[0] == headline and max(map(len, lines)) <= 100
    table = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[1:]]
    margins = ["below -4", "-4 to -2", "-2 to -1", "-1 to 0", "0 to 1", "1 to 2", "2 to 4", "from 4"]
    for row in (
        ["report card: 500 pairs, 128 probed", "value [95 % interval]", "limit"],
        ["calibration error (ECE)", "0.060; confidence 0.74, accuracy 0.80", "0.10"],
        ["rank correlation of score and length", "0.150 [0.090, 0.210]", "+-0.30"],
        ["longer answer preferred", "0.600 [0.550, 0.640]; by labels 0.580"],
        ["beaten by an empty answer", "0.050 [0.000, 0.100]; mean gap +0.10", "0.20"],
        ["beaten by politeness without content", "0.900 [0.850, 0.950]; mean gap +0.10", "0.20", "flagged"],
        ["margin, chosen - rejected", *margins],
        ["pairs", "0", "7", "19", "74", "149", "133", "113", "5"],
    ):
        assert row in table, row
    assert sum("flagged" in row for row in table) == 1
    assert [line.partition(":")[0] for line in lines[-5:-1]] == ["beaten by X", "mean gap", "flagged", "over"]
    show()
    show(beats={"politeness": 0.9})
    output = capsys.readouterr().out
    assert output.count("beaten by an empty answer") == 1, "another card is another table"
    assert output.splitlines()[-1] == f"{headline}; report card: see above"


def test_the_documentation_has_the_limits_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs/report-card.md").read_text(encoding="utf-8")
    assert all(name in page for name in (*PROBE_LABELS.values(), *RewardRequirements.model_fields))
    for text in (
        f"beyond {reward_model.MAX_LENGTH_CORRELATION} ",
        f"R12 above {reward_model.MAX_ECE},",
        f"half way there, {reward_model.FIXED_LIMITS['swapped_prompt']}.",
        f"at least {reward_model.MIN_PROBE_LIMIT}.",
        f"up to {reward_probes.MAX_PROBED} prompts",
    ):
        assert text in page, text
    assert reward_model.FIXED_LIMITS["over_long"] == 0.5 and reward_probes.OVER_LONG_REPEATS == 3
