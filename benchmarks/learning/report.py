"""The comparison as plain data, as Markdown, and as a figure."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.curves import GAIN_EVERY, WINDOW, Curve, gains, moving_means, paired, score_at
from benchmarks.learning.heldout import paths

KLS, MAX_KL = (5, 10, 15), 16  # KLs of the score comparison, end of the figure's axis
UPDATE = 64  # episodes, also of TRL's recorded runs
SYSTEMS = {"rlhf": "rlhf", "trl": "TRL 1.12"}
COLORS = ("#1f5fa8", "#2a8c4a", "#8a3fa0", "#b08000")  # of the recipes
TRL, BEST = "#d1660a", "#444444"


def summarize(curve: Curve, sft_score: float) -> dict[str, Any]:
    """Return the scores of a curve at the KLs and at its end, and its gains over SFT."""
    at = {kl: score_at(curve, kl) for kl in KLS}
    score, kl = moving_means(curve)[-1]
    return {
        "at": {str(kl): {"score": point.score, "reached": point.reached} for kl, point in at.items()},
        "end": {"score": score, "kl": kl},
        "gains": gains(curve, sft_score),
    }


def compare(ours: dict[int, Curve], trl: dict[int, Curve], best_of: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of each curve, ours - TRL's at each KL over the common seeds, and `best_of`."""
    seeds = sorted(set(ours) & set(trl))
    curves = {
        name: {str(seed): summarize(curve, best_of[0]["score"]) for seed, curve in sorted(system.items())}
        for name, system in (("rlhf", ours), ("trl", trl))
    }
    differences = {}
    for kl in map(str, KLS):
        if seeds:
            pair = [[curves[name][str(seed)]["at"][kl]["score"] for seed in seeds] for name in ("rlhf", "trl")]
            differences[kl] = paired(*pair)._asdict() | {"seeds": seeds}
    return {"window": WINDOW, "curves": curves, "ours_minus_trl": differences, "best_of": best_of}


def kl_bound(n: int) -> float:
    """Return the upper bound of the KL of best of n from its source."""
    return math.log(n) - (n - 1) / n


def markdown(result: dict[str, Any]) -> str:
    """Return the tables of a comparison."""
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
    longest = max(len(curve["gains"]) for system in result["curves"].values() for curve in system.values())
    columns = " | ".join(f"{UPDATE * GAIN_EVERY * number} episodes" for number in range(1, longest + 1))
    gain = [f"| gain over SFT / root of KL | {columns} |", "|---" * (longest + 1) + "|"]
    for name, label in SYSTEMS.items():
        for seed, curve in result["curves"][name].items():
            cells = [f"{value:.2f}" for value in curve["gains"]] + [""] * (longest - len(curve["gains"]))
            gain.append(f"| {label}, seed {seed} | {' | '.join(cells)} |")
    best_of = ["| SFT, best of n | score | KL, at most |", "|---|---|---|"]
    best_of += [f"| {best['n']} | {best['score']:.2f} | {kl_bound(best['n']):.2f} |" for best in result["best_of"]]
    return [lines for lines in (scores, notes, gain, best_of) if lines]


def draw(lines: Sequence[dict[str, Any]], trl: dict[int, Curve], best_of: list[dict], path: Path) -> None:
    """Draw score and judge's win rate over KL: the held-out `lines`, TRL's training and SFT's best of n."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "rlhf"  # makes the file reproducible
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    for axis, key in ((left, "score"), (right, "judge")):
        _draw_paths(axis, paths(lines), key)
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


def _draw_paths(axis: Any, by_policy: dict[tuple[str, str, str], list[dict[str, Any]]], key: str) -> None:
    """Draw a line for each seed's policies, dashed for averages, and a thick one for the mean of the seeds."""
    recipes = sorted({recipe for recipe, *_ in by_policy})
    labelled = set()
    for (recipe, weights, seeds), path in by_policy.items():
        name = recipe + ", average" * (weights == "average") + ", mean of seeds" * (" " in seeds)
        axis.plot(
            [line["kl"] for line in path],
            [line[key] for line in path],
            linestyle="--" if weights == "average" else "-",
            linewidth=2.4 if " " in seeds else 1.0,
            color=COLORS[recipes.index(recipe) % len(COLORS)],
            label=None if name in labelled else name,
        )
        labelled.add(name)
