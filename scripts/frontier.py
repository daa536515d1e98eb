"""How far PPO went and what that was worth: every snapshot of a run judged, as a table and a figure.

python scripts/frontier.py runs/reviews --judge critic --figure docs/reviews.svg

Each snapshot is evaluated like the finished policy, into RUN/frontier/step_N (what is there already is kept). The SFT
model's best of n, from RUN/eval, stands beside it at its KL bound.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlhf_cli import config


def evaluate(run: Path, step: str) -> dict[str, Any]:
    """The report of one snapshot, sampled as in PPO's training."""
    ppo, folder = config.load("ppo", run / "ppo/config.yaml").ppo, run / "frontier" / step
    settings = {
        "run": folder,
        "models.sft": run / "sft",
        "models.ppo": run / "ppo/snapshots" / step,
        "models.reward": run / "reward",
        "eval.temperature": ppo.temperature,
        "eval.response_length": ppo.max_response_length,
        "eval.modes": "[sampled]",
        "eval.best_of": "[]",
        "eval.require": "{}",
    }
    sets = [text for key, value in settings.items() for text in ("-s", f"{key}={value}")]
    command = [sys.executable, "-m", "rlhf_cli", "eval", "-c", str(run / "eval.yaml"), *sets]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return json.loads((folder / "eval/report.json").read_text(encoding="utf-8"))


def points(run: Path, judge: str) -> list[dict[str, Any]]:
    """{what, kl, reward, rate, ci95} of each snapshot, and of each best of n."""
    found = []
    for folder in sorted((run / "ppo/snapshots").glob("step_*")):
        report = evaluate(run, folder.name)
        rate, model = report["win_rate"]["ppo_vs_sft"][judge], report["models"]["ppo"]
        what = f"PPO, update {int(folder.name.removeprefix('step_'))}"
        found.append({"what": what, "kl": model["kl"], "reward": model["reward_mean"], **rate})
    for row in json.loads((run / "eval/report.json").read_text(encoding="utf-8")).get("best_of", []):
        rate = row["win_rate_vs_sft"][judge]
        found.append({"what": f"best of {row['n']}", "kl": row["kl_bound"], "reward": row["reward_mean"], **rate})
    return found


def draw(found: list[dict[str, Any]], judge: str, path: Path) -> None:
    """Reward and win rate over KL."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "rlhf"  # the same picture is the same file
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for kind, style in (("PPO", "o-"), ("best", "s--")):
        rows = sorted((row for row in found if row["what"].startswith(kind)), key=lambda row: row["kl"])
        kl, rates = [row["kl"] for row in rows], [row["value"] for row in rows]
        label = "PPO, along its updates" if kind == "PPO" else "SFT, best of n (KL: upper bound)"
        left.plot(kl, [row["reward"] for row in rows], style, label=label)
        errors = [[abs(row["ci95"][side] - row["value"]) for row in rows] for side in (0, 1)]
        right.errorbar(kl, rates, yerr=errors, fmt=style, capsize=3, label=label)
    left.set(xlabel="KL from SFT, nats an answer", ylabel="reward (SFT: 0 ± 1)", title="what PPO was trained on")
    right.set(xlabel="KL from SFT, nats an answer", ylabel="win rate over SFT", title=f"what the {judge} says")
    right.axhline(0.5, color="grey", linewidth=0.8)
    left.legend()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--judge", default="reward")
    parser.add_argument("--figure", type=Path)
    asked = parser.parse_args()
    found = points(asked.run, asked.judge)
    print(f"| | KL, nats | reward | win rate over SFT, {asked.judge} |\n|---|---|---|---|")
    for row in found:
        interval = f"{row['value']:.3f} [{row['ci95'][0]:.3f}, {row['ci95'][1]:.3f}]"
        bound = "<= " if row["what"].startswith("best") else ""
        print(f"| {row['what']} | {bound}{row['kl']:.2f} | {row['reward']:.3f} | {interval} |")
    if asked.figure:
        draw(found, asked.judge, asked.figure)


if __name__ == "__main__":
    main()
