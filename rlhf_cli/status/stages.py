"""One stage of a run: how far it is, what came out, how long it took. Reads little and takes no lock."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhf_cli import room
from rlhf_cli.checkpoints import Status, newest_step, processes_of
from rlhf_cli.checkpoints.locks import Holder, holder
from rlhf_cli.checkpoints.stages import Left, left_in, outdated
from rlhf_cli.config import Config, PPOConfig, RewardConfig, SFTConfig, load
from rlhf_cli.errors import RLHFError, quoted, reading
from rlhf_cli.evaluation.render import deciding_judge
from rlhf_cli.tracking import newest_rows

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
    """What is known of a stage; `--json` has the same names (docs/status.md)."""

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
    process: Holder | None = None  # that is writing it
    unread: tuple[str, ...] = ()  # keys of what was taken for unchanged, see `checkpoints.glance`


def read_stage(stage: str, folder: Path, status: Status | None = None) -> Stage:
    """A stage as its folder tells it, and `status` where its config is known: without it nothing is told as stale."""
    try:
        with reading(folder):
            return _read(stage, folder, status)
    except RLHFError as error:
        return Stage(stage, folder, "unreadable", (error.problems[0].text,))
    except OSError:  # moved aside at this very moment
        return Stage(stage, folder, "new")


def _read(stage: str, folder: Path, status: Status | None) -> Stage:
    left, process = left_in(folder), holder(folder)
    if left.state == "unreadable":
        return Stage(stage, folder, "unreadable", (left.problem or "",), process=process)
    state = _state(left, status, process)
    rows = newest_rows(folder / "metrics.jsonl")
    step, steps = _steps(stage, folder, state, left, rows)
    ended = (left.manifest or {}).get("stopped")
    reasons = status.reasons if status else (left.problem,) if left.problem else ()
    if status is None and state == "finished" and (others := tuple(outdated(folder, left.manifest or {}))):
        state, reasons = "stale", tuple(f"made from {what}" for what in others)
    elif state == "finished" and ended:
        reasons = (str(ended),)
    elif state == "stale" and left.state != "finished" and (folder / "config.yaml").is_file():
        reasons += (f"as it was begun it goes on: rlhf {stage} --config {quoted(folder / 'config.yaml')}",)
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
        bytes=room.used(folder),
        process=process,
        unread=status.unread if status else (),
    )


def _state(left: Left, status: Status | None, process: Holder | None) -> State:
    told = status.state if status else left.state
    return "running" if process else STATES.get(told, told)  # type: ignore[arg-type]


def _steps(stage: str, folder: Path, state: State, left: Left, rows: Sequence[Row]) -> tuple[int | None, int | None]:
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
            return config.ppo.across(processes_of(folder)).num_updates()
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
