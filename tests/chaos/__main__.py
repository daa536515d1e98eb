"""Kill runs of every stage, hit every fail point, fill the disk, and see that all end in the same bytes.

Exits with 1 where a run differs, a process ends in another way than it must, fewer than 10 % of the kills landed inside
a write, or the kills cover less than 80 % of the steps. What differs is kept, and so is --out.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from chaos import chain, kills, planted, points, runs, troubles
from chaos.kills import A_RUN, Outcome
from chaos.report import Found, tell
from chaos.runs import STAGES, World
from rlhf_cli.progress import Progress

Job = Callable[[], Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="kills a stage")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="every K-th fail point of a stage")
    parser.add_argument("--straight", action="store_true", help="no fail points that only a resumed run comes to")
    parser.add_argument("--troubles", type=int, metavar="N", help="full disks, signals and so on; default: all")
    parser.add_argument("--chain-stages", nargs="+", default=list(STAGES), choices=STAGES, metavar="STAGE")
    parser.add_argument("--chain-kills", type=int, default=6, metavar="N", help="kills of `rlhf run`, 3 a chain")
    parser.add_argument("--planted", action="store_true", help="plant faults, too: is each of them seen?")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at the same time")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, help="where the runs go (default: a temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all that was seen, as JSON")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not live through a fork
    folder = (args.out or Path(tempfile.mkdtemp(prefix="chaos-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["RLHF_CACHE"] = str(folder / "cache")
    began, world = time.monotonic(), runs.make_world(folder / "world")
    context = get_context("fork")  # the workers have all that was imported, and so have the runs that they fork
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        found = everything(args, world, pool)
    times = os.times()
    found.seconds = time.monotonic() - began
    found.cpu_seconds = times.user + times.system + times.children_user + times.children_system
    faults = tell(found, args.kills)
    if args.json:
        args.json.write_text(json.dumps(asdict(found) | {"faults": faults}, indent=1), encoding="utf-8")
    for fault in faults:
        print(f"chaos: {fault}", file=sys.stderr)
    if not faults and not args.out:
        shutil.rmtree(folder)
    elif faults:
        print(f"chaos: what differs is in {folder}", file=sys.stderr)
    return 1 if faults else 0


def everything(args: argparse.Namespace, world: World, pool: ProcessPoolExecutor) -> Found:
    """Do it all."""
    found = Found()
    for stage in STAGES:
        found.killed[stage] = list(_kills(pool, world, stage, args.kills, args.seed))
    jobs = [partial(points.find, world, stage, resumed=not args.straight) for stage in STAGES]
    listed = dict(zip(STAGES, _all(pool, jobs, "fail points"), strict=True))
    for stage, trials in listed.items():
        found.names[stage] = len(trials)
        picked = trials[args.seed % args.every :: args.every]
        parts = [picked[i : i + points.A_CHAIN] for i in range(0, len(picked), points.A_CHAIN)]
        jobs = [partial(points.tried, world, stage, str(i), part) for i, part in enumerate(parts)]
        found.tried[stage] = list(_all(pool, jobs, f"{stage}: fail points"))
    # The stages take turns, so that a few of them are of all stages too.
    kinds = [(kind, STAGES[(i + j) % 3]) for i, kind in enumerate(troubles.kinds()) for j in range(3)]
    every = [partial(kind, world, stage, 100 * args.seed + n) for n, (kind, stage) in enumerate(kinds)]
    share = len(every) / min(args.troubles or len(every), len(every))
    chosen = [every[int(i * share)] for i in range(int(len(every) / share + 1e-9))]
    found.troubles = list(_all(pool, chosen, "troubles"))
    each = [min(3, args.chain_kills - done) for done in range(0, args.chain_kills, 3)]
    jobs = [partial(chain.chain_killed, world, args.chain_stages, args.seed + i, n) for i, n in enumerate(each)]
    found.chains = list(_all(pool, jobs, "rlhf run"))
    if args.planted:
        (found.planted,) = _all(pool, [partial(planted.all_seen, world)], "planted faults")
    return found


def _kills(pool: ProcessPoolExecutor, world: World, stage: str, wanted: int, seed: int) -> Iterator[Outcome]:
    """Runs until so many kills hit, or none of a round does."""
    hit, made, before = 0, 0, -1
    while before < hit < wanted:
        before, missing = hit, wanted - hit
        sizes = [min(A_RUN, missing - done) for done in range(0, missing, A_RUN)]
        jobs = [partial(kills.killed, world, stage, 10_000 * seed + made + i, n) for i, n in enumerate(sizes)]
        made += len(jobs)
        for outcome in _all(pool, jobs, f"{stage}: {hit} of {wanted} kills, runs"):
            hit += len(outcome.kills)
            yield outcome


def _all(pool: ProcessPoolExecutor, jobs: Iterable[Job], what: str) -> list[Any]:
    """What the jobs return, in their order; a line tells how far they are."""
    futures: list[Future[Any]] = [pool.submit(job) for job in jobs]
    left = set(futures)
    with Progress(what, len(futures), "run") as bar:
        while left:
            done, left = wait(left, return_when=FIRST_COMPLETED)
            bar.advance(len(done))
    return [future.result() for future in futures]


if __name__ == "__main__":
    sys.exit(main())
