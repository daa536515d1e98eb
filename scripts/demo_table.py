"""A Markdown table of demo runs, and whether each meets the demo's guards. docs/results/demo.md has both tables.

python scripts/demo_table.py runs/demo-0 runs/demo-1 ...
python scripts/demo_table.py --frontier runs/demo-kl0         (of one run, its policies along the way)
"""

import json
import sys
from pathlib import Path

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


def row(run: Path) -> list[str]:
    """One run's figures, from its report and the reward stage's manifest."""
    report = json.loads((run / "eval/report.json").read_text(encoding="utf-8"))
    sft, ppo, rates = report["models"]["sft"], report["models"]["ppo"], report["win_rate"]
    gold, base = rates["ppo_vs_sft"]["gold"], rates["sft_vs_base"]["gold"]
    accuracy = report["reward_model"]["accuracy"]
    longer = ppo["response_length_mean"] / sft["response_length_mean"]
    guards = {
        "win rate": gold["value"] >= 0.75 and gold["ci95"][0] > 0.65,
        "SFT over base": base["value"] >= 0.75,
        "ended": min(sft["eos_fraction"], ppo["eos_fraction"]) >= 0.9,
        "reward accuracy": 0.70 <= accuracy <= 0.95,
        "KL": ppo["kl"] <= 20,
        "length": 0.5 <= longer <= 2,
        "distinct": ppo["distinct_fraction"] >= 0.5,
    }
    missed = [name for name, met in guards.items() if not met]
    return [
        run.name,
        f"{gold['value']:.3f} [{gold['ci95'][0]:.3f}, {gold['ci95'][1]:.3f}]",
        f"{sft['judges']['gold']['mean']:.3f} -> {ppo['judges']['gold']['mean']:.3f}",
        f"{ppo['kl']:.1f}",
        f"{sft['response_length_mean']:.1f} -> {ppo['response_length_mean']:.1f}",
        f"{ppo['eos_fraction']:.0%}",
        f"{ppo['distinct_fraction']:.0%}",
        f"{base['value']:.3f}",
        f"{accuracy:.3f}",
        "missed: " + ", ".join(missed) if missed else "all met",
    ]


def frontier(run: Path) -> list[list[str]]:
    """A row for each policy that the run's evaluation asked, the finished one last."""
    report = json.loads((run / "eval/report.json").read_text(encoding="utf-8"))
    rows = []
    for point in report["frontier"]:
        gold = point["judges"]["gold"]
        rows.append(
            [
                str(point["step"]),
                f"{point['reward']:.3f}",
                f"{gold['mean']:.3f} [{gold['ci95'][0]:.3f}, {gold['ci95'][1]:.3f}]",
                f"{point['kl']:.1f}",
                f"{point['win_rate']['gold']['value']:.3f}",
                f"{point['response_length_mean']:.1f}",
            ]
        )
    return rows


def show(head: list[str], rows: list[list[str]]) -> None:
    for cells in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(cells) + " |")


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--frontier"]:
        show(["update", "reward", "gold", "KL, nats", "PPO over SFT, gold", "tokens"], frontier(Path(arguments[1])))
    else:
        show(COLUMNS, [row(Path(folder)) for folder in arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
