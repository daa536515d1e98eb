"""The comparison as plain data, and as Markdown."""

import math
from typing import Any

from benchmarks.learning.curves import WINDOW, Curve, moving_means, paired, score_at
from benchmarks.learning.judged import best_within

KLS, LIMIT, GOAL = (5, 10, 15), 12, 0.92


def row(curve: Curve) -> dict[str, Any]:
    at = {kl: score_at(curve, kl) for kl in KLS}
    score, kl = moving_means(curve)[-1]
    return {
        "at": {str(kl): {"score": point.score, "reached": point.reached} for kl, point in at.items()},
        "end": {"score": score, "kl": kl},
    }


def compare(ours: dict[int, Curve], trl: dict[int, Curve]) -> dict[str, Any]:
    """Each curve's scores at the KLs, and ours - TRL's over the seeds that both have."""
    seeds = sorted(set(ours) & set(trl))
    curves = {
        name: {str(seed): row(curve) for seed, curve in sorted(system.items())}
        for name, system in (("rlhf", ours), ("trl", trl))
    }
    differences = {}
    for kl in map(str, KLS):
        if seeds:
            pair = [[curves[name][str(seed)]["at"][kl]["score"] for seed in seeds] for name in ("rlhf", "trl")]
            differences[kl] = paired(*pair)._asdict() | {"seeds": seeds}
    return {"window": WINDOW, "curves": curves, "ours_minus_trl": differences}


def of_judge(points: dict[int, dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Per seed: the final policy, and the point of highest reward within the KL limit."""
    found = {}
    for seed, judged in points.items():
        if judged:
            last, best = max(judged), best_within(judged, LIMIT)
            found[str(seed)] = {
                "points": judged,
                "final": {"update": int(last)} | judged[last],
                "within": None if best is None else {"update": int(best)} | judged[best],
            }
    return found


def markdown(found: dict[str, Any]) -> str:
    lines = [
        "| | " + " | ".join(f"score at KL {kl}" for kl in KLS) + " | end: score | KL |",
        "|---|---|---|---|---|---|",
    ]
    for name, label in (("rlhf", "rlhf"), ("trl", "TRL 1.12")):
        for seed, curve in found["curves"][name].items():
            cells = [f"{at['score']:.2f}" + ("" if at["reached"] else "*") for at in curve["at"].values()]
            end = curve["end"]
            lines.append(f"| {label}, seed {seed} | {' | '.join(cells)} | {end['score']:.2f} | {end['kl']:.1f} |")
    pairs = found["ours_minus_trl"]
    if pairs:
        mean = [f"**{p['mean']:+.2f}** [{p['low']:+.2f}, {p['high']:+.2f}]" for p in pairs.values()]
        each = [", ".join(f"{d:+.2f}" for d in p["differences"]) for p in pairs.values()]
        lines.append(f"| rlhf - TRL, mean and 95 % interval | {' | '.join(mean)} | | |")
        lines.append(f"| each seed | {' | '.join(each)} | | |")
        n = len(next(iter(pairs.values()))["seeds"])
        lines += ["", f"The interval is the paired t interval over {n} seeds, {n - 1} degrees of freedom."]
    if "*" in "".join(lines[2:-3]).replace("**", ""):
        lines.append("\\* never at that KL: the curve's end (or start) on this side of it stands in.")
    lines += ["", "| SFT, best of n | score | KL, at most |", "|---|---|---|"]
    for best in found["best_of"]:
        bound = math.log(best["n"]) - (best["n"] - 1) / best["n"]
        lines.append(f"| {best['n']} | {best['score']:.2f} | {bound:.2f} |")
    if found["judged"]:
        lines += ["", "| judge | updates | win rate over SFT | P(positive) | reward | KL | length |"]
        lines.append("|---|---|---|---|---|---|---|")
        for seed, judged in found["judged"].items():
            for what, point in (("end", judged["final"]), (f"KL <= {LIMIT}", judged["within"])):
                if point is None:
                    lines.append(f"| seed {seed}, {what} | none | | | | | |")
                    continue
                win = f"{point['win']:.3f} [{point['low']:.3f}, {point['high']:.3f}]"
                rest = f"{point['positive']:.3f} | {point['reward']:.2f} | {point['kl']:.1f} | {point['length']:.1f}"
                lines.append(f"| seed {seed}, {what} | {point['update']} | {win} | {rest} |")
    return "\n".join(lines) + "\n"
