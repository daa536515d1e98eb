"""Speed and memory of our PPO, beside TRL 1.12's and against the arithmetic that it cannot avoid.

    python -m benchmarks.speed --shared ../shared --peer .peer/bin/python --out runs/bench

`make bench` makes the peer's environment first. Every part is a process of its own, on one thread, counted in CPU
seconds; what is in --out is not measured again without --fresh. Parts: ragged (64 prompts an update, the first 3 to 12
words of a review, up to 64 new tokens, 4 epochs) and dense (the same without a stop token), ours and the peer's in
turn; padding; growth; start; demo. Without the developers' shared folder, --pos and --neg name two files of sentences,
and two models are trained from them first, once. Writes OUT/bench.json, bench.md (the tables) and bench.svg.
"""

import argparse
import json
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.speed import demo, figure, reference, start, tables, workload
from benchmarks.speed.children import ask
from benchmarks.speed.goals import verdicts
from benchmarks.speed.job import Job
from benchmarks.speed.kept import Kept, refuse
from benchmarks.speed.tables import SYSTEMS

SIDES = ("ragged", "dense")  # measured beside the peer
PARTS = (*SIDES, "padding", "growth", "start", "demo")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="the developers' shared folder")
    parser.add_argument("--pos", type=Path, metavar="FILE", help="good reviews, one a line, for models of your own")
    parser.add_argument("--neg", type=Path, metavar="FILE", help="bad reviews, one a line")
    parser.add_argument("--peer", type=Path, default=Path(".peer/bin/python"), help="the peer's Python, of peer.txt")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--fresh", action="store_true", help="measure again what is there")
    parser.add_argument("--rounds", type=int, default=2, help="of ours and the peer's in turn")
    parser.add_argument("--updates", type=int, default=5, help="in each process; the first one is not counted")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of our `ppo:`")
    return parser.parse_args()


def files(part: str, rounds: int) -> list[str]:
    """The names that the results of a part are kept by."""
    return [part] if part not in SIDES else [f"{part}/{side}-{n}" for side in SYSTEMS for n in range(rounds)]


def sides(kept: Kept, job: Job, name: str, peer: Path, rounds: int) -> dict[str, list[Any]]:
    """Our process and the peer's in turn: each round with seeds and prompts of its own, the same for both."""
    found: dict[str, list[Any]] = {"ours": [], "peer": []}
    for number in range(rounds):
        file = kept.folder / name / f"job-{number}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        replace(job, dense=name == "dense", seed=number, first=number * job.updates * job.batch).write(file)
        for system, python in (("ours", Path(sys.executable)), ("peer", peer)):
            measure = partial(ask, f"benchmarks.speed.{system}", file.resolve(), python=python, threads=job.threads)
            found[system].append(kept.get(f"{name}/{system}-{number}", measure))
    return found


def measured(kept: Kept, args: argparse.Namespace, job: Job) -> dict[str, Any]:
    """The parts that were asked for, and those that are there."""
    synthetic = partial(ask, "benchmarks.speed.synthetic", "--threads", str(args.threads), job.sft)
    alone = {
        "padding": partial(synthetic, "padding"),
        "growth": partial(synthetic, "growth"),
        "start": start.measure,
        "demo": partial(demo.measure, kept.folder / "demo", threads=args.threads),
    }
    found: dict[str, Any] = {}
    for name in PARTS:
        if name in args.only or kept.has(files(name, args.rounds)):
            pair = partial(sides, kept, job, name, args.peer.absolute(), args.rounds)
            found[name] = pair() if name in SIDES else kept.get(name, alone[name])
    return found


def prepared(args: argparse.Namespace) -> Job | str:
    """The job, its prompts written; or what is missing."""
    given = workload.Reference.shared(args.shared)
    if given.missing():
        if not (args.pos and args.neg):
            return f"{given.missing()} is missing: say --shared FOLDER, or --pos FILE and --neg FILE (sentences)"
        if lost := next((path for path in (args.pos, args.neg) if not path.is_file()), None):
            return f"{lost} is no file"
        given = reference.train(args.pos, args.neg, args.out / "reference", args.threads)
    if set(SIDES) & set(args.only) and not shutil.which(args.peer):
        return f"{args.peer} is no Python: `make bench` makes the peer's environment"
    settings = {key: yaml.safe_load(value) for key, value in (text.split("=", 1) for text in args.set)}
    args.out.mkdir(parents=True, exist_ok=True)
    prompts = (args.out / "prompts.json").resolve()
    models = str(given.sft.resolve()), str(given.reward.resolve())
    job = Job(*models, str(prompts), updates=args.updates, threads=args.threads, settings=settings)
    if not prompts.exists():
        workload.write_prompts(given, prompts)
    kept = args.out / "job.json"
    anew = args.fresh and set(args.only) == set(PARTS)
    if kept.exists() and not anew and Job.read(kept) != job:
        return f"{args.out} has measurements of another job: give another --out, or --fresh for all parts"
    job.write(kept)
    return job


def main() -> int:
    args = arguments()
    job = prepared(args)
    if isinstance(job, str):
        return refuse(job)
    kept = Kept(args.out)
    for part in args.only if args.fresh else ():
        kept.drop(part)
    try:
        parts = measured(kept, args, job)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        return refuse(str(error))
    made = list(tables.tables(parts))
    judged = [{**asdict(one), "holds": one.holds} for one in verdicts(parts)]
    machine = {"machine": platform.machine(), "system": platform.system(), "python": platform.python_version()}
    result = {"job": asdict(job), **machine, "code": kept.code, "stale": sorted(kept.stale), "goals": judged, **parts}
    (args.out / "bench.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    (args.out / "bench.md").write_text(tables.markdown(made), encoding="utf-8")
    if {*SIDES, "padding", "growth"} & set(parts):
        figure.draw(parts, args.out / "bench.svg")
    tables.show(made)
    kept.tell_stale()
    return 0


if __name__ == "__main__":
    sys.exit(main())
