"""Print a Markdown table of a metrics.jsonl: first, last, minimum and maximum of each metric, or its values at steps.

python scripts/metrics_table.py RUN/ppo/metrics.jsonl
python scripts/metrics_table.py RUN/ppo/metrics.jsonl 5 20 50
"""

import json
import sys
from pathlib import Path


def table(path: Path, steps: list[int]) -> list[list[str]]:
    """Return the header and a row for each metric except times."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names = [name for name in dict.fromkeys(name for line in lines for name in line) if name != "step"]
    columns = [f"step {step}" for step in steps] or ["first", "last", "min", "max"]
    rows = [["metric", *columns], ["---"] * (len(columns) + 1)]
    for name in names:
        if not name.endswith(("_s", "_per_s")):
            by_step = {line["step"]: line[name] for line in lines if name in line}
            values = list(by_step.values())
            cells = [by_step.get(step) for step in steps] or [values[0], values[-1], min(values), max(values)]
            rows.append([f"`{name}`", *("" if value is None else _format(value) for value in cells)])
    return rows


def _format(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


if __name__ == "__main__":
    for row in table(Path(sys.argv[1]), [int(step) for step in sys.argv[2:]]):
        print("| " + " | ".join(row) + " |")
