"""Progress, results and next action of runs, for `rlhf status` and `rlhf ls`. Reads few files and takes no lock."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhf_cli import runs, system
from rlhf_cli.config.base import Config
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.machinery.loading import load
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import Problem, RLHFError, read_error, shell_path, shown, translate_read_errors
from rlhf_cli.evaluation.requirements import check_requirements
from rlhf_cli.evaluation.sample_pairs import deciding_judge
from rlhf_cli.jsonl import is_number
from rlhf_cli.pipeline import run as pipeline
from rlhf_cli.pipeline.run import StageDecision
from rlhf_cli.runs import read
from rlhf_cli.runs.checkpoints import newest_step
from rlhf_cli.runs.discover import STAGES, configs_in, find_run_folders, has_output, is_preset
from rlhf_cli.runs.locks import LockOwner, lock_owner
from rlhf_cli.runs.report import read_report
from rlhf_cli.runs.stage_folder import recorded_num_processes
from rlhf_cli.runs.status import StageStatus
from rlhf_cli.tracking import newest_rows
from rlhf_cli.trees import at

MAX_DEPTH = 4  # levels of folders to search for runs
STATES = {"absent": "new", "begun": "stopped", "resume": "stopped"}
# Metrics of each stage to show: of its manifest, and of its log while it runs. The first must be present.
HEADLINES = {
    "sft": (("eval_loss",), ("loss",)),
    "reward": (("accuracy", "accuracy_ci95"), ("accuracy",)),
    "dpo": (("accuracy", "accuracy_ci95"), ("rewards/accuracies",)),
    "ppo": (("objective/scores", "objective/kl_k1"), ("objective/scores", "objective/kl_k1")),
}


@dataclass(frozen=True)
class StageInfo:
    """Progress and results of a stage. `--json` prints these fields (docs/commands.md)."""

    stage: str
    folder: Path
    state: str  # new, running, stopped, finished, stale, damaged or unreadable
    reasons: tuple[str, ...] = ()  # why it is stale or damaged, or stopped early
    step: int | None = None  # completed so far; if stopped, the last one saved
    steps: int | None = None  # in total
    headline: Mapping[str, Any] = field(default_factory=dict)
    headline_from: Literal["manifest.json", "metrics.jsonl"] | None = None
    time_s: float | None = None  # of training, without interruptions
    left_s: float | None = None  # estimated time to the end, if running
    changed: float | None = None  # time of the end or the last write, in seconds since the epoch
    bytes: int = 0
    process: LockOwner | None = None  # that has locked the folder
    unread: tuple[str, ...] = ()  # keys of inputs assumed unchanged without hashing


@dataclass(frozen=True)
class NextAction:
    """Action of `rlhf run` on the run as it is."""

    action: Literal["run", "wait", "nothing", "refused"]  # wait: a stage is running
    decisions: Mapping[str, StageDecision] = field(default_factory=dict)  # by stage
    problems: tuple[Problem, ...] = ()  # with which it would fail; of `nothing`, what does not meet `eval.require`


@dataclass(frozen=True)
class RunInfo:
    """State of a run folder. `next` is None if its configs were not read."""

    folder: Path
    stages: tuple[StageInfo, ...]
    bases: tuple[StageInfo, ...]  # unfinished stages of inner runs that it starts from, e.g. base/sft
    next: NextAction | None = None

    @property
    def all_stages(self) -> dict[str, StageInfo]:
        """Stages of the bases by their path in the run, then its own by name."""
        bases = {os.path.relpath(stage.folder, self.folder): stage for stage in self.bases}
        return bases | {stage.stage: stage for stage in self.stages}

    @property
    def changed(self) -> float:
        """Time when a stage last wrote, or of the newest config if no stage has started."""
        times = [stage.changed for stage in self.all_stages.values() if stage.changed is not None]
        return max(times or [path.stat().st_mtime for path in configs_in(self.folder)], default=0.0)


# Read a stage


def read_stage(stage: str, folder: Path, status: StageStatus | None = None) -> StageInfo:
    """Read a stage's folder. Without a `status`, changes of its config and inputs go unnoticed."""
    try:
        with translate_read_errors(folder):
            return _read_stage(stage, folder, status)
    except RLHFError as error:
        return StageInfo(stage, folder, "unreadable", (error.problems[0].text,))
    except OSError:  # moved to .old/ at this moment
        return StageInfo(stage, folder, "new")


def _read_stage(stage: str, folder: Path, status: StageStatus | None) -> StageInfo:
    output, process = read.read_stage(stage, folder, logs=False), lock_owner(folder)
    reasons = status.reasons if status else (output.problem,) if output.problem else ()
    if output.state == "unreadable":
        return StageInfo(stage, folder, "unreadable", (output.problem or "",), process=process)
    manifest, rows = output.manifest or {}, newest_rows(folder / "metrics.jsonl")
    written: str = status.state if status else output.state
    state = "running" if process else STATES.get(written, written)
    if not status and state == "finished" and (changes := read.changed_parents(output)):
        state, reasons = "stale", tuple(f"made from {change}" for change in changes)
    elif state == "finished" and manifest.get("stopped"):
        reasons = (str(manifest["stopped"]),)
    elif state == "stale" and output.state != "finished" and (folder / "config.yaml").is_file():
        reasons += (f"to resume it with its old config: rlhf {stage} --config {shell_path(folder / 'config.yaml')}",)
    step, steps = (None, None) if state == "new" or stage == "eval" else _steps(output, state, rows)
    metrics, source = _headline_metrics(stage, output.table("metrics") if output.state == "finished" else {}, rows)
    names = ("manifest.json", "metrics.jsonl", "identity.json")
    times = {name: (folder / name).stat().st_mtime for name in names if (folder / name).is_file()}
    return StageInfo(
        stage,
        folder,
        state,
        reasons,
        step,
        steps,
        metrics,
        source,
        time_s=max((_finite(row.get("time_s")) for row in rows), default=None),
        left_s=_remaining_s(rows, step, steps) if state == "running" else None,
        changed=times.get("manifest.json", max(times.values(), default=None)),
        bytes=system.folder_bytes(folder),
        process=process,
        unread=status.unread if status else (),
    )


def _steps(output: read.Stage, state: str, rows: Sequence[read.Row]) -> tuple[int | None, int | None]:
    """Return the steps completed and the total."""
    logged = max((row["step"] for row in rows), default=None)
    if output.state == "finished" and state != "running" and "stopped" not in (output.manifest or {}):
        return logged, logged
    saved = state != "running" and output.state != "finished"
    return newest_step(output.folder / "state") if saved else logged, _total_steps(output, rows)


def _total_steps(output: read.Stage, rows: Sequence[read.Row]) -> int | None:
    """Return the total steps of a started stage by its saved config; None if they cannot be computed."""
    try:
        config: Any = load(output.name, output.folder / "config.yaml")
        if isinstance(config, PPOConfig):
            return config.ppo.across(recorded_num_processes(output.folder)).num_updates()
    except (RLHFError, ValueError):  # damaged, invalid for its number of processes, or counted in prompts
        return None
    settings = getattr(config, output.name)
    step, epoch = (rows[-1]["step"], _finite(rows[-1].get("epoch"))) if rows else (0, 0.0)
    if settings.max_steps is not None or epoch <= 0:
        return settings.max_steps
    return math.ceil(settings.num_train_epochs * math.ceil(step / epoch - 1e-6))  # an epoch has a whole number of steps


def _remaining_s(rows: Sequence[read.Row], step: int | None, steps: int | None) -> float | None:
    """Return the seconds to the end, at the speed of the newest lines of the log."""
    if step is None or steps is None:
        return None
    start = rows[0] if len(rows) > 1 else {"step": 0}
    done, seconds = rows[-1]["step"] - start["step"], _finite(rows[-1].get("time_s")) - _finite(start.get("time_s"))
    return max(0, steps - step) * seconds / done if done > 0 and seconds > 0 else None


def _headline_metrics(stage: str, metrics: read.Row, rows: Sequence[read.Row]) -> tuple[dict[str, Any], Any]:
    """Return a stage's main metrics and the file that they are from."""
    final = _win_rate(metrics) if stage == "eval" else _pick(metrics, HEADLINES[stage][0])
    if final or stage == "eval":
        return final, "manifest.json" if final else None
    logged = next(filter(None, (_pick(row, HEADLINES[stage][1]) for row in reversed(rows))), None)
    return (logged, "metrics.jsonl") if logged else ({}, None)


def _pick(metrics: read.Row, names: Sequence[str]) -> dict[str, Any]:
    """Return the named metrics that are numbers or intervals; nothing if the first is missing."""
    picked = {name: metrics[name] for name in names if _is_result(metrics.get(name))}
    return picked if names[0] in picked else {}


def _win_rate(metrics: read.Row) -> dict[str, Any]:
    """Return PPO's win rate over SFT by the deciding judge; nothing if there is none."""
    rates = at(metrics, "win_rate.ppo_vs_sft")
    try:
        judge = deciding_judge(rates)
        rate = {"win_rate": rates[judge]["value"], "win_rate_ci95": rates[judge].get("ci95")}
    except (KeyError, TypeError, ValueError, AttributeError):  # nothing was compared, or a foreign file
        return {}
    picked = _pick(rate, ("win_rate", "win_rate_ci95"))
    return {"judge": judge, **picked} if picked else {}


def _is_result(value: Any) -> bool:
    """Return True for a finite number, or an interval of two."""
    if isinstance(value, list):
        return len(value) == 2 and all(map(_is_result, value))
    return is_number(value) and math.isfinite(value)


def _finite(value: Any) -> float:
    return float(value) if is_number(value) and math.isfinite(value) else 0.0


# Read a run


def read_run(folder: Path, overrides: Sequence[str] = ()) -> RunInfo:
    """Read a run, or the run of a stage's folder, with its configs.

    Raises RLHFError C09 if the folder is not a run, C11 for overrides that belong to no stage.
    """
    root = folder.parent if folder.name in STAGES and has_output(folder) else folder
    started = [stage for stage in STAGES if has_output(root / stage)]
    files: dict[str, Path] = {}
    problems: list[Problem] = []
    try:
        files = pipeline.find_configs(root)
    except RLHFError as error:
        if not started:
            raise
        problems += error.problems
    configs, invalid = pipeline.load_valid(files.values(), pipeline.route_overrides(overrides, list(files)))
    problems += invalid
    statuses = {stage: _status(config) for stage, config in configs.items()}
    stages = []
    for stage in STAGES:
        if stage in files or stage in started:
            stage_folder = configs[stage].folder if stage in configs else root / stage
            status = statuses.get(stage)
            stages.append(read_stage(stage, stage_folder, status if isinstance(status, StageStatus) else None))
    bases = _unfinished(_bases(root, configs.values()))
    if any(stage.process for stage in [*bases, *stages]):
        return RunInfo(root, tuple(stages), bases, NextAction("wait", problems=tuple(problems)))
    return RunInfo(root, tuple(stages), bases, _next_action(configs, statuses, problems))


def _bases(root: Path, configs: Iterable[Config]) -> list[Path]:
    """Return the stage folders of other runs inside this one that its configs start from."""
    run_folder = Path(os.path.abspath(root))
    # A path that does not exist is still relative, since it may be a hub id.
    paths = [config.file.parent / reference.path for config in configs for reference in runs.references(config)]
    inside = [path for path in paths if path.name in STAGES and run_folder in path.parent.parents]
    return [path for path in dict.fromkeys(inside) if has_output(path) or configs_in(path.parent)]


def _unfinished(folders: Iterable[Path]) -> tuple[StageInfo, ...]:
    stages = [read_stage(folder.name, folder) for folder in folders]
    return tuple(stage for stage in stages if stage.state != "finished")


def _status(config: Config) -> StageStatus | RLHFError:
    try:
        return runs.quick_stage_status(config)
    except RLHFError as error:
        return error
    except OSError as error:  # cannot be read, or was deleted at this moment
        return read_error(error, config.folder)


def _next_action(
    configs: Mapping[str, Config], statuses: Mapping[str, StageStatus | RLHFError], problems: Sequence[Problem]
) -> NextAction:
    def get_status(config: Config) -> StageStatus:
        status = statuses[config.stage]
        if isinstance(status, RLHFError):
            raise status
        return status

    try:
        if problems:
            raise RLHFError.from_problems(problems)
        pipeline.check_inputs_exist(configs, quick=True)
        decisions = pipeline.plan_stages(configs, get_status=get_status)
    except RLHFError as error:
        return NextAction("refused", problems=error.problems)
    if any(decision.runs or decision.after for decision in decisions.values()):
        return NextAction("run", decisions)
    try:
        if isinstance(evaluation := configs.get("eval"), EvalConfig):
            check_requirements(read_report(evaluation.folder), evaluation.eval.require, where=evaluation.where)
    except RLHFError as error:
        return NextAction("nothing", decisions, error.problems)
    return NextAction("nothing", decisions)


def find_runs(folders: Sequence[Path], max_folders: int | None = None) -> list[RunInfo]:
    """Find the runs at or below folders, newest first, searching at most `max_folders`; configs are not checked.

    A run inside another that starts from it is part of that run. A preset counts once a stage has written into it.
    Raises RLHFError C09 if a folder does not exist.
    """
    for folder in folders:
        if not os.path.isdir(folder):
            raise RLHFError("C09", f"no such folder: {shown(folder)}")
    paths = [path for folder in folders for path in find_run_folders(folder, MAX_DEPTH, max_folders)]
    run_paths = dict.fromkeys(Path(os.path.abspath(path)) for path in paths)
    outer = {path for inner in run_paths for path in inner.parents if path in run_paths}
    bases = {path: _bases(path, pipeline.load_valid(configs_in(path), {})[0].values()) for path in outer}
    inner = {base.parent for stage_folders in bases.values() for base in stage_folders}
    found = []
    for path in run_paths:
        stages = tuple(read_stage(stage, path / stage) for stage in STAGES if has_output(path / stage))
        if path not in inner and (stages or not is_preset(path)):
            found.append(RunInfo(path, stages, _unfinished(bases.get(path, ()))))
    return sorted(found, key=lambda run: -run.changed)
