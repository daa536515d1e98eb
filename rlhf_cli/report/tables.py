"""What ran, for the page: the facts of its head, and tables of stages, data, models, versions and hashes."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from rlhf_cli.config.loading import load
from rlhf_cli.config.machinery.fields import AUTOMATIC
from rlhf_cli.errors import RLHFError, shell_word
from rlhf_cli.files import files_sha256, select_files
from rlhf_cli.jsonl import is_number
from rlhf_cli.report.formats import count
from rlhf_cli.runs.layout import MANIFEST
from rlhf_cli.runs.manifest import ParentEntry
from rlhf_cli.runs.parents import FOREIGN
from rlhf_cli.runs.read import Run, Stage
from rlhf_cli.system import format_bytes
from rlhf_cli.terminal import duration
from rlhf_cli.trees import flatten

PHASES = {
    "time/rollout_s": ("rollout", "generating responses"),
    "time/judge_s": ("judge", "log-probs, values, scores, advantages"),
    "time/update_s": ("update", "training the models"),
}
REST = ("other", "checkpoints, samples, logs, loading")
ABSENT = "not run yet"


# The head of the page


class Fact(NamedTuple):
    """A line of the page's head; a `detail` is folded."""

    name: str
    text: str
    is_detail: bool = False


def facts(run: Run, data: Sequence[Sequence[str]]) -> list[Fact]:
    """Return when and where a run was made, of which models and data; `data` is that of `data_rows`."""
    stages = [stage for stage in run.stages.values() if stage.there]
    seconds = sum(map(total_seconds, stages))
    found = [
        Fact("Date", _date(stages)),
        Fact("Training", duration(seconds) if seconds else ""),
        Fact("Machine", " and ".join(dict.fromkeys(filter(None, map(_device, stages))))),
        Fact("Models", _models(run), is_detail=True),
        Fact("Data", _rows(data, run), is_detail=True),
    ]
    return [fact for fact in found if fact.text]


def _rows(data: Sequence[Sequence[str]], run: Run) -> str:
    """Return how many rows each stage read: `sft train 600, eval prompts 256 of 516 rows`."""
    parts = []
    used = f"{run.report.n:,}" if run.report else ""
    for stage, key, _, rows, _ in data:
        if key.startswith("data.") and rows[:1].isdigit():
            read = f"{used} of {rows}" if stage == "eval" and used not in ("", rows) else rows
            parts.append(f"{stage} {key.removeprefix('data.')} {read}")
    return f"{', '.join(parts)} rows" if parts else ""


def _date(stages: Iterable[Stage]) -> str:
    """Return when a stage was finished last, or else wrote its log."""
    times = []
    for stage in stages:
        for name in (MANIFEST, "metrics.jsonl"):
            file = stage.folder / name
            if file.is_file():
                times.append(file.stat().st_mtime)
                break
    return datetime.fromtimestamp(max(times), tz=UTC).strftime("%Y-%m-%d %H:%M UTC") if times else ""


def _models(run: Run) -> str:
    """Return the model that SFT started from, and the size of what the stages wrote."""
    sft = run.stages["sft"]
    start = sft.manifest.parents.get("model.path")
    parts = [f"from {start.path.removeprefix('../')}"] if start else []
    for name, what in (("ppo", "policy"), ("reward", "reward model")):
        size = _weights_bytes(run.stages[name])
        if size:
            parts.append(f"{what} {format_bytes(size)}")
    return ", ".join(parts)


def _weights_bytes(stage: Stage) -> int:
    """Return the size of the weights that a stage wrote."""
    weights = select_files(stage.manifest.files, "model/")
    return sum(entry["bytes"] for name, entry in weights.items() if name.endswith(".safetensors"))


# Stages


class StageRow(NamedTuple):
    """A stage as texts; unknown cells are empty."""

    name: str
    state: str
    steps: str
    time: str
    seed: str
    device: str


def stage_row(stage: Stage) -> StageRow:
    """Return what ran of a stage."""
    state = {"absent": ABSENT, "begun": "not finished"}.get(stage.state, stage.state)
    if stage.elsewhere:
        state += f" (from {stage.elsewhere})"

    steps = ""
    if stage.metrics:
        last = max(row["step"] for row in stage.metrics)
        steps = count(last, "update" if stage.name == "ppo" else "step")
    seconds = total_seconds(stage)

    return StageRow(
        stage.name,
        state,
        steps,
        time=duration(seconds) if seconds else "",
        seed=str(stage.setting("seed")) if stage.config else "",
        device=_device(stage),
    )


def _device(stage: Stage) -> str:
    """Return where a stage ran; empty if it does not say."""
    environment = (stage.identity or {}).get("environment") or {}
    device = str(environment.get("device") or "")
    processes = environment.get("processes", 1)
    return device if processes == 1 else f"{device}, {processes} processes"


def total_seconds(stage: Stage) -> float:
    """Return the seconds of a stage's training without interruptions; 0 if its log has none."""
    times = [row["time_s"] for row in stage.metrics if is_number(row.get("time_s"))]
    return float(max(times, default=0.0))


def data_rows(stages: Iterable[Stage]) -> list[list[str]]:
    """Return (stage, key, path, rows, sha256) of the data; rows of a file that exists and has not changed since."""
    rows = []
    for stage in stages:
        for key, sha256 in stage.data.items():
            path = stage.setting(key)
            name = path if isinstance(path, str) else ""
            lines = _row_count(stage.folder / name, sha256)
            rows.append([stage.name, key, name, lines, sha256])
    return rows


def _row_count(path: Path, sha256: str) -> str:
    """Return the rows of a file with this hash, or that it has changed; empty if they cannot be counted."""
    with suppress(OSError):
        if not path.is_file():
            return ""
        if files_sha256([path]) != sha256:
            return "changed since"
        if path.suffix in (".jsonl", ".txt"):
            with path.open("rb") as file:
                return f"{sum(bool(line.strip()) for line in file):,}"
    return ""


def model_rows(run: Run) -> list[list[str]]:
    """Return (stage, key, description, path, sha256) of the input models and the output of each stage."""
    rows = []
    for stage in run.stages.values():
        manifest = stage.manifest
        for key, entry in manifest.parents.items():
            path = f"{entry.path} at {entry.revision}" if entry.revision else entry.path
            rows.append([stage.name, key, _origin(entry), path, entry.sha256])
        if manifest.model_sha256:
            output = "output"
            if manifest.model_is:
                output += f", {manifest.model_is}"
            if manifest.step is not None:
                output += f", after step {manifest.step}"
            rows.append([stage.name, "model/", output, "", manifest.model_sha256])
    return rows


def _origin(entry: ParentEntry) -> str:
    """Return which stage made a model, and whether in this run."""
    if entry.stage == FOREIGN:
        return "external"
    run = "this run" if entry.path == f"../{entry.stage}" else "another run"
    return f"{entry.stage} stage of {run}"


def versions(stages: Iterable[Stage]) -> dict[str, str]:
    """Return {package: version}, with all versions if the stages differ."""
    by_name: dict[str, dict[str, None]] = defaultdict(dict)  # each version once, in order
    for stage in stages:
        for name, version in stage.manifest.versions.items():
            by_name[name][version] = None
    return {name: " and ".join(each) for name, each in by_name.items()}


def install_command(versions: Mapping[str, str]) -> str:
    """Return the command that installs the packages of a run; empty if its stages used different versions."""
    packages = {name: version for name, version in versions.items() if name not in ("rlhf", "python")}
    if not packages or any(" and " in version for version in packages.values()):
        return ""
    pinned = [f"{name}=={version.partition('+')[0]}" for name, version in packages.items()]  # without +cpu
    return f"pip install {' '.join(pinned)}"


class Phase(NamedTuple):
    """A phase of PPO, its time as text and as a share."""

    name: str
    about: str
    time: str
    share: float


def phases(ppo: Stage) -> list[Phase]:
    """Return the phases of PPO's time; empty if its log has no times."""
    seconds = {phase: _total(ppo, key) for key, phase in PHASES.items()}
    measured = sum(seconds.values())
    if not measured:
        return []

    total = max(total_seconds(ppo), measured)
    seconds[REST] = total - measured
    return [Phase(name, about, duration(value), value / total) for (name, about), value in seconds.items()]


def _total(ppo: Stage, key: str) -> float:
    """Return the sum of a metric over all updates."""
    return sum(value for _, value in ppo.series(key))


def speed(ppo: Stage) -> str:
    """Return PPO's throughput of prompt and response tokens; empty if its log has no times."""
    tokens = _total(ppo, "tokens/real")
    seconds = sum(_total(ppo, key) for key in PHASES)
    if not tokens or not seconds:
        return ""
    return f"{tokens / seconds:,.0f} tokens/s over {tokens:,.0f} tokens"


def commands(run: Run) -> list[str]:
    """Return the commands that repeat the run from the folder that contains it.

    From the run's own configs if they still have the values that were used (--set may have changed some), else stage by
    stage from the copies that each stage keeps.
    """
    place = shell_word(run.folder.name)
    present = [stage for stage in run.stages.values() if stage.there]
    if all(_matches_its_file(run, stage) for stage in present):
        return [f"rlhf run {place}"]
    local = [stage.name for stage in present if not stage.elsewhere]

    return [f"rlhf {name} --config {place}/{name}/config.yaml --fresh" for name in local]


def _matches_its_file(run: Run, stage: Stage) -> bool:
    """Return True if RUN/STAGE.yaml has the values that the stage was run with; newer keys are ignored."""
    file = run.folder / f"{stage.name}.yaml"
    if not file.is_file():
        return False
    try:
        now = flatten(load(stage.name, file).dump(relative_to=run.folder / stage.name))
    except RLHFError:
        return False

    used = flatten(stage.config or {})
    changed = {key for key, value in used.items() if now.get(key) != value}
    return all(key in AUTOMATIC and now.get(key) is None for key in changed)


def hashes(run: Run) -> list[tuple[str, str]]:
    """Return (name, sha256 or revision) of each stage's config, tokenizer, chat template and code."""
    rows = []
    for name, stage in run.stages.items():
        manifest = stage.manifest
        found = {
            "config": stage.config_sha256,
            "tokenizer": manifest.tokenizer_sha256,
            "template": manifest.template_sha256,
            "git revision": manifest.git,
        }
        rows += [(f"{name}, {kind}", value) for kind, value in found.items() if value]
    return rows
