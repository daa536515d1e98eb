"""What trackers are told of an evaluation: the report's numbers, the frontier over PPO's updates, some answers."""

from collections.abc import Mapping
from typing import Any

from rlhf_cli.config import EvalConfig
from rlhf_cli.stages.eval.answers import Answers
from rlhf_cli.stages.eval.report import sample_rows
from rlhf_cli.trackers import Trackers

PROMPTS = 32  # whose answers are shown: samples.jsonl has them all


def tell(config: EvalConfig, report: Mapping[str, Any], judged: list[Answers]) -> None:
    """At step 0 what `models` and `win_rate` hold; at the step of each policy of the frontier, its own."""
    with Trackers(config) as trackers:
        if not trackers:
            return
        headline = {name: report[name] for name in ("models", "win_rate", "selected_step") if name in report}
        best = {str(each["n"]): each for each in report.get("best_of", [])}
        trackers.metrics({"step": 0, **numbers({**headline, "best_of": best})})
        shown = [each for each in judged if each.mode == "sampled" and each.model in report["models"]]
        trackers.table(0, "samples", [row for row in sample_rows(shown) if row["index"] < PROMPTS])
        for point in report.get("frontier", []):
            told = {key: value for key, value in point.items() if key != "step"}
            trackers.metrics({"step": point["step"], **numbers({"frontier": told})})


def numbers(tree: Any, name: str = "") -> dict[str, float]:
    """The numbers of a part of the report by their keys, `/` between them; of an interval `low` and `high`."""
    if isinstance(tree, int | float) and not isinstance(tree, bool):
        return {name: tree}
    if isinstance(tree, list) and len(tree) == 2:
        tree = dict(zip(("low", "high"), tree, strict=True))
    below = tree if isinstance(tree, Mapping) else {}
    found: dict[str, float] = {}
    for key, value in below.items():
        found |= numbers(value, f"{name}/{key}" if name else key)
    return found
