"""What benchmarks that compare runs of the demo share: the demo of a seed, its runs, and tables over the seeds."""

import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from benchmarks.speed.processes import child_environment
from rlhf_cli.jsonl import read_jsonl
from rlhf_cli.statistics import student_interval, with_interval

Row = dict[str, Any]


class World:
    """The folder of a seed: the demo with its SFT model, and a run for each arm."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.seed = seed

    def prepare(self) -> None:
        """Create the demo and its SFT model."""
        self.folder.mkdir(parents=True, exist_ok=True)
        demo = self.folder / "demo"
        if not demo.exists():
            rlhf("init", "demo", demo, "--seed", self.seed)
        rlhf("run", demo, "--only", "sft")

    def write(self, run: Path, stage: str, **changes: Row) -> None:
        """Write a stage's YAML: the demo's with its data, and with other keys in some sections."""
        settings = yaml.safe_load((self.folder / f"demo/{stage}.yaml").read_text())
        settings["data"] = {key: f"../demo/{path}" for key, path in settings["data"].items()}
        for section, keys in changes.items():
            kept = {} if section == "models" else settings.get(section, {})
            settings[section] = kept | keys
        (run / f"{stage}.yaml").write_text(yaml.safe_dump(settings))


def read(path: Path) -> list[Row]:
    """Return the rows of a file."""
    return [row for _, row in read_jsonl(path)]


def rlhf(*arguments: Any) -> None:
    """Run a command. Raises CalledProcessError if it fails."""
    command = [sys.executable, "-m", "rlhf_cli", *map(str, arguments)]
    print("$ rlhf", *command[3:], flush=True)
    subprocess.run(command, check=True, env=child_environment(threads=1))


def value_at(points: Sequence[tuple[float, float]], kl: float) -> float | None:
    """Return the value where the points, in this order, first pass a KL, linear between two; None if they do not."""
    for (low, before), (high, after) in pairwise(points):
        if low <= kl <= high:
            return before + (after - before) * (kl - low) / (high - low)
    return None


def difference(first: float | None, second: float | None) -> float | None:
    """Return first - second, None without one of them."""
    return None if first is None or second is None else first - second


def spread(values: Sequence[float | None]) -> str:
    """Return the mean and the values of the seeds."""
    if None in values:
        return ", ".join("-" if value is None else f"{value:.3f}" for value in values)
    known = [value for value in values if value is not None]
    return f"{fmean(known):.3f} ({', '.join(f'{value:.3f}' for value in known)})"


def interval(values: Sequence[float | None]) -> str:
    """Return the mean with the 95 % interval of Student's t over the seeds."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or len(known) < 2:
        return "-"
    return with_interval(fmean(known), student_interval(known), sign="+")
