"""The slope of scores over lengths, and accuracy and length correlation without it, by hand."""

import re
from dataclasses import replace

import pytest

from rlhf_cli.config.reward import MIN_DEBIAS_ANSWERS
from rlhf_cli.evaluation import reward_model
from rlhf_cli.evaluation.length_bias import LengthTrend, compare, debias, fit_trend
from rlhf_cli.evaluation.reward_choices import choice_rows
from rlhf_cli.evaluation.reward_model import ScoredPair, describe_debiasing, find_problems
from rlhf_cli.runs.report import Adversarial, RewardModelCard

# Raw score = 0.1 per token + quality; the quality of the chosen answer is 0.5, of the rejected one 0.
PAIRS = [ScoredPair(0.1 * chosen + 0.5, 0.1 * rejected, chosen, rejected) for chosen, rejected in
         [(10, 20), (20, 10), (30, 40), (40, 30), (10, 14), (14, 10)]]  # fmt: skip
MANY = [replace(pair, prompt=number) for number, pair in enumerate(PAIRS * 10)]
TREND = LengthTrend(slope=0.1, mean_length=20.0)


def answers(lengths: list[int], slope: float) -> tuple[list[float], list[int], list[bool]]:
    """Scores on a line, with noise that no line explains, of as many answers as a slope needs."""
    lengths = lengths * MIN_DEBIAS_ANSWERS
    noise = [1.0, -1.0] * (len(lengths) // 2)
    both = [*lengths, *lengths]
    scores = [7 + slope * length for length in lengths]
    high = [score + shift for score, shift in zip(scores, noise, strict=True)]
    low = [score - shift for score, shift in zip(scores, noise, strict=True)]
    return [*high, *low], both, [True] * len(both)


def test_the_slope_is_that_of_least_squares_around_the_mean_length() -> None:
    scores, lengths, ended = answers([10, 30], slope=-0.25)
    assert fit_trend(scores, lengths, ended) == LengthTrend(pytest.approx(-0.25), 20.0)


def test_an_answer_that_was_cut_off_has_no_say_in_the_slope() -> None:
    scores, lengths, ended = answers([10, 30], slope=0.1)
    cut = 4 * MIN_DEBIAS_ANSWERS  # as many as ended: the mean length is that of all
    found = fit_trend([*scores, *[-50.0] * cut], [*lengths, *[60] * cut], [*ended, *[False] * cut])
    assert found == LengthTrend(pytest.approx(0.1), pytest.approx(40.0))


def test_no_slope_of_one_length_or_of_too_few_answers() -> None:
    scores, lengths, ended = answers([10, 30], slope=0.1)
    few = MIN_DEBIAS_ANSWERS - 1
    assert fit_trend(scores, [12] * len(lengths), ended) is None
    assert fit_trend(scores[:few], lengths[:few], ended[:few]) is None
    assert fit_trend(scores, lengths, [*ended[:few], *[False] * (len(ended) - few)]) is None
    assert fit_trend(scores[: few + 1], lengths[: few + 1], ended[: few + 1]) is not None


def test_scores_without_the_trend() -> None:
    pair = debias(PAIRS, TREND)[0]
    assert (pair.chosen, pair.rejected) == pytest.approx((1.5 + 1.0, 2.0)), "moved to the mean length"
    assert (pair.chosen_length, pair.rejected_length, pair.prompt) == (10, 20, PAIRS[0].prompt)


def test_results_before_and_after() -> None:
    found = compare(PAIRS, TREND, applied=False)
    assert (found.raw.accuracy, found.debiased.accuracy) == (pytest.approx(4 / 6), 1.0)  # (10, 20) and (30, 40) lost
    assert found.accuracy_difference == pytest.approx(2 / 6)
    assert found.accuracy_difference_ci95 and found.accuracy_difference_ci95[0] < 2 / 6
    assert found.raw.length_correlation > 0.9 and abs(found.debiased.length_correlation) < 0.1
    expected = reward_model.length_correlation(debias(PAIRS, TREND))
    assert (found.debiased.length_correlation, tuple(found.debiased.length_correlation_ci95)) == expected


def test_a_slope_that_moves_no_pair_has_no_interval() -> None:
    found = compare(MANY, LengthTrend(slope=1e-6, mean_length=20.0), applied=False)
    assert (found.accuracy_difference, found.accuracy_difference_ci95) == (0.0, None)


def card(applied: bool) -> RewardModelCard:
    plain = reward_model.make_card(debias(MANY, TREND) if applied else MANY, Adversarial(n=1, probes={}))
    return plain.with_changes(length_debiasing=compare(MANY, TREND, applied=applied))


def choices(card: RewardModelCard) -> dict[str, list[str]]:
    """What the card says of each choice: whether it was used, and its gain."""
    return {name: texts for name, *texts in choice_rows(card)}


def test_the_card_says_what_it_would_gain() -> None:
    (problem,) = (problem for problem in find_problems(card(applied=False)) if problem.code == "R10")
    gain = describe_debiasing(card(applied=False))
    assert gain.startswith("set reward.length_debias: true, which brings it to ") and "accuracy by +0.333 [" in gain
    assert problem.hint and problem.hint.startswith(f"{gain}; or balance the pairs")
    used, gained = choices(card(applied=False))["length debiasing"]
    assert used == "no; reward.length_debias"
    assert re.fullmatch(r"correlation 0\.\d{3} to -?0\.\d{3} \[.*\], accuracy \+0\.333 \[.*\]", gained)


def test_no_advice_to_subtract_a_slope_that_does_not_suffice() -> None:
    plain = reward_model.make_card(MANY, Adversarial(n=1, probes={}))
    weak = plain.with_changes(length_debiasing=compare(MANY, LengthTrend(0.01, 20.0), applied=False))
    assert describe_debiasing(weak) == ""
    assert choices(weak)["length debiasing"][1].startswith("correlation ")
    (problem,) = (problem for problem in find_problems(weak) if problem.code == "R10")
    assert problem.hint and problem.hint.startswith("balance the pairs")


def test_the_card_says_what_it_gained() -> None:
    debiased = card(applied=True)
    assert describe_debiasing(debiased) == "" and debiased.accuracy == 1.0
    assert "R10" not in {problem.code for problem in find_problems(debiased)}
    used, gained = choices(debiased)["length debiasing"]
    raw = reward_model.length_correlation(MANY)[0]
    assert used == "yes"
    assert gained.startswith(f"correlation {raw:.3f} to ") and ", accuracy +0.333 [" in gained


def test_a_card_that_knows_nothing_of_it_says_nothing() -> None:
    plain = reward_model.make_card(MANY, Adversarial(n=1, probes={}))
    assert choices(plain)["length debiasing"] == ["no", "unknown"]
    assert describe_debiasing(plain) == ""
    (problem,) = (problem for problem in find_problems(plain) if problem.code == "R10")
    assert problem.hint and problem.hint.startswith("balance the pairs")
