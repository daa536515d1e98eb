"""Print a Markdown table of demo runs and of the demo's goals, of the snapshots of one run, or of judge and KL of all
policies of runs (docs/results/demo.md, docs/results/reviews.md).

python scripts/demo_table.py runs/demo-0 runs/demo-1 ...
python scripts/demo_table.py --frontier runs/demo-kl0
python scripts/demo_table.py --policies gold 2 4 6 runs/demo-0 ...     # PPO's mean of judge gold at 2, 4 and 6 nats
"""

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from rlhf_cli.runs.report import FrontierPoint, PolicyScores, read_report

COLUMNS = [
    "run",
    "PPO over SFT, gold",
    "gold SFT -> PPO",
    "KL",
    "tokens",
    "ended",
    "distinct",
    "SFT over base",
    "reward acc.",
    "guards",
]
POLICIES = {"sft": "SFT", "ppo": "PPO", "best_of": "best-of-n SFT", "dpo": "DPO"}
FRONTIER_COLUMNS = ["update", "reward", "gold", "KL, nats", "PPO over SFT, gold", "tokens"]


def run_row(run: Path) -> list[str]:
    """Return the results of a run, and the goals that it misses."""
    report = read_report(run / "eval")
    sft, ppo = report.models["sft"], report.models["ppo"]
    gold = report.ppo_over_sft["gold"]
    base = report.win_rate["sft_vs_base"]["gold"]
    accuracy = report.reward_model.accuracy
    length_ratio = ppo.response_length_mean / sft.response_length_mean
    goals = {
        "win rate": gold.value >= 0.75 and gold.ci95[0] > 0.65,
        "SFT over base": base.value >= 0.75,
        "ended": min(sft.eos_fraction, ppo.eos_fraction) >= 0.9,
        "reward accuracy": 0.70 <= accuracy <= 0.95,
        "KL": ppo.kl <= 20,
        "length": 0.5 <= length_ratio <= 2,
        "distinct": ppo.distinct_fraction >= 0.5,
    }
    missed = [name for name, met in goals.items() if not met]
    return [
        run.name,
        f"{gold.value:.3f} [{gold.ci95[0]:.3f}, {gold.ci95[1]:.3f}]",
        f"{sft.judges['gold'].mean:.3f} -> {ppo.judges['gold'].mean:.3f}",
        f"{ppo.kl:.1f}",
        f"{sft.response_length_mean:.1f} -> {ppo.response_length_mean:.1f}",
        f"{ppo.eos_fraction:.0%}",
        f"{ppo.distinct_fraction:.0%}",
        f"{base.value:.3f}",
        f"{accuracy:.3f}",
        "missed: " + ", ".join(missed) if missed else "all met",
    ]


def frontier_row(point: FrontierPoint) -> list[str]:
    """Return the results of a snapshot in a run's evaluation."""
    gold = point.judges["gold"]
    return [
        str(point.step),
        f"{point.reward_mean:.3f}",
        f"{gold.mean:.3f} [{gold.ci95[0]:.3f}, {gold.ci95[1]:.3f}]",
        f"{point.kl:.1f}",
        f"{point.win_rate['gold'].value:.3f}",
        f"{point.response_length_mean:.1f}",
    ]


def judge_at(path: list[tuple[float, float]], kl: float) -> str:
    """Return the mean where a path of (KL, mean) first has that KL, between its two policies by the root of KL."""
    for (low, before), (high, after) in pairwise(path):
        if low <= kl <= high:
            part = (kl**0.5 - low**0.5) / (high**0.5 - low**0.5)
            return f"{before + part * (after - before):.3f}"
    return "-"


def policies_row(run: Path, judge: str, kls: list[float]) -> list[str]:
    """Return a judge's mean of PPO's snapshots and of policies between SFT and PPO at each KL, then other policies."""
    report = read_report(run / "eval")
    models = report.models
    start = (0.0, models["sft"].judges[judge].mean)

    def path(points: Sequence[PolicyScores]) -> list[tuple[float, float]]:
        return [start, *((max(point.kl, 0.0), point.judges[judge].mean) for point in points)]

    shares = path([*(report.interpolated or []), models["ppo"]])
    paths = [path(report.frontier or []), shares if len(shares) > 2 else []]
    points = [(name, models[key]) for key, name in POLICIES.items() if key in models]
    return [
        run.name,
        *(" / ".join(judge_at(path, kl) for path in paths if path) for kl in kls),
        "; ".join(f"{name} {point.judges[judge].mean:.3f} at {point.kl:.1f}" for name, point in points),
    ]


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--policies"]:
        judge, rest = arguments[1], arguments[2:]
        kls = [float(text) for text in rest if text.isdigit()]
        columns = ["run", *(f"PPO's snapshots / interpolated, {kl:g} nats" for kl in kls), "policies"]
        rows = [policies_row(Path(folder), judge, kls) for folder in rest if not folder.isdigit()]
    elif arguments[:1] == ["--frontier"]:
        columns = FRONTIER_COLUMNS
        rows = [frontier_row(point) for point in read_report(Path(arguments[1]) / "eval").frontier]
    else:
        columns, rows = COLUMNS, [run_row(Path(folder)) for folder in arguments]
    for cells in (columns, ["---"] * len(columns), *rows):
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
