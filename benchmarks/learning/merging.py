"""Policies beyond the last one, averages of a run's snapshots, and means of several seeds, on held-out prompts.

    python -m benchmarks.learning --shared ../shared --recipe frontier --out DIR
    python -m benchmarks.learning.merging --shared ../shared --recipe frontier --out DIR --average 0.98

Of each seed, and of all together, SFT + share * (mean of the seeds' policies - SFT). The mean: Ramé et al. 2024 (WARP,
arXiv 2406.16768, section 3.2, with the mean in place of SLERP). Shares above 1: Zheng et al. 2024 (arXiv 2404.16792).
With --average a seed's policy is the average of its snapshots, as `ppo.average` has it of the policies of all updates.
About 16 CPU seconds a policy; DIR/RECIPE/merged.jsonl has a line for each, and an interrupted run resumes.
"""

import argparse
import copy
import json
import math
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from benchmarks.learning import curves, train
from benchmarks.learning.__main__ import progress
from benchmarks.learning.heldout import MAX_KL, TARGETS, best_judge, cells, evaluator, load_saved
from rlhf_cli.evaluation.limit import crossing
from rlhf_cli.ppo.optimizer import WeightAverage

SHARES = (0.6, 0.7, 0.85, 1.0, 1.1, 1.2, 1.3)  # beside 0, which is SFT

Line = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.learning.merging",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="the developers' shared folder")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-learning"), help="that of benchmarks.learning")
    parser.add_argument("--recipe", choices=train.RECIPES, default="frontier")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--update", type=int, default=120, help="the policies after this update (default: 120)")
    parser.add_argument("--average", type=float, help="decay an update of the average of the snapshots (default: none)")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def seed_policy(folder: Path, update: int, decay: float | None) -> Any:
    """Return a seed's policy after an update, or the average of its snapshots until then, by a decay an update."""
    points = folder / "points"
    policy = load_saved(points / f"{update:03d}" / "policy")
    if decay is None:
        return policy

    numbers = sorted(int(point.name) for point in points.iterdir() if point.name.isdigit())
    spacing = numbers[0]
    average = WeightAverage(policy, decay**spacing)
    for count, number in enumerate((number for number in numbers if number <= update), start=1):
        policy.load_state_dict(load_saved(points / f"{number:03d}" / "policy").state_dict())
        average.update(count)
    policy.load_state_dict(average.state_dict(), strict=False)  # tied weights are one
    return policy


@torch.no_grad()
def mean_policy(policies: Sequence[Any]) -> Any:
    """Return the first policy with the means of the policies' weights."""
    merged = policies[0]
    for weights in zip(*(policy.parameters() for policy in policies), strict=True):
        weights[0].copy_(torch.stack(weights).mean(0))
    return merged


def evaluate(args: argparse.Namespace, seeds: Sequence[int]) -> list[Line]:
    """Return the lines of SFT and of each share of the seeds' mean policy: `key_of` and score, kl, n, judge."""
    folder = args.out / args.recipe
    file = folder / "merged.jsonl"
    known = {key_of(line): line for line in curves.read_lines(file)}
    name = " ".join(map(str, seeds))

    policy = None
    lines = []
    for share in (0.0, *sorted(args.shares)):
        line = {"seeds": name, "update": args.update, "average": args.average, "share": share}
        if key_of(line) in known:
            lines.append(known[key_of(line)])
            continue

        progress(f"held out: seeds {name}, share {share:g}")
        if policy is None:
            policy = mean_policy([seed_policy(folder / f"seed-{seed}", args.update, args.average) for seed in seeds])
        result = evaluator(args.shared).line(copy.deepcopy(policy), share)
        line |= {key: round(value, 4) for key, value in result.items()}
        with file.open("a", encoding="utf-8") as output:
            output.write(json.dumps(line) + "\n")
        lines.append(line)
    return lines


def key_of(line: Line) -> tuple[Any, ...]:
    return tuple(line.get(key) for key in ("seeds", "update", "average", "share"))


def kl_for(lines: Sequence[Line], score: float) -> float | None:
    """Return the KL at which the line from SFT through the shares first has a score: the root of KL is interpolated."""
    root = np.sqrt([line["kl"] for line in lines])
    gaps = np.array([line["score"] - score for line in lines])
    kl = crossing(root, gaps)
    return None if math.isinf(kl) else kl


def table(lines: Sequence[Line]) -> list[str]:
    """Return a row for each group of seeds: the KL at each target score, and the best judge within MAX_KL."""
    targets = [f"KL for {score:g}" for score in TARGETS]
    rows = [f"| seeds | {' | '.join(targets)} | best judge within {MAX_KL:g} nats | share, score, KL |"]
    rows.append("|---" * (len(targets) + 3) + "|")
    for seeds, group in groupby(lines, key=lambda line: line["seeds"]):
        points = list(group)
        found = [kl_for(points, score) for score in TARGETS]
        each = "; ".join(f"{line['share']:g}: {line['score']:.2f}, {line['kl']:.2f}" for line in points)
        rows.append(f"| {seeds} | {' | '.join(cells((*found, best_judge(points))))} | {each} |")
    return rows


def main() -> int:
    args = arguments()
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    groups = [[seed] for seed in args.seeds]
    if len(args.seeds) > 1:
        groups.append(args.seeds)
    lines = [line for seeds in groups for line in evaluate(args, seeds)]
    progress("")
    print("\n".join(table(lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
