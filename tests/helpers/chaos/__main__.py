"""Kill runs of every stage, hit every fail point, limit files and memory, and check that all end in the same bytes.

Exits with 1 if a run differs or a process ends in another way than it must, if a planted fault is not found, if fewer
than 10 % of the kills landed inside a write, or if the kills cover less than 80 % of the steps. Runs that differ are
kept, and so is --out.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from chaos import kills, troubles, world
from chaos.kills import Outcome
from chaos.world import STAGES, STEPS, World
from rlhf_cli import terminal
from rlhf_cli.progress import Progress

KILLS_PER_RUN, POINTS_PER_RUN, LEAST_FAIL_POINTS = 5, 12, 150
LEAST_INSIDE, LEAST_COVERED = 0.1, 0.8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="kills per stage")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="every K-th fail point of a stage")
    parser.add_argument("--troubles", type=int, metavar="N", help="limits, signals and so on; default: all")
    parser.add_argument("--chains", type=int, default=2, metavar="N", help="runs of `rlhf run`, killed 3 times each")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at the same time")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, help="folder of the runs (default: a temporary folder)")
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
        outcomes = everything(args, origin, pool)
    faults = report(outcomes, args.kills)
    terminal.out(f"{time.monotonic() - start:.0f} s, {sum(os.times()[:4]):.0f} CPU seconds")
    for fault in faults:
        print(f"chaos: {fault}", file=sys.stderr)
    if faults:
        print(f"chaos: the runs that differ are in {folder}", file=sys.stderr)
    elif not args.out:
        shutil.rmtree(folder)
    return 1 if faults else 0


def everything(args: argparse.Namespace, origin: World, pool: ProcessPoolExecutor) -> dict[str, list[Outcome]]:
    """Return {title: outcomes}."""
    outcomes: dict[str, list[Outcome]] = {}

    def add(title: str, jobs: Sequence[Callable[[], Outcome]]) -> None:
        outcomes[title] = _all(pool, jobs, title)

    for stage in STAGES:
        sizes = [min(KILLS_PER_RUN, args.kills - done) for done in range(0, args.kills, KILLS_PER_RUN)]
        seeds = range(10_000 * args.seed, 10_000 * args.seed + len(sizes))
        add(f"{stage}: kills", [partial(kills.killed, origin, stage, *pair) for pair in zip(seeds, sizes, strict=True)])
    found = _all(pool, [partial(kills.find, origin, stage) for stage in STAGES], "search of fail points")
    for stage, points in zip(STAGES, found, strict=True):
        picked = points[args.seed % args.every :: args.every]
        starts = range(0, len(picked), POINTS_PER_RUN)
        jobs = [partial(kills.hit, origin, stage, i, picked[i : i + POINTS_PER_RUN]) for i in starts]
        add(f"{stage}: fail points", jobs)
        if len(points) < LEAST_FAIL_POINTS:
            outcomes[f"{stage}: fail points"].append(Outcome(stage, wrong=[f"only {len(points)} fail points"]))
    # The stages take turns, so that a few troubles cover all stages, too.
    kinds = [(kind, STAGES[(i + j) % 3]) for i, kind in enumerate(troubles.TROUBLES) for j in range(3)]
    jobs = [partial(kind, origin, stage, 100 * args.seed + n) for n, (kind, stage) in enumerate(kinds)]
    count = min(args.troubles or len(jobs), len(jobs))
    add("troubles", [jobs[i * len(jobs) // count] for i in range(count)])
    add("rlhf run", [partial(kills.chain_killed, origin, args.seed + i, 3) for i in range(args.chains)])
    add("planted faults", [partial(troubles.planted, origin, name) for name in troubles.PLANTED])
    return outcomes


def _all(pool: ProcessPoolExecutor, jobs: Sequence[Callable[[], Any]], label: str) -> list[Any]:
    """Return the results of the jobs in order, with a progress line."""
    futures = [pool.submit(job) for job in jobs]
    with Progress(label, len(futures), "run") as bar:
        for _ in as_completed(futures):
            bar.advance()
    return [future.result() for future in futures]


def report(outcomes: dict[str, list[Outcome]], requested: int) -> list[str]:
    """Print the table; return all faults."""
    faults, rows = [], []
    for title, each in outcomes.items():
        hits = [kill for outcome in each for kill in outcome.kills]
        inside, steps = sum(kill.inside for kill in hits), len({kill.step for kill in hits} - {0})
        counts = [len(hits), f"{inside / len(hits):.0%}", f"{steps} of {STEPS}"] if hits else ["", "", ""]
        rows.append([title, len(each), sum(not outcome.wrong for outcome in each), *counts])
        faults += [f"{outcome.name}: {text}" for outcome in each for text in outcome.wrong]
        if title.endswith(": kills"):
            faults += [f"{title}: {text}: vacuous" for text in vacuous(len(hits), inside, steps, requested)]
    columns = ["", "runs", "as they must", "kills", "inside a write", "steps hit"]
    terminal.table(columns, [[str(cell) for cell in row] for row in rows])
    return faults


def vacuous(count: int, inside: int, steps: int, requested: int) -> list[str]:
    """Return why these kills would show nothing. Few kills must hit different steps, every second one."""
    faults = [f"{count} of {requested} kills hit a run"] if count < LEAST_COVERED * requested else []
    if inside < LEAST_INSIDE * count:
        faults.append(f"{inside} of {count} kills landed inside a write")
    if steps < LEAST_COVERED * min(STEPS, count // 2):
        faults.append(f"{count} kills hit {steps} of {STEPS} steps")
    return faults


if __name__ == "__main__":
    sys.exit(main())
