"""What `rlhf plan` prints: a table of memory for each stage, its time and its rows, and the total of a run."""

from collections.abc import Sequence

from rlhf_cli import terminal
from rlhf_cli.commands.common.plan.stage_plan import StagePlan, TotalPlan
from rlhf_cli.judges.costs import MostCost
from rlhf_cli.models import devices
from rlhf_cli.planning.memory import KINDS
from rlhf_cli.planning.target import Target
from rlhf_cli.system import format_bytes
from rlhf_cli.terminal import duration

GENERATING = ("ppo", "eval")
VERDICTS = {True: "fits", False: "does not fit", None: "may fit with its optimizer"}
BOUNDS = {False: "about", True: "at least"}  # by whether only matrix products are counted
STEP = {"sft": "a step", "reward": "a step", "dpo": "a step", "ppo": "an update", "eval": "an evaluation"}
INDENT = " " * 9


def show(plan: StagePlan, target: Target) -> None:
    """Print the plan of a stage."""
    _show_phases(plan, target)
    _show_memory(plan, target)
    _show_time(plan)
    terminal.out(f"data     {_rows(plan)}")
    for name, cost in plan.judges.items():
        _show_judge(name, cost)
    terminal.out()


def conclude(plans: Sequence[StagePlan], target: Target) -> None:
    """Print a line on each stage with --quiet, which hides the tables."""
    if not terminal.has_mode("quiet"):
        return
    for plan in plans:
        needed = f"{format_bytes(plan.memory_bytes)} of {format_bytes(target.memory)}: {VERDICTS[plan.fits]}"
        terminal.answer(f"{plan.stage:<8} {needed}; {BOUNDS[plan.is_bound]} {duration(plan.seconds)}")


def _show_judge(name: str, cost: MostCost) -> None:
    """Print what a judge costs, and that its time, which nothing here tells, is not part of the stage's."""
    terminal.out(f"judge    {name}: {cost}")
    a_second = duration(cost.calls / cost.concurrency)
    rate = f"{a_second} for each second of a call, {cost.concurrency} at once"
    terminal.out(f"{INDENT}its answers take time that is not counted above: at most {rate}")


def _show_phases(plan: StagePlan, target: Target) -> None:
    """Print the table of memory by phase and kind."""
    columns = [""]
    for phase in plan.phases:
        columns.append(f"{phase.name}, {phase.rows} rows" if phase.rows else phase.name)

    table = []
    for kind in KINDS:
        sizes = [phase.bytes.get(kind, 0) for phase in plan.phases]
        if any(sizes):
            table.append([kind, *map(format_bytes, sizes)])
    table.append(["total", *(format_bytes(phase.total) for phase in plan.phases)])
    terminal.table(columns, table, title=_title(plan, target))


def _title(plan: StagePlan, target: Target) -> str:
    """Describe the models, the lengths and the mode."""
    models = ", ".join(f"{name} {count:,}" for name, count in plan.parameters.items())
    if _generates(plan):
        lengths = f"prompts of {plan.prompt_tokens} tokens, responses of {plan.response_tokens}"
    else:
        lengths = f"rows of {plan.prompt_tokens + plan.response_tokens} tokens"

    title = f"{plan.stage}: {models} parameters; {lengths}"
    if plan.mode != "full":
        title += f"; mode {plan.mode}"
    if target.processes > 1:
        title += f"; each of {target.processes} processes"
    return title


def _generates(plan: StagePlan) -> bool:
    return plan.stage in GENERATING or "rollout" in plan.once_seconds


def _show_memory(plan: StagePlan, target: Target) -> None:
    """Print whether the stage fits, and the settings with which it does."""
    needed = f"{format_bytes(plan.memory_bytes)} in {plan.fullest}"
    if plan.libraries:
        needed += f", libraries {format_bytes(plan.libraries)}"
    if plan.holes:
        needed += f", what malloc keeps {format_bytes(plan.holes)}"
    terminal.out(f"memory   {needed}; {target.name} has {format_bytes(target.memory)}: {VERDICTS[plan.fits]}")

    for each in plan.advice:
        terminal.out(f"{INDENT}{format_bytes(each.memory_bytes)}, {VERDICTS[each.fits]}, with {each.set}")
    if any("models.adapters" in each.set for each in plan.advice):
        terminal.out(f"{INDENT}adapters in PPO share one base if reward.yaml has model.adapters, too")


def _show_time(plan: StagePlan) -> None:
    """Print the time of a step by phase, and of the stage."""
    step = duration(sum(plan.step_seconds.values()))
    parts = _by_phase(plan.step_seconds)
    if len(parts) < 2:
        parts = [step]
    terminal.out(f"time     {STEP[plan.stage]}: {' + '.join(parts)}")

    steps = str(plan.steps)
    if plan.steps_are != "exact":
        steps = f"{plan.steps_are} {steps}"
    terms = " + ".join([f"{steps} x {step}", *_by_phase(plan.once_seconds)])
    total = f"{BOUNDS[plan.is_bound]} {duration(plan.seconds)}"
    terminal.out(f"{INDENT}{terms}: {total}{_assumptions(plan)}")

    if plan.share < devices.MIN_CPU_SHARE:
        alone = duration(plan.seconds * plan.share)
        terminal.out(f"{INDENT}other processes leave {plan.share:.0%} of the processor now; alone about {alone}")


def _by_phase(seconds: dict[str, float]) -> list[str]:
    return [f"{name} {duration(each)}" for name, each in seconds.items()]


def _assumptions(plan: StagePlan) -> str:
    """Describe what the time of a stage that generates assumes."""
    if not _generates(plan):
        return ""
    text = ", with all responses at their limit"
    if plan.mean_response_tokens:
        text = f", with responses of {plan.mean_response_tokens:.0f} tokens as PPO measured"
    if plan.stage in ("ppo", "eval") and "rollout" not in plan.step_seconds:
        text += ", without the rollouts of the server"
    return text


def _rows(plan: StagePlan) -> str:
    """Describe how many rows are used and how many are dropped."""
    is_exact = plan.rows_are == "exact"
    if not is_exact and not plan.rows:
        return "not read"
    certainty = "" if is_exact else f"{plan.rows_are} "
    text = f"{certainty}{plan.rows} {plan.unit}"
    if plan.left_out:
        share = plan.left_out / plan.asked
        text += f"; {certainty}{plan.left_out} of {plan.asked} rows dropped ({share:.1%})"
    return text


def show_total(total: TotalPlan, *, is_judged: bool) -> None:
    """Print the total of a run's stages. `is_judged`: a language model compares answers in one of them."""
    time = f"{BOUNDS[total.is_bound]} {duration(total.seconds)}"
    memory = f"at most {format_bytes(total.memory_bytes)} of memory, in {total.fullest}: {VERDICTS[total.fits]}"
    terminal.out(f"in all   {time} for {total.starts} stages; {memory}")

    loading = f" (some {duration(total.load_seconds)} here, longer with TRL)" if total.load_seconds else ""
    judges = ", judges" if is_judged else ""
    terminal.out(f"{INDENT}on top: {total.starts} starts{loading}, evaluations{judges}, report card and states")
