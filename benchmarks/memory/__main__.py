"""Memory of our PPO with full models, adapters and a shared base, compared with TRL 1.12's LoRA PPO and `rlhf plan`.

    python -m benchmarks.memory --peer .peer/bin/python --out runs/bench-memory

`make bench-memory` creates the environment of TRL 1.12 first. Each case runs the command of a stage in its own process:
two updates (or steps) of eight short rows, float32, on a Llama with 91 M random weights. Weights, gradients and
optimizer state are counted on the live trainer. The peak is VmHWM minus the memory of the process after the same stage
with tiny sizes; on a GPU it is torch.cuda.max_memory_allocated (untested). Results in --out are reused unless --fresh
is given. Writes OUT/memory.json and memory.md (the tables).
"""

import argparse
import json
import platform
import shutil
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.memory import cases, tables
from benchmarks.memory.cases import CASES, LORA
from benchmarks.speed.processes import ResultCache, fail, run_module
from benchmarks.speed.report import markdown, show

# "returns": glibc returns freed memory immediately, so that a process only has the memory of its tensors
# (docs/scaling.md). "keeps": the default of glibc.
MALLOC: dict[str, dict[str, str]] = {
    "returns": {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    "keeps": {},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench-memory"))
    parser.add_argument("--peer", type=Path, default=Path(".peer/bin/python"), help="Python with TRL 1.12 (peer.txt)")
    parser.add_argument("--malloc", choices=MALLOC, default="returns", help="what glibc does with freed memory")
    parser.add_argument("--fresh", action="store_true", help="ignore the results in --out")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def measure_cases(cache: ResultCache, folder: Path, peer: Path, **how: Any) -> dict[str, Any]:
    """Return the result of every case and of TRL, each measured in its own process or taken from the cache."""
    big, small = folder / "big", folder / "small"
    results = {}
    for case in CASES:
        configs = [case.config(part).resolve() for part in (big, small)]
        run = partial(run_module, "benchmarks.memory.ours", case.stage, *configs, **how)
        results[case.name] = cache.get(case.name, run)
    jobs = cases.write_job(big, cases.BIG), cases.write_job(small, cases.SMALL)
    lora = str(LORA["r"]), str(LORA["lora_alpha"])
    run = partial(run_module, "benchmarks.memory.peer", *jobs, *lora, python=peer, **how)
    return results | {tables.PEER: cache.get(tables.PEER, run)}


def main() -> int:
    args = arguments()
    if not shutil.which(args.peer):
        return fail(f"{args.peer} is not a Python executable: `make bench-memory` creates the environment of TRL 1.12")
    folder = args.out / "world"
    if args.fresh:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(args.out / args.malloc, ignore_errors=True)
    cache = ResultCache(args.out / args.malloc)
    try:
        for name, size in (("big", cases.BIG), ("small", cases.SMALL)):
            cases.write(folder / name, size, CASES)
        results = measure_cases(cache, folder, args.peer.absolute(), threads=args.threads, **MALLOC[args.malloc])
    except RuntimeError as error:
        return fail(str(error))
    report = list(tables.tables(results, args.malloc))
    machine = {"machine": platform.machine(), "system": platform.system(), "python": platform.python_version()}
    memory = {"size": asdict(cases.BIG), "malloc": args.malloc, **machine, "code": cache.code, "bytes": results}
    (args.out / "memory.json").write_text(json.dumps(memory, indent=1), encoding="utf-8")
    (args.out / "memory.md").write_text(markdown(report), encoding="utf-8")
    show(report)
    cache.report_stale()
    return 0


if __name__ == "__main__":
    sys.exit(main())
