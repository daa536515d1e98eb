"""Report card of a reward model as a table, and the requirements on it that `ppo.require_reward` sets."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from rlhf_cli import runs, terminal
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import Problem, RLHFError, shown
from rlhf_cli.evaluation.reward_model import (
    MAX_LENGTH_CORRELATION,
    PROBE_LABELS,
    describe_confidence,
    ece_limit,
    is_length_biased,
    is_probe_flagged,
    probe_limit,
)
from rlhf_cli.runs.parents import FOREIGN, Parent
from rlhf_cli.statistics import with_interval

KEY = "ppo.require_reward"
LEGEND = (
    "beaten by X: share of the prompts for which X scores above the good answer.",
    "mean gap: mean over the prompts of the score of X minus that of the good answer.",
    "flagged: beyond the limit by more than chance, for all probes together. PPO would exploit it.",
    "Some limits depend on the accuracy or the number of pairs: see docs/evaluation.md.",
)


def card_rows(card: Mapping[str, Any]) -> list[list[str]]:
    """Return [quantity, value, limit, "flagged" or ""] for a card that has more than the accuracy."""
    ece, correlation = f"{card['ece']:.3f}; {describe_confidence(card)}", card["length_correlation"]
    rows = [
        ("calibration error (ECE)", ece, f"{ece_limit(card):.2f}", card["ece"] > ece_limit(card)),
        (
            "rank correlation of score and length",
            with_interval(correlation, card["length_correlation_ci95"]),
            f"+-{MAX_LENGTH_CORRELATION:.2f}",
            is_length_biased(card),
        ),
    ]
    if longer := card.get("longer_answer"):
        value = f"{with_interval(longer['preferred'], longer['ci95'])}; by people {longer['chosen']:.3f}"
        rows.append(("longer answer preferred", value, "", False))
    for name, probe in card["adversarial"]["probes"].items():
        value = f"{with_interval(probe['beats'], probe['ci95'])}; mean gap {probe['margin']:+z.2f}"
        limit = f"{probe_limit(name, card['accuracy']):.2f}"
        rows.append((f"beaten by {PROBE_LABELS[name]}", value, limit, is_probe_flagged(name, card)))
    return [[*texts, "flagged" if is_flagged else ""] for *texts, is_flagged in rows]


def print_card(card: Mapping[str, Any]) -> None:
    """Print a card with held-out accuracy; `ci95` is the accuracy's interval.

    The table is printed once per command, even across its processes. A card of an older version has only the accuracy.
    """
    text = f"reward model: accuracy {with_interval(card['accuracy'], card['ci95'])} on the held-out pairs"
    text += ", may be no better than chance: do not train PPO with it" if card["ci95"][0] <= 0.5 else ""
    if "adversarial" not in card:
        terminal.out(text)
        return
    rows = card_rows(card)
    if not terminal.is_first_time(f"{text}\n{rows}"):
        terminal.out(f"{text}; report card: see above")
        return
    terminal.out(text)
    title = f"report card: {card['n']} pairs, {card['adversarial']['n']} probed"
    terminal.table([title, "value [95 % interval]", "limit", ""], rows)
    edges, counts = card["margin_histogram"]["edges"], card["margin_histogram"]["counts"]
    inner = [f"{low:g} to {high:g}" for low, high in pairwise(edges)]
    bins = [f"below {edges[0]:g}", *inner, f"from {edges[-1]:g}"]
    terminal.table(["margin, chosen - rejected", *bins], [["pairs", *map(str, counts)]])
    for line in LEGEND:
        terminal.out(line)


def missing_card_reason(stage: str, manifest: runs.Manifest) -> str | None:
    """Return why a reward model has no report card, None if it has one."""
    if "accuracy" in manifest.metrics:
        return None
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
    problems = [problem for parent in models.values() for problem in _unmet_requirements(config, parent)]
    if problems:
        raise RLHFError.from_problems(problems)


def _unmet_requirements(config: PPOConfig, parent: Parent) -> list[Problem]:
    assert config.ppo.require_reward
    folder, reason = shown(parent.path), missing_card_reason(parent.stage, parent.manifest)
    if reason:
        rerun = "set data.eval or data.eval_fraction in reward.yaml and run rlhf reward --fresh"
        hint = "name the folder of a reward stage" if parent.stage == FOREIGN else rerun
        text = f"{KEY}: {folder} has no report card: {reason}"
        return [Problem("M11", text, config.where(KEY), f"{hint}; or remove {KEY}")]
    problems, metrics = [], parent.manifest.metrics
    values = {**metrics, "accuracy_low": metrics["accuracy_ci95"][0]}
    for name, bound in config.ppo.require_reward.model_dump(exclude_none=True).items():
        where, is_minimum = config.where(f"{KEY}.{name}"), name.startswith("accuracy")
        if name not in values:
            text = f"{KEY}.{name}: the report card of {folder} has no {name}; an older version wrote it"
            problems.append(Problem("M11", text, where, "run the stage again: rlhf reward --fresh"))
        elif values[name] < bound if is_minimum else abs(values[name]) > bound:
            required = f"{'at least' if is_minimum else 'at most'} {bound:g}"
            text = f"{KEY}.{name}: {folder} has {values[name]:.4g}, required {required}"
            change = "lower" if is_minimum else "raise"
            hint = f"train a better reward model (docs/evaluation.md); or {change} {KEY}.{name}"
            problems.append(Problem("M11", text, where, hint))
    return problems
