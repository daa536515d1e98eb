"""Memory of our PPO with whole models, adapters and one base, beside TRL 1.12's LoRA PPO and beside `rlhf plan`.

    python -m benchmarks.memory --peer .peer/bin/python --out runs/bench-memory

`make bench-memory` makes the peer's environment first. Every case is a process of its own, the command of a stage from
its start to its end: two updates (or steps) of eight short rows, float32, on a Llama of 91 M random weights that is
made here. Weights, gradients and optimizer state are counted on the live trainer; the peak is VmHWM above what the
process held once the same stage had run on next to nothing. On a GPU it is torch.cuda.max_memory_allocated, which has
not been tried. What is in --out is not measured again without --fresh. Writes OUT/memory.json and memory.md (tables).
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

from benchmarks.memory import tables, world
from benchmarks.memory.world import LORA, Case
from benchmarks.speed.children import ask
from benchmarks.speed.kept import Kept, refuse
from benchmarks.speed.tables import markdown, show

CASES = [*world.STAGES, *world.PPO]
# glibc then gives back at once what is freed, and a process holds what its tensors take (docs/scaling.md).
RETURNS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
MALLOC: dict[str, dict[str, str]] = {"returns": RETURNS, "keeps": {}}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench-memory"))
    parser.add_argument("--peer", type=Path, default=Path(".peer/bin/python"), help="the peer's Python, of peer.txt")
    parser.add_argument("--malloc", choices=MALLOC, default="returns", help="what glibc does with what is freed")
    parser.add_argument("--fresh", action="store_true", help="measure again what is there")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def measured(kept: Kept, folder: Path, peer: Path, **how: Any) -> dict[str, Any]:
    """Every case of ours and the peer's, each in a process of its own, or as it was found before."""
    big, small = folder / "big", folder / "small"
    found = {case.name: kept.get(case.name, partial(_ours, case, big, small, how)) for case in CASES}
    jobs = world.job(big, world.BIG), world.job(small, world.SMALL)
    scale = str(LORA["r"]), str(LORA["lora_alpha"])
    asked = partial(ask, "benchmarks.memory.peer", *jobs, *scale, python=peer, **how)
    return found | {tables.PEER: kept.get(tables.PEER, asked)}


def _ours(case: Case, big: Path, small: Path, how: dict[str, Any]) -> Any:
    paths = [case.config(part).resolve() for part in (big, small)]
    return ask("benchmarks.memory.ours", case.stage, *paths, **how)


def main() -> int:
    args = arguments()
    if not shutil.which(args.peer):
        return refuse(f"{args.peer} is no Python: `make bench-memory` makes the peer's environment")
    folder = args.out / "world"
    if args.fresh:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(args.out / args.malloc, ignore_errors=True)
    kept = Kept(args.out / args.malloc)
    try:
        for name, size in (("big", world.BIG), ("small", world.SMALL)):
            world.write(folder / name, size, CASES)
        parts = measured(kept, folder, args.peer.absolute(), threads=args.threads, **MALLOC[args.malloc])
    except RuntimeError as error:
        return refuse(str(error))
    made = list(tables.tables(parts, args.malloc))
    machine = {"machine": platform.machine(), "system": platform.system(), "python": platform.python_version()}
    result = {"size": asdict(world.BIG), "malloc": args.malloc, **machine, "code": kept.code, "bytes": parts}
    (args.out / "memory.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    (args.out / "memory.md").write_text(markdown(made), encoding="utf-8")
    show(made)
    kept.tell_stale()
    return 0


if __name__ == "__main__":
    sys.exit(main())
