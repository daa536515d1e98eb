"""`rlhf plan FILE|DIR`: estimate the memory and time of each stage from its config, without loading weights."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rlhf_cli import terminal
from rlhf_cli.commands.common.plan.run_plan import PlanOptions, plan_run
from rlhf_cli.commands.plan.show import conclude, show, show_total
from rlhf_cli.config.base import Options


def print_plan(
    path: Path, overrides: Sequence[str], options: Options, choices: PlanOptions, *, as_json: bool = False
) -> None:
    """Print the estimate of each stage, with settings that save memory if it does not fit. Raises as `plan_run`."""
    plan = plan_run(path, overrides, options, choices)
    if as_json:
        stages = {stage.stage: asdict(stage) for stage in plan.stages}
        known = {**asdict(plan.target), "device": plan.target.name, "stages": stages, "total": asdict(plan.total)}
        terminal.print_json(known)
        return
    for stage in plan.stages:
        show(stage, plan.target)
    if len(plan.stages) > 1:
        show_total(plan.total, is_judged=any(stage.judges for stage in plan.stages))
    conclude(plan.stages, plan.target)
