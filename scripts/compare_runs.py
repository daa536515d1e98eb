"""Compare the results of two runs: `python scripts/compare_runs.py RUN OTHER`; lists differences and exits 1.

It compares every tensor of every model bit for bit, config.json and tokenizer.json, the metrics of each step without
times, and the numbers of eval/report.json. A change that only moves or renames code must not change any of them.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

CONFIG_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def contents(run: Path) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of every compared value; checkpoints are skipped."""
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run).as_posix()
        if "/state/" in name or name.startswith(".old/"):
            continue
        if path.suffix == ".safetensors":
            yield from ((f"{name}: {key}", tensor) for key, tensor in load_file(path).items())
        elif path.name in CONFIG_FILES or name.endswith("eval/report.json"):
            yield from flatten(name, json.loads(path.read_text(encoding="utf-8")))
        elif path.name == "metrics.jsonl":
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                yield from flatten(f"{name}:{number}", json.loads(line))


def flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, leaf) of nested JSON without times, and without the texts of report.json, which may be reworded."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not key.endswith(("_s", "_per_s")):
                yield from flatten(f"{name} {key}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from flatten(f"{name}[{index}]", item)
    elif not (isinstance(value, str) and "report.json" in name):
        yield name, value


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


def main(run: str, other: str) -> int:
    first, second = dict(contents(Path(run))), dict(contents(Path(other)))
    names = [name for name in first | second if not (name in first and name in second)]
    names += [name for name in first if name in second and not equal(first[name], second[name])]
    print("\n".join([*names[:50], f"{len(first)} values in {run}, {len(second)} in {other}: {len(names)} differ"]))
    return 1 if names or not first else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
