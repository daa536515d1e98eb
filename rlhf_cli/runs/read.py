"""The files of a run, read without changing them: it may be unfinished, running, damaged, or spread over folders.

Also its settings beside their defaults and those of other runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlhf_cli.config.machinery import yaml_io
from rlhf_cli.config.machinery.fields import key_at, with_current_names
from rlhf_cli.config.stages import CONFIGS
from rlhf_cli.errors import RLHFError, shown, translate_read_errors
from rlhf_cli.files import find_damage, list_folder, path_exists, read_regular, select_files
from rlhf_cli.jsonl import is_number, read_jsonl
from rlhf_cli.runs.discover import OPTIONAL_STAGES, STAGES, has_output
from rlhf_cli.runs.parents import FOREIGN, no_stage_error, read_manifest
from rlhf_cli.runs.report import (
    FILE_NAME,
    PPO_OVER_SFT,
    FrontierPoint,
    Report,
    SelectedPolicy,
    WinRates,
    read_report,
)
from rlhf_cli.runs.resolve import LAST, SELECTED, require_step
from rlhf_cli.runs.schemas import schema_error
from rlhf_cli.runs.status import read_identity
from rlhf_cli.tracking import read_log
from rlhf_cli.trees import at, flatten

State = Literal["absent", "begun", "finished", "damaged", "unreadable"]
Row = Mapping[str, Any]
# Config keys that name another stage's folder, for a stage without a manifest.
PARENT_KEYS = {"model.path": "sft", "models.sft": "sft", "models.reward": "reward", "models.ppo": "ppo"}
ANSWER_KEYS = {"index", "prompt", "model", "mode", "response", "ended", "length", "scores"}


@dataclass(frozen=True)
class Stage:
    """The folder of one stage. All is empty if it is absent; `problem` is what is damaged or cannot be read."""

    name: str
    folder: Path
    state: State = "absent"
    problem: str | None = None
    elsewhere: str | None = None  # the folder as other stages name it, if it is not in the run's folder
    outdated: tuple[str, ...] = ()  # parents that have changed since, see `changed_parents`
    manifest: Row | None = None
    identity: Row | None = None
    config: Row | None = None
    metrics: tuple[Row, ...] = ()  # metrics.jsonl

    @property
    def there(self) -> bool:
        """Return True if the stage wrote anything."""
        return self.state != "absent"

    def table(self, key: str) -> Row:
        """Return a table of the manifest; empty if there is none."""
        table = (self.manifest or {}).get(key)
        return table if isinstance(table, Mapping) else {}

    def setting(self, path: str) -> Any:
        """Return the value at a dotted path of config.yaml, or None."""
        return at(self.config, path)

    def series(self, key: str) -> list[tuple[int, float]]:
        """Return (step, value) of each line of metrics.jsonl that has the metric."""
        return [(row["step"], float(row[key])) for row in self.metrics if is_number(row.get(key))]


@dataclass(frozen=True)
class Run:
    """The folder of a run."""

    name: str  # of the folder; messages for other people name no path of this machine
    folder: Path
    stages: Mapping[str, Stage]
    report: Report | None  # eval/report.json
    answers: tuple[Row, ...]  # eval/samples.jsonl
    samples: tuple[Row, ...]  # ppo/samples.jsonl
    firings: tuple[Row, ...]  # ppo/watchdog.jsonl
    notes: tuple[str, ...]  # what is damaged or out of date

    @property
    def outcome(self) -> Report | None:
        """Return the report if it is of the present stages."""
        return None if self.stages["eval"].outdated else self.report

    @property
    def rates(self) -> WinRates:
        """Return PPO's win rates over SFT in `outcome`, by judge."""
        return self.outcome.ppo_over_sft if self.outcome else {}


def read_stage(name: str, folder: Path, *, logs: bool = True) -> Stage:
    """Read a stage's folder. Model files are checked by size, report.json also by hash.

    Without `logs`, config.yaml and metrics.jsonl are not read.
    """
    if not has_output(folder):
        return Stage(name, folder)
    try:
        with translate_read_errors(folder):
            list_folder(folder)
            stage = Stage(name, folder, "begun", identity=read_identity(folder))
            if path_exists(folder / "manifest.json"):
                manifest, problem = read_manifest(folder)
                problem = problem or _damage(folder, manifest["files"])
                stage = replace(stage, state="damaged" if problem else "finished", problem=problem, manifest=manifest)
            if not logs:
                return stage
            config, config_problem = _read_config(folder / "config.yaml")
            odd = schema_error("manifest.json", stage.manifest) if stage.manifest else None
            problem = stage.problem or config_problem or odd
            return replace(
                stage,
                state="damaged" if problem and stage.state == "finished" else stage.state,
                problem=problem,
                manifest=None if odd else stage.manifest,
                config=config,
                metrics=tuple(read_log(folder / "metrics.jsonl")),
            )
    except RLHFError as error:
        return Stage(name, folder, "unreadable", error.problems[0].text)


def _damage(folder: Path, files: Row) -> str | None:
    try:
        models = find_damage(folder, select_files(files, ("model/", "value/")), where=str(folder), content=False)
        return models or find_damage(folder, select_files(files, "report.json"), where=str(folder), content=True)
    except RLHFError as error:
        if error.problems[0].code == "E08":
            raise
        return error.problems[0].text  # a name that leads out of the folder


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
    for key, entry in stage.table("parents").items():
        name, path = (entry.get("stage"), entry.get("path")) if isinstance(entry, Mapping) else (None, None)
        if name == FOREIGN or not isinstance(path, str):
            continue
        parent = read_stage(str(name), stage.folder / path, logs=False)
        sha256 = (parent.manifest or {}).get("model_sha256")
        if sha256 and sha256 != entry.get("sha256"):
            changes.append(f"another {name} than the current one ({key})")
        elif parent.state == "begun":
            changes.append(f"another {name} than the one being trained now ({key})")
    return tuple(changes)


def read_run(folder: Path) -> Run:
    """Read the folder of a run or of one of its stages.

    A stage that the folder lacks is read from where the other stages name it. Raises RLHFError M01 if there is none.
    """
    root = folder.resolve()
    if root.name in STAGES and has_output(root):
        root = root.parent
    stages = {name: read_stage(name, root / name) for name in STAGES}
    stages = {name: stage for name, stage in stages.items() if stage.there or name not in OPTIONAL_STAGES}
    if not any(stage.there for stage in stages.values()):
        raise no_stage_error(folder, f"no output of the stages {', '.join(STAGES)}")
    for name in [name for name in ("eval", "ppo", "dpo", "reward") if name in stages]:
        for other, path in _parent_folders(stages[name]):
            if other in stages and not stages[other].there:
                parent = read_stage(other, (stages[name].folder / path).resolve())
                stages[other] = replace(parent, elsewhere=path) if parent.there else stages[other]
    for key, stage in stages.items():
        problem = stage.problem and _without_path(stage.problem, stage.folder)
        stages[key] = replace(stage, problem=problem, outdated=changed_parents(stage))
    notes = [f"{stage.name}: {stage.problem}" for stage in stages.values() if stage.problem]
    notes += [f"{stage.name} was made from {change}" for stage in stages.values() for change in stage.outdated]
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


def _parent_folders(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yield (stage, folder as written there) of each stage that a stage was made from."""
    entries = [entry for entry in stage.table("parents").values() if isinstance(entry, Mapping)]
    named = [(entry.get("stage"), entry.get("path")) for entry in entries]
    for name, path in named or [(name, stage.setting(key)) for key, name in PARENT_KEYS.items()]:
        if name in STAGES and isinstance(path, str):
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
    if stage.state == "unreadable" or not (stage.folder / FILE_NAME).is_file():
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
    """Return the run with the answers, win rates and samples of the policy after `step`: last, selected or a number.

    Without near-greedy answers, comparisons and interpolations, which an evaluation has for the last policy only.
    Raises RLHFError C07 for another word, M10 if no evaluation covers the policy or selects one.
    """
    require_step(step)
    points = (run.report.frontier if run.report else None) or []
    ends = [row["step"] for row in run.stages["ppo"].metrics] + [point.step for point in points]
    # of a stopped run: that of its best policy; later snapshots may exist
    end = (run.stages["ppo"].manifest or {}).get("step", max(ends, default=0))
    if step == LAST:
        return run
    number = _selected(run) if step == SELECTED else int(step)
    if number == end:
        return run
    point = next((point for point in points if point.step == number), None)
    if run.report is None or point is None:
        known = f"it knows {', '.join(str(point.step) for point in points)}" if points else "it has no frontier"
        text = f"--step {step}: the evaluation of {run.name} does not cover the policy after update {number}; {known}"
        raise RLHFError("M10", text, hint="output.snapshots in ppo.yaml keeps policies, eval.frontier judges them")
    if number == run.report.selected_step and run.report.selected:
        point = _without_selection_bias(point, run.report.selected)
    policy = f"ppo_step_{number:06d}"
    return replace(
        run,
        name=f"{run.name} at update {number}",
        report=_report_of(run.report, point),
        answers=tuple(
            {**row, "model": "ppo"} if row["model"] == policy else row for row in run.answers if row["model"] != "ppo"
        ),
        samples=tuple(row for row in run.samples if row["step"] <= number),
    )


def _without_selection_bias(point: FrontierPoint, selected: SelectedPolicy) -> FrontierPoint:
    """Return the selected point with its unbiased scores, which older versions do not have."""
    return point.with_changes(
        judges=selected.judges or point.judges,
        win_rate=selected.win_rate or point.win_rate,
        reward_mean=point.reward_mean if selected.reward_mean is None else selected.reward_mean,
    )


def _report_of(report: Report, point: FrontierPoint) -> Report:
    others = {pair: rates for pair, rates in report.win_rate.items() if not pair.startswith("ppo_vs_")}
    return report.with_changes(
        models={**report.models, "ppo": point},
        win_rate={PPO_OVER_SFT: point.win_rate, **others},
        best_of=[each.with_changes(ppo_win_rate=None) for each in report.best_of or []],
        by=None,
        greedy=None,
        interpolated=None,
    )


def _selected(run: Run) -> int:
    step = run.report.selected_step if run.report else None
    if step is None:
        text = f"--step {SELECTED}: the evaluation of {run.name} has selected no policy"
        raise RLHFError("M10", text, hint="run `rlhf eval`; eval.select in eval.yaml names the judge that selects")
    return step


# Settings, by their dotted keys in config.yaml

RUN_FOLDERS = {f"../{name}" for name in STAGES} | {".."}  # the default paths in a config.yaml
REQUIRED = object()  # in place of a default


@dataclass(frozen=True)
class Difference:
    """A setting that is not at its default. `default` is None for a required key, `-` for a key without one."""

    stage: str
    key: str
    value: str
    default: str | None


def from_defaults(stage: Stage) -> list[Difference]:
    """Return the settings of a stage's config.yaml that are not at their defaults."""
    differences = []
    for key, value in flatten(stage.config or {}).items():
        if key == "stage" or _is_run_folder(stage.name, key, value):
            continue
        config_key = key_at(CONFIGS[stage.name], key.split("."))
        default = config_key.default(REQUIRED) if config_key else REQUIRED
        if default != value:
            text = None if default is REQUIRED else value_text(default)
            differences.append(Difference(stage.name, key, value_text(value), text if config_key else "-"))
    return differences


def between(runs: Sequence[Run]) -> list[tuple[str, str, list[str]]]:
    """Return (stage, key, value in each run) of the keys that differ; `-` where a run lacks the key.

    Runs without the stage are not compared.
    """
    differences = []
    for stage in STAGES:
        configs = [flatten(run.stages[stage].config or {}) if stage in run.stages else {} for run in runs]
        for key in dict.fromkeys(key for config in configs for key in config):
            values = [value_text(config[key]) if key in config else "-" for config in configs]
            present = {value for config, value in zip(configs, values, strict=True) if config}
            if len(present) > 1 and not all(_is_run_folder(stage, key, config.get(key)) for config in configs):
                differences.append((stage, key, values))
    return differences


def value_text(value: Any) -> str:
    """Return a value as in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_run_folder(stage: str, key: str, value: Any) -> bool:
    config_key = key_at(CONFIGS[stage], key.split("."))
    return config_key is not None and config_key.path_field is not None and value in RUN_FOLDERS
