"""What `rlhf plan` prints: a table of memory for each stage, its time and its rows, and the total of a run."""

from typing import Any

from rlhf_cli import system, terminal
from rlhf_cli.models import devices
from rlhf_cli.planning.memory import KINDS
from rlhf_cli.planning.target import Target

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
    terminal.out()


def _show_phases(plan: dict[str, Any], target: Target) -> None:
    """Print the table of memory by phase and kind."""
    phases = plan["phases"]
    columns = [f"{phase['name']}, {phase['rows']} rows" if phase["rows"] else phase["name"] for phase in phases]
    kinds = [kind for kind in KINDS if any(phase["bytes"].get(kind) for phase in phases)]
    rows = []
    for kind in kinds:
        sizes = [system.format_bytes(phase["bytes"].get(kind, 0)) for phase in phases]
        rows.append([kind, *sizes])
    rows.append(["total", *(system.format_bytes(phase["total"]) for phase in phases)])
    terminal.table(["", *columns], rows, title=_title(plan, target))


def _title(plan: dict[str, Any], target: Target) -> str:
    models = ", ".join(f"{name} {count:,}" for name, count in plan["parameters"].items())
    prompt, response = plan["prompt_tokens"], plan["response_tokens"]
    lengths = f"rows of {prompt + response} tokens"
    if _generates(plan):
        lengths = f"prompts of {prompt} tokens, responses of {response}"
    mode = "" if plan["mode"] == "full" else f"; mode {plan['mode']}"
    processes = f"; each of {target.processes} processes" if target.processes > 1 else ""
    return f"{plan['stage']}: {models} parameters; {lengths}{mode}{processes}"


def _show_memory(plan: dict[str, Any], target: Target) -> None:
    size = system.format_bytes
    needed = f"{size(plan['memory_bytes'])} in {plan['fullest']}"
    for key, name in (("libraries", "libraries"), ("holes", "what malloc keeps")):
        if plan[key]:
            needed += f", {name} {size(plan[key])}"
    terminal.out(f"memory   {needed}; {target.name} has {size(target.memory)}: {VERDICTS[plan['fits']]}")

    for each in plan["advice"]:
        terminal.out(f"{INDENT}{size(each['memory_bytes'])}, {VERDICTS[each['fits']]}, with {each['set']}")
    if any("models.adapters" in each["set"] for each in plan["advice"]):
        terminal.out(f"{INDENT}adapters in PPO share one base if reward.yaml has model.adapters, too")


def _show_time(plan: dict[str, Any]) -> None:
    """Print the time of a step by phase, and of the stage."""
    seconds = plan["step_seconds"]
    step = terminal.duration(sum(seconds.values()))
    parts = " + ".join(f"{name} {terminal.duration(each)}" for name, each in seconds.items())
    terminal.out(f"time     {STEP[plan['stage']]}: {parts if len(seconds) > 1 else step}")

    steps = plan["steps"] if plan["steps_are"] == "exact" else f"{plan['steps_are']} {plan['steps']}"
    once = "".join(f" + {name} {terminal.duration(each)}" for name, each in plan["once_seconds"].items())
    total = f"{BOUNDS[plan['run']]} {terminal.duration(plan['seconds'])}{_assumptions(plan)}"
    terminal.out(f"{INDENT}{steps} x {step}{once}: {total}")
    if plan["share"] < devices.MIN_CPU_SHARE:
        idle = terminal.duration(plan["seconds"] * plan["share"])
        terminal.out(f"{INDENT}other processes leave {plan['share']:.0%} of the processor now; alone about {idle}")


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
    size, verdict = system.format_bytes(total["memory_bytes"]), VERDICTS[total["fits"]]
    time = f"{BOUNDS[total['run']]} {terminal.duration(total['seconds'])} for {total['starts']} stages"
    terminal.out(f"in all   {time}; at most {size} of memory, in {total['fullest']}: {verdict}")
    loads = total["load_seconds"]
    loading = f" (some {terminal.duration(loads)} here, longer with TRL)" if loads else ""
    terminal.out(f"{INDENT}on top: {total['starts']} starts{loading}, evaluations, report card and states")
