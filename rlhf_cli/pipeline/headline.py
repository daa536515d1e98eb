"""The main result of a stage, from its manifest, or from its log while it runs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_cli.evaluation.sample_pairs import deciding_judge
from rlhf_cli.jsonl import is_number
from rlhf_cli.runs.layout import MANIFEST
from rlhf_cli.runs.manifest import Manifest
from rlhf_cli.runs.read import Row, Stage
from rlhf_cli.runs.report import PPO_OVER_SFT

# Metrics of each stage to show: of its manifest, and of its log while it runs. The first must be present.
HEADLINES = {
    "sft": (("eval_loss",), ("loss",)),
    "reward": (("accuracy", "accuracy_ci95"), ("accuracy",)),
    "dpo": (("accuracy", "accuracy_ci95"), ("rewards/accuracies",)),
    "ppo": (("objective/scores", "objective/kl_k1"), ("objective/scores", "objective/kl_k1")),
}
LOG = "metrics.jsonl"


class Headline(NamedTuple):
    """Main metrics of a stage, and the file that they are from; None without metrics."""

    metrics: Mapping[str, Any]
    source: str | None


def headline(stage: Stage) -> Headline:
    """Return a stage's main metrics: of a finished one from its manifest, else from its log."""
    if stage.state == "finished":
        final = _final_metrics(stage)
        if final:
            return Headline(final, MANIFEST)
    if stage.name != "eval":
        _, names = HEADLINES[stage.name]
        for row in reversed(stage.progress.rows):
            logged = _pick(row, names)
            if logged:
                return Headline(logged, LOG)
    return Headline({}, None)


def _final_metrics(stage: Stage) -> dict[str, Any]:
    if stage.name == "eval":
        return _win_rate(stage.manifest)
    names, _ = HEADLINES[stage.name]
    return _pick(stage.manifest.metrics, names)


def _pick(metrics: Row, names: Sequence[str]) -> dict[str, Any]:
    """Return the named metrics that are numbers or intervals; nothing if the first is missing."""
    picked = {name: metrics[name] for name in names if _is_result(metrics.get(name))}
    return picked if names[0] in picked else {}


def _win_rate(manifest: Manifest) -> dict[str, Any]:
    """Return PPO's win rate over SFT by the deciding judge; nothing if there is none."""
    rates = manifest.known_metrics.win_rate.get(PPO_OVER_SFT)
    if not rates:
        return {}
    judge = deciding_judge(rates)
    rate = {"judge": judge, "win_rate": rates[judge].value}
    return rate if rates[judge].ci95 is None else rate | {"win_rate_ci95": rates[judge].ci95}


def _is_result(value: Any) -> bool:
    """Return True for a finite number, or an interval of two."""
    if isinstance(value, list):
        return len(value) == 2 and all(map(_is_result, value))
    return is_number(value) and math.isfinite(value)
