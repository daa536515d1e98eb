"""The comparison as plain data, as Markdown, and as a figure."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.curves import WINDOW, Curve, moving_means, paired, score_at

KLS, MAX_KL = (5, 10, 15), 16  # KLs of the score comparison, end of the figure's axis
SYSTEMS = {"rlhf": "rlhf", "trl": "TRL 1.12"}
COLORS = ("#1f5fa8", "#2a8c4a", "#8a3fa0", "#b08000")  # of the recipes
TRL, BEST = "#d1660a", "#444444"


def summarize(curve: Curve) -> dict[str, Any]:
    """Return the scores of a curve at the KLs and at its end."""
    at = {kl: score_at(curve, kl) for kl in KLS}
    score, kl = moving_means(curve)[-1]
    return {
        "at": {str(kl): {"score": point.score, "reached": point.reached} for kl, point in at.items()},
        "end": {"score": score, "kl": kl},
    }


def compare(ours: dict[int, Curve], trl: dict[int, Curve]) -> dict[str, Any]:
    """Return the summary of each curve, and ours - TRL's at each KL over the common seeds."""
    seeds = sorted(set(ours) & set(trl))
    curves = {
        name: {str(seed): summarize(curve) for seed, curve in sorted(system.items())}
        for name, system in (("rlhf", ours), ("trl", trl))
    }
    differences = {}
    for kl in map(str, KLS):
        if seeds:
            pair = [[curves[name][str(seed)]["at"][kl]["score"] for seed in seeds] for name in ("rlhf", "trl")]
            differences[kl] = paired(*pair)._asdict() | {"seeds": seeds}
    return {"window": WINDOW, "curves": curves, "ours_minus_trl": differences}


def kl_bound(n: int) -> float:
    """Return the upper bound of the KL of best of n from its source."""
    return math.log(n) - (n - 1) / n


def markdown(result: dict[str, Any]) -> str:
    """Return the tables of a comparison with `best_of`."""
    return "\n\n".join(["\n".join(lines) for lines in _tables(result)]) + "\n"


def _tables(result: dict[str, Any]) -> list[list[str]]:
    columns = " | ".join(f"score at KL {kl}" for kl in KLS)
    scores = [f"| | {columns} | end: score | KL |", "|---|---|---|---|---|---|"]
    all_reached = True
    for name, label in SYSTEMS.items():
        for seed, curve in result["curves"][name].items():
            cells = [f"{at['score']:.2f}" + ("" if at["reached"] else "*") for at in curve["at"].values()]
            all_reached = all_reached and all(at["reached"] for at in curve["at"].values())
            end = curve["end"]
            scores.append(f"| {label}, seed {seed} | {' | '.join(cells)} | {end['score']:.2f} | {end['kl']:.1f} |")
    notes = []
    if pairs := result["ours_minus_trl"]:
        mean = [f"**{p['mean']:+.2f}** [{p['low']:+.2f}, {p['high']:+.2f}]" for p in pairs.values()]
        each = [", ".join(f"{d:+.2f}" for d in p["differences"]) for p in pairs.values()]
        scores.append(f"| rlhf - TRL, mean and 95 % interval | {' | '.join(mean)} | | |")
        scores.append(f"| each seed | {' | '.join(each)} | | |")
        n = len(next(iter(pairs.values()))["seeds"])
        notes.append(f"The interval is the paired t interval over {n} seeds, {n - 1} degrees of freedom.")
    if not all_reached:
        notes.append("\\* never at that KL: the end (or start) of the curve is used instead.")
    best_of = ["| SFT, best of n | score | KL, at most |", "|---|---|---|"]
    best_of += [f"| {best['n']} | {best['score']:.2f} | {kl_bound(best['n']):.2f} |" for best in result["best_of"]]
    return [lines for lines in (scores, notes, best_of) if lines]


def draw(lines: Sequence[dict[str, Any]], trl: dict[int, Curve], best_of: list[dict], path: Path) -> None:
    """Draw score and judge's win rate over the KL of the held-out `lines` of each recipe."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "rlhf"  # makes the file reproducible
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    for axis, key in ((left, "score"), (right, "judge")):
        for color, recipe in zip(COLORS, sorted({line["recipe"] for line in lines}), strict=False):
            _draw_recipe(axis, [line for line in lines if line["recipe"] == recipe], key, color)
        axis.set(xlabel="KL from SFT, nats per response", xlim=(0, MAX_KL))
    for number, (_, curve) in enumerate(sorted(trl.items())):
        scores, kls = zip(*moving_means(curve), strict=True)
        left.plot(kls, scores, color=TRL, linewidth=1, label=None if number else "TRL 1.12, training")
    bounds = [kl_bound(row["n"]) for row in best_of]
    left.plot(bounds, [row["score"] for row in best_of], "s", color=BEST, markersize=4, label="SFT, best of n")
    left.set(ylabel="score (reward model minus the EOS penalty)")
    right.set(ylabel="judge's win rate over SFT")
    for axis in (left, right):
        axis.legend(fontsize=8, frameon=False, loc="lower right")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _draw_recipe(axis: Any, lines: Sequence[dict[str, Any]], key: str, color: str) -> None:
    """Draw the saved policies of each seed, averaged if they are, and dashed those between the last one and SFT."""
    for number, seed in enumerate(sorted({line["seed"] for line in lines})):
        of_seed = [line for line in lines if line["seed"] == seed]
        last = max(line["episodes"] for line in of_seed)
        weights = max(line.get("weights", "") for line in of_seed)
        trained = [line for line in of_seed if "share" not in line and line.get("weights", "") == weights]
        between = [line for line in of_seed if "share" in line and line["episodes"] == last]
        recipe, label = lines[0]["recipe"], not number
        for points, style, name in ((trained, "o-", recipe), (between, "--", f"{recipe}, interpolated")):
            points = sorted(points, key=lambda line: line.get("share", line["episodes"]))
            kls, values = [line["kl"] for line in points], [line[key] for line in points]
            axis.plot(kls, values, style, color=color, markersize=3, linewidth=1.2, label=name if label else None)
