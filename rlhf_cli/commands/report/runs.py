"""What a run's folder holds, as far as it is there: it may be half done, running, damaged, or spread over folders."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from rlhf_cli.config.paths import default_of, field_at, field_kind
from rlhf_cli.config.training import CONFIGS
from rlhf_cli.errors import RLHFError, shown, translate_read_errors
from rlhf_cli.evaluation import render
from rlhf_cli.jsonl import read_jsonl
from rlhf_cli.runs.discover import has_output
from rlhf_cli.runs.parents import FOREIGN
from rlhf_cli.runs.resolve import LAST, SELECTED, require_step
from rlhf_cli.runs.shapes import schema_error
from rlhf_cli.runs.stage_state import StageState, State, describe_changed_parents, read_stage_state
from rlhf_cli.tracking.metrics_log import read_log

STAGES = tuple(CONFIGS)  # in the order of the chain
# The keys of a config that name another stage's folder: where to look before there is a manifest.
PARENTS = {"model.path": "sft", "models.sft": "sft", "models.reward": "reward", "models.ppo": "ppo"}
ANSWER = {"index", "prompt", "model", "mode", "response", "ended", "length", "scores"}


@dataclass(frozen=True)
class Stage:
    """What one stage left. Of a stage that is absent all is empty; `problem` says what is damaged."""

    name: str
    folder: Path
    state: State = "absent"
    problem: str | None = None
    elsewhere: str | None = None  # its folder as the run's other stages name it, where that is not in the run's
    outdated: tuple[str, ...] = ()  # what it was made from and is no longer there, as `stages.outdated` says it
    manifest: Mapping[str, Any] | None = None
    identity: Mapping[str, Any] | None = None
    config: Mapping[str, Any] | None = None
    metrics: tuple[Mapping[str, Any], ...] = ()

    @property
    def there(self) -> bool:
        return self.state != "absent"

    def told(self, key: str) -> Mapping[str, Any]:
        """A table of the manifest; empty where there is none."""
        found = (self.manifest or {}).get(key)
        return found if isinstance(found, Mapping) else {}

    def setting(self, path: str) -> Any:
        """A value of config.yaml by its dotted path; None where it is not there."""
        return at(self.config, path)

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of each line of metrics.jsonl that has the metric."""
        return [(row["step"], float(row[key])) for row in self.metrics if is_number(row.get(key))]


@dataclass(frozen=True)
class Run:
    """A run as its files tell it."""

    name: str  # the folder's own name: a page goes to others, and says nothing of this machine
    folder: Path
    stages: Mapping[str, Stage]
    report: Mapping[str, Any] | None  # eval/report.json
    answers: tuple[Mapping[str, Any], ...]  # eval/samples.jsonl
    samples: tuple[Mapping[str, Any], ...]  # ppo/samples.jsonl
    firings: tuple[Mapping[str, Any], ...]  # ppo/watchdog.jsonl
    notes: tuple[str, ...]  # what is damaged, or does not belong together

    @property
    def outcome(self) -> Mapping[str, Any] | None:
        """The report, where it is of the stages that are there now: what is concluded is concluded from this."""
        return None if self.stages["eval"].outdated else self.report

    @property
    def rates(self) -> Mapping[str, Any]:
        """PPO's win rates over SFT in that, by judge."""
        return at(self.outcome, "win_rate.ppo_vs_sft") or {}


def read_run(folder: Path) -> Run:
    """Read a run's folder, or that of one of its stages. Changes nothing.

    A stage that the folder lacks is looked for where the others name it. Raises RLHFError M01 where there is no stage.
    """
    root = folder.resolve()
    if root.name in STAGES and has_output(root):
        root = root.parent
    stages = {name: read_stage(name, root / name) for name in STAGES}
    if not any(stage.there for stage in stages.values()):
        text = f"{shown(folder)} holds none of the stages {', '.join(STAGES)}"
        raise RLHFError("M01", text, hint="name the folder of a run, e.g. runs/demo")
    for name in ("eval", "ppo", "reward"):
        for other, path, told in _named(stages[name]):
            if not stages[other].there and (found := read_stage(other, path)).there:
                stages[other] = replace(found, elsewhere=told)
    stages = {
        name: replace(stage, outdated=tuple(describe_changed_parents(stage.folder, stage.manifest or {})))
        for name, stage in stages.items()
    }
    notes = [f"{stage.name}: {stage.problem}" for stage in stages.values() if stage.problem]
    notes += [f"{stage.name} was made from {what}" for stage in stages.values() for what in stage.outdated]
    report = _read_report(stages["eval"], notes)
    return Run(
        name=root.name or "run",
        folder=root,
        stages=stages,
        report=report,
        answers=_read_answers(stages["eval"], notes) if report else (),
        samples=_read_log(stages["ppo"], "samples.jsonl", notes),
        firings=_read_log(stages["ppo"], "watchdog.jsonl", notes),
        notes=tuple(notes),
    )


def at(tree: Any, path: str) -> Any:
    """The value at a dotted path of nested tables, or None."""
    for part in path.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of a file is a number, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_stage(name: str, folder: Path) -> Stage:
    """What a stage left in its folder, as far as it is there and can be read. Changes nothing."""
    left = read_stage_state(folder)
    if left.state == "absent":
        return Stage(name, folder)
    try:
        with translate_read_errors(folder):
            if left.state == "unreadable":
                raise RLHFError("E08", left.problem or "it cannot be read now")
            return _read_stage(name, folder, left)
    except RLHFError as error:
        return Stage(name, folder, "unreadable", _without_place(error, folder))


def _without_place(error: RLHFError, folder: Path) -> str:
    """What is wrong in a stage's folder, for a page: it says nothing of this machine."""
    return error.problems[0].text.replace(f"{shown(folder)}/", "").replace(shown(folder), "the folder")


def _read_stage(name: str, folder: Path, left: StageState) -> Stage:
    config, unreadable = _read_config(folder / "config.yaml")
    odd = schema_error("manifest.json", left.manifest) if left.manifest else None
    problem = left.problem or unreadable or odd
    return Stage(
        name,
        folder,
        "damaged" if problem and left.state == "finished" else left.state,
        problem,
        manifest=None if odd else left.manifest,
        identity=left.identity,
        config=config,
        metrics=tuple(read_log(folder / "metrics.jsonl")),
    )


def _read_config(path: Path) -> tuple[dict[str, Any] | None, str | None]:
    try:
        with translate_read_errors(path):
            tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None, f"{path.name} is missing or not readable"
    return (tree, None) if isinstance(tree, dict) else (None, f"{path.name} holds no keys")


def _named(stage: Stage) -> Iterator[tuple[str, Path, str]]:
    """(stage, folder, that folder as it is written there) of each stage of ours that a stage was made from."""
    parents = stage.told("parents").values()
    told = [(each.get("stage"), each.get("path")) for each in parents if isinstance(each, Mapping)]
    if not told:
        told = [(name, stage.setting(key)) for key, name in PARENTS.items()]
    for name, path in told:
        if name in STAGES and name != FOREIGN and isinstance(path, str):
            yield name, (stage.folder / path).resolve(), path


def _read_log(stage: Stage, name: str, notes: list[str]) -> tuple[Mapping[str, Any], ...]:
    if stage.state in ("absent", "unreadable"):
        return ()
    try:
        with translate_read_errors(stage.folder / name):
            return tuple(read_log(stage.folder / name))
    except RLHFError as error:
        notes.append(f"{stage.name}: {_without_place(error, stage.folder)}")
        return ()


def _read_report(stage: Stage, notes: list[str]) -> dict[str, Any] | None:
    if stage.state == "unreadable" or not (stage.folder / "report.json").is_file():
        return None
    try:
        found = render.read_report(stage.folder)
    except RLHFError as error:
        notes.append(f"eval: {_without_place(error, stage.folder)}")
        return None
    if isinstance(at(found, "models.sft.judges"), Mapping):
        return found
    notes.append("eval: report.json tells of no SFT model")
    return None


def _read_answers(stage: Stage, notes: list[str]) -> tuple[Mapping[str, Any], ...]:
    try:
        path = stage.folder / "samples.jsonl"
        rows = [row for _, row in read_jsonl(path)] if path.is_file() else []
    except RLHFError as error:
        notes.append(f"eval: samples.jsonl is damaged: {error.problems[0].text}")
        return ()
    whole = tuple(row for row in rows if row.keys() >= ANSWER and isinstance(row["scores"], Mapping))
    if len(whole) < len(rows):
        notes.append(f"eval: samples.jsonl has {len(rows) - len(whole)} rows that are no answers")
    return whole


def at_step(run: Run, step: str) -> Run:
    """The run with answers, win rates and samples of the policy after `step`: `last`, `selected`, or a number.

    Near-greedy answers and what was compared with the last policy are left out: an evaluation has them of that one
    alone. Raises RLHFError C07 for another word, M10 where no evaluation tells of the policy or selects one.
    """
    require_step(step)
    points = (run.report or {}).get("frontier") or []
    ends = [row["step"] for row in run.stages["ppo"].metrics] + [point["step"] for point in points]
    # A run that was stopped is told by its best policy, and may have a snapshot that is later.
    end = (run.stages["ppo"].manifest or {}).get("step", max(ends, default=0))
    if step == LAST:
        return run
    number = _selected(run) if step == SELECTED else int(step)
    if number == end:
        return run
    point = next((point for point in points if point["step"] == number), None)
    if run.report is None or point is None:
        there = f"it knows {', '.join(str(each['step']) for each in points)}" if points else "it has no frontier"
        text = f"--step {step}: the evaluation of {run.name} tells nothing of the policy after update {number}; {there}"
        raise RLHFError("M10", text, hint="output.snapshots in ppo.yaml keeps policies, eval.frontier judges them")
    return replace(
        run,
        name=f"{run.name} at update {number}",
        report=_report(run.report, point),
        answers=tuple(
            {**row, "model": "ppo"} if row["model"] == f"ppo_step_{number:06d}" else row
            for row in run.answers
            if row["model"] != "ppo"
        ),
        samples=tuple(row for row in run.samples if row["step"] <= number),
    )


def _report(report: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    others = {pair: rates for pair, rates in report["win_rate"].items() if not pair.startswith("ppo_vs_")}
    tried = report.get("best_of", [])
    return {
        **{key: value for key, value in report.items() if key != "greedy"},
        "models": {**report["models"], "ppo": point},
        "win_rate": {"ppo_vs_sft": point["win_rate"], **others},
        "best_of": [{key: value for key, value in row.items() if key != "ppo_win_rate"} for row in tried],
    }


def _selected(run: Run) -> int:
    found = (run.report or {}).get("selected_step")
    if not isinstance(found, int):
        text = f"--step {SELECTED}: the evaluation of {run.name} has selected no policy"
        raise RLHFError("M10", text, hint="run `rlhf eval`; eval.select in eval.yaml names the judge that selects")
    return found


OF_THE_CHAIN = {f"../{name}" for name in STAGES} | {".."}  # the run's own folders, where a run has them by default


@dataclass(frozen=True)
class Difference:
    """A key with its value, and what it is without being set: None where it must be set, `-` where it would not be."""

    stage: str
    key: str
    value: str
    default: str | None


def from_defaults(stage: Stage) -> list[Difference]:
    """The keys of a stage's config.yaml that are not at their default; keys that have none are among them."""
    found = []
    for key, value in flat(stage.config or {}).items():
        if key == "stage" or _is_own_folder(stage.name, key, value):
            continue
        default = _default(stage.name, key)
        if default in (MUST_BE_SET, FREE):
            found.append(Difference(stage.name, key, said(value), None if default is MUST_BE_SET else "-"))
        elif default != value:
            found.append(Difference(stage.name, key, said(value), said(default)))
    return found


def between(runs: list[Run]) -> list[tuple[str, str, list[str]]]:
    """(stage, key, value in each run) of the keys that are not the same in all runs; `-` where a run lacks the key.

    A stage that a run lacks says nothing of its keys.
    """
    found = []
    for stage in STAGES:
        trees = [flat(run.stages[stage].config or {}) for run in runs]
        for key in dict.fromkeys(key for tree in trees for key in tree):
            values = [said(tree[key]) if key in tree else "-" for tree in trees]
            told = {value for tree, value in zip(trees, values, strict=True) if tree}
            if len(told) > 1 and not all(_is_own_folder(stage, key, tree.get(key)) for tree in trees):
                found.append((stage, key, values))
    return found


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{dotted path: value}; an empty table is a value."""
    if not isinstance(tree, Mapping) or not (tree or not prefix):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def said(value: Any) -> str:
    """A value as YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(said, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


MUST_BE_SET, FREE = "must be set", "a key of the user's own"


def _default(stage: str, key: str) -> Any:
    field = field_at(CONFIGS[stage], tuple(key.split(".")))
    return FREE if field is None else default_of(field, MUST_BE_SET)


def _is_own_folder(stage: str, key: str, value: Any) -> bool:
    field = field_at(CONFIGS[stage], tuple(key.split(".")))
    return field is not None and field_kind(field).path is not None and value in OF_THE_CHAIN
