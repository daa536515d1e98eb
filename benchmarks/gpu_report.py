"""Run all GPU measurements, and write their rows and tables: `make gpu`, or `python -m benchmarks.gpu_report`.

It needs torch, transformers, peft, bitsandbytes, trl and this repository, and no network. A part that fails leaves the
rows that it measured, and the exit code is 1. Writes OUT/gpu.json and OUT/gpu.md.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.processes import fail

TITLES = {
    "check": "What was checked (`python -m benchmarks.gpu_check`)",
    "speed": "Speed and memory of rollouts and updates (`python -m benchmarks.gpu`)",
    "chain": "A whole run in the shape of Qwen3-0.6B, beside `rlhf plan` (`python -m benchmarks.chain`)",
}


def commands(work: Path, tiny: bool) -> dict[str, list[str]]:
    """Return the arguments of each part's module."""
    small = ["--tiny"] if tiny else []
    parts = {"check": ["benchmarks.gpu_check", *small], "speed": ["benchmarks.gpu", *small]}
    if not tiny:
        parts["chain"] = ["benchmarks.chain", "--model", "Qwen3-0.6B", "--out", str(work / "chain")]
    return {part: [*words, "--json", str(work / f"{part}.json")] for part, words in parts.items()}


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a part's JSON file without nested values."""
    rows = result["rows"] if "rows" in result else [*result["stages"], *result["files"]]
    return [{name: value for name, value in row.items() if not isinstance(value, dict)} for row in rows]


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table: what was measured, and its numbers."""
    yield "| part | what | numbers |"
    yield "|---|---|---|"
    for row in rows:
        part, what = row.pop("part", ""), row.pop("what", row.pop("stage", ""))
        numbers = ", ".join(f"{name} {value}" for name, value in row.items() if value is not None)
        yield f"| {part} | {what} | {numbers or 'holds'} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--work", type=Path, default=Path("runs/gpu"), help="folder of the parts' files")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU too: a smoke test of this command")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.tiny:
        return fail("no GPU: `make gpu TINY=1 OUT=FOLDER` tests the command itself on a CPU")
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, tiny sizes"
    results: dict[str, Any] = {}
    failed = []
    for part, words in commands(args.work, args.tiny).items():
        file = args.work / f"{part}.json"
        file.unlink(missing_ok=True)
        if subprocess.run([sys.executable, "-m", *words]).returncode:
            failed.append(part)
        if file.exists():
            results[part] = json.loads(file.read_text(encoding="utf-8"))
        lines = [f"# Measured on one GPU: {card}", "", "Made by `make gpu`.", ""]
        for done, result in results.items():
            lines += [f"## {TITLES[done]}", "", *table(rows_of(result)), ""]
        (args.out / "gpu.md").write_text("\n".join(lines), encoding="utf-8")
        (args.out / "gpu.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(
        f"written: {args.out / 'gpu.json'}, {args.out / 'gpu.md'}"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
