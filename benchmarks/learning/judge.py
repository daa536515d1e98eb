"""Win rates of saved policies by the independent judge of the shared folder; results are cached."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from benchmarks.learning.curves import Curve

NUMBER = r"(-?[\d.]+)"
LINE = re.compile(
    rf"^(\S+): P\(pos\) {NUMBER} win {NUMBER} \[{NUMBER}, {NUMBER}\] reward {NUMBER} KL {NUMBER} length {NUMBER}$"
)
FIELDS = ("positive", "win", "low", "high", "reward", "kl", "length")

Points = dict[str, dict[str, float]]


def parse(text: str) -> Points:
    """Return the judge's results by name: NAME for a policy in X/NAME/policy."""
    points: Points = {}
    for line in text.splitlines():
        if match := LINE.match(line):
            name, *numbers = match.groups()
            points[name] = dict(zip(FIELDS, map(float, numbers), strict=True))
    return points


def evaluate(shared: Path, folder: Path, names: Sequence[str]) -> Points:
    """Run the judge on the policies folder/points/NAME/policy, and cache each result in folder/judged.json.

    Returns all cached results. Raises RuntimeError if the judge prints no result for a policy.
    """
    cache = folder / "judged.json"
    points: Points = json.loads(cache.read_text(encoding="utf-8")) if cache.exists() else {}
    policies = [str(folder / "points" / name / "policy") for name in names if name not in points]
    if policies:
        command = [sys.executable, "-u", str(shared / "bench/judge.py"), str(shared), *policies]
        with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            for line in process.stdout or ():
                if result := parse(line):
                    points |= result
                    cache.write_text(json.dumps(points, indent=1), encoding="utf-8")
        if missing := [name for name in names if name not in points]:
            raise RuntimeError(f"no result of the judge for {folder}/points/{missing[0]}: {shlex.join(command)}")
    return points


def candidates(curve: Curve, saved: Sequence[str], kl: float) -> list[str]:
    """Return the saved policies whose KL in training is at most 1.2 `kl`, highest training score first.

    Score and KL of a policy after u updates are means of the five updates around u + 1, whose episodes it generated.
    """
    means = {}
    for name in saved:
        around = curve[max(0, int(name) - 2) : int(name) + 3]
        means[name] = mean(score for score, _ in around), mean(k for _, k in around)
    near = [name for name in saved if means[name][1] <= 1.2 * kl]
    return sorted(near, key=lambda name: means[name][0], reverse=True)


def evaluate_run(shared: Path, folder: Path, curve: Curve, kl: float) -> Points:
    """Evaluate the final policy, then the candidates until one has at most `kl`."""
    saved = sorted(place.name for place in (folder / "points").iterdir() if place.name.isdigit())
    points = evaluate(shared, folder, saved[-1:])
    for name in candidates(curve, saved, kl):
        points = evaluate(shared, folder, [name])
        if points[name]["kl"] <= kl:
            break
    return points


def best_within(points: Points, kl: float) -> str | None:
    """Return the policy with the highest reward among those whose KL is at most `kl`."""
    within = [name for name, point in points.items() if point["kl"] <= kl]
    return max(within, key=lambda name: points[name]["reward"], default=None)
