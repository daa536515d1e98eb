"""One stage of a run: how far it is, what came out, how long it took. Reads little and takes no lock."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhf_cli import runs as checkpoints
from rlhf_cli import system
from rlhf_cli.commands import run as pipeline
from rlhf_cli.commands.run import STAGES, Step
from rlhf_cli.config.base import Config
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.loading import load
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.training import RewardConfig, SFTConfig
from rlhf_cli.errors import Problem, RLHFError, read_error, shell_path, translate_read_errors
from rlhf_cli.evaluation import render
from rlhf_cli.evaluation.render import deciding_judge
from rlhf_cli.runs.checkpoints import newest_step
from rlhf_cli.runs.discover import configs_in, find_run_folders, has_output, is_preset
from rlhf_cli.runs.locks import LockOwner, lock_owner
from rlhf_cli.runs.stage_folder import StageStatus, recorded_num_processes
from rlhf_cli.runs.stage_state import StageState, describe_changed_parents, read_stage_state
from rlhf_cli.tracking.metrics_log import newest_rows

State = Literal["new", "running", "stopped", "finished", "stale", "damaged", "unreadable"]
Origin = Literal["manifest.json", "metrics.jsonl"]
Row = Mapping[str, Any]
Numbers = dict[str, Any]
# Of each stage's metrics those that tell most: as its manifest has them, and as its log has them on the way.
HEADLINES = {
    "sft": (("eval_loss",), ("loss",)),
    "reward": (("accuracy", "accuracy_ci95"), ("accuracy",)),
    "ppo": (("objective/scores", "objective/kl_k1"), ("objective/scores", "objective/kl_k1")),
}
STATES: dict[str, State] = {"absent": "new", "begun": "stopped", "new": "new", "resume": "stopped"}


@dataclass(frozen=True)
class Stage:
    """What is known of a stage; `--json` has the same names (docs/commands.md)."""

    stage: str
    folder: Path
    state: State
    reasons: tuple[str, ...] = ()  # why it is stale or damaged, or ended before its time
    step: int | None = None  # made so far; of a stopped one saved so far
    steps: int | None = None  # in all
    headline: Numbers = field(default_factory=dict)
    headline_from: Origin | None = None
    time_s: float | None = None  # of its training, interruptions left out
    left_s: float | None = None  # of a running one, to its end
    changed: float | None = None  # when it ended, or last wrote: seconds of the epoch
    bytes: int = 0
    process: LockOwner | None = None  # that is writing it
    unread: tuple[str, ...] = ()  # keys of what was taken for unchanged, see `runs.quick_stage_status`


def read_stage(stage: str, folder: Path, status: StageStatus | None = None) -> Stage:
    """A stage as its folder tells it, and `status` where its config is known: without it nothing is told as stale."""
    try:
        with translate_read_errors(folder):
            return _read(stage, folder, status)
    except RLHFError as error:
        return Stage(stage, folder, "unreadable", (error.problems[0].text,))
    except OSError:  # moved aside at this very moment
        return Stage(stage, folder, "new")


def _read(stage: str, folder: Path, status: StageStatus | None) -> Stage:
    left, process = read_stage_state(folder), lock_owner(folder)
    if left.state == "unreadable":
        return Stage(stage, folder, "unreadable", (left.problem or "",), process=process)
    state = _state(left, status, process)
    rows = newest_rows(folder / "metrics.jsonl")
    step, steps = _steps(stage, folder, state, left, rows)
    ended = (left.manifest or {}).get("stopped")
    reasons = status.reasons if status else (left.problem,) if left.problem else ()
    if (
        status is None
        and state == "finished"
        and (others := tuple(describe_changed_parents(folder, left.manifest or {})))
    ):
        state, reasons = "stale", tuple(f"made from {what}" for what in others)
    elif state == "finished" and ended:
        reasons = (str(ended),)
    elif state == "stale" and left.state != "finished" and (folder / "config.yaml").is_file():
        reasons += (f"as it was begun it goes on: rlhf {stage} --config {shell_path(folder / 'config.yaml')}",)
    headline, where = _headline(stage, left.manifest if left.state == "finished" else None, rows)
    return Stage(
        stage=stage,
        folder=folder,
        state=state,
        reasons=reasons,
        step=step,
        steps=steps,
        headline=headline,
        headline_from=where,
        time_s=max((_finite(row.get("time_s")) for row in rows), default=None),
        left_s=_left(rows, step, steps) if state == "running" else None,
        changed=_changed(folder),
        bytes=system.folder_bytes(folder),
        process=process,
        unread=status.unread if status else (),
    )


def _state(left: StageState, status: StageStatus | None, process: LockOwner | None) -> State:
    told = status.state if status else left.state
    return "running" if process else STATES.get(told, told)  # type: ignore[arg-type]


def _steps(
    stage: str, folder: Path, state: State, left: StageState, rows: Sequence[Row]
) -> tuple[int | None, int | None]:
    """Steps made, and in all."""
    if state == "new" or stage == "eval":
        return None, None
    logged = max((row["step"] for row in rows), default=None)
    if left.state == "finished" and state != "running":
        return logged, _whole(stage, folder, rows) if "stopped" in (left.manifest or {}) else logged
    return logged if state == "running" else newest_step(folder / "state"), _whole(stage, folder, rows)


def _whole(stage: str, folder: Path, rows: Sequence[Row]) -> int | None:
    """Steps in all of a stage that was begun, by the config that it was begun with; None where that does not tell."""
    try:
        config: Config = load(stage, folder / "config.yaml")
        if isinstance(config, PPOConfig):
            return config.ppo.across(recorded_num_processes(folder)).num_updates()
    except (RLHFError, ValueError):  # damaged; of as many processes as it does not go with; or counted in prompts
        return None
    assert isinstance(config, SFTConfig | RewardConfig)
    settings = config.sft if isinstance(config, SFTConfig) else config.reward
    told = [(row["step"], _finite(row.get("epoch"))) for row in rows]
    step, epoch = told[-1] if told else (0, 0.0)
    if settings.max_steps is not None or epoch <= 0:
        return settings.max_steps
    return math.ceil(settings.num_train_epochs * math.ceil(step / epoch - 1e-6))  # of whole steps an epoch


def _left(rows: Sequence[Row], step: int | None, steps: int | None) -> float | None:
    """Seconds to the end, at the speed of the newest lines of the log."""
    if step is None or steps is None:
        return None
    first, last = rows[0], rows[-1]
    made, seconds = last["step"] - first["step"], _finite(last.get("time_s")) - _finite(first.get("time_s"))
    if made <= 0:
        made, seconds = last["step"], _finite(last.get("time_s"))
    return max(0, steps - step) * seconds / made if made > 0 and seconds > 0 else None


def _headline(stage: str, manifest: Row | None, rows: Sequence[Row]) -> tuple[Numbers, Origin | None]:
    metrics = (manifest or {}).get("metrics")
    metrics = metrics if isinstance(metrics, Mapping) else {}
    if stage == "eval":
        found = _won(metrics)
        return found, "manifest.json" if found else None
    at_the_end, on_the_way = HEADLINES[stage]
    if found := _picked(metrics, at_the_end):
        return found, "manifest.json"
    logged = [found for row in reversed(rows) if (found := _picked(row, on_the_way))]
    return (logged[0], "metrics.jsonl") if logged else ({}, None)


def _picked(metrics: Row, names: Sequence[str]) -> Numbers:
    """Those of the names that are there, where the first is; else none."""
    found = {name: metrics[name] for name in names if _is_told(metrics.get(name))}
    return found if names[0] in found else {}


def _won(metrics: Row) -> Numbers:
    """PPO's win rate over SFT by the judge that decides."""
    try:
        rates = metrics["win_rate"]["ppo_vs_sft"]
        judge = deciding_judge(rates)
        told = {"win_rate": rates[judge]["value"], "win_rate_ci95": rates[judge].get("ci95")}
    except (KeyError, TypeError, ValueError, AttributeError):  # none was compared; or no file of ours
        return {}
    return {"judge": judge, **found} if "win_rate" in (found := _picked(told, ("win_rate", "win_rate_ci95"))) else {}


def _is_told(value: Any) -> bool:
    """Whether a value is a number, or an interval of two."""
    if isinstance(value, list):
        return len(value) == 2 and all(map(_is_told, value))
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _finite(value: Any) -> float:
    return float(value) if not isinstance(value, list) and _is_told(value) else 0.0


def _changed(folder: Path) -> float | None:
    """When the manifest was written, or what a stage writes on its way."""
    for names in (["manifest.json"], ["metrics.jsonl", "identity.json"]):
        times = [(folder / name).stat().st_mtime for name in names if (folder / name).is_file()]
        if times:
            return max(times)
    return None


DEPTH = 4  # folders below the one that is named


@dataclass(frozen=True)
class Next:
    """What `rlhf run` would do about the run as it is: `steps` by stage, or `problems` over which it would refuse.

    `wait`: a stage is being written. `nothing` has problems where what `eval.require` asks for does not hold.
    """

    action: Literal["run", "wait", "nothing", "refused"]
    steps: Mapping[str, Step] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Run:
    """A run's folder; `next` is None where only its files were looked at."""

    folder: Path
    stages: tuple[Stage, ...]
    bases: tuple[Stage, ...]  # unfinished stages of runs inside of this one that it starts from: base/sft of the demo
    next: Next | None = None

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        """Those of its bases first."""
        return (*self.bases, *self.stages)

    @property
    def bytes(self) -> int:
        """Of the whole folder, data and what was moved aside among it."""
        return system.folder_bytes(self.folder)

    @property
    def old_bytes(self) -> int:
        """Of what was moved aside, in .old/."""
        return system.folder_bytes(self.folder / ".old")

    @property
    def changed(self) -> float:
        """When a stage last wrote; of a run that has none, its newest config."""
        times = [stage.changed for stage in self.all_stages if stage.changed is not None]
        files = [path.stat().st_mtime for path in configs_in(self.folder)]
        return max(times or files, default=0.0)


def read_run(folder: Path, overrides: Sequence[str] = ()) -> Run:
    """A run with all that its configs tell; of a stage's folder, the run that it belongs to. Changes nothing.

    Raises RLHFError C09 for a folder that is no run, C11 for overrides that no stage could mean.
    """
    root = folder.parent if folder.name in STAGES and has_output(folder) else folder
    begun = [stage for stage in STAGES if has_output(root / stage)]
    configs: dict[str, Config] = {}
    problems: list[Problem] = []
    try:
        files = pipeline.find_configs(root)
    except RLHFError as error:
        if not begun:
            raise
        files, problems = {}, [*error.problems]
    routed = pipeline.route(overrides, list(files))
    for stage, path in files.items():
        try:
            configs |= pipeline.load_all({stage: path}, routed)
        except RLHFError as error:
            problems += error.problems
    looked = {stage: _look(config) for stage, config in configs.items()}
    bases = _unfinished(_bases(root, configs.values()))
    stages = []
    for stage in STAGES:
        if stage in files or stage in begun:
            place = configs[stage].folder if stage in configs else root / stage
            found = looked.get(stage)
            stages.append(read_stage(stage, place, found if isinstance(found, StageStatus) else None))
    return Run(root, tuple(stages), bases, _next(configs, looked, problems, [*bases, *stages]))


def _bases(root: Path, configs: Iterable[Config]) -> list[Path]:
    """The folders of stages of other runs, inside of this one, that its configs start from."""
    here = Path(os.path.abspath(root))
    # What is not there yet may be a hub id, and stands as it was written.
    named = [config.file.parent / one.path for config in configs for one in checkpoints.references(config)]
    inside = [path for path in named if path.name in STAGES and here in path.parent.parents]
    return [path for path in dict.fromkeys(inside) if has_output(path) or configs_in(path.parent)]


def _unfinished(folders: Iterable[Path]) -> tuple[Stage, ...]:
    found = [read_stage(folder.name, folder) for folder in folders]
    return tuple(stage for stage in found if stage.state != "finished")


def _look(config: Config) -> StageStatus | RLHFError:
    try:
        with translate_read_errors(config.folder):
            return checkpoints.quick_stage_status(config)
    except RLHFError as error:
        return error
    except OSError as error:  # gone at this very moment
        return read_error(error, config.folder)


def _next(
    configs: Mapping[str, Config],
    looked: Mapping[str, StageStatus | RLHFError],
    problems: Sequence[Problem],
    stages: Sequence[Stage],
) -> Next:
    def look(config: Config) -> StageStatus:
        found = looked[config.stage]
        if isinstance(found, RLHFError):
            raise found
        return found

    if any(stage.process for stage in stages):
        return Next("wait", problems=tuple(problems))
    try:
        if problems:
            raise RLHFError.from_problems(problems)
        pipeline.refuse_what_is_missing(configs, quick=True)
        steps = pipeline.forecast(configs, look=look)
    except RLHFError as error:
        return Next("refused", problems=error.problems)
    if any(step.runs or step.after for step in steps.values()):
        return Next("run", steps)
    return Next("nothing", steps, _not_met(configs.get("eval")))


def _not_met(config: Config | None) -> tuple[Problem, ...]:
    """What `eval.require` asks for and a finished evaluation does not hold: `rlhf run` ends with it."""
    try:
        if isinstance(config, EvalConfig):
            report = render.read_report(config.folder)
            render.check_requirements(report, config.eval.require, where=config.where)
    except RLHFError as error:
        return error.problems
    return ()


def find_runs(folders: Sequence[Path], most: int | None = None) -> list[Run]:
    """The runs at or below folders by their files alone, newest first; `most`: see `below`.

    One inside of another that starts from it belongs to that; a preset is none until a stage wrote into it.
    Raises RLHFError C09 for what is no folder.
    """
    for folder in folders:
        if not os.path.isdir(folder):
            raise RLHFError("C09", f"no such folder: {checkpoints.shown(folder)}")
    found = dict.fromkeys(
        Path(os.path.abspath(path)) for folder in folders for path in find_run_folders(folder, DEPTH, most)
    )
    outer = {path for inner in found for path in inner.parents if path in found}
    bases = {path: _bases(path, _readable(path)) for path in outer}
    owned = {base.parent for named in bases.values() for base in named}
    runs = [
        Run(
            path,
            tuple(read_stage(stage, path / stage) for stage in STAGES if has_output(path / stage)),
            _unfinished(bases.get(path, ())),
        )
        for path in found
        if path not in owned
    ]
    return sorted((run for run in runs if run.stages or not is_preset(run.folder)), key=lambda run: -run.changed)


def _readable(folder: Path) -> Iterator[Config]:
    """Those configs of a run in which nothing is wrong."""
    for path in configs_in(folder):
        with suppress(RLHFError):
            yield load(path.stem, path)
