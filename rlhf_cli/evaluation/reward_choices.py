"""What may make a reward model better: whether a run had it, and what it would gain where the card can tell."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rlhf_cli.evaluation.kept_step import best_of
from rlhf_cli.evaluation.reward_model import is_length_biased
from rlhf_cli.runs.report import RewardModelCard
from rlhf_cli.statistics import with_interval

TITLES = ("what may help", "this run", "what it would gain")


class Choice(NamedTuple):
    """A row of the table below the card: two functions of the card return its short texts."""

    name: str
    used: Callable[[RewardModelCard], str]
    gain: Callable[[RewardModelCard], str]


def choice_rows(card: RewardModelCard) -> list[list[str]]:
    """Return [name, whether this run had it, what it would gain] of each choice; see TITLES."""
    return [[choice.name, choice.used(card), choice.gain(card)] for choice in CHOICES]


# The best checkpoint


def _kept_step(card: RewardModelCard) -> str:
    kept = card.kept_step
    if kept is None:
        return "no: one step was evaluated"
    last = kept.evaluated[-1].step
    if kept.step != last:
        return f"yes: step {kept.step} of {last}"
    return f"the last of {len(kept.evaluated)} evaluated steps"


def _gain_of_best_step(card: RewardModelCard) -> str:
    kept = card.kept_step
    if kept is None:
        return "unknown; reward.eval_steps evaluates more"
    best = best_of(kept)
    last = kept.evaluated[-1]
    gain = best.accuracy - (kept.optimism or 0.0) - last.accuracy
    if kept.step != last.step:
        return f"had: {gain:.3f} of accuracy over the last step"
    if last.within_noise:
        return "nothing beyond chance"
    return f"{gain:.3f} of accuracy: set reward.keep: best"


# The length


def _length_debiasing(card: RewardModelCard) -> str:
    found = card.length_debiasing
    if found is None:
        return "no"
    return "yes" if found.applied else "no; reward.length_debias"


def _gain_of_length_debiasing(card: RewardModelCard) -> str:
    """Return both correlations and the change of the accuracy, on the same pairs."""
    found = card.length_debiasing
    if found is None:
        return "little: scores hardly depend on it" if not is_length_biased(card) else "unknown"
    before = f"{found.raw.length_correlation:.3f}"
    after = with_interval(found.debiased.length_correlation, found.debiased.length_correlation_ci95)
    change = with_interval(found.accuracy_difference, found.accuracy_difference_ci95, sign="+")
    return f"correlation {before} to {after}, accuracy {change}"


# Labels


def _label_errors(card: RewardModelCard) -> str:
    errors = card.label_errors
    if errors is None:
        return "unknown: no pair has two labels"
    low, high = errors.wrong_ci95
    return f"{errors.wrong:.1%} [{low:.1%}, {high:.1%}] are wrong"


def _gain_of_right_labels(card: RewardModelCard) -> str:
    """Return the accuracy on held-out labels without errors; those of a share e, unrelated to the scores, hide it.

    accuracy = a (1 - e) + (1 - a) e, for the accuracy a on right labels (Natarajan et al. 2013, NeurIPS, lemma 1).
    """
    errors = card.label_errors
    if errors is None:
        return "unknown; label some pairs twice"
    if errors.wrong >= min(card.accuracy, 1 - card.accuracy):
        return "cannot be told: the labels err as often"
    right = (card.accuracy - errors.wrong) / (1 - 2 * errors.wrong)
    return f"accuracy {right:.3f}, if held-out labels err alike"


CHOICES: Sequence[Choice] = (
    Choice("best checkpoint", _kept_step, _gain_of_best_step),
    Choice("length debiasing", _length_debiasing, _gain_of_length_debiasing),
    Choice("labels without errors", _label_errors, _gain_of_right_labels),
)
