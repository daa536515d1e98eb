"""Every fail point of a stage: found by recording runs, then hit one after another, and the run must end the same."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from chaos import faults
from chaos.faults import Point
from chaos.kills import finished
from chaos.runs import Run, World, record, recorded
from rlhf_cli import runs, terminal

KILLS = {
    "write": ("before", "half", "after"),
    "save": ("before", "half", "after"),
    "remove": ("before", "half", "after"),
    "fsync": ("before", "after"),
    "rename": ("before", "after"),
    "truncate": ("before", "after"),
    "mkdir": ("after",),
    "unlink": ("after",),
}
A_CHAIN = 12  # points tried in one run, if it lives that long
STATE = re.compile(r"save state/.*(tensors|model)\.safetensors")
# Where a process is killed for the next one to have something to clear up: amid a state, and just before the end.
LEADS = ("half a state", "almost done")


@dataclass(frozen=True)
class Trial:
    """A point, and where the process before must have died for a process to come to it."""

    point: Point
    lead: Point | None = None


@dataclass
class Tried:
    """Some trials of a stage. `wrong`: what was not as it must be."""

    hit: int = 0
    runs: int = 0
    wrong: list[str] = field(default_factory=list)
    different: int = 0  # runs


def find(world: World, stage: str, *, resumed: bool = True) -> list[Trial]:
    """All trials of a stage, in the order in which a run comes to them: of the straight run, and of resumed ones."""
    seen = recorded(stage, world.origin)
    state = next(name for name in seen if STATE.fullmatch(name))
    leads = dict(zip(LEADS, (Point(state, "half", 2), Point("rename manifest.json", "before")), strict=True))
    trials = [Trial(point) for name, count in seen.items() if count for point in _points(name, count)]
    for what, lead in leads.items() if resumed else ():
        for name, count in _recorded(world, stage, what, lead).items():
            if count and not seen.get(name):
                seen[name] = count
                trials += [Trial(point, lead) for point in _points(name, count)]
    return trials


def _points(name: str, count: int) -> list[Point]:
    kind = name.partition(" ")[0]
    moments = KILLS.get(kind, ()) + (("full",) if kind in faults.FILLING else ())
    return [Point(name, moment, 2 if count > 3 else 1) for moment in moments]


def _recorded(world: World, stage: str, what: str, lead: Point) -> dict[str, int]:
    folder = world.trial(stage, f"recorded-{what.replace(' ', '-')}")
    run = Run(stage, folder, before=partial(_install, lead))
    assert run.wait() == -signal.SIGKILL, f"{lead}: {run.said()}"
    return record(stage, folder)


def _install(point: Point, folder: Path) -> None:
    faults.install(folder, point)


def tried(world: World, stage: str, name: str, trials: Sequence[Trial]) -> Tried:
    """Hit the points one after another, each process from where the one before died, and compare what comes out."""
    told = Tried()
    waiting, number = list(trials), 0
    while waiting:
        folder = world.trial(stage, f"points-{name}-{number}")
        number, told.runs = number + 1, told.runs + 1
        chain = _chain(told, stage, folder, waiting)
        if wrong := finished(world, stage, folder):
            told.different += 1
            told.wrong.append(f"{stage}: after {'; '.join(map(str, chain))}: {wrong}")
    return told


def _chain(told: Tried, stage: str, folder: Path, waiting: list[Trial]) -> list[Point]:
    """One run: takes the trials that it comes to off `waiting`."""
    chain: list[Point] = []
    while waiting and len(chain) < A_CHAIN:
        trial = waiting[0]
        if trial.lead:
            if chain:
                break  # what leads there is at its best in a fresh run
            if not _dies(stage, folder, trial.lead, chain):
                told.wrong.append(f"{stage}: no run comes to {trial.lead}")
        safe = _safe(folder / stage)
        point = trial.point
        run = Run(stage, folder, before=partial(_install, point))
        code = run.wait()
        if code == 0 and chain and not trial.lead:  # its time was over in this run: once more, in a fresh one
            break
        waiting.pop(0)
        chain.append(point)
        if code == 0:  # in a run of its own
            told.wrong.append(f"{stage}: no run comes to {point}")
            break
        told.hit += 1
        told.wrong += [f"{stage}: {point}: {text}" for text in _amiss(run, code, point, safe)]
    return chain


def _dies(stage: str, folder: Path, lead: Point, chain: list[Point]) -> bool:
    chain.append(lead)
    return Run(stage, folder, before=partial(_install, lead)).wait() == -signal.SIGKILL


def _safe(folder: Path) -> set[str]:
    """The states that were whole before: one of them, or a newer one, must be whole afterwards."""
    return {path.parent.name for path in folder.glob("state/*/state.json")}


def _none_whole(folder: Path) -> bool:
    with terminal.muted_warnings():
        return runs.latest_state(folder / "state") is None


def _amiss(run: Run, code: int, point: Point, safe: set[str]) -> list[str]:
    """What is wrong with how a process ended at a point."""
    wrong = []
    if point.moment != "full":
        wrong += [f"it ended with {code}"] if code != -signal.SIGKILL else []
    else:
        wrong += unclean(run, code)
    if safe and _none_whole(run.folder):
        wrong.append("no state is whole any more")
    return wrong


def unclean(run: Run, code: int) -> list[str]:
    """Where a run ended by an error of the system: what is not one line and a hint with exit code 1."""
    said = run.said()
    errors = [line for line in said.splitlines() if line.startswith("error[")]
    wrong = [f"exit code {code}, not 1"] if code != 1 else []
    wrong += [f"{len(errors)} lines of error"] if len(errors) != 1 else []
    wrong += ["not told as E03"] if any(not line.startswith("error[E03]") for line in errors) else []
    wrong += ["a traceback"] if "Traceback" in said else []
    return [f"{', '.join(wrong)}: {' '.join(said.split())[-400:]}"] if wrong else []
