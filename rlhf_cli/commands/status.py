"""`rlhf status RUN` and `rlhf ls`: how far runs are and what comes next. Reads files alone, quickly, takes no lock."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlhf_cli import system, terminal
from rlhf_cli.commands import status_read
from rlhf_cli.commands.run import Step
from rlhf_cli.commands.status_read import Next, Run, Stage
from rlhf_cli.errors import shell_path, shown
from rlhf_cli.errors import shown as shown_path
from rlhf_cli.evaluation.render import LAST_UPDATE, TRAINING, format_reward
from rlhf_cli.runs.discover import is_run
from rlhf_cli.statistics import with_interval
from rlhf_cli.terminal import ago, duration

STAGE_COLUMNS = ("stage", "state", "headline", "time", "when", "size")
NOT_THERE = {"M01", "M10"}  # a model that is not made yet
RUN_COLUMNS = ("run", "stages", "headline", "when", "size")


def stage_rows(run: Run) -> list[list[str]]:
    """The stages in the lines of `rlhf status`, those of a base that is not finished first."""
    return [_stage_row(name(run, stage), stage) for stage in run.all_stages]


def name(run: Run, stage: Stage) -> str:
    """A stage as the run calls it: by its path where it is another run's."""
    return stage.stage if stage in run.stages else os.path.relpath(stage.folder, run.folder)


def _stage_row(name: str, stage: Stage) -> list[str]:
    return [
        name,
        _state(stage),
        headline(stage),
        duration(stage.time_s) if stage.time_s else "",
        ago(time.time() - stage.changed) if stage.changed else "",
        system.format_bytes(stage.bytes) if stage.bytes else "",
    ]


def _state(stage: Stage) -> str:
    far = "" if stage.step is None else f"step {stage.step}" + (f" of {stage.steps}" if stage.steps else "")
    if stage.state == "stopped":
        return f"stopped, saved at {far}" if far else "stopped, nothing saved"
    if stage.state == "running" or (stage.state == "finished" and stage.reasons):
        return f"{stage.state}, {far}" if far else stage.state
    return stage.state


def headline(stage: Stage) -> str:
    """What came out of a stage, or how it goes: by its held-out rows, or else as its log last said."""
    told, by_log = stage.headline, stage.headline_from == "metrics.jsonl"
    if "eval_loss" in told:
        return f"held-out loss {told['eval_loss']:.3f}"
    if "loss" in told:
        return f"loss {told['loss']:.3f}"
    if "accuracy" in told:
        more = " in training" if by_log else ""
        return f"accuracy {with_interval(told['accuracy'], told.get('accuracy_ci95'))}{more}"
    if "objective/scores" in told:
        kl = told.get("objective/kl_k1")
        said = format_reward(told, LAST_UPDATE if by_log else TRAINING)
        return said + ("" if kl is None else f", KL {kl:.2f}")
    if "win_rate" in told:
        return f"PPO over SFT {with_interval(told['win_rate'], told.get('win_rate_ci95'))} by {told['judge']}"
    return ""


def notes(run: Run) -> list[str]:
    """What the table has no room for, a line each."""
    lines = []
    for stage in run.all_stages:
        if stage.process:
            left = "" if stage.left_s is None else f"; about {duration(stage.left_s)} left"
            lines.append(f"{name(run, stage):<8} {stage.process}{left}")
        elif stage.reasons:
            lines.append(f"{name(run, stage):<8} {'; '.join(stage.reasons)}")
        if stage.unread:
            names = ", ".join(stage.unread)
            text = f"{names}: large, with a date later than this stage's start, taken for unchanged; --dry-run reads it"
            lines.append(f"{stage.stage:<8} {text}")
    if run.old_bytes:
        lines.append(f".old     {system.format_bytes(run.old_bytes)} that was moved aside")
    return lines


def next_line(run: Run) -> str:
    """What `rlhf run` would do, and why."""
    upcoming, command = run.next, f"rlhf run {shell_path(run.folder)}"
    assert upcoming, "a run that was looked at with its configs"
    if upcoming.action == "wait":
        names = " and ".join(name(run, stage) for stage in run.all_stages if stage.process)
        return f"next: wait for {names}; {command} would be refused until then"
    told = _problems(upcoming)
    if upcoming.action == "refused" and run.bases and {problem.code for problem in upcoming.problems} <= NOT_THERE:
        first = dict.fromkeys(f"rlhf run {shell_path(stage.folder.parent)}" for stage in run.bases)
        return f"next: {'; '.join(first)}, which {shown(run.folder)} starts from; then {command}"
    if upcoming.action == "refused":
        return f"next: {command} would be refused: {told}"
    if upcoming.action == "run":
        return f"next: {command} runs {_order(upcoming.steps)}"
    if told:
        return f"next: nothing is left to run; {command} ends with {told}"
    unread = any(stage.unread for stage in run.stages)
    return f"next: nothing, {'as far as dates tell' if unread else 'all is up to date'}"


def _order(steps: Mapping[str, Step]) -> str:
    """Which stages, in their order, the first one with its reason."""
    (first, step), *rest = [item for item in steps.items() if item[1].runs or item[1].after]
    sure = [name for name, each in rest if each.runs]
    perhaps = [name for name, each in rest if not each.runs]
    they = "it starts" if len(perhaps) == 1 else "they start"
    text = f"{first} ({step.why})" + (f", then {_listed(sure)}" if sure else "")
    return text + (f", and {_listed(perhaps)} if that changes what {they} from" if perhaps else "")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _problems(upcoming: Next) -> str:
    if not upcoming.problems:
        return ""
    more = len(upcoming.problems) - 1
    return upcoming.problems[0].line().partition("\n")[0] + (f" (and {more} more)" if more else "")


def run_row(run: Run) -> list[str]:
    """A run in a line of `rlhf ls`."""
    each = [(name(run, stage), stage) for stage in run.all_stages]
    marks = [called if stage.state == "finished" else f"{called} ({_state(stage)})" for called, stage in each]
    told = [
        text for stage in reversed(run.stages) if stage.headline_from == "manifest.json" and (text := headline(stage))
    ]
    return [
        shown(run.folder),
        ", ".join(marks) or "nothing yet",
        told[0] if told else "",
        ago(time.time() - run.changed),
        system.format_bytes(run.bytes),
    ]


def status_json(run: Run) -> dict[str, Any]:
    """A run as `--json` tells it: paths as messages show them, times as ISO 8601 in UTC."""
    told: dict[str, Any] = {
        "run": shown(run.folder),
        "changed": _iso(run.changed),
        "bytes": run.bytes,
        "old_bytes": run.old_bytes,
        "bases": [_stage(stage) for stage in run.bases],
        "stages": [_stage(stage) for stage in run.stages],
    }
    if run.next:
        told["next"] = {
            "action": run.next.action,
            "steps": [{"stage": stage, **asdict(step)} for stage, step in run.next.steps.items()],
            "problems": [asdict(problem) for problem in run.next.problems],
        }
    return told


def _stage(stage: Stage) -> dict[str, Any]:
    process = stage.process and {**asdict(stage.process), "since": _iso(stage.process.since)}
    return {**asdict(stage), "folder": shown(stage.folder), "changed": _iso(stage.changed), "process": process}


def _iso(moment: float | None) -> str | None:
    return None if moment is None else datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")


MOST = 500  # folders that are looked at where a run was forgotten


def show(folder: Path, overrides: Sequence[str] = (), *, as_json: bool = False) -> None:
    """Print a run stage by stage, and what `rlhf run` with these overrides would do. Raises RLHFError C09, C11."""
    with terminal.muted_warnings():  # who runs a stage is warned
        found = status_read.read_run(folder, overrides)
    if as_json:
        terminal.out(json.dumps(status_json(found), indent=2, ensure_ascii=False))
        return
    terminal.table(STAGE_COLUMNS, stage_rows(found))
    for line in notes(found):
        terminal.out(line)
    terminal.out(next_line(found))


def list_runs(folders: Sequence[Path], *, as_json: bool = False) -> None:
    """Print the runs below folders; without any, below `runs` where that is there, else here. Raises RLHFError C09."""
    places = list(folders) or usual_places()
    with terminal.muted_warnings():
        found = status_read.find_runs(places)
    if as_json:
        terminal.out(json.dumps([status_json(run) for run in found], indent=2, ensure_ascii=False))
    elif found:
        terminal.table(RUN_COLUMNS, [run_row(run) for run in found])
    else:
        terminal.say(f"no runs below {', '.join(map(shown_path, places))}; rlhf init demo runs/demo makes one")


def runs_here() -> list[str]:
    """The runs that `rlhf ls` would list, by its names and in its order, and "." alone where this folder is one.

    Looks at few folders: whoever asks forgot to name one.
    """
    if is_run(Path(".")):
        return ["."]
    with terminal.muted_warnings():
        return [shown_path(run.folder) for run in status_read.find_runs(usual_places(), MOST)]


def usual_places() -> list[Path]:
    """Where runs are looked for when nobody says where."""
    usual = Path("runs")
    return [usual if usual.is_dir() else Path(".")]
