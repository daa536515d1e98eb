"""Kill runs of every stage, hit every fail point, fill the disk, and check that all end in the same bytes.

Exits with 1 if a run differs or a process ends in another way than it must, if fewer than 10 % of the kills landed
inside a write, or if the kills cover less than 80 % of the steps. Runs that differ are kept, and so is --out.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from chaos import trials, troubles, world
from chaos.trials import Outcome, Tried
from chaos.world import STAGES, STEPS, World
from rlhf_cli import terminal
from rlhf_cli.progress import Progress

LEAST_INSIDE, LEAST_COVERED = 0.1, 0.8


@dataclass
class Found:
    """The results of all runs."""

    killed: dict[str, list[Outcome]] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)  # fail points of a stage: names x moments
    tried: dict[str, list[Tried]] = field(default_factory=dict)
    troubles: list[Outcome] = field(default_factory=list)
    chains: list[Outcome] = field(default_factory=list)
    planted: dict[str, list[str]] = field(default_factory=dict)  # differences with each planted fault
    seconds: float = 0.0
    cpu_seconds: float = 0.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="kills per stage")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="every K-th fail point of a stage")
    parser.add_argument("--straight", action="store_true", help="no fail points that only a resumed run reaches")
    parser.add_argument("--troubles", type=int, metavar="N", help="full disks, signals and so on; default: all")
    parser.add_argument("--chain-stages", nargs="+", default=list(STAGES), choices=STAGES, metavar="STAGE")
    parser.add_argument("--chain-kills", type=int, default=6, metavar="N", help="kills of `rlhf run`, 3 a chain")
    parser.add_argument("--planted", action="store_true", help="plant faults, too: is each of them found?")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at the same time")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, help="folder of the runs (default: a temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results as JSON")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
    folder = (args.out or Path(tempfile.mkdtemp(prefix="chaos-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["RLHF_CACHE"] = str(folder / "cache")
    start, origin = time.monotonic(), world.make_world(folder / "world")
    # the workers have all modules imported, and so have the runs that they fork
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("fork")) as pool:
        found = everything(args, origin, pool)
    times = os.times()
    found.seconds = time.monotonic() - start
    found.cpu_seconds = times.user + times.system + times.children_user + times.children_system
    faults = report(found, args.kills)
    if args.json:
        args.json.write_text(json.dumps(asdict(found) | {"faults": faults}, indent=1), encoding="utf-8")
    for fault in faults:
        print(f"chaos: {fault}", file=sys.stderr)
    if faults:
        print(f"chaos: the runs that differ are in {folder}", file=sys.stderr)
    elif not args.out:
        shutil.rmtree(folder)
    return 1 if faults else 0


def everything(args: argparse.Namespace, origin: World, pool: ProcessPoolExecutor) -> Found:
    found = Found()
    for stage in STAGES:
        found.killed[stage] = list(_kills(pool, origin, stage, args.kills, args.seed))
    jobs = [partial(trials.find, origin, stage, resumed=not args.straight) for stage in STAGES]
    for stage, points in zip(STAGES, _all(pool, jobs, "fail points"), strict=True):
        found.names[stage] = len(points)
        picked = points[args.seed % args.every :: args.every]
        parts = [picked[i : i + trials.POINTS_PER_RUN] for i in range(0, len(picked), trials.POINTS_PER_RUN)]
        jobs = [partial(trials.tried, origin, stage, str(i), part) for i, part in enumerate(parts)]
        found.tried[stage] = _all(pool, jobs, f"{stage}: fail points")
    # The stages take turns, so that a few troubles cover all stages, too.
    kinds = [(kind, STAGES[(i + j) % 3]) for i, kind in enumerate(troubles.kinds()) for j in range(3)]
    jobs = [partial(kind, origin, stage, 100 * args.seed + n) for n, (kind, stage) in enumerate(kinds)]
    count = min(args.troubles or len(jobs), len(jobs))
    found.troubles = _all(pool, [jobs[i * len(jobs) // count] for i in range(count)], "troubles")
    sizes = [min(3, args.chain_kills - done) for done in range(0, args.chain_kills, 3)]
    jobs = [partial(trials.chain_killed, origin, args.chain_stages, args.seed + i, n) for i, n in enumerate(sizes)]
    found.chains = _all(pool, jobs, "rlhf run")
    if args.planted:
        (found.planted,) = _all(pool, [partial(troubles.all_seen, origin)], "planted faults")
    return found


def _kills(pool: ProcessPoolExecutor, origin: World, stage: str, requested: int, seed: int) -> Iterator[Outcome]:
    """Run until `requested` kills have hit, or none of a round does."""
    hit, number, before = 0, 0, -1
    while before < hit < requested:
        before, missing = hit, requested - hit
        sizes = [min(trials.KILLS_PER_RUN, missing - done) for done in range(0, missing, trials.KILLS_PER_RUN)]
        jobs = [partial(trials.killed, origin, stage, 10_000 * seed + number + i, n) for i, n in enumerate(sizes)]
        number += len(jobs)
        for outcome in _all(pool, jobs, f"{stage}: {hit} of {requested} kills, runs"):
            hit += len(outcome.kills)
            yield outcome


def _all(pool: ProcessPoolExecutor, jobs: Iterable[Callable[[], Any]], label: str) -> list[Any]:
    """Return the results of the jobs in order, with a progress line."""
    futures = [pool.submit(job) for job in jobs]
    with Progress(label, len(futures), "run") as bar:
        for _ in as_completed(futures):
            bar.advance()
    return [future.result() for future in futures]


def report(found: Found, requested: int) -> list[str]:
    """Print the tables; return all faults."""
    faults: list[str] = []
    rows = []
    for stage, outcomes in [*found.killed.items(), ("rlhf run", found.chains)]:
        kills = [kill for outcome in outcomes for kill in outcome.kills]
        inside, steps = sum(kill.inside for kill in kills), len({kill.step for kill in kills} - {0})
        share, early = f"{inside} ({inside / max(len(kills), 1):.0%})", sum(outcome.early for outcome in outcomes)
        covered, same = f"{steps} of {STEPS}", sum(not outcome.wrong for outcome in outcomes)
        rows.append([stage, len(kills), share, covered if stage in found.killed else "-", early, len(outcomes), same])
        faults += [f"{outcome.name}: {text}" for outcome in outcomes for text in outcome.wrong]
        if stage in found.killed:
            faults += vacuous(stage, len(kills), inside, steps, requested)
    _table(["killed", "kills", "inside a write", "steps hit", "before a step", "runs", "identical"], rows)
    rows = []
    for stage, parts in found.tried.items():
        hit, count, bad = (sum(getattr(part, name) for part in parts) for name in ("hit", "runs", "different"))
        rows.append([stage, found.names[stage], hit, count, count - bad])
        faults += [text for part in parts for text in part.wrong]
    _table(["fail points", "there are", "hit", "runs", "identical"], rows)
    rows = [[outcome.name, outcome.end, "no" if outcome.wrong else "yes"] for outcome in found.troubles]
    _table(["trouble", "ended", "clean, then identical"], rows)
    terminal.out(f"{found.seconds:.0f} s, {found.cpu_seconds:.0f} CPU seconds")
    return faults + [f"{outcome.name}: {text}" for outcome in found.troubles for text in outcome.wrong]


def _table(columns: list[str], rows: list[list[Any]]) -> None:
    terminal.table(columns, [[str(cell) for cell in row] for row in rows])
    terminal.out()


def vacuous(stage: str, count: int, inside: int, steps: int, requested: int) -> list[str]:
    """Return why these kills would show nothing. Few kills must hit different steps, every second one."""
    faults = [f"{stage}: {count} kills hit, {requested} were requested"] if count < requested else []
    if inside < LEAST_INSIDE * count:
        faults.append(f"{stage}: {inside} of {count} kills landed inside a write: vacuous")
    if steps < LEAST_COVERED * min(STEPS, count // 2):
        faults.append(f"{stage}: {count} kills hit {steps} of {STEPS} steps: vacuous")
    return faults


if __name__ == "__main__":
    sys.exit(main())
