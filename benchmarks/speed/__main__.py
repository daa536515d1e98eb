"""Speed and memory of our PPO, compared with TRL 1.12's and with the minimum arithmetic of an update.

    python -m benchmarks.speed --shared ../shared --peer .peer/bin/python --out runs/bench

`make bench` creates the environment of TRL 1.12 first. Each part runs in its own process on one thread, and is measured
in CPU seconds. Results in --out are reused unless --fresh is given. Parts: ragged (64 prompts per update, the first 3
to 12 words of a review, up to 64 new tokens, 4 epochs) and dense (the same without a stop token), both systems in turn;
padding; growth; start; demo. Without the developers' shared folder, --pos and --neg name two files of sentences, and
two models are trained from them first, once. Writes OUT/bench.json, bench.md (the tables) and bench.svg.
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

from benchmarks.speed import cli_time, reference, report, workload
from benchmarks.speed.goals import verdicts
from benchmarks.speed.processes import ResultCache, fail, run_module
from benchmarks.speed.workload import Job

COMPARED = ("ragged", "dense")  # measured for both systems
PARTS = (*COMPARED, "padding", "growth", "start", "demo")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="the developers' shared folder")
    parser.add_argument("--pos", type=Path, metavar="FILE", help="good reviews, one per line, to train the two models")
    parser.add_argument("--neg", type=Path, metavar="FILE", help="bad reviews, one per line")
    parser.add_argument("--peer", type=Path, default=Path(".peer/bin/python"), help="Python with TRL 1.12 (peer.txt)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--fresh", action="store_true", help="ignore the results in --out")
    parser.add_argument("--rounds", type=int, default=2, help="processes per system, in turn")
    parser.add_argument("--updates", type=int, default=5, help="per process; the first is a warm-up")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of our `ppo:`")
    return parser.parse_args()


def result_names(part: str, rounds: int) -> list[str]:
    """Return the names of a part in the cache."""
    return [part] if part not in COMPARED else [f"{part}/{side}-{n}" for side in report.SYSTEMS for n in range(rounds)]


def measure_both(cache: ResultCache, job: Job, name: str, peer: Path, rounds: int) -> dict[str, list[Any]]:
    """Measure both systems in turn. Each round has its own seed and prompts, the same for both systems."""
    results: dict[str, list[Any]] = {"ours": [], "peer": []}
    for number in range(rounds):
        file = cache.folder / name / f"job-{number}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        replace(job, dense=name == "dense", seed=number, first=number * job.updates * job.batch).write(file)
        for system, python in (("ours", Path(sys.executable)), ("peer", peer)):
            run = partial(run_module, f"benchmarks.speed.{system}", file.resolve(), python=python, threads=job.threads)
            results[system].append(cache.get(f"{name}/{system}-{number}", run))
    return results


def measure_parts(cache: ResultCache, args: argparse.Namespace, job: Job) -> dict[str, Any]:
    """Return the requested parts and those in the cache."""
    synthetic = partial(run_module, "benchmarks.speed.synthetic", "--threads", str(args.threads), job.sft)
    measures = {
        "padding": partial(synthetic, "padding"),
        "growth": partial(synthetic, "growth"),
        "start": cli_time.measure_help,
        "demo": partial(cli_time.measure_chain, cache.folder / "demo", threads=args.threads),
    }
    parts: dict[str, Any] = {}
    for name in PARTS:
        if name not in args.only and not cache.has(result_names(name, args.rounds)):
            continue
        if name in COMPARED:
            parts[name] = measure_both(cache, job, name, args.peer.absolute(), args.rounds)
        else:
            parts[name] = cache.get(name, measures[name])
    return parts


def prepare(args: argparse.Namespace) -> Job | str:
    """Write the prompts and return the job, or return the text of an error."""
    models = workload.Reference.shared(args.shared)
    if models.missing():
        if not (args.pos and args.neg):
            return f"{models.missing()} is missing: pass --shared FOLDER, or --pos FILE and --neg FILE (sentences)"
        if missing := next((path for path in (args.pos, args.neg) if not path.is_file()), None):
            return f"{missing} is not a file"
        models = reference.train(args.pos, args.neg, args.out / "reference", args.threads)
    if set(COMPARED) & set(args.only) and not shutil.which(args.peer):
        return f"{args.peer} is not a Python executable: `make bench` creates the environment of TRL 1.12"
    settings = {key: yaml.safe_load(value) for key, value in (text.split("=", 1) for text in args.set)}
    args.out.mkdir(parents=True, exist_ok=True)
    prompts = (args.out / "prompts.json").resolve()
    paths = str(models.sft.resolve()), str(models.reward.resolve())
    job = Job(*paths, str(prompts), updates=args.updates, threads=args.threads, settings=settings)
    if not prompts.exists():
        workload.write_prompts(models, prompts)
    previous = args.out / "job.json"
    replaces_all = args.fresh and set(args.only) == set(PARTS)
    if previous.exists() and not replaces_all and Job.read(previous) != job:
        return f"{args.out} contains results of a different job: pass another --out, or --fresh for all parts"
    job.write(previous)
    return job


def main() -> int:
    args = arguments()
    job = prepare(args)
    if isinstance(job, str):
        return fail(job)
    cache = ResultCache(args.out)
    for part in args.only if args.fresh else ():
        cache.drop(part)
    try:
        parts = measure_parts(cache, args, job)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        return fail(str(error))
    tables = list(report.tables(parts))
    goals = [{**asdict(goal), "holds": goal.holds} for goal in verdicts(parts)]
    machine = {"machine": platform.machine(), "system": platform.system(), "python": platform.python_version()}
    result = {"job": asdict(job), **machine, "code": cache.code, "stale": sorted(cache.stale), "goals": goals, **parts}
    (args.out / "bench.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    (args.out / "bench.md").write_text(report.markdown(tables), encoding="utf-8")
    if {*COMPARED, "padding", "growth"} & set(parts):
        report.draw(parts, args.out / "bench.svg")
    report.show(tables)
    cache.report_stale()
    return 0


if __name__ == "__main__":
    sys.exit(main())
