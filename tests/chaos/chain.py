"""`rlhf run` in real processes, killed anywhere in the chain and started again until it is through."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from chaos.fingerprint import differences, fingerprint
from chaos.kills import Kill, Outcome, writing
from chaos.runs import STEPS, World, last_step

PATIENCE = 300.0  # seconds


def chain_killed(world: World, stages: Sequence[str], seed: int, wanted: int) -> Outcome:
    """A chain that is killed `wanted` times; every second time the parent alone, whose stage must stop by itself."""
    draw = random.Random(f"chain/{seed}")
    outcome, folder = Outcome(f"rlhf run {seed}"), world.folder / "trials" / f"chain-{seed}"
    folder.mkdir(parents=True)
    shutil.copytree(world.origin / "data", folder / "data")
    for stage in stages:
        shutil.copy(world.origin / f"{stage}.yaml", folder)
    targets = sorted((draw.randrange(len(stages)), draw.randrange(STEPS)) for _ in range(wanted))
    for number, (stage_number, step) in enumerate(targets):
        stage = stages[stage_number]
        traces = writing(folder / stage)
        parent = _start(folder)
        if _reached(parent, folder / stage, step, draw):
            outcome.kills.append(_kill(parent, folder / stage, traces, alone=number % 2 == 1))
    if code := _start(folder).wait(PATIENCE):
        return Outcome(outcome.name, outcome.kills, 0, [f"it ended with {code}: {_said(folder)}"])
    for stage in stages:
        found = differences(fingerprint(world.origin / stage), fingerprint(folder / stage))
        outcome.wrong += [f"{stage}/{name}" for name in found]
    return outcome


def _start(folder: Path) -> subprocess.Popen[bytes]:
    """`rlhf run`; where a stage of a killed parent is still saving, when that is done."""
    deadline = time.monotonic() + PATIENCE
    while any(_held(lock) for lock in folder.glob(".*.lock")) and time.monotonic() < deadline:
        time.sleep(0.02)
    command = [sys.executable, "-m", "rlhf_cli", "run", str(folder)]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def _held(lock: Path) -> bool:
    from filelock import FileLock, Timeout

    try:
        with FileLock(lock).acquire(timeout=0):
            return False
    except Timeout:
        return True


def _reached(parent: subprocess.Popen[bytes], folder: Path, step: int, draw: random.Random) -> bool:
    """Wait for a stage's step, or its folder, and a little more; False where all was over before."""
    deadline = time.monotonic() + PATIENCE
    while not (folder.exists() and last_step(folder) >= step):
        if parent.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    time.sleep(draw.uniform(0, 0.2))
    return parent.poll() is None


def _kill(parent: subprocess.Popen[bytes], folder: Path, traces: set[tuple[str, int]], *, alone: bool) -> Kill:
    children = [int(word) for word in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
    for pid in [parent.pid, *([] if alone else children)]:
        os.kill(pid, signal.SIGKILL)
    parent.wait()
    return Kill(last_step(folder), bool(writing(folder) - traces))


def _said(folder: Path) -> str:
    return " ".join((folder / "log").read_text(encoding="utf-8", errors="replace").split())[-500:]
