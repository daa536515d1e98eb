"""Decide which stages of a run have to run, by the content of their configs, data, parents and outputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_cli import runs
from rlhf_cli.config.base import Config
from rlhf_cli.data import sources
from rlhf_cli.errors import collect_errors
from rlhf_cli.runs.identity import StageStatus


@dataclass(frozen=True)
class StageDecision:
    """Decision to run or skip one stage."""

    reason: str
    runs: bool
    fresh: bool  # its old output is moved to .old/ first
    after: tuple[str, ...] = ()  # earlier stages that run first; the stage then runs too if they change its inputs


def steps_json(decisions: Mapping[str, StageDecision]) -> list[dict[str, Any]]:
    """Return decisions as printed by `--json`, in the order of the stages."""
    steps = []
    for stage, decision in decisions.items():
        step = {
            "stage": stage,
            "why": decision.reason,
            "runs": decision.runs,
            "fresh": decision.fresh,
            "after": decision.after,
        }
        steps.append(step)
    return steps


def compute_status(config: Config) -> StageStatus:
    """Compare a stage's output with its config, data and parents as they are now."""
    identity = runs.compute_identity(config, runs.open_parents(config), config.sources())
    return runs.stage_status(config, identity)


def plan_stages(
    configs: Mapping[str, Config],
    force: Sequence[str] = (),
    get_status: Callable[[Config], StageStatus] = compute_status,
) -> dict[str, StageDecision]:
    """Return the decision on each stage. Those after a stage that would run depend on its result."""
    decisions: dict[str, StageDecision] = {}
    pending: dict[Path, str] = {}  # folders that a stage will write, or may write again
    for stage, config in configs.items():
        inputs = [Path(reference.path) for reference in runs.references(config)]
        after = tuple(dict.fromkeys(pending[path] for path in inputs if path in pending))
        if after:
            decision = _decide_after(after, is_new=not config.folder.exists())
        else:
            decision = decide_stage(get_status(config), forced=stage in force)
        if after or decision.runs:
            pending[config.folder] = stage
        decisions[stage] = decision
    return decisions


def _decide_after(after: tuple[str, ...], *, is_new: bool) -> StageDecision:
    """Return the decision on a stage whose inputs other stages write first."""
    reason = "new" if is_new else "runs again if that changes what it starts from"
    return StageDecision(f"after {' and '.join(after)}: {reason}", runs=is_new, fresh=False, after=after)


def decide_stage(status: StageStatus, *, forced: bool) -> StageDecision:
    """Decide if a stage has to run, by its status."""
    if forced and status.state != "new":
        return StageDecision("forced to run again", runs=True, fresh=True)
    fresh = status.state in ("stale", "damaged")
    return StageDecision(describe_status(status), runs=status.state != "finished", fresh=fresh)


def describe_status(status: StageStatus) -> str:
    """Return the reason why a stage runs or is skipped, as printed."""
    if status.state == "finished":
        return f"up to date ({(status.sha256 or '')[:6]}), skipped"
    if status.state == "resume":
        return f"resumes at step {status.step}" if status.step is not None else "starts again (no step was saved)"

    reasons = list(status.reasons[:3])
    if len(status.reasons) > 3:
        reasons.append(f"and {len(status.reasons) - 3} more")
    return f"{status.state}: {'; '.join(reasons)}" if reasons else status.state


def check_inputs_exist(configs: Mapping[str, Config], *, quick: bool = False) -> None:
    """Check that data and models exist, except those that an earlier stage of this run makes.

    With `quick`, hub datasets are not fetched and weights of external models are not hashed.
    Raises D01, M01, M04, M10.
    """
    checks: list[Callable[[], object]] = []
    outputs: list[Path] = []
    for config in configs.values():
        data = {key: source for key, source in config.sources().items() if not quick or sources.is_local(source)}
        checks.append(partial(sources.locate, data))
        checks.append(partial(runs.open_parents, config, tuple(outputs), hashed=not quick))
        outputs += [config.folder, *(member.folder for member in config.other_members)]
    collect_errors(*checks)
