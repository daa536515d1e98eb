"""`rlhf status RUN` and `rlhf ls`: print the progress of runs and what comes next."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlhf_cli import system, terminal
from rlhf_cli.errors import shell_path, shown
from rlhf_cli.evaluation.report_text import LAST_UPDATE, TRAINING, format_reward
from rlhf_cli.pipeline import status
from rlhf_cli.pipeline.run import StageDecision
from rlhf_cli.pipeline.status import RunInfo, StageInfo
from rlhf_cli.runs.discover import find_run_folders
from rlhf_cli.statistics import with_interval
from rlhf_cli.terminal import ago, duration

STAGE_COLUMNS = ("stage", "state", "headline", "time", "when", "size")
RUN_COLUMNS = ("run", "stages", "headline", "when", "size")
MISSING_MODEL_CODES = {"M01", "M10"}
MAX_FOLDERS = 500  # to search for runs if none was named


def show(folder: Path, overrides: Sequence[str] = (), *, as_json: bool = False) -> None:
    """Print the stages of a run, and what `rlhf run` with these overrides would do. Raises RLHFError C09, C11."""
    with terminal.muted_warnings():  # the stages print them
        run = status.read_run(folder, overrides)
    if as_json:
        terminal.out(json.dumps(_run_json(run), indent=2, ensure_ascii=False))
        return
    terminal.table(STAGE_COLUMNS, stage_rows(run))
    for line in [*_notes(run), _next_line(run)]:
        terminal.out(line)


def list_runs(folders: Sequence[Path], *, as_json: bool = False) -> None:
    """Print the runs below folders, by default below ./runs or else the working directory. Raises RLHFError C09."""
    folders = list(folders) or [_default_folder()]
    with terminal.muted_warnings():
        found = status.find_runs(folders)
    if as_json:
        terminal.out(json.dumps([_run_json(run) for run in found], indent=2, ensure_ascii=False))
    elif found:
        terminal.table(RUN_COLUMNS, [_run_row(run) for run in found])
    else:
        terminal.say(f"no runs below {', '.join(map(shown, folders))}; rlhf init demo runs/demo makes one")


def runs_here() -> list[str]:
    """Return the folders that `rlhf ls` would list, or only "." if this folder is a run. Searches few folders."""
    if any(find_run_folders(Path("."), 0)):
        return ["."]
    with terminal.muted_warnings():
        return [shown(run.folder) for run in status.find_runs([_default_folder()], MAX_FOLDERS)]


def _default_folder() -> Path:
    return Path("runs") if Path("runs").is_dir() else Path(".")


def stage_rows(run: RunInfo) -> list[list[str]]:
    """Return the table rows of `rlhf status`, unfinished stages of base runs first."""
    return [
        [
            name,
            _state_text(stage),
            _headline(stage),
            duration(stage.time_s) if stage.time_s else "",
            ago(time.time() - stage.changed) if stage.changed else "",
            system.format_bytes(stage.bytes) if stage.bytes else "",
        ]
        for name, stage in run.all_stages.items()
    ]


def _run_row(run: RunInfo) -> list[str]:
    stages = [
        name if stage.state == "finished" else f"{name} ({_state_text(stage)})"
        for name, stage in run.all_stages.items()
    ]
    results = [_headline(stage) for stage in reversed(run.stages) if stage.headline_from == "manifest.json"]
    return [
        shown(run.folder),
        ", ".join(stages) or "nothing yet",
        next(filter(None, results), ""),
        ago(time.time() - run.changed),
        system.format_bytes(system.folder_bytes(run.folder)),
    ]


def _state_text(stage: StageInfo) -> str:
    progress = "" if stage.step is None else f"step {stage.step}" + (f" of {stage.steps}" if stage.steps else "")
    if stage.state == "stopped":
        return f"stopped, saved at {progress}" if progress else "stopped, nothing saved"
    shows_progress = stage.state == "running" or (stage.state == "finished" and stage.reasons)
    return f"{stage.state}, {progress}" if progress and shows_progress else stage.state


def _headline(stage: StageInfo) -> str:
    """Return a stage's main result, or its last logged metrics while it runs."""
    metrics, from_log = stage.headline, stage.headline_from == "metrics.jsonl"
    if "eval_loss" in metrics:
        return f"held-out loss {metrics['eval_loss']:.3f}"
    if "loss" in metrics:
        return f"loss {metrics['loss']:.3f}"
    if (accuracy := metrics.get("accuracy", metrics.get("rewards/accuracies"))) is not None:
        return f"accuracy {with_interval(accuracy, metrics.get('accuracy_ci95'))}{' in training' if from_log else ''}"
    if "objective/scores" in metrics:
        kl = metrics.get("objective/kl_k1")
        return format_reward(metrics, LAST_UPDATE if from_log else TRAINING) + ("" if kl is None else f", KL {kl:.2f}")
    if "win_rate" in metrics:
        return f"PPO over SFT {with_interval(metrics['win_rate'], metrics.get('win_rate_ci95'))} by {metrics['judge']}"
    return ""


def _notes(run: RunInfo) -> list[str]:
    """Return the lines below the table: processes, reasons, inputs not read, size of .old/."""
    lines = []
    for name, stage in run.all_stages.items():
        if stage.process:
            remaining = "" if stage.left_s is None else f"; about {duration(stage.left_s)} left"
            lines.append(f"{name:<8} {stage.process}{remaining}")
        elif stage.reasons:
            lines.append(f"{name:<8} {'; '.join(stage.reasons)}")
        if stage.unread:
            names = ", ".join(stage.unread)
            text = f"{names}: large, with a date later than this stage's start, taken for unchanged; --dry-run reads it"
            lines.append(f"{stage.stage:<8} {text}")
    if old_bytes := system.folder_bytes(run.folder / ".old"):
        lines.append(f".old     {system.format_bytes(old_bytes)} that was moved aside")
    return lines


def _next_line(run: RunInfo) -> str:
    """Return the line on what `rlhf run` would do, and why."""
    following, command = run.next, f"rlhf run {shell_path(run.folder)}"
    assert following, "the run was read without its configs"
    problems = following.problems
    first = problems[0].line().partition("\n")[0] if problems else ""
    first += f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if following.action == "wait":
        names = " and ".join(name for name, stage in run.all_stages.items() if stage.process)
        return f"next: wait for {names}; {command} would be refused until then"
    if following.action == "refused" and run.bases and {problem.code for problem in problems} <= MISSING_MODEL_CODES:
        base_commands = dict.fromkeys(f"rlhf run {shell_path(stage.folder.parent)}" for stage in run.bases)
        return f"next: {'; '.join(base_commands)}, which {shown(run.folder)} starts from; then {command}"
    if following.action == "refused":
        return f"next: {command} would be refused: {first}"
    if following.action == "run":
        return f"next: {command} runs {_describe_order(following.decisions)}"
    if problems:
        return f"next: nothing is left to run; {command} ends with {first}"
    unread = any(stage.unread for stage in run.stages)
    return f"next: nothing, {'as far as dates tell' if unread else 'all is up to date'}"


def _describe_order(decisions: Mapping[str, StageDecision]) -> str:
    """Name the stages that run, in order, with the reason of the first."""
    (first, decision), *rest = [item for item in decisions.items() if item[1].runs or item[1].after]
    certain, possible = ([stage for stage, later in rest if later.runs is runs] for runs in (True, False))
    text = f"{first} ({decision.reason})" + (f", then {', '.join(certain)}" if certain else "")
    return text + (f", then {', '.join(possible)} if their inputs change" if possible else "")


def _run_json(run: RunInfo) -> dict[str, Any]:
    """Return a run as printed by `--json`: paths as in messages, times as ISO 8601 in UTC."""
    result: dict[str, Any] = {
        "run": shown(run.folder),
        "changed": _iso(run.changed),
        "bytes": system.folder_bytes(run.folder),
        "old_bytes": system.folder_bytes(run.folder / ".old"),
        "bases": [_stage_json(stage) for stage in run.bases],
        "stages": [_stage_json(stage) for stage in run.stages],
    }
    if run.next:
        result["next"] = {
            "action": run.next.action,
            "steps": [
                {"stage": stage, "why": plan.reason, "runs": plan.runs, "fresh": plan.fresh, "after": plan.after}
                for stage, plan in run.next.decisions.items()
            ],
            "problems": [asdict(problem) for problem in run.next.problems],
        }
    return result


def _stage_json(stage: StageInfo) -> dict[str, Any]:
    process = stage.process and {**asdict(stage.process), "since": _iso(stage.process.since)}
    return {**asdict(stage), "folder": shown(stage.folder), "changed": _iso(stage.changed), "process": process}


def _iso(timestamp: float | None) -> str | None:
    return None if timestamp is None else datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="seconds")
