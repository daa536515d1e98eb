"""What `rlhf plan` prints: a table of memory for each stage, its time and its rows, and the total of a run."""

from typing import Any

from rlhf_cli import system, terminal
from rlhf_cli.models import devices
from rlhf_cli.planning.memory import KINDS
from rlhf_cli.planning.target import Target
from rlhf_cli.stages.eval import pairwise_judges

GENERATING = ("ppo", "eval")
VERDICTS = {True: "fits", False: "does not fit", None: "may fit with its optimizer"}
BOUNDS = {True: "about", False: "at least"}  # of measured times, and of those of matrix products only
STEP = {"sft": "a step", "reward": "a step", "dpo": "a step", "ppo": "an update", "eval": "an evaluation"}
INDENT = " " * 9


def show(plan: dict[str, Any], target: Target) -> None:
    """Print the plan of a stage."""
    _show_phases(plan, target)
    _show_memory(plan, target)
    _show_time(plan)
    terminal.out(f"data     {_rows(plan)}")
    for name, cost in plan.get("judges", {}).items():
        terminal.out(f"judge    {name}: {pairwise_judges.describe_most(cost['calls'], cost['tokens'])}")
    terminal.out()


def _show_phases(plan: dict[str, Any], target: Target) -> None:
    """Print the table of memory by phase and kind."""
    phases = plan["phases"]
    columns = [""]
    for phase in phases:
        rows = f", {phase['rows']} rows" if phase["rows"] else ""
        columns.append(phase["name"] + rows)

    table = []
    for kind in KINDS:
        sizes = [phase["bytes"].get(kind, 0) for phase in phases]
        if any(sizes):
            table.append([kind, *map(system.format_bytes, sizes)])
    totals = [phase["total"] for phase in phases]
    table.append(["total", *map(system.format_bytes, totals)])
    terminal.table(columns, table, title=_title(plan, target))


def _title(plan: dict[str, Any], target: Target) -> str:
    models = [f"{name} {count:,}" for name, count in plan["parameters"].items()]
    prompt, response = plan["prompt_tokens"], plan["response_tokens"]
    lengths = f"rows of {prompt + response} tokens"
    if _generates(plan):
        lengths = f"prompts of {prompt} tokens, responses of {response}"

    title = f"{plan['stage']}: {', '.join(models)} parameters; {lengths}"
    if plan["mode"] != "full":
        title += f"; mode {plan['mode']}"
    if target.processes > 1:
        title += f"; each of {target.processes} processes"
    return title


def _show_memory(plan: dict[str, Any], target: Target) -> None:
    size = system.format_bytes
    needed = f"{size(plan['memory_bytes'])} in {plan['fullest']}"
    for key, name in (("libraries", "libraries"), ("holes", "what malloc keeps")):
        if plan[key]:
            needed += f", {name} {size(plan[key])}"
    room, verdict = size(target.memory), VERDICTS[plan["fits"]]
    terminal.out(f"memory   {needed}; {target.name} has {room}: {verdict}")

    for each in plan["advice"]:
        needed, verdict = size(each["memory_bytes"]), VERDICTS[each["fits"]]
        terminal.out(f"{INDENT}{needed}, {verdict}, with {each['set']}")
    if any("models.adapters" in each["set"] for each in plan["advice"]):
        terminal.out(f"{INDENT}adapters in PPO share one base if reward.yaml has model.adapters, too")


def _show_time(plan: dict[str, Any]) -> None:
    """Print the time of a step by phase, and of the stage."""
    step = terminal.duration(sum(plan["step_seconds"].values()))
    parts = _by_phase(plan["step_seconds"])
    what = STEP[plan["stage"]]
    terminal.out(f"time     {what}: {' + '.join(parts) if len(parts) > 1 else step}")

    steps = str(plan["steps"])
    if plan["steps_are"] != "exact":
        steps = f"{plan['steps_are']} {steps}"
    sums = " + ".join([f"{steps} x {step}", *_by_phase(plan["once_seconds"])])
    bound, total = BOUNDS[plan["run"]], terminal.duration(plan["seconds"])
    terminal.out(f"{INDENT}{sums}: {bound} {total}{_assumptions(plan)}")

    share = plan["share"]
    if share < devices.MIN_CPU_SHARE:
        alone = terminal.duration(plan["seconds"] * share)
        terminal.out(f"{INDENT}other processes leave {share:.0%} of the processor now; alone about {alone}")


def _by_phase(seconds: dict[str, float]) -> list[str]:
    return [f"{name} {terminal.duration(each)}" for name, each in seconds.items()]


def _generates(plan: dict[str, Any]) -> bool:
    return plan["stage"] in GENERATING or "rollout" in plan["once_seconds"]


def _assumptions(plan: dict[str, Any]) -> str:
    """Describe what the time of a stage that generates assumes."""
    if not _generates(plan):
        return ""
    mean = plan["mean_response_tokens"]
    text = f", with responses of {mean:.0f} tokens as PPO measured" if mean else ", with all responses at their limit"
    without_server = plan["stage"] == "ppo" and "rollout" not in plan["step_seconds"]
    return f"{text}, without the rollouts of the server" if without_server else text


def _rows(plan: dict[str, Any]) -> str:
    """Describe how many rows are used and how many are dropped."""
    if plan["rows_are"] != "exact" and not plan["rows"]:
        return "not read"
    certainty = "" if plan["rows_are"] == "exact" else f"{plan['rows_are']} "
    text = f"{certainty}{plan['rows']} {plan['unit']}"
    dropped, asked = plan["left_out"], plan["asked"]
    if dropped:
        text += f"; {certainty}{dropped} of {asked} rows dropped ({dropped / asked:.1%})"
    return text


def show_total(total: dict[str, Any]) -> None:
    """Print the total of a run's stages."""
    bound, time = BOUNDS[total["run"]], terminal.duration(total["seconds"])
    size, verdict = system.format_bytes(total["memory_bytes"]), VERDICTS[total["fits"]]
    memory = f"at most {size} of memory, in {total['fullest']}: {verdict}"
    terminal.out(f"in all   {bound} {time} for {total['starts']} stages; {memory}")

    loading = ""
    if total["load_seconds"]:
        loading = f" (some {terminal.duration(total['load_seconds'])} here, longer with TRL)"
    terminal.out(f"{INDENT}on top: {total['starts']} starts{loading}, evaluations, report card and states")
