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
from chaos.world import STAGES, STEPS, Run, World, last_step, record, recorded
from rlhf_cli import runs, terminal

PATIENCE_S = 300.0
MOMENTS = {
    "write": ("before", "half", "after", "full"),
    "save": ("before", "half", "after", "full"),
    "remove": ("before", "half", "after"),
    "fsync": ("before", "after", "full"),
    "rename": ("before", "after", "full"),
    "truncate": ("before", "after"),
    "mkdir": ("after", "full"),
    "unlink": ("after",),
}
STATE = re.compile(r"save state/.*(tensors|model)\.safetensors")


@dataclass(frozen=True)
class Kill:
    """The last step of a killed process, and whether it died inside a write."""

    step: int
    inside: bool


@dataclass
class Outcome:
    """One run, restarted as often as it ended early; `wrong` is what differs from the straight run."""

    name: str
    kills: list[Kill] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def finish(world: World, stage: str, folder: Path) -> list[str]:
    """Restart a run, let it end, and return its differences from the straight run. An equal one is deleted."""
    run = Run(stage, folder)
    if code := run.wait():
        return [f"it ended with exit code {code}: {' '.join(run.output().split())[-500:]}"]
    wrong = differences(fingerprint(world.origin / stage), fingerprint(run.folder))
    if not wrong:
        shutil.rmtree(folder)
    return wrong


# Random moments: half of them anywhere, half aimed at the writing of a checkpoint, a snapshot or the models


def killed(world: World, stage: str, seed: int, count: int) -> Outcome:
    """Kill a run `count` times, as far as it lives that long, then finish and compare it."""
    draw = random.Random(f"{stage}/{seed}")
    folder, outcome = world.trial(stage, f"kills-{seed}"), Outcome(f"{stage} {seed}")
    for number, target in enumerate(sorted(draw.choices(range(1, STEPS + 1), k=count))):
        run = Run(stage, folder)
        traces = writing(run.folder)
        if draw.random() < 0.9:  # the others die early in a process
            run.wait_for_step(target)
        if number % 2:
            time.sleep(draw.uniform(0, 2 * (time.monotonic() - run.began) / STEPS))
        else:
            while run.alive() and not writing(run.folder) - traces:
                time.sleep(0.0003)
            time.sleep(draw.choice([0.0, draw.uniform(0, 0.003)]))
        run.signal(signal.SIGKILL)
        if run.wait() != -signal.SIGKILL:
            break
        outcome.kills.append(Kill(run.step(), bool(writing(run.folder) - traces)))
    outcome.wrong = finish(world, stage, folder)
    return outcome


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


def chain_killed(world: World, seed: int, count: int) -> Outcome:
    """Kill `rlhf run` `count` times; every second time the parent only, whose stage must stop by itself."""
    draw = random.Random(f"chain/{seed}")
    outcome, folder = Outcome(f"rlhf run {seed}"), world.folder / "trials" / f"chain-{seed}"
    shutil.copytree(world.origin / "data", folder / "data")
    for stage in STAGES:
        shutil.copy(world.origin / f"{stage}.yaml", folder)
    targets = sorted((draw.randrange(len(STAGES)), draw.randrange(STEPS)) for _ in range(count))
    for number, (stage_number, step) in enumerate(targets):
        place = folder / STAGES[stage_number]
        traces, parent = writing(place), _start_chain(folder)
        while parent.poll() is None and not (place.exists() and last_step(place) >= step):
            time.sleep(0.005)
        if parent.poll() is None:
            time.sleep(draw.uniform(0, 0.2))
            children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
            for pid in [parent.pid, *(map(int, children) if number % 2 == 0 else ())]:
                os.kill(pid, signal.SIGKILL)
            parent.wait()
            outcome.kills.append(Kill(last_step(place), bool(writing(place) - traces)))
    if code := _start_chain(folder).wait(PATIENCE_S):
        log = (folder / "log").read_text(encoding="utf-8", errors="replace")
        outcome.wrong.append(f"it ended with {code}: {' '.join(log.split())[-500:]}")
    for stage in STAGES:
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


# Every fail point: found in recorded runs, then hit one after another


def find(world: World, stage: str) -> list[Point]:
    """Return the fail points of a stage in the order in which a run reaches them: a straight run, and resumed ones.

    A resumed run deletes leftovers of a process that was killed in the middle of a checkpoint, or just before the end.
    """
    seen = recorded(stage, world.origin)
    state = next(name for name in seen if STATE.fullmatch(name))
    points = [point for name, count in seen.items() for point in _points(name, count)]
    for number, lead in enumerate([Point(state, "half", 2), Point("rename manifest.json", "before")]):
        folder = world.trial(stage, f"recorded-{number}")
        assert (run := _run_to(stage, folder, lead)).code == -signal.SIGKILL, f"{lead}: {run.output()}"
        more = {name: count for name, count in record(stage, folder).items() if not seen.get(name)}
        seen |= more
        points += [point for name, count in more.items() for point in _points(name, count, lead)]
    return points


def _points(name: str, count: int, lead: Point | None = None) -> list[Point]:
    moments = MOMENTS.get(name.partition(" ")[0], ()) if count else ()
    return [Point(name, moment, 2 if count > 3 else 1, lead) for moment in moments]


def _run_to(stage: str, folder: Path, point: Point) -> Run:
    """Return a run that has ended at a fail point."""
    run = Run(stage, folder, before=partial(faults.install, point=point))
    run.wait()
    return run


def hit(world: World, stage: str, number: int, points: Sequence[Point]) -> Outcome:
    """End a run at one fail point after another, each process starting where the last died, then compare it."""
    outcome, waiting = Outcome(f"{stage}: {points[0]} to {points[-1]}"), list(points)
    while waiting:
        folder, new = world.trial(stage, f"points-{number}-{len(waiting)}"), True
        while waiting and (new or not waiting[0].lead):
            point = waiting[0]
            if point.lead:
                _run_to(stage, folder, point.lead)
            complete = any((folder / stage).glob("state/*/state.json"))
            run = _run_to(stage, folder, point)
            if run.code == 0 and not new:  # this run had passed it: again in a new one
                break
            waiting.pop(0)
            new = False
            if point.moment == "full":
                outcome.wrong += [f"{point}: {text}" for text in unclean(run)]
            elif run.code != -signal.SIGKILL:
                outcome.wrong.append(f"{point}: it ended with {run.code}")
            with terminal.muted_warnings():
                if complete and runs.latest_state(run.folder / "state") is None:
                    outcome.wrong.append(f"{point}: no checkpoint is complete any more")
            if run.code == 0:
                break
        outcome.wrong += finish(world, stage, folder)
    return outcome


def unclean(run: Run) -> list[str]:
    """Return what is not one error line E03 with exit code 1 at the end of a run."""
    output = run.output()
    errors = [line for line in output.splitlines() if line.startswith("error[")]
    clean = run.code == 1 and len(errors) == 1 and errors[0].startswith("error[E03]") and "Traceback" not in output
    return [] if clean else [f"it ended with {run.code}: {' '.join(output.split())[-400:]}"]
