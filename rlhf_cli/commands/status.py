"""`rlhf status RUN` and `rlhf ls`: print the progress of runs and what comes next."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlhf_cli import system, terminal
from rlhf_cli.errors import shell_path, shown
from rlhf_cli.evaluation.report_text import LAST_UPDATE, TRAINING, format_reward
from rlhf_cli.pipeline.decide import StageDecision, steps_json
from rlhf_cli.pipeline.headline import LOG, headline
from rlhf_cli.pipeline.load import run_command
from rlhf_cli.pipeline.run import RunOutcome
from rlhf_cli.pipeline.status import NextAction, find_runs, read_run_and_next
from rlhf_cli.report.formats import count
from rlhf_cli.report.show import brief
from rlhf_cli.runs.layout import MANIFEST, REPORT_PAGE, SEEDS_FOLDER, find_run_folders, seeds_in
from rlhf_cli.runs.read import Run, Stage
from rlhf_cli.statistics import with_interval
from rlhf_cli.terminal import ago, duration

STAGE_COLUMNS = ("stage", "state", "headline", "time", "when", "size")
RUN_COLUMNS = ("run", "stages", "headline", "when", "size")
MISSING_MODEL_CODES = {"M01", "M10"}
MAX_UNSTARTED = 5  # folders that never ran, by name
MAX_FOLDERS = 500  # to search for runs if none was named


def show(folder: Path, overrides: Sequence[str] = (), *, as_json: bool = False) -> None:
    """Print the stages of a run, and what `rlhf run` with these overrides would do. Raises RLHFError C09, C11."""
    with terminal.muted_warnings():  # the stages print them
        run, following = read_run_and_next(folder, overrides)
    if as_json:
        terminal.print_json({**_run_json(run), "next": _next_json(following)})
        return
    terminal.table(STAGE_COLUMNS, stage_rows(run))
    for line in [*_notes(run), _next_line(run, following)]:
        terminal.out(line)


def conclude_run(folder: Path, overrides: Sequence[str], outcome: RunOutcome) -> None:
    """Print the result of `rlhf run` with --json or --quiet: the run as `rlhf status` has it, and what was done."""
    if outcome.code and not outcome.unmet and not terminal.has_mode("json"):
        return  # there is no result
    page = folder / "eval" / REPORT_PAGE
    place = page if page.is_file() else folder
    values: dict[str, Any] = {}
    if terminal.has_mode("json"):
        with terminal.muted_warnings():
            run, following = read_run_and_next(folder, overrides)
        values = {
            **_run_json(run),
            "next": _next_json(following),
            "exit_code": outcome.code,
            "ran": outcome.ran,
            "page": shown(page) if page.is_file() else None,
            "conclusion": brief(folder)[0] if page.is_file() else None,
        }
    terminal.conclude(shown(place), values)


def list_runs(folders: Sequence[Path], *, as_json: bool = False) -> None:
    """Print the runs below folders, by default below ./runs or else the working directory. Raises RLHFError C09."""
    folders = list(folders) or [_default_folder()]
    with terminal.muted_warnings():
        found = find_runs(folders)
    if as_json:
        terminal.print_json([_run_json(run) for run in found])
    elif found:
        started = [run for run in found if _has_started(run)]
        if started:
            terminal.table(RUN_COLUMNS, [_run_row(run) for run in started])
        _print_unstarted([run for run in found if run not in started])
    else:
        terminal.say(f"no runs below {', '.join(map(shown, folders))}; rlhf init demo runs/demo makes one")


def _has_started(run: Run) -> bool:
    """Return True if a stage has started, here or in the run of a seed."""
    return any(stage.condition != "new" for stage in run.all_stages.values()) or bool(seeds_in(run.folder))


def _print_unstarted(runs: Sequence[Run]) -> None:
    """Print the folders of configs that never ran, in one line."""
    names = [shown(run.folder) for run in runs[:MAX_UNSTARTED]]
    if len(runs) > MAX_UNSTARTED:
        names.append(f"and {len(runs) - MAX_UNSTARTED} more")
    if names:
        terminal.out(f"never run: {', '.join(names)}")


def runs_here() -> list[str]:
    """Return the folders that `rlhf ls` would list, or only "." if this folder is a run. Searches few folders."""
    if any(find_run_folders(Path("."), 0)):
        return ["."]
    with terminal.muted_warnings():
        return [shown(run.folder) for run in find_runs([_default_folder()], MAX_FOLDERS)]


def _default_folder() -> Path:
    return Path("runs") if Path("runs").is_dir() else Path(".")


def stage_rows(run: Run) -> list[list[str]]:
    """Return the table rows of `rlhf status`, unfinished stages of base runs first."""
    return [_stage_row(name, stage) for name, stage in run.all_stages.items()]


def _stage_row(name: str, stage: Stage) -> list[str]:
    progress = stage.progress
    return [
        name,
        _state_text(stage),
        _headline_text(stage),
        duration(progress.time_s) if progress.time_s else "",
        ago(time.time() - progress.changed) if progress.changed else "",
        system.format_bytes(progress.bytes) if progress.bytes else "",
    ]


def _run_row(run: Run) -> list[str]:
    stages = []
    for name, stage in run.all_stages.items():
        stages.append(name if stage.condition == "finished" else f"{name} ({_state_text(stage)})")
    return [
        shown(run.folder),
        ", ".join(stages) or count(len(seeds_in(run.folder)), "seed"),
        _last_result(run),
        ago(time.time() - run.changed),
        system.format_bytes(system.folder_bytes(run.folder)),
    ]


def _last_result(run: Run) -> str:
    """Return the result of the last stage of a run that has one."""
    for stage in reversed(list(run.stages.values())):
        text = _headline_text(stage)
        if text and headline(stage).source == MANIFEST:
            return text
    return ""


def _state_text(stage: Stage) -> str:
    condition = stage.condition
    progress = _progress_text(stage)
    if condition == "stopped":
        return f"stopped, saved at {progress}" if progress else "stopped, nothing saved"
    ended_early = condition == "finished" and bool(stage.reasons)
    return f"{condition}, {progress}" if progress and (condition == "running" or ended_early) else condition


def _progress_text(stage: Stage) -> str:
    """Return `step 3 of 8`; empty if the step is unknown."""
    step = stage.progress.step
    steps = stage.progress.steps
    if step is None:
        return ""
    return f"step {step} of {steps}" if steps else f"step {step}"


def _headline_text(stage: Stage) -> str:
    """Return a stage's main result, or its last logged metrics while it runs."""
    metrics, source = headline(stage)
    from_log = source == LOG
    if "eval_loss" in metrics:
        return f"held-out loss {metrics['eval_loss']:.3f}"
    if "loss" in metrics:
        return f"loss {metrics['loss']:.3f}"

    accuracy = metrics.get("accuracy", metrics.get("rewards/accuracies"))
    if accuracy is not None:
        where = " in training" if from_log else ""
        if stage.name == "reward" and stage.manifest.model_is == "the best step":
            where = f", the best step ({stage.manifest.step})"
        return f"accuracy {with_interval(accuracy, metrics.get('accuracy_ci95'))}{where}"
    if "objective/scores" in metrics:
        reward = format_reward(metrics, LAST_UPDATE if from_log else TRAINING)
        kl = metrics.get("objective/kl_k1")
        return reward if kl is None else f"{reward}, KL {kl:.2f}"
    if "win_rate" in metrics:
        rate = with_interval(metrics["win_rate"], metrics.get("win_rate_ci95"))
        return f"PPO over SFT {rate} by {metrics['judge']}"
    return ""


def _notes(run: Run) -> list[str]:
    """Return the lines below the table: processes, reasons, inputs not read, size of .old/."""
    lines = []
    for name, stage in run.all_stages.items():
        if stage.process:
            lines.append(f"{name:<8} {stage.process}{_process_progress(stage)}")
        elif stage.reasons:
            lines.append(f"{name:<8} {'; '.join(stage.reasons)}")
        if stage.unread:
            names = ", ".join(stage.unread)
            text = f"{names}: large, with a date later than this stage's start, taken for unchanged; --dry-run reads it"
            lines.append(f"{stage.name:<8} {text}")

    seeds = seeds_in(run.folder)
    if seeds:
        lines.append(f"{SEEDS_FOLDER:<8} {', '.join(map(str, seeds))} in {shown(run.folder / SEEDS_FOLDER)}")
    old_bytes = system.folder_bytes(run.folder / ".old")
    if old_bytes:
        lines.append(f".old     {system.format_bytes(old_bytes)} that was moved aside")
    return lines


def _process_progress(stage: Stage) -> str:
    """Return when a stage will end; of a process elsewhere also when it wrote last: it may have been killed."""
    progress = stage.progress
    text = ""
    if stage.process and stage.process.is_elsewhere and progress.changed:
        text += f", last wrote {ago(time.time() - progress.changed)}"
    if progress.left_s is not None:
        text += f"; about {duration(progress.left_s)} left"
    return text


def _next_line(run: Run, following: NextAction) -> str:
    """Return the line on what `rlhf run` would do, and why."""
    command = run_command(run.folder)
    problems = following.problems
    first = problems[0].line().partition("\n")[0] if problems else ""
    if len(problems) > 1:
        first += f" (and {len(problems) - 1} more)"

    if following.action == "wait":
        processes = {name: stage.process for name, stage in run.all_stages.items() if stage.process}
        names = " and ".join(processes)
        hosts = " and ".join(dict.fromkeys(each.host for each in processes.values() if each.is_elsewhere))
        end = f", or until its process on {hosts} has ended, which cannot be seen from here" if hosts else ""
        return f"next: wait for {names}; {command} would be refused until then{end}"
    if following.action == "refused" and run.bases and {problem.code for problem in problems} <= MISSING_MODEL_CODES:
        base_commands = dict.fromkeys(f"rlhf run {shell_path(stage.folder.parent)}" for stage in run.bases)
        return f"next: {'; '.join(base_commands)}, which {shown(run.folder)} starts from; then {command}"
    if following.action == "refused":
        return f"next: {command} would be refused: {first}"
    if following.action == "run":
        text = f"{command} runs {_describe_order(following.decisions)}"
        seeds = ",".join(map(str, seeds_in(run.folder)))
        return f"next: {command} --seeds {seeds} for its seeds; {text}" if seeds else f"next: {text}"
    if problems:
        return f"next: nothing is left to run; {command} ends with {first}"
    unread = any(stage.unread for stage in run.stages.values())
    return f"next: nothing, {'as far as dates tell' if unread else 'all is up to date'}"


def _describe_order(decisions: Mapping[str, StageDecision]) -> str:
    """Name the stages that run, in order, with the reason of the first."""
    pending = [stage for stage, decision in decisions.items() if decision.runs or decision.after]
    first, *rest = pending
    certain = [stage for stage in rest if decisions[stage].runs]
    possible = [stage for stage in rest if not decisions[stage].runs]
    text = f"{first} ({decisions[first].reason})"
    if certain:
        text += f", then {', '.join(certain)}"
    if possible:
        text += f", then {', '.join(possible)} if their inputs change"
    return text


def _run_json(run: Run) -> dict[str, Any]:
    """Return a run as printed by `--json`: paths as in messages, times as ISO 8601 in UTC."""
    return {
        "run": shown(run.folder),
        "changed": _iso(run.changed),
        "bytes": system.folder_bytes(run.folder),
        "old_bytes": system.folder_bytes(run.folder / ".old"),
        "bases": [_stage_json(stage) for stage in run.bases],
        "stages": [_stage_json(stage) for stage in run.stages.values()],
    }


def _next_json(following: NextAction) -> dict[str, Any]:
    problems = [asdict(problem) for problem in following.problems]
    return {"action": following.action, "steps": steps_json(following.decisions), "problems": problems}


def _stage_json(stage: Stage) -> dict[str, Any]:
    metrics, source = headline(stage)
    progress = stage.progress
    process = stage.process
    return {
        "stage": stage.name,
        "folder": shown(stage.folder),
        "state": stage.condition,
        "reasons": stage.reasons,
        "step": progress.step,
        "steps": progress.steps,
        "headline": metrics,
        "headline_from": source,
        "time_s": progress.time_s,
        "left_s": progress.left_s,
        "changed": _iso(progress.changed),
        "bytes": progress.bytes,
        "process": process and {"pid": process.pid, "host": process.host, "since": _iso(process.since)},
        "unread": stage.unread,
    }


def _iso(timestamp: float | None) -> str | None:
    return None if timestamp is None else datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="seconds")
