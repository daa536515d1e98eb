"""Report card of a reward model: accuracy, calibration, length bias, and flags. No torch."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlhf_cli.errors import Problem
from rlhf_cli.evaluation.reward_probes import PROBE_LABELS
from rlhf_cli.runs.report import (
    Adversarial,
    CalibrationBin,
    CardFlag,
    EnsembleCard,
    LongerAnswer,
    MarginHistogram,
    RewardModelCard,
)
from rlhf_cli.statistics import (
    Clusters,
    bonferroni_z,
    effective_rows,
    share_interval,
    wilson,
    wilson_difference,
    with_interval,
)

if TYPE_CHECKING:  # numpy takes long to import
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

MARGIN_EDGES = (-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0)  # log-odds: 1, 2 and 4 are probabilities of 73, 88 and 98 %
NUM_BINS = 10  # of calibration, of equal width, from 0.5 to 1
NUM_RESAMPLES = 1000
# Chen et al. 2024, arXiv 2402.07319: 0.45 (Pearson) for a reward model whose policies grew long. 0.3 is a tenth of the
# variance of the ranks. The demo's reward model has 0.15.
MAX_LENGTH_CORRELATION = 0.3
MAX_ECE = 0.1  # pairs with confidence 0.8 are right in 70 % or 90 % of the cases
MIN_PROBE_LIMIT = 0.1  # else 1 - accuracy: a probe without content should lose more often than a rejected answer
# Limits that do not depend on the accuracy. over_long: indifference. swapped_prompt: half of a model without a prompt.
FIXED_LIMITS = {"over_long": 0.5, "swapped_prompt": 0.25}


@dataclass(frozen=True)
class ScoredPair:
    """Raw scores of an evaluation pair, the answers' lengths in tokens including the end token, and the prompt.

    If all pairs have one prompt, `prompt` is what tells them apart instead: their answers.
    """

    chosen: float
    rejected: float
    chosen_length: int
    rejected_length: int
    prompt: Hashable = field(default_factory=object)  # by default not that of another pair

    @property
    def margin(self) -> float:
        return self.chosen - self.rejected

    @property
    def right(self) -> float:
        """1 if the chosen answer scores higher, 0 if the rejected does, 0.5 for a tie."""
        return 0.5 if self.chosen == self.rejected else float(self.chosen > self.rejected)


# Accuracy, calibration and length


def make_card(pairs: Sequence[ScoredPair], adversarial: Adversarial, *, seed: int = 0) -> RewardModelCard:
    """Return the card of at least one pair with finite scores, without flags; deterministic for a seed.

    `independent_pairs`: as many of them would give an accuracy as certain, since pairs of one prompt depend on one
    another.
    """
    import numpy as np

    n = len(pairs)
    right = [pair.right for pair in pairs]
    margins = [pair.margin for pair in pairs]
    prompts = [pair.prompt for pair in pairs]
    bins = calibration_bins(pairs)
    correlation, correlation_interval = length_correlation(pairs)
    return RewardModelCard(
        n=n,
        accuracy=sum(right) / n,
        accuracy_ci95=list(share_interval(right, prompts)),
        independent_pairs=min(float(n), effective_rows(np.array(right), Clusters.of(n, prompts))),
        margin=sum(margins) / n,
        margin_histogram=MarginHistogram(edges=list(MARGIN_EDGES), counts=margin_histogram(margins)),
        ece=expected_calibration_error(bins),
        ece_by_chance=ece_null_quantile(pairs, seed=seed),
        calibration=bins,
        length_correlation=correlation,
        length_correlation_ci95=list(correlation_interval),
        longer_answer=longer_answer_preference(pairs),
        adversarial=adversarial,
    )


def compare_members(scores: Sequence[Sequence[float]]) -> EnsembleCard:
    """Compare the members of an ensemble by the scores of each: of the chosen answers, then of the rejected ones."""
    import numpy as np

    by_member = np.array(scores)
    chosen, rejected = np.split(by_member, 2, axis=1)
    margins = chosen - rejected
    accuracies = (np.sign(margins).mean(1) + 1) / 2  # a tie counts half
    return EnsembleCard(
        accuracies=accuracies.tolist(),
        accuracy=float((np.sign(margins.mean(0)).mean() + 1) / 2),
        disagreement=float(by_member.std(0).mean()),
    )


def margin_histogram(margins: Sequence[float]) -> list[int]:
    """Count the margins below the first of MARGIN_EDGES, from each edge up to the next, and from the last."""
    counts = Counter(bisect_right(MARGIN_EDGES, margin) for margin in margins)
    return [counts[index] for index in range(len(MARGIN_EDGES) + 1)]


def confidence(pair: ScoredPair) -> float:
    """Return the probability that the scores assign to the preferred answer: max(p, 1 - p), p = sigmoid(margin).

    p itself cannot be calibrated, because the chosen answer always comes first: a model that is always sure and always
    right has p = 1 throughout, one that is always sure and always wrong p = 0.
    """
    return 1 / (1 + math.exp(-abs(pair.margin)))


def calibration_bins(pairs: Sequence[ScoredPair]) -> list[CalibrationBin]:
    """Return each bin that has pairs."""
    members: dict[int, list[ScoredPair]] = {}
    for pair in pairs:
        members.setdefault(_bin(confidence(pair)), []).append(pair)

    bins = []
    for index, inside in sorted(members.items()):
        low = 0.5 + 0.5 * index / NUM_BINS
        high = 0.5 + 0.5 * (index + 1) / NUM_BINS
        n = len(inside)
        accuracy = sum(pair.right for pair in inside) / n
        bins.append(
            CalibrationBin(low=low, high=high, n=n, confidence=sum(map(confidence, inside)) / n, accuracy=accuracy)
        )
    return bins


def expected_calibration_error(bins: Sequence[CalibrationBin]) -> float:
    """Return the expected calibration error: sum over bins of n_bin / n * |accuracy - mean confidence|.

    Guo et al. 2017, arXiv 1706.04599, equation 3, for two classes, so that bins start at 0.5.
    """
    gaps = sum(each.n * abs(each.accuracy - each.confidence) for each in bins)
    return gaps / sum(each.n for each in bins)


def ece_null_quantile(pairs: Sequence[ScoredPair], *, seed: int = 0) -> float:
    """Return the 95 % quantile of the calibration error if outcomes are drawn from the confidences themselves.

    With few pairs a bin's accuracy deviates by chance (consistency resampling: Broecker and Smith 2007). It deviates
    by more if the pairs of one prompt are right or wrong together: by the square root of the design effect.
    """
    import numpy as np

    n = len(pairs)
    rng = np.random.default_rng(seed)
    probabilities = np.array([confidence(pair) for pair in pairs])
    bins = np.array([_bin(probability) for probability in probabilities])
    errors = []
    for _ in range(NUM_RESAMPLES):
        outcomes = rng.random(n) < probabilities
        gaps = np.bincount(bins, weights=outcomes - probabilities)
        errors.append(np.abs(gaps).sum() / n)

    clusters = Clusters.of(n, [pair.prompt for pair in pairs])
    residuals = np.array([pair.right for pair in pairs]) - probabilities
    residuals -= residuals.mean()
    variance = float(residuals @ residuals)
    design = float((clusters.sums(residuals) ** 2).sum()) / variance if variance > 0 else 1.0
    return float(np.quantile(errors, 0.95)) * math.sqrt(max(1.0, design))


def _bin(probability: float) -> int:
    return min(NUM_BINS - 1, int((probability - 0.5) * 2 * NUM_BINS))


def length_correlation(pairs: Sequence[ScoredPair]) -> tuple[float, tuple[float, float]]:
    """Return Spearman's correlation of score and length over all answers, and its 95 % interval.

    Ranks, because the reward need not be linear in the length and one very long answer must not dominate. The interval
    is Student's on Fisher's z scale; the variance is that of the influence of each prompt (Croux and Dehon 2010,
    Statistical Methods and Applications 19, 497-515; its answers depend on one another). 0 with an interval of width 0
    if all lengths, or all scores, are equal; from -1 to 1 if `prompt` is the same for all.
    """
    raw_scores: list[float] = []
    raw_lengths: list[float] = []
    prompts: list[Hashable] = []
    for pair in pairs:
        raw_scores += [pair.chosen, pair.rejected]
        raw_lengths += [pair.chosen_length, pair.rejected_length]
        prompts += [pair.prompt, pair.prompt]

    scores = _centred_ranks(raw_scores)
    lengths = _centred_ranks(raw_lengths)
    deviation = math.sqrt(float((scores**2).mean() * (lengths**2).mean()))
    if deviation == 0:
        return 0.0, (0.0, 0.0)
    value = float((scores * lengths).mean()) / deviation
    clusters = Clusters.of(len(scores), prompts)
    if len(clusters.sizes) == 1:
        return value, (-1.0, 1.0)

    influence = _product_influence(scores, lengths) / deviation
    influence -= value / 2 * (_relative_influence(scores) + _relative_influence(lengths))
    error = math.sqrt(float((clusters.deviations(influence - influence.mean()) ** 2).sum()))
    if abs(value) >= 1 or error == 0:
        return value, (value, value)
    z = math.atanh(value)
    half = clusters.quantile * error / (1 - value * value)
    return value, (math.tanh(z - half), math.tanh(z + half))


def _relative_influence(ranks: "Array") -> "Array":
    """Return the influence of each row on the variance of ranks, as a share of it."""
    influence: Array = _product_influence(ranks, ranks) / (ranks**2).mean()
    return influence


def _centred_ranks(values: Sequence[float]) -> "Array":
    """Return the mid-ranks of values as shares of their number, less one half: (n,)."""
    import numpy as np
    from scipy.stats import rankdata

    ranks: Array = rankdata(values)
    return (ranks - (len(values) + 1) / 2) / np.float64(len(values))


def _product_influence(x: "Array", y: "Array") -> "Array":
    """Return the influence of each row on the mean product of two columns of ranks, up to a constant.

    A row adds its product, and it raises the ranks of the rows above it.
    """
    return x * y + _mean_above(x, y) + _mean_above(y, x)


def _mean_above(ranks: "Array", values: "Array") -> "Array":
    """Return the sum of the values of the rows with a higher rank, and half of those with the same, over all rows."""
    import numpy as np

    _, level = np.unique(ranks, return_inverse=True)
    sums = np.bincount(level, weights=values)
    above = np.cumsum(sums[::-1])[::-1] - sums / 2
    return above[level] / len(values)


def longer_answer_preference(pairs: Sequence[ScoredPair]) -> LongerAnswer | None:
    """Return how often the longer answer of a pair scores higher, and how often people chose it.

    Over pairs of different lengths; None without such pairs. A share rather than a correlation, which is undefined if
    the longer answer is always chosen: 2 * share - 1 is the correlation of the signs over both orders of each pair.
    """
    unequal = [pair for pair in pairs if pair.chosen_length != pair.rejected_length]
    if not unequal:
        return None

    n = len(unequal)
    chosen_is_longer = [pair.chosen_length > pair.rejected_length for pair in unequal]
    wins = [pair.right if longer else 1 - pair.right for pair, longer in zip(unequal, chosen_is_longer, strict=True)]
    interval = share_interval(wins, [pair.prompt for pair in unequal])
    return LongerAnswer(n=n, preferred=sum(wins) / n, ci95=list(interval), chosen=sum(chosen_is_longer) / n)


# Flags: limits that a card exceeds by more than chance


def with_flags(card: RewardModelCard, problems: Sequence[Problem]) -> RewardModelCard:
    """Return the card with its problems as flags."""
    return card.with_changes(flags=[CardFlag(code=problem.code, text=problem.text) for problem in problems])


def find_problems(card: RewardModelCard) -> list[Problem]:
    """Return the card's problems: R10 length bias, R11 a probe that wins too often, R12 calibration."""
    problems = [_length_bias(card)] if is_length_biased(card) else []
    problems += [_winning_probe(name, card) for name in card.adversarial.probes if is_probe_flagged(name, card)]
    if card.ece > ece_limit(card):
        text = f"the scores are miscalibrated: ECE {card.ece:.2f}, limit {MAX_ECE}; {describe_confidence(card)}"
        hint = "over-confident: fewer epochs or a lower learning rate; under-confident: train longer"
        problems.append(Problem("R12", text, hint=hint))
    return problems


def _length_bias(card: RewardModelCard) -> Problem:
    low, high = card.length_correlation_ci95
    text = "the score depends on the length of the answer: rank correlation "
    text += f"{card.length_correlation:.2f} [{low:.2f}, {high:.2f}], limit {MAX_LENGTH_CORRELATION}"
    if card.longer_answer:
        text += f"; the longer answer is the chosen one in {card.longer_answer.chosen:.0%} of the evaluation pairs"
    hint = "balance the pairs by length, or set ppo.overlong_penalty, and monitor objective/response_length"
    gain = describe_debiasing(card)
    return Problem("R10", text, hint=f"{gain}; or {hint}" if gain else hint)


def describe_debiasing(card: RewardModelCard) -> str:
    """Return the advice to set `reward.length_debias`, with its effect; empty if that is not known to remove R10."""
    found = card.length_debiasing
    if found is None or found.applied or _is_beyond_limit(found.debiased.length_correlation_ci95):
        return ""
    correlation = with_interval(found.debiased.length_correlation, found.debiased.length_correlation_ci95)
    change = with_interval(found.accuracy_difference, found.accuracy_difference_ci95, sign="+")
    return f"set reward.length_debias: true, which brings it to {correlation} and changes the accuracy by {change}"


def _winning_probe(name: str, card: RewardModelCard) -> Problem:
    beats = card.adversarial.probes[name].beats
    text = f"{PROBE_LABELS[name]} scores above the chosen answer for {beats:.0%} of "
    text += f"{card.adversarial.n} prompts, limit {probe_limit(name, card.accuracy):.0%}"
    hint = "PPO will exploit it: add pairs in which such answers are rejected"
    if name == "swapped_prompt":
        hint += "; ignore this if the reward must not depend on the prompt"
    return Problem("R11", text, hint=hint)


def probe_limit(probe: str, accuracy: float) -> float:
    """Return the largest acceptable share of prompts for which a probe scores above the chosen answer."""
    return FIXED_LIMITS.get(probe, max(MIN_PROBE_LIMIT, 1 - accuracy))


def ece_limit(card: RewardModelCard) -> float:
    """Return the largest acceptable calibration error (R12 above it)."""
    return max(MAX_ECE, card.ece_by_chance)


def is_length_biased(card: RewardModelCard) -> bool:
    """Return True (R10) if the entire interval of the length correlation is beyond the limit."""
    return _is_beyond_limit(card.length_correlation_ci95)


def _is_beyond_limit(correlation_ci95: Sequence[float]) -> bool:
    low, high = correlation_ci95
    return low > MAX_LENGTH_CORRELATION or high < -MAX_LENGTH_CORRELATION


def is_probe_flagged(name: str, card: RewardModelCard) -> bool:
    """Return True (R11) if a probe wins significantly more often than its limit.

    Corrected for the number of probes, and for the uncertainty of the accuracy if the limit depends on it.
    """
    probes = card.adversarial.probes
    n = card.adversarial.n
    share = probes[name].beats
    z = bonferroni_z(len(probes))
    low, _ = wilson(share * n, n, z)
    if name in FIXED_LIMITS:
        return low > FIXED_LIMITS[name]

    pairs = card.n if card.independent_pairs is None else card.independent_pairs
    low_difference, _ = wilson_difference((share, n), (1 - card.accuracy, pairs), z)
    return low > MIN_PROBE_LIMIT and low_difference > 0


def describe_confidence(card: RewardModelCard) -> str:
    """Return mean confidence and accuracy as text."""
    return f"confidence {mean_confidence(card):.2f}, accuracy {card.accuracy:.2f}"


def mean_confidence(card: RewardModelCard) -> float:
    """Return the mean confidence over the pairs."""
    return float(sum(each.n * each.confidence for each in card.calibration) / card.n)
