"""The independent judge of the shared folder, asked about folders of policies; answers are kept."""

import json
import re
import subprocess
import sys
from pathlib import Path

NUMBER = r"(-?[\d.]+)"
LINE = re.compile(
    rf"^(\S+): P\(pos\) {NUMBER} win {NUMBER} \[{NUMBER}, {NUMBER}\] reward {NUMBER} KL {NUMBER} length {NUMBER}$"
)
FIELDS = ("positive", "win", "low", "high", "reward", "kl", "length")


def parse(text: str) -> dict[str, dict[str, float]]:
    """The judge's lines by name: a policy at X/NAME/policy is called NAME."""
    found = {}
    for line in text.splitlines():
        if match := LINE.match(line):
            name, *numbers = match.groups()
            found[name] = dict(zip(FIELDS, map(float, numbers), strict=True))
    return found


def judge(shared: Path, folder: Path) -> dict[str, dict[str, float]]:
    """What the judge says of each policy in `folder`/points, by the number of updates; asked once."""
    kept = folder / "judged.json"
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    left = [place / "policy" for place in sorted((folder / "points").glob("[0-9]*")) if place.name.isdigit()]
    left = [policy for policy in left if policy.parent.name not in found]
    if left:
        command = [sys.executable, str(shared / "bench/judge.py"), str(shared), *map(str, left)]
        found |= parse(subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout)
        kept.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return found


def best_within(points: dict[str, dict[str, float]], kl: float) -> str | None:
    """The saved point with the highest reward among those whose KL, by the judge's prompts, is at most `kl`."""
    within = [name for name, point in points.items() if point["kl"] <= kl]
    return max(within, key=lambda name: points[name]["reward"], default=None)
