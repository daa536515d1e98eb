"""The main result of a stage, from its manifest, or from its log while it runs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rlhf_cli.evaluation.sample_pairs import deciding_judge
from rlhf_cli.jsonl import is_number
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
Source = Literal["manifest.json", "metrics.jsonl"]


def headline(stage: Stage) -> tuple[Mapping[str, Any], Source | None]:
    """Return a stage's main metrics, and the file that they are from."""
    is_finished = stage.state == "finished"
    if stage.name == "eval":
        rate = _win_rate(stage.manifest) if is_finished else {}
        return rate, "manifest.json" if rate else None

    of_manifest, of_log = HEADLINES[stage.name]
    final = _pick(stage.manifest.metrics, of_manifest) if is_finished else {}
    if final:
        return final, "manifest.json"
    for row in reversed(stage.progress.rows):
        logged = _pick(row, of_log)
        if logged:
            return logged, "metrics.jsonl"
    return {}, None


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
