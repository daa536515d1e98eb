"""What ran, in tables: stages, data, models, versions, and where PPO's time went."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli.commands.report.runs import Run, Stage, flat, is_number
from rlhf_cli.commands.report.tables import count, percent
from rlhf_cli.config.loading import load
from rlhf_cli.errors import RLHFError, shell_word
from rlhf_cli.files import files_sha256
from rlhf_cli.runs.parents import FOREIGN
from rlhf_cli.terminal import duration

# PPO's phases: the metrics of their seconds, and what they are.
PHASES = {
    "time/rollout_s": ("rollout", "writing responses"),
    "time/judge_s": ("judge", "log-probs, values, scores, advantages"),
    "time/update_s": ("update", "training policy and value model"),
}
REST = ("the rest", "checkpoints, samples, logs, loading")
LINES = {".jsonl", ".txt"}  # kinds of file of which a line is a row


@dataclass(frozen=True)
class StageRow:
    name: str
    state: str
    steps: str
    time: str
    seed: str
    device: str


@dataclass(frozen=True)
class DataRow:
    stage: str
    key: str
    path: str
    rows: str
    sha256: str


@dataclass(frozen=True)
class ModelRow:
    stage: str
    key: str
    path: str
    kind: str
    sha256: str


@dataclass(frozen=True)
class Phase:
    name: str
    about: str
    time: str
    share: float

    @property
    def percent(self) -> str:
        return percent(self.share)


def stage_row(stage: Stage) -> StageRow:
    """A stage in a line; what is not known is left empty."""
    steps = [row["step"] for row in stage.metrics]
    seconds = total_seconds(stage)
    environment = (stage.identity or {}).get("environment") or {}
    processes = environment.get("processes", 1)
    device = str(environment.get("device") or "")
    where = f" (from {stage.elsewhere})" if stage.elsewhere else ""
    return StageRow(
        stage.name,
        ("not there yet" if not stage.there else "not finished" if stage.state == "begun" else stage.state) + where,
        count(max(steps), "update" if stage.name == "ppo" else "step") if steps else "",
        duration(seconds) if seconds else "",
        str(stage.setting("seed")) if stage.config else "",
        device + (f", {processes} processes" if processes != 1 else ""),
    )


def total_seconds(stage: Stage) -> float:
    """Seconds of a stage's training, interruptions left out; 0 where its log tells none."""
    return max((float(row["time_s"]) for row in stage.metrics if is_number(row.get("time_s"))), default=0.0)


def data_rows(stages: Iterable[Stage]) -> list[DataRow]:
    """The data of each stage by key. Rows are counted where the file is there and still what was read."""
    found = []
    for stage in stages:
        told = (stage.manifest or stage.identity or {}).get("data")
        for key, sha256 in (told if isinstance(told, Mapping) else {}).items():
            path = stage.setting(key)
            name = path if isinstance(path, str) else ""
            found.append(
                DataRow(stage.name, key, name, _rows(stage.folder / name, sha256) if name else "", str(sha256))
            )
    return found


def _rows(path: Path, sha256: Any) -> str:
    try:
        if not path.is_file():
            return ""
        if files_sha256([path]) != sha256:
            return "changed since"
        if path.suffix not in LINES:
            return ""
        with path.open("rb") as file:
            return f"{sum(bool(line.strip()) for line in file):,}"
    except OSError:
        return ""


def model_rows(run: Run) -> list[ModelRow]:
    """What each stage started from, and what it made."""
    found = []
    for stage in run.stages.values():
        for key, told in stage.told("parents").items():
            if isinstance(told, Mapping):
                kind = "not ours" if told.get("stage") == FOREIGN else f"the {told.get('stage')} stage"
                path = str(told.get("path", "")) + (f" at {told['revision']}" if "revision" in told else "")
                found.append(ModelRow(stage.name, key, path, kind, str(told.get("sha256", ""))))
        if made := (stage.manifest or {}).get("model_sha256"):
            found.append(ModelRow(stage.name, "model/", "", _made(stage), str(made)))
    return found


def _made(stage: Stage) -> str:
    """What a stage made, in words."""
    manifest = stage.manifest or {}
    told = f", {manifest['model_is']}" if "model_is" in manifest else ""
    return f"made by it{told}" + (f", after step {manifest['step']}" if "step" in manifest else "")


def versions(stages: Iterable[Stage]) -> dict[str, str]:
    """{package: version}; where stages had different ones, all of them."""
    found: dict[str, dict[str, None]] = {}
    for stage in stages:
        for name, version in stage.told("versions").items():
            found.setdefault(str(name), {})[str(version)] = None
    return {name: " and ".join(each) for name, each in found.items()}


def phases(ppo: Stage) -> list[Phase]:
    """Where PPO's time went; empty where its log does not tell."""
    seconds = {key: sum(value for _, value in ppo.series(key)) for key in PHASES}
    whole = max(total_seconds(ppo), sum(seconds.values()))
    if not whole or not any(seconds.values()):
        return []
    named = {PHASES[key]: value for key, value in seconds.items()} | {REST: whole - sum(seconds.values())}
    return [Phase(name, about, duration(value), value / whole) for (name, about), value in named.items()]


def speed(ppo: Stage) -> str:
    """Tokens of prompts and responses a second of rollout, judge and update; empty where the log does not tell."""
    tokens = sum(value for _, value in ppo.series("tokens/real"))
    seconds = sum(value for key in PHASES for _, value in ppo.series(key))
    return f"{tokens / seconds:,.0f} tokens/s over {tokens:,.0f} tokens" if tokens and seconds else ""


def commands(run: Run) -> list[str]:
    """How to make the run again: from the configs in its folder where they still say what ran (--set may have said
    something else), else stage by stage from what each stage has kept of its own.

    From the folder that holds the run: a page goes to others, and its bytes are the same wherever it is made.
    """
    place = shell_word(run.folder.name)
    if all(_says_its_file(run, stage) for stage in run.stages.values() if stage.there):
        return [f"rlhf run {place}"]
    there = [name for name, stage in run.stages.items() if stage.there and not stage.elsewhere]
    return [f"rlhf {name} --config {place}/{name}/config.yaml --fresh" for name in there]


def _says_its_file(run: Run, stage: Stage) -> bool:
    """Whether a config gives what the stage was run with; keys that are newer than the run are not held against it."""
    file = run.folder / f"{stage.name}.yaml"
    try:
        now = flat(load(stage.name, file).dump(relative_to=run.folder / stage.name)) if file.is_file() else {}
    except RLHFError:
        return False
    return bool(now) and all(now.get(key) == value for key, value in flat(stage.config or {}).items())


def hashes(run: Run) -> list[tuple[str, str]]:
    """(what, sha256 or revision) of all that a run was made from."""
    found = []
    for stage in run.stages.values():
        manifest = stage.manifest or stage.identity or {}
        for key in ("config_sha256", "tokenizer_sha256", "template_sha256", "git", "sha256"):
            if manifest.get(key):
                name = {"sha256": "manifest.json", "git": "git revision"}.get(key, key.removesuffix("_sha256"))
                found.append((f"{stage.name}, {name}", str(manifest[key])))
    return found
