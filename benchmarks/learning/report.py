"""The comparison as plain data, as Markdown, and as a figure."""

import math
from pathlib import Path
from typing import Any

from benchmarks.learning.curves import WINDOW, Curve, moving_means, paired, score_at
from benchmarks.learning.judge import Points, best_within

KLS, LIMIT = (5, 10, 15), 12  # KLs of the score comparison, KL limit of the judge's comparison
SYSTEMS = {"rlhf": "rlhf", "trl": "TRL 1.12"}
OURS, TRL, BEST = "#1f5fa8", "#d1660a", "#444444"


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


def summarize_judge(points: dict[int, Points]) -> dict[str, Any]:
    """Return for each seed the final policy, and the policy with the highest reward within the KL limit."""
    summary = {}
    for seed, judged in points.items():
        if judged:
            last, best = max(judged), best_within(judged, LIMIT)
            summary[str(seed)] = {
                "points": judged,
                "final": {"update": int(last)} | judged[last],
                "within": None if best is None else {"update": int(best)} | judged[best],
            }
    return summary


def kl_bound(n: int) -> float:
    """Return the upper bound of the KL of best of n from its source."""
    return math.log(n) - (n - 1) / n


def markdown(result: dict[str, Any]) -> str:
    """Return the tables of a comparison with `best_of` and `judged`."""
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
    judged = ["| judge | updates | win rate over SFT | P(positive) | reward | KL | length |", f"|{'---|' * 7}"]
    for seed, policies in result["judged"].items():
        for what, point in (("end", policies["final"]), (f"KL <= {LIMIT}", policies["within"])):
            if point is None:
                judged.append(f"| seed {seed}, {what} | none | | | | | |")
                continue
            win = f"{point['win']:.3f} [{point['low']:.3f}, {point['high']:.3f}]"
            rest = f"{point['positive']:.3f} | {point['reward']:.2f} | {point['kl']:.1f} | {point['length']:.1f}"
            judged.append(f"| seed {seed}, {what} | {point['update']} | {win} | {rest} |")
    return [lines for lines in (scores, notes, best_of, judged if result["judged"] else []) if lines]


def draw(
    ours: dict[int, Curve], trl: dict[int, Curve], best_of: list[dict], judged: dict[int, Points], path: Path
) -> None:
    """Draw the score over the KL of each system, and the judge's win rate over the KL."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "rlhf"  # makes the file reproducible
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    _draw_scores(left, ours, trl, best_of)
    _draw_win_rates(right, judged)
    for axis in (left, right):
        axis.legend(fontsize=8, frameon=False, loc="lower right")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _draw_scores(axis: Any, ours: dict[int, Curve], trl: dict[int, Curve], best_of: list[dict]) -> None:
    for curves, color, label in ((ours, OURS, "rlhf"), (trl, TRL, "TRL 1.12")):
        for number, (seed, curve) in enumerate(sorted(curves.items())):
            points = moving_means(curve)
            kl, scores = [k for _, k in points], [score for score, _ in points]
            style = ("-", "--", ":", "-.")[number % 4]
            axis.plot(kl, scores, style, color=color, linewidth=1.4, label=f"{label}, seed {seed}")
            axis.plot(kl[-1], scores[-1], "o", color=color, markersize=4)
    bounds = [kl_bound(row["n"]) for row in best_of]
    axis.plot(bounds, [row["score"] for row in best_of], "s", color=BEST, markersize=4, label="SFT, best of n")
    for row, bound in zip(best_of, bounds, strict=True):
        if row["n"] in (1, 4, 32):
            axis.annotate(f"n={row['n']}", (bound, row["score"]), (6, -3), textcoords="offset points", fontsize=8)
    for kl in KLS:
        axis.axvline(kl, color="#cccccc", linewidth=0.8, zorder=0)
    axis.set(xlabel="KL from SFT, nats per response", ylabel="score (reward model minus the EOS penalty)")
    axis.set_title("Training: means over 5 updates, dot = end", fontsize=10)


def _draw_win_rates(axis: Any, judged: dict[int, Points]) -> None:
    for number, (seed, points) in enumerate(sorted(judged.items())):
        rows = [points[name] for name in sorted(points)]
        kl, wins = [row["kl"] for row in rows], [row["win"] for row in rows]
        errors = [[row["win"] - row["low"] for row in rows], [row["high"] - row["win"] for row in rows]]
        style = {"fmt": "os^d"[number % 4], "color": OURS, "markersize": 4, "linewidth": 1}
        axis.errorbar(kl, wins, errors, label=f"rlhf, seed {seed}", **style)
    axis.axhline(0.92, color="#cccccc", linewidth=0.8, zorder=0)
    axis.axvline(LIMIT, color="#cccccc", linewidth=0.8, zorder=0)
    axis.set(xlabel="KL from SFT, nats per response", ylabel="win rate over SFT", xlim=(0, None), ylim=(0.45, 1))
    axis.set_title("Judge, on the evaluated policies (goal: 0.92 at 12)", fontsize=10)
