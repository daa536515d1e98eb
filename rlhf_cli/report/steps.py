"""`--step`: a run's page as if the policy after another of PPO's updates were its result."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_cli.checkpoints.runs import LAST, SELECTED, require_step
from rlhf_cli.errors import RLHFError
from rlhf_cli.report.runs import Run


def at_step(run: Run, step: str) -> Run:
    """The run with answers, win rates and samples of the policy after `step`: `last`, `selected`, or a number.

    Near-greedy answers and what was compared with the last policy are left out: an evaluation has them of that one
    alone. Raises RLHFError C07 for another word, M10 where no evaluation tells of the policy or selects one.
    """
    require_step(step)
    points = (run.report or {}).get("frontier") or []
    ends = [row["step"] for row in run.stages["ppo"].metrics] + [point["step"] for point in points]
    # A run that was stopped is told by its best policy, and may have a snapshot that is later.
    end = (run.stages["ppo"].manifest or {}).get("step", max(ends, default=0))
    if step == LAST:
        return run
    number = _selected(run) if step == SELECTED else int(step)
    if number == end:
        return run
    point = next((point for point in points if point["step"] == number), None)
    if run.report is None or point is None:
        there = f"it knows {', '.join(str(each['step']) for each in points)}" if points else "it has no frontier"
        text = f"--step {step}: the evaluation of {run.name} tells nothing of the policy after update {number}; {there}"
        raise RLHFError("M10", text, hint="output.snapshots in ppo.yaml keeps policies, eval.frontier judges them")
    return replace(
        run,
        name=f"{run.name} at update {number}",
        report=_report(run.report, point),
        answers=tuple(
            {**row, "model": "ppo"} if row["model"] == f"ppo_step_{number:06d}" else row
            for row in run.answers
            if row["model"] != "ppo"
        ),
        samples=tuple(row for row in run.samples if row["step"] <= number),
    )


def _report(report: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    others = {pair: rates for pair, rates in report["win_rate"].items() if not pair.startswith("ppo_vs_")}
    tried = report.get("best_of", [])
    return {
        **{key: value for key, value in report.items() if key != "greedy"},
        "models": {**report["models"], "ppo": point},
        "win_rate": {"ppo_vs_sft": point["win_rate"], **others},
        "best_of": [{key: value for key, value in row.items() if key != "ppo_win_rate"} for row in tried],
    }


def _selected(run: Run) -> int:
    found = (run.report or {}).get("selected_step")
    if not isinstance(found, int):
        text = f"--step {SELECTED}: the evaluation of {run.name} has selected no policy"
        raise RLHFError("M10", text, hint="run `rlhf eval`; eval.select in eval.yaml names the judge that picks")
    return found
