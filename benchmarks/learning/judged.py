"""The independent judge of the shared folder, asked about folders of policies; answers are kept."""

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
    """The judge's lines by name: a policy at X/NAME/policy is called NAME."""
    found: Points = {}
    for line in text.splitlines():
        if match := LINE.match(line):
            name, *numbers = match.groups()
            found[name] = dict(zip(FIELDS, map(float, numbers), strict=True))
    return found


def ask(shared: Path, folder: Path, names: Sequence[str]) -> Points:
    """What the judge says of the policies folder/points/NAME/policy; kept line by line, so asked once."""
    kept = folder / "judged.json"
    found: Points = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    left = [str(folder / "points" / name / "policy") for name in names if name not in found]
    if left:
        command = [sys.executable, "-u", str(shared / "bench/judge.py"), str(shared), *left]
        with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            for line in process.stdout or ():
                if told := parse(line):
                    found |= told
                    kept.write_text(json.dumps(found, indent=1), encoding="utf-8")
        missing = [name for name in names if name not in found]
        if missing:
            raise RuntimeError(f"the judge said nothing of {folder}/points/{missing[0]}: {shlex.join(command)}")
    return found


def candidates(curve: Curve, saved: Sequence[str], kl: float) -> list[str]:
    """Saved points, highest training score first, that may be within `kl`: by training at most a fifth above it.

    A point after u updates is told by the mean of the five updates around u + 1, whose episodes it wrote.
    """
    told = {}
    for name in saved:
        around = curve[max(0, int(name) - 2) : int(name) + 3]
        told[name] = mean(score for score, _ in around), mean(k for _, k in around)
    near = [name for name in saved if told[name][1] <= 1.2 * kl]
    return sorted(near, key=lambda name: told[name][0], reverse=True)


def judge(shared: Path, folder: Path, curve: Curve, kl: float) -> Points:
    """The end of a run, and its candidates in turn until the judge finds one within `kl`."""
    saved = sorted(place.name for place in (folder / "points").iterdir() if place.name.isdigit())
    points = ask(shared, folder, saved[-1:])
    for name in candidates(curve, saved, kl):
        points = ask(shared, folder, [name])
        if points[name]["kl"] <= kl:
            break
    return points


def best_within(points: Points, kl: float) -> str | None:
    """Of the judged points whose KL is at most `kl`, the one with the highest reward."""
    within = [name for name, point in points.items() if point["kl"] <= kl]
    return max(within, key=lambda name: points[name]["reward"], default=None)
