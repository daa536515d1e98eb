"""SIGKILL at random moments: half of them anywhere, half aimed at the writing of a state, a snapshot or the models."""

import random
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from chaos.fingerprint import differences, fingerprint
from chaos.runs import STEPS, Run, World

A_RUN = 5  # kills


@dataclass(frozen=True)
class Kill:
    """One that hit a live run after its first step."""

    step: int
    inside: bool


@dataclass
class Outcome:
    """One run, started as often as it was ended; `wrong` is what is not as in the straight run."""

    name: str
    kills: list[Kill] = field(default_factory=list)
    early: int = 0  # kills between the start of a process and its first step
    wrong: list[str] = field(default_factory=list)
    how: str = ""  # it ended before it was started again


def killed(world: World, stage: str, seed: int, wanted: int = A_RUN) -> Outcome:
    """A run that is killed `wanted` times, if it lives that long, then left to end, and compared."""
    draw = random.Random(f"{stage}/{seed}")
    folder = world.trial(stage, f"kills-{seed}")
    outcome = Outcome(f"{stage} {seed}")
    for number, target in enumerate(sorted(draw.choices(range(1, STEPS + 1), k=wanted))):
        if draw.random() < 0.1:
            outcome.early += _kill_early(Run(stage, folder), draw)
        run = Run(stage, folder)
        if kill := _kill(run, target, draw, aimed=number % 2 == 0):
            outcome.kills.append(kill)
        if run.wait() != -signal.SIGKILL:
            break
    outcome.wrong = finished(world, stage, folder)
    return outcome


def finished(world: World, stage: str, folder: Path, *, keep: bool = False) -> list[str]:
    """Start a run once more and let it end: what differs from the straight run. One that is the same is deleted."""
    run = Run(stage, folder)
    if code := run.wait():
        return [f"it ended with exit code {code}: {' '.join(run.said().split())[-500:]}"]
    wrong = differences(fingerprint(world.origin / stage), fingerprint(run.folder))
    if not wrong and not keep:
        shutil.rmtree(folder)
    return wrong


def _kill_early(run: Run, draw: random.Random) -> bool:
    time.sleep(draw.uniform(0, 0.5))
    run.signal(signal.SIGKILL)
    return run.wait() == -signal.SIGKILL


def _kill(run: Run, target: int, draw: random.Random, *, aimed: bool) -> Kill | None:
    """Kill a run once it has made a step, and come to `target`; None where it ended before."""
    traces = writing(run.folder)
    while run.alive() and not run.made(target):
        time.sleep(0.002)
    pace = (time.monotonic() - run.began) / STEPS
    if aimed:
        while run.alive() and not writing(run.folder) - traces:
            time.sleep(0.0003)
        time.sleep(draw.choice([0.0, draw.uniform(0, 0.003)]))
    else:
        time.sleep(draw.uniform(0, 2 * pace))
    run.signal(signal.SIGKILL)
    if run.wait() != -signal.SIGKILL:
        return None
    return Kill(run.step(), bool(writing(run.folder) - traces))


def writing(folder: Path) -> set[tuple[str, int]]:
    """What tells that a process is, or was when it died, in the middle of a write: (name, time), to be compared."""
    found = []
    for place in (folder, folder / "state", folder / "snapshots"):
        found += [path for pattern in (".tmp-*", ".trash-*") for path in place.glob(pattern)]
    found += [path for path in (folder / "state").glob("checkpoint-*") if not (path / "state.json").exists()]
    if not (folder / "manifest.json").exists():
        found += [path for name in ("model", "value") if (path := folder / name).exists()]
    for name in ("metrics.jsonl", "samples.jsonl"):
        found += [path for path in [folder / name] if _torn(path)]
    return {told for path in found if (told := _told(path))}


def _torn(log: Path) -> bool:
    """Whether the last line of a log has no end."""
    try:
        return not (log.read_bytes() or b"\n").endswith(b"\n")
    except OSError:
        return False


def _told(path: Path) -> tuple[str, int] | None:
    try:
        return path.name, path.stat().st_mtime_ns
    except OSError:  # gone since
        return None
