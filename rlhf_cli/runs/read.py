"""The files of a run, read without changing them: it may be unfinished, running, damaged, or spread over folders.

One read model for the report, the model card and `rlhf status`. Logs and progress are read only on demand.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rlhf_cli.config.machinery import yaml_io
from rlhf_cli.config.machinery.fields import with_current_names
from rlhf_cli.errors import RLHFError, shell_path, shown, translate_read_errors
from rlhf_cli.files import find_damage, list_folder, path_exists, read_regular, select_files
from rlhf_cli.jsonl import is_number, read_jsonl
from rlhf_cli.runs.identity import StageStatus, read_identity
from rlhf_cli.runs.layout import MANIFEST, OPTIONAL_STAGES, REPORT, STAGES, configs_in, has_output
from rlhf_cli.runs.locks import LockOwner
from rlhf_cli.runs.manifest import Manifest, read_manifest
from rlhf_cli.runs.parents import FOREIGN, no_stage_error
from rlhf_cli.runs.report import (
    PPO_OVER_SFT,
    FrontierPoint,
    InterpolatedPolicy,
    Report,
    WinRates,
    policy_label,
    read_report,
)
from rlhf_cli.runs.resolve import LAST, RECOMMENDED, SELECTED, require_step
from rlhf_cli.tracking.logs import read_log
from rlhf_cli.trees import at

State = Literal["absent", "begun", "finished", "damaged", "unreadable"]
Row = Mapping[str, Any]
# Config keys that name another stage's folder, for a stage without a manifest.
PARENT_KEYS = {"model.path": "sft", "models.sft": "sft", "models.reward": "reward", "models.ppo": "ppo"}
ANSWER_KEYS = {"index", "prompt", "model", "mode", "response", "ended", "length", "scores"}


@dataclass(frozen=True)
class Progress:
    """How far a stage is, see `read_stage_at_work`; empty for a stage that was read without it."""

    step: int | None = None  # completed so far; if stopped, the last one saved
    steps: int | None = None  # in total
    time_s: float | None = None  # of training, without interruptions
    left_s: float | None = None  # estimated time to the end, if running
    changed: float | None = None  # time of the end or the last write, in seconds since the epoch
    bytes: int = 0
    rows: tuple[Row, ...] = ()  # the newest of metrics.jsonl


@dataclass(frozen=True)
class Stage:
    """The folder of one stage. All is empty if it is absent; `problem` is what is damaged or cannot be read."""

    name: str
    folder: Path
    state: State = "absent"
    problem: str | None = None
    elsewhere: str | None = None  # the folder as other stages name it, if it is not in the run's folder
    outdated: tuple[str, ...] = ()  # parents that have changed since, see `changed_parents`
    manifest: Manifest = field(default_factory=Manifest)  # empty before it is finished
    identity: Row | None = None
    config: Row | None = None  # config.yaml
    metrics: tuple[Row, ...] = ()  # metrics.jsonl
    process: LockOwner | None = None  # that has locked the folder
    status: StageStatus | None = None  # compared with the config of the run, if that was read
    has_config: bool = False  # config.yaml is there, and `rlhf status` may name it
    progress: Progress = Progress()

    @property
    def there(self) -> bool:
        """Return True if the stage wrote anything."""
        return self.state != "absent"

    @property
    def condition(self) -> str:
        """Return the state for users: new, running, stopped, finished, stale, damaged or unreadable."""
        if self.state == "unreadable":
            return "unreadable"
        if self.process:
            return "running"
        if self.status is None and self.state == "finished" and self.outdated:
            return "stale"
        state = self.status.state if self.status else self.state
        return {"absent": "new", "begun": "stopped", "resume": "stopped"}.get(state, state)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return why the stage is stale, damaged or unreadable, or was stopped early."""
        if self.status is None or self.state == "unreadable":
            reasons = tuple(filter(None, [self.problem]))
        else:
            reasons = self.status.reasons

        if self.condition == "finished" and self.manifest.stopped:
            return (self.manifest.stopped,)
        if self.condition != "stale":
            return reasons
        if self.status is None:
            return tuple(f"made from {change}" for change in self.outdated)

        if self.state != "finished" and self.has_config:
            command = f"rlhf {self.name} --config {shell_path(self.folder / 'config.yaml')}"
            return (*reasons, f"to resume it with its old config: {command}")
        return reasons

    @property
    def unread(self) -> tuple[str, ...]:
        """Return the keys of inputs that were assumed to be unchanged without hashing."""
        return self.status.unread if self.status else ()

    @property
    def data(self) -> Mapping[str, str]:
        """Return the hashes of the stage's data, by config key."""
        return self.manifest.data or (self.identity or {}).get("data", {})

    @property
    def config_sha256(self) -> str | None:
        """Return the hash of the settings that can change the result."""
        return self.manifest.config_sha256 or (self.identity or {}).get("config_sha256")

    def setting(self, path: str) -> Any:
        """Return the value at a dotted path of config.yaml, or None."""
        return at(self.config, path)

    def series(self, key: str) -> list[tuple[int, float]]:
        """Return (step, value) of each line of metrics.jsonl that has the metric."""
        return [(row["step"], float(row[key])) for row in self.metrics if is_number(row.get(key))]


@dataclass(frozen=True)
class Run:
    """The folder of a run. `rlhf status` fills only `stages` and `bases`, which the page does not have."""

    name: str  # of the folder; messages for other people name no path of this machine
    folder: Path
    stages: Mapping[str, Stage]
    report: Report | None = None  # eval/report.json
    answers: tuple[Row, ...] = ()  # eval/samples.jsonl
    samples: tuple[Row, ...] = ()  # ppo/samples.jsonl
    firings: tuple[Row, ...] = ()  # ppo/watchdog.jsonl
    notes: tuple[str, ...] = ()  # what is damaged or out of date
    bases: tuple[Stage, ...] = ()  # unfinished stages of inner runs that it starts from, e.g. base/sft

    @property
    def outcome(self) -> Report | None:
        """Return the report if it is of the present stages."""
        return None if self.stages["eval"].outdated else self.report

    @property
    def rates(self) -> WinRates:
        """Return PPO's win rates over SFT in `outcome`, by judge."""
        return self.outcome.ppo_over_sft if self.outcome else {}

    @property
    def all_stages(self) -> dict[str, Stage]:
        """Return the stages of the bases by their path in the run, then its own by name."""
        bases = {os.path.relpath(stage.folder, self.folder): stage for stage in self.bases}
        return bases | dict(self.stages)

    @property
    def changed(self) -> float:
        """Return the time when a stage last wrote, or of the newest config if no stage has started."""
        times = [stage.progress.changed for stage in self.all_stages.values() if stage.progress.changed is not None]
        return max(times or [path.stat().st_mtime for path in configs_in(self.folder)], default=0.0)


# Read a stage


def read_stage(name: str, folder: Path) -> Stage:
    """Read the manifest and the identity in a stage's folder.

    Model files are checked by size, report.json also by hash.
    """
    if not has_output(folder):
        return Stage(name, folder)
    try:
        with translate_read_errors(folder):
            list_folder(folder)
            identity = read_identity(folder)
            if not path_exists(folder / MANIFEST):
                return Stage(name, folder, "begun", identity=identity)

            manifest, problem = read_manifest(folder)
            problem = problem or _find_damage(folder, manifest.files)
            state: State = "damaged" if problem else "finished"
            return Stage(name, folder, state, problem=problem, manifest=manifest, identity=identity)
    except RLHFError as error:
        return unreadable(name, folder, error)


def unreadable(name: str, folder: Path, error: RLHFError) -> Stage:
    """Return a stage whose files cannot be read now."""
    return Stage(name, folder, "unreadable", error.problems[0].text)


def _find_damage(folder: Path, files: Row) -> str | None:
    try:
        models = find_damage(folder, select_files(files, ("model/", "value/")), where=str(folder), content=False)
        return models or find_damage(folder, select_files(files, REPORT), where=str(folder), content=True)
    except RLHFError as error:
        if error.problems[0].code == "E08":
            raise
        return error.problems[0].text  # a name that leads out of the folder


def read_stage_with_logs(name: str, folder: Path) -> Stage:
    """Read a stage's folder with its config.yaml and metrics.jsonl."""
    stage = read_stage(name, folder)
    if stage.state in ("absent", "unreadable"):
        return stage
    try:
        with translate_read_errors(folder):
            config, config_problem = _read_config(folder / "config.yaml")
            metrics = tuple(read_log(folder / "metrics.jsonl"))
    except RLHFError as error:
        return unreadable(name, folder, error)

    odd = stage.manifest.odd
    problem = stage.problem or config_problem or odd
    state: State = "damaged" if problem and stage.state == "finished" else stage.state
    manifest = Manifest() if odd else stage.manifest
    return replace(stage, state=state, problem=problem, manifest=manifest, config=config, metrics=metrics)


def _read_config(path: Path) -> tuple[Row | None, str | None]:
    try:
        with translate_read_errors(path):
            text = read_regular(path, yaml_io.MAX_BYTES).decode("utf-8")
        return with_current_names(yaml_io.parse(text, path.name).tree), None
    except (OSError, ValueError):
        return None, f"{path.name} is missing or not readable"
    except RLHFError as error:
        if error.problems[0].code == "E08":
            raise
        return None, f"{path.name} is missing or not readable: {error.problems[0].text}"


def changed_parents(stage: Stage) -> tuple[str, ...]:
    """Return the parents that have changed since: `another ppo than the current one (models.ppo)`."""
    changes = []
    for key, entry in stage.manifest.parents.items():
        if entry.stage == FOREIGN:
            continue
        parent = read_stage(entry.stage, stage.folder / entry.path)
        sha256 = parent.manifest.model_sha256
        if sha256 and sha256 != entry.sha256:
            changes.append(f"another {entry.stage} than the current one ({key})")
        elif parent.state == "begun":
            changes.append(f"another {entry.stage} than the one being trained now ({key})")
    return tuple(changes)


def root_of(folder: Path) -> Path:
    """Return the folder of the run, if `folder` is that of one of its stages."""
    return folder.parent if folder.name in STAGES and has_output(folder) else folder


def read_run(folder: Path) -> Run:
    """Read the folder of a run or of one of its stages, with all logs.

    A stage that the folder lacks is read from where the other stages name it. Raises RLHFError M01 if there is none.
    """
    root = root_of(folder.resolve())
    stages = _read_stages(root)
    if not any(stage.there for stage in stages.values()):
        raise no_stage_error(folder, f"no output of the stages {', '.join(STAGES)}")

    for key, stage in stages.items():
        problem = stage.problem and _without_path(stage.problem, stage.folder)
        stages[key] = replace(stage, problem=problem, outdated=changed_parents(stage))
    notes = [f"{stage.name}: {stage.problem}" for stage in stages.values() if stage.problem]
    for stage in stages.values():
        notes += [f"{stage.name} was made from {change}" for change in stage.outdated]

    report = _report(stages["eval"], notes)
    return Run(
        name=root.name or "run",
        folder=root,
        stages=stages,
        report=report,
        answers=_answers(stages["eval"], notes) if report else (),
        samples=_log(stages["ppo"], "samples.jsonl", notes),
        firings=_log(stages["ppo"], "watchdog.jsonl", notes),
        notes=tuple(notes),
    )


def _read_stages(root: Path) -> dict[str, Stage]:
    """Return the stages in a run's folder, and in place of absent ones those that the others name elsewhere."""
    found = {name: read_stage_with_logs(name, root / name) for name in STAGES}
    stages = {name: stage for name, stage in found.items() if stage.there or name not in OPTIONAL_STAGES}
    for name in ("eval", "ppo", "dpo", "reward"):
        if name not in stages:
            continue
        for other, path in _parent_folders(stages[name]):
            if other in stages and not stages[other].there:
                parent = read_stage_with_logs(other, (stages[name].folder / path).resolve())
                if parent.there:
                    stages[other] = replace(parent, elsewhere=path)
    return stages


def _parent_folders(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yield (stage, folder as written there) of each stage that a stage was made from."""
    entries = stage.manifest.parents.values()
    for entry in entries:
        if entry.stage in STAGES:
            yield entry.stage, entry.path
    if entries:
        return

    for key, name in PARENT_KEYS.items():
        path = stage.setting(key)
        if isinstance(path, str):
            yield name, path


def _without_path(text: str, folder: Path) -> str:
    return text.replace(f"{shown(folder)}/", "").replace(shown(folder), "the folder")


def _log(stage: Stage, name: str, notes: list[str]) -> tuple[Row, ...]:
    """Return the rows of samples.jsonl or watchdog.jsonl; a problem goes to the notes."""
    if stage.state in ("absent", "unreadable"):
        return ()
    try:
        with translate_read_errors(stage.folder / name):
            return tuple(read_log(stage.folder / name))
    except RLHFError as error:
        notes.append(f"{stage.name}: {_without_path(error.problems[0].text, stage.folder)}")
        return ()


def _report(stage: Stage, notes: list[str]) -> Report | None:
    if stage.state == "unreadable" or not (stage.folder / REPORT).is_file():
        return None
    try:
        report = read_report(stage.folder)
    except RLHFError as error:
        notes.append(f"eval: {_without_path(error.problems[0].text, stage.folder)}")
        return None
    if "sft" in report.models:
        return report
    notes.append("eval: report.json has no SFT model")
    return None


def _answers(stage: Stage, notes: list[str]) -> tuple[Row, ...]:
    try:
        path = stage.folder / "samples.jsonl"
        rows = [row for _, row in read_jsonl(path)] if path.is_file() else []
    except RLHFError as error:
        notes.append(f"eval: samples.jsonl is damaged: {error.problems[0].text}")
        return ()
    answers = tuple(row for row in rows if row.keys() >= ANSWER_KEYS and isinstance(row["scores"], Mapping))
    if len(answers) < len(rows):
        notes.append(f"eval: samples.jsonl has {len(rows) - len(answers)} rows that are not answers")
    return answers


def at_step(run: Run, step: str) -> Run:
    """Return the run with the answers, win rates and samples of a policy: last, recommended (selected) or a number.

    Without near-greedy answers, comparisons and interpolations, which an evaluation has for the last policy only. The
    figures of a recommended policy other than the last are of prompts that had no part in the choice. Raises RLHFError
    C07 for another word, M10 if no evaluation covers the policy or recommends one of PPO.
    """
    require_step(step)
    report = run.report
    points = (report.frontier if report else None) or []
    ends = [row["step"] for row in run.stages["ppo"].metrics] + [point.step for point in points]
    # of a stopped run: that of its best policy; later snapshots may exist
    final = run.stages["ppo"].manifest.step
    end = max(ends, default=0) if final is None else final
    if step == LAST:
        return run
    if step in (RECOMMENDED, SELECTED):
        number, share = _recommended(run, step)
        if report and share is not None:
            between = next(each for each in report.interpolated or [] if each.share == share)
            return _with_policy(run, report, between, number, name=f"interpolated_{share:g}")
    else:
        number = int(step)
    if number == end:
        return run

    point = next((point for point in points if point.step == number), None)
    if report is None or point is None:
        known = f"it knows {', '.join(str(point.step) for point in points)}" if points else "it has no frontier"
        text = f"--step {step}: the evaluation of {run.name} does not cover the policy after update {number}; {known}"
        raise RLHFError("M10", text, hint="output.snapshots in ppo.yaml keeps policies, eval.frontier judges them")
    return _with_policy(run, report, point, number, name=f"ppo_step_{number:06d}")


def _with_policy(run: Run, report: Report, point: FrontierPoint | InterpolatedPolicy, step: int, *, name: str) -> Run:
    """Return the run with a policy that was made after an update in the place of the last one."""
    return replace(
        run,
        name=f"{run.name} at {policy_label(step, point.share)}",
        report=_report_of(report, point),
        answers=tuple(
            {**row, "model": "ppo"} if row["model"] == name else row for row in run.answers if row["model"] != "ppo"
        ),
        samples=tuple(row for row in run.samples if row["step"] <= step),
    )


def _report_of(report: Report, point: FrontierPoint | InterpolatedPolicy) -> Report:
    others = {pair: rates for pair, rates in report.win_rate.items() if not pair.startswith("ppo_vs_")}
    scores = report.without_choice(point)
    return report.with_changes(
        models={**report.models, "ppo": scores},
        win_rate={PPO_OVER_SFT: scores.win_rate, **others},
        best_of=[each.with_changes(ppo_win_rate=None) for each in report.best_of or []],
        by=None,
        greedy=None,
        interpolated=None,
    )


def _recommended(run: Run, step: str) -> tuple[int, float | None]:
    """Return the step and the share of the recommended policy. Raises RLHFError M10 without one of PPO."""
    report = run.report
    recommended = report.recommended if report else None
    if report is None or recommended is None:
        text = f"--step {step}: the evaluation of {run.name} recommends no policy"
        raise RLHFError("M10", text, hint="run `rlhf eval`")
    if report.selected_step is None:
        text = f"--step {step}: the evaluation of {run.name} recommends {report.recommendation}"
        raise RLHFError("M10", text, hint="omit --step: the page compares it with the last policy")
    return report.selected_step, recommended.share
