"""Runs that are killed at random moments and at every fail point, then finish, and must equal the straight run."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

from chaos import faults
from chaos.faults import Point
from chaos.fingerprint import differences, fingerprint
from chaos.world import STEPS, Run, World, last_step, record, recorded
from rlhf_cli import runs, terminal

KILLS_PER_RUN, POINTS_PER_RUN = 5, 12
PATIENCE_S = 300.0
MOMENTS = {
    "write": ("before", "half", "after"),
    "save": ("before", "half", "after"),
    "remove": ("before", "half", "after"),
    "fsync": ("before", "after"),
    "rename": ("before", "after"),
    "truncate": ("before", "after"),
    "mkdir": ("after",),
    "unlink": ("after",),
}
STATE = re.compile(r"save state/.*(tensors|model)\.safetensors")


@dataclass(frozen=True)
class Kill:
    """A kill that hit a process after its first step."""

    step: int
    inside: bool  # a write


@dataclass
class Outcome:
    """One run, restarted as often as it was ended; `wrong` is what differs from the straight run."""

    name: str
    kills: list[Kill] = field(default_factory=list)
    early: int = 0  # kills between the start of a process and its first step
    wrong: list[str] = field(default_factory=list)
    end: str = ""  # of the first process


def finish(world: World, stage: str, folder: Path, *, keep: bool = False) -> list[str]:
    """Restart a run, let it end, and return its differences from the straight run. An equal one is deleted."""
    run = Run(stage, folder)
    if code := run.wait():
        return [f"it ended with exit code {code}: {' '.join(run.output().split())[-500:]}"]
    wrong = differences(fingerprint(world.origin / stage), fingerprint(run.folder))
    if not wrong and not keep:
        shutil.rmtree(folder)
    return wrong


# Kills at random moments: half of them anywhere, half aimed at the writing of a checkpoint, a snapshot or the models


def killed(world: World, stage: str, seed: int, requested: int = KILLS_PER_RUN) -> Outcome:
    """Kill a run `requested` times, as far as it lives that long, then finish and compare it."""
    draw = random.Random(f"{stage}/{seed}")
    folder, outcome = world.trial(stage, f"kills-{seed}"), Outcome(f"{stage} {seed}")
    for number, target in enumerate(sorted(draw.choices(range(1, STEPS + 1), k=requested))):
        if draw.random() < 0.1:
            run = Run(stage, folder)
            time.sleep(draw.uniform(0, 0.5))
            run.signal(signal.SIGKILL)
            outcome.early += run.wait() == -signal.SIGKILL
        run = Run(stage, folder)
        if kill := _kill(run, target, draw, aimed=number % 2 == 0):
            outcome.kills.append(kill)
        if run.wait() != -signal.SIGKILL:
            break
    outcome.wrong = finish(world, stage, folder)
    return outcome


def _kill(run: Run, target: int, draw: random.Random, *, aimed: bool) -> Kill | None:
    """Kill a run once it has reached the step `target`; return None if it ended before."""
    traces = writing(run.folder)
    run.wait_for_step(target)
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
    """Return (name, time) of the traces of a process that is, or was when it died, in the middle of a write."""
    places = (folder, folder / "state", folder / "snapshots")
    paths = [path for place in places for pattern in (".tmp-*", ".trash-*") for path in place.glob(pattern)]
    paths += [path for path in (folder / "state").glob("checkpoint-*") if not (path / "state.json").exists()]
    if not (folder / "manifest.json").exists():
        paths += [folder / "model", folder / "value"]
    found = set()
    for path in [*paths, folder / "metrics.jsonl", folder / "samples.jsonl"]:
        try:
            if path.suffix != ".jsonl" or not (path.read_bytes() or b"\n").endswith(b"\n"):  # its last line has no end
                found.add((path.name, path.stat().st_mtime_ns))
        except OSError:  # missing, or deleted since
            continue
    return found


# Kills of `rlhf run`


def chain_killed(world: World, stages: Sequence[str], seed: int, requested: int) -> Outcome:
    """Kill `rlhf run` `requested` times; every second time the parent only, whose stage must stop by itself."""
    draw = random.Random(f"chain/{seed}")
    outcome, folder = Outcome(f"rlhf run {seed}"), world.folder / "trials" / f"chain-{seed}"
    shutil.copytree(world.origin / "data", folder / "data")
    for stage in stages:
        shutil.copy(world.origin / f"{stage}.yaml", folder)
    targets = sorted((draw.randrange(len(stages)), draw.randrange(STEPS)) for _ in range(requested))
    for number, (stage_number, step) in enumerate(targets):
        place = folder / stages[stage_number]
        traces, parent = writing(place), _start_chain(folder)
        if _reached(parent, place, step):
            time.sleep(draw.uniform(0, 0.2))
            children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
            for pid in [parent.pid, *(map(int, children) if number % 2 == 0 else ())]:
                os.kill(pid, signal.SIGKILL)
            parent.wait()
            outcome.kills.append(Kill(last_step(place), bool(writing(place) - traces)))
    if code := _start_chain(folder).wait(PATIENCE_S):
        log = (folder / "log").read_text(encoding="utf-8", errors="replace")
        outcome.wrong.append(f"it ended with {code}: {' '.join(log.split())[-500:]}")
        return outcome
    for stage in stages:
        found = differences(fingerprint(world.origin / stage), fingerprint(folder / stage))
        outcome.wrong += [f"{stage}/{name}" for name in found]
    return outcome


def _start_chain(folder: Path) -> subprocess.Popen[bytes]:
    """Start `rlhf run`, after the stage of a killed parent has saved."""
    for lock in folder.glob(".*.lock"):
        with suppress(Timeout), FileLock(lock).acquire(timeout=PATIENCE_S):
            pass
    command = [sys.executable, "-m", "rlhf_cli", "run", str(folder)]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def _reached(parent: subprocess.Popen[bytes], folder: Path, step: int) -> bool:
    """Wait for a stage's step; return False if the run ended before."""
    deadline = time.monotonic() + PATIENCE_S
    while not (folder.exists() and last_step(folder) >= step):
        if parent.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return parent.poll() is None


# Every fail point: found in recorded runs, then hit one after another


@dataclass(frozen=True)
class Trial:
    """A fail point, and the point where an earlier process must die for a process to reach it."""

    point: Point
    lead: Point | None = None


@dataclass
class Tried:
    """Some trials of a stage."""

    hit: int = 0
    runs: int = 0
    wrong: list[str] = field(default_factory=list)
    different: int = 0  # runs


def find(world: World, stage: str, *, resumed: bool = True) -> list[Trial]:
    """Return the trials of a stage in the order in which a run reaches them: of the straight run, and of resumed ones.

    A resumed run deletes leftovers of a process that was killed in the middle of a checkpoint, or just before the end.
    """
    seen = recorded(stage, world.origin)
    state = next(name for name in seen if STATE.fullmatch(name))
    trials = [Trial(point) for name, count in seen.items() if count for point in _points(name, count)]
    for number, lead in enumerate([Point(state, "half", 2), Point("rename manifest.json", "before")] * resumed):
        folder = world.trial(stage, f"recorded-{number}")
        run = Run(stage, folder, before=partial(_install, lead))
        assert run.wait() == -signal.SIGKILL, f"{lead}: {run.output()}"
        for name, count in record(stage, folder).items():
            if count and not seen.get(name):
                seen[name] = count
                trials += [Trial(point, lead) for point in _points(name, count)]
    return trials


def _points(name: str, count: int) -> list[Point]:
    kind = name.partition(" ")[0]
    moments = MOMENTS.get(kind, ()) + (("full",) if kind in faults.FILLING else ())
    return [Point(name, moment, 2 if count > 3 else 1) for moment in moments]


def _install(point: Point, folder: Path) -> None:
    faults.install(folder, point)


def tried(world: World, stage: str, name: str, trials: Sequence[Trial]) -> Tried:
    """Hit the points one after another, each process starting where the one before died, and compare the results."""
    result, waiting = Tried(), list(trials)
    while waiting:
        folder = world.trial(stage, f"points-{name}-{result.runs}")
        result.runs += 1
        points = _hit_points(result, stage, folder, waiting)
        if wrong := finish(world, stage, folder):
            result.different += 1
            result.wrong.append(f"{stage}: after {'; '.join(map(str, points))}: {wrong}")
    return result


def _hit_points(result: Tried, stage: str, folder: Path, waiting: list[Trial]) -> list[Point]:
    """Hit points in one run, and remove the trials that it reaches from `waiting`."""
    points: list[Point] = []
    while waiting and len(points) < POINTS_PER_RUN:
        point, lead = waiting[0].point, waiting[0].lead
        if lead and points:
            break  # in a fresh run
        if lead:
            points.append(lead)
            if Run(stage, folder, before=partial(_install, lead)).wait() != -signal.SIGKILL:
                result.wrong.append(f"{stage}: no run reaches {lead}")
        complete = any((folder / stage).glob("state/*/state.json"))
        run = Run(stage, folder, before=partial(_install, point))
        code = run.wait()
        if code == 0 and points and not lead:  # this run had passed it: again in a fresh one
            break
        waiting.pop(0)
        points.append(point)
        if code == 0:
            result.wrong.append(f"{stage}: no run reaches {point}")
            break
        result.hit += 1
        wrong = unclean(run, code) if point.moment == "full" else []
        if point.moment != "full" and code != -signal.SIGKILL:
            wrong.append(f"it ended with {code}")
        with terminal.muted_warnings():
            if complete and runs.latest_state(run.folder / "state") is None:
                wrong.append("no checkpoint is complete any more")
        result.wrong += [f"{stage}: {point}: {text}" for text in wrong]
    return points


def unclean(run: Run, code: int) -> list[str]:
    """Return what is not one error line E03 and a hint with exit code 1 at the end of a run."""
    output = run.output()
    errors = [line for line in output.splitlines() if line.startswith("error[")]
    wrong = [f"exit code {code}, not 1"] if code != 1 else []
    wrong += [f"{len(errors)} error lines"] if len(errors) != 1 else []
    wrong += ["not E03"] if any(not line.startswith("error[E03]") for line in errors) else []
    wrong += ["a traceback"] if "Traceback" in output else []
    return [f"{', '.join(wrong)}: {' '.join(output.split())[-400:]}"] if wrong else []
