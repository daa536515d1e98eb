"""Report card of a reward model as a table, and the requirements on it that `ppo.require_reward` sets."""

from collections.abc import Mapping
from itertools import pairwise

from rlhf_cli import runs, terminal
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import Problem, RLHFError, shown
from rlhf_cli.evaluation.reward_choices import TITLES, choice_rows
from rlhf_cli.evaluation.reward_model import (
    MAX_LENGTH_CORRELATION,
    describe_confidence,
    ece_limit,
    is_length_biased,
    is_probe_flagged,
    probe_limit,
)
from rlhf_cli.evaluation.reward_probes import PROBE_LABELS
from rlhf_cli.runs.parents import FOREIGN, Parent
from rlhf_cli.runs.report import RewardModelAccuracy, RewardModelCard
from rlhf_cli.statistics import with_interval, without_bias

KEY = "ppo.require_reward"
LEGEND = (
    "beaten by X: share of the prompts for which X scores above the good answer.",
    "mean gap: mean over the prompts of the score of X minus that of the good answer.",
    "flagged: beyond the limit by more than chance, for all probes together. PPO would exploit it.",
    "over: beyond the limit, but not by more than chance.",
    "Some limits depend on the accuracy or the number of pairs: see docs/report-card.md.",
)


def card_rows(card: RewardModelCard) -> list[list[str]]:
    """Return [quantity, value, limit, status] of each quantity; the status is empty within the limit."""
    limit = ece_limit(card)
    error = f"{card.ece:.3f}; {describe_confidence(card)}"
    correlation = with_interval(card.length_correlation, card.length_correlation_ci95)
    rows = [
        _row("calibration error (ECE)", error, f"{limit:.2f}", is_over=card.ece > limit, is_flagged=card.ece > limit),
        _row(
            "rank correlation of score and length",
            correlation,
            f"+-{MAX_LENGTH_CORRELATION:.2f}",
            is_over=abs(card.length_correlation) > MAX_LENGTH_CORRELATION,
            is_flagged=is_length_biased(card),
        ),
    ]
    if ensemble := card.ensemble:
        members = ", ".join(f"{accuracy:.3f}" for accuracy in ensemble.accuracies)
        rows.append(_row("accuracy of the members' mean score", f"{ensemble.accuracy:.3f}; of each {members}"))
        rows.append(_row("disagreement of the members", f"{ensemble.disagreement:.2f} standard deviations"))
    if longer := card.longer_answer:
        preferred = with_interval(longer.preferred, longer.ci95)
        rows.append(_row("longer answer preferred", f"{preferred}; by labels {longer.chosen:.3f}"))
    if card.kept_step and card.kept_step.optimism is not None:
        value, bounds = without_bias(card.accuracy, card.accuracy_ci95, card.kept_step.optimism)
        rows.append(_row("accuracy on pairs that did not choose the step", with_interval(value, bounds)))

    for name, probe in card.adversarial.probes.items():
        beats = with_interval(probe.beats, probe.ci95)
        bound = probe_limit(name, card.accuracy)
        rows.append(
            _row(
                f"beaten by {PROBE_LABELS[name]}",
                f"{beats}; mean gap {probe.margin:+z.2f}",
                f"{bound:.2f}",
                is_over=probe.beats > bound,
                is_flagged=is_probe_flagged(name, card),
            )
        )
    return rows


def _row(quantity: str, value: str, limit: str = "", *, is_over: bool = False, is_flagged: bool = False) -> list[str]:
    status = "over" if is_over else ""
    return [quantity, value, limit, "flagged" if is_flagged else status]


def print_card(result: RewardModelAccuracy) -> None:
    """Print a reward model's accuracy on held-out pairs, and its card if it has one.

    The table is printed once per command, even across its processes.
    """
    interval = result.accuracy_ci95
    text = f"reward model: accuracy {with_interval(result.accuracy, interval)} on the held-out pairs"
    if interval and interval[0] <= 0.5:
        text += ", may be no better than chance: do not train PPO with it"
    if not isinstance(result, RewardModelCard):
        terminal.out(text)
        return

    rows = card_rows(result)
    if not terminal.is_first_time(f"{text}\n{rows}"):
        terminal.out(f"{text}; report card: see above")
        return
    terminal.out(text)
    title = f"report card: {result.n} pairs, {result.adversarial.n} probed"
    terminal.table([title, "value [95 % interval]", "limit", ""], rows)
    _print_margins(result)
    terminal.table(list(TITLES), choice_rows(result))
    for line in LEGEND:
        terminal.out(line)


def _print_margins(card: RewardModelCard) -> None:
    edges = card.margin_histogram.edges
    titles = ["margin, chosen - rejected", f"below {edges[0]:g}"]
    for low, high in pairwise(edges):
        titles.append(f"{low:g} to {high:g}")
    titles.append(f"from {edges[-1]:g}")

    row = ["pairs"]
    for count in card.margin_histogram.counts:
        row.append(str(count))
    terminal.table(titles, [row])


def missing_card_reason(stage: str) -> str:
    """Return why a reward model without an accuracy has none."""
    return "it was not trained by `rlhf reward`" if stage == FOREIGN else "its stage had no evaluation pairs"


def check_required(config: PPOConfig, parents: Mapping[str, Parent]) -> None:
    """Compare the report card of every available reward model with ppo.require_reward.

    Raises RLHFError M11 with all unmet requirements, C17 if no reward is a model.
    """
    if config.ppo.require_reward is None:
        return
    if not any(reference.key.startswith("rewards.") for reference in runs.references(config)):
        raise RLHFError("C17", f"{KEY} has no effect: no reward is a model", where=config.where(KEY), hint="remove it")
    # Several keys may name one folder.
    models = {parent.path: parent for key, parent in parents.items() if key.startswith("rewards.")}
    problems: list[Problem] = []
    for parent in models.values():
        problems += _unmet_requirements(config, parent)
    if problems:
        raise RLHFError.from_problems(problems)


def _unmet_requirements(config: PPOConfig, parent: Parent) -> list[Problem]:
    assert config.ppo.require_reward
    folder = shown(parent.path)
    result = parent.manifest.reward_model
    if result is None:
        return [_no_card(config, parent)]

    problems = []
    for name, bound in config.ppo.require_reward.model_dump(exclude_none=True).items():
        where = config.where(f"{KEY}.{name}")
        value = _required_value(result, name)
        is_minimum = name.startswith("accuracy")
        if value is None:
            text = f"{KEY}.{name}: the report card of {folder} has no {name}; an older version wrote it"
            problems.append(Problem("M11", text, where, "run the stage again: rlhf reward --fresh"))
        elif value < bound if is_minimum else abs(value) > bound:
            required = f"{'at least' if is_minimum else 'at most'} {bound:g}"
            text = f"{KEY}.{name}: {folder} has {value:.4g}, required {required}"
            change = "lower" if is_minimum else "raise"
            hint = f"train a better reward model (docs/report-card.md); or {change} {KEY}.{name}"
            problems.append(Problem("M11", text, where, hint))
    return problems


def _no_card(config: PPOConfig, parent: Parent) -> Problem:
    rerun = "set data.eval or data.eval_fraction in reward.yaml and run rlhf reward --fresh"
    hint = "name the folder of a reward stage" if parent.stage == FOREIGN else rerun
    text = f"{KEY}: {shown(parent.path)} has no report card: {missing_card_reason(parent.stage)}"
    return Problem("M11", text, config.where(KEY), f"{hint}; or remove {KEY}")


def _required_value(result: RewardModelAccuracy, name: str) -> float | None:
    """Return the value that a key of ppo.require_reward bounds; None on a card of an older version without it."""
    if name == "accuracy_low":
        return result.accuracy_ci95[0] if result.accuracy_ci95 else None
    value: float | None = getattr(result, name, None)
    return value
