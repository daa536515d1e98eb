"""The figure: what each system scores at which KL, and what the judge makes of it."""

import math
from pathlib import Path

from benchmarks.learning.curves import Curve, moving_means

OURS, TRL, BEST = "#1f5fa8", "#d1660a", "#444444"


def draw(
    ours: dict[int, Curve],
    trl: dict[int, Curve],
    best_of: list[dict],
    judged: dict[int, dict[str, dict[str, float]]],
    path: Path,
) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "rlhf"  # the same picture is the same file
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    for curves, color, label in ((ours, OURS, "rlhf"), (trl, TRL, "TRL 1.12")):
        for number, (seed, curve) in enumerate(sorted(curves.items())):
            points = moving_means(curve)
            kl, scores = [k for _, k in points], [score for score, _ in points]
            style = ("-", "--", ":", "-.")[number % 4]
            left.plot(kl, scores, style, color=color, linewidth=1.4, label=f"{label}, seed {seed}")
            left.plot(kl[-1], scores[-1], "o", color=color, markersize=4)
    bounds = [math.log(row["n"]) - (row["n"] - 1) / row["n"] for row in best_of]
    left.plot(bounds, [row["score"] for row in best_of], "s", color=BEST, markersize=4, label="SFT, best of n")
    for row, bound in zip(best_of, bounds, strict=True):
        if row["n"] in (1, 4, 32):
            left.annotate(f"n={row['n']}", (bound, row["score"]), (6, -3), textcoords="offset points", fontsize=8)
    for kl in (5, 10, 15):
        left.axvline(kl, color="#cccccc", linewidth=0.8, zorder=0)
    for number, (seed, points) in enumerate(sorted(judged.items())):
        rows = [points[name] for name in sorted(points)]
        style = "os^d"[number % 4]
        kl = [row["kl"] for row in rows]
        wins = [row["win"] for row in rows]
        errors = [[row["win"] - row["low"] for row in rows], [row["high"] - row["win"] for row in rows]]
        right.errorbar(kl, wins, errors, fmt=style, color=OURS, markersize=4, linewidth=1, label=f"rlhf, seed {seed}")
    right.axhline(0.92, color="#cccccc", linewidth=0.8, zorder=0)
    right.axvline(12, color="#cccccc", linewidth=0.8, zorder=0)
    left.set(xlabel="KL from SFT, nats a response", ylabel="score (reward model, less the EOS penalty)")
    left.set_title("Training: means over 5 updates, dot = end", fontsize=10)
    right.set(xlabel="KL from SFT, nats a response", ylabel="win rate over SFT", xlim=(0, None), ylim=(0.45, 1))
    right.set_title("The judge, on policies it was asked about (goal: 0.92 at 12)", fontsize=10)
    for axis in (left, right):
        axis.legend(fontsize=8, frameon=False, loc="lower right")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
