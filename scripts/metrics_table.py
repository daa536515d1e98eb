"""A Markdown table of a metrics.jsonl: first, last, least and greatest value of each metric, or its values at steps.

python scripts/metrics_table.py RUN/ppo/metrics.jsonl               (docs/tuning.md has these values)
python scripts/metrics_table.py RUN/ppo/metrics.jsonl 5 20 50
"""

import json
import sys
from pathlib import Path


def table(path: Path, steps: list[int]) -> list[list[str]]:
    """The head, and a row for each key that some line has; times are left out."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names = [name for name in dict.fromkeys(name for line in lines for name in line) if name != "step"]
    head = [f"step {step}" for step in steps] or ["first", "last", "min", "max"]
    found = [["metric", *head], ["---"] * (len(head) + 1)]
    for name in names:
        if not name.endswith(("_s", "_per_s")):
            values = {line["step"]: line[name] for line in lines if name in line}
            every = list(values.values())
            picked = [values.get(step) for step in steps] or [every[0], every[-1], min(every), max(every)]
            found.append([f"`{name}`", *("" if value is None else _short(value) for value in picked)])
    return found


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


if __name__ == "__main__":
    for cells in table(Path(sys.argv[1]), [int(step) for step in sys.argv[2:]]):
        print("| " + " | ".join(cells) + " |")
