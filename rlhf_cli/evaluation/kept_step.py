"""Which step of a reward training is the model: the best one on held-out pairs, or the last if chance explains it."""

from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean

from rlhf_cli.runs.report import EvaluatedStep, KeptStep
from rlhf_cli.statistics import selection_weights, within_noise

Rights = Mapping[int, Sequence[float]]  # by step, for each pair: 1 if it is ranked right, 0.5 for a tie, 0 if wrong


def best_step(right: Rights) -> int:
    """Return the step with the highest accuracy, the first of equal ones."""
    return max(right, key=lambda step: fmean(right[step]))


def keep_step(right: Rights, prompts: Sequence[Hashable], *, keeps_best: bool = True) -> KeptStep:
    """Return the best step, or the last one unless it is worse by more than chance, and how much the choice flatters.

    Multiple comparisons with the best decide, over the prompts and with all steps together (`within_noise`): of several
    equal models one is the best by chance. `optimism` is by how much the accuracy of the best step is above that of
    steps which other prompts select (`selection_weights`). Without `keeps_best` the last step is kept in any case.
    """
    tied = within_noise(right, prompts)
    best = best_step(right)
    last = max(right)
    evaluated = [
        EvaluatedStep(step=step, accuracy=fmean(values), within_noise=step in tied) for step, values in right.items()
    ]
    if last in tied or not keeps_best:
        return KeptStep(step=last, evaluated=evaluated)
    return KeptStep(step=best, evaluated=evaluated, optimism=_optimism(right, best, prompts))


def _optimism(right: Rights, best: int, prompts: Sequence[Hashable]) -> float:
    """Return the accuracy of the best step on the pairs that selected it, minus that on pairs which did not."""
    import numpy as np

    rows = np.array(list(right.values()), dtype=np.float64).T
    elsewhere = (selection_weights(right, prompts) * rows).sum(axis=1)
    return fmean(right[best]) - float(elsewhere.mean())


def describe(kept: KeptStep) -> str:
    """Return which step is the model and why, without a full stop."""
    last = kept.evaluated[-1]
    best = best_of(kept)
    if kept.step != last.step:
        found = f"held-out accuracy {best.accuracy:.3f}; that of the last step, {last.accuracy:.3f}, is lower"
        return f"step {best.step} of {last.step}: {found} by more than chance"

    text = f"the last step, {last.step}: held-out accuracy {last.accuracy:.3f}"
    if best.accuracy == last.accuracy:
        return f"{text}; no other evaluated step has a higher one"
    difference = "not by more than chance" if last.within_noise else "by more than chance"
    return f"{text}; that of step {best.step}, {best.accuracy:.3f}, is higher, {difference}"


def best_of(kept: KeptStep) -> EvaluatedStep:
    """Return the evaluated step with the highest accuracy."""
    return max(kept.evaluated, key=lambda each: each.accuracy)
