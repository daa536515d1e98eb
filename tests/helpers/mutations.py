"""Odd values in the JSON files of a run, with matching hashes, as in a run from an unknown source."""

import copy
import json
import random
from pathlib import Path
from typing import Any

from rlhf_cli.files import file_sha256, write_checked_json

ODD: list[Any] = [
    None, True, -1, 0, 1.5, 1e308, 10**30, "", "x", "1", "é\u2028<b>", [], ["x"], [1, "x"], [[]], {}, {"x": 1},
    {"": None}, {"value": "x"}, {"mean": None, "ci95": 3},
]  # fmt: skip
FILES = ["sft", "reward", "ppo", "eval", "eval", "eval/report.json", "eval/report.json", "eval/report.json"]


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [found for key, value in items for found in [(*path, key), *places(value, (*path, key))]]


def mutate(folder: Path, draw: random.Random) -> str:
    """Put an odd value into a manifest or the report of a run, seal it, and say what was done."""
    name = draw.choice([name for name in FILES if (folder / name).exists()])
    file = folder / name if name.endswith(".json") else folder / name / "manifest.json"
    content = json.loads(file.read_text())
    content.pop("sha256", None) if file.name == "manifest.json" else None
    # The names of the files that it lists would only be missing: that is another test's.
    *above, last = draw.choice([path for path in places(content) if path[0] != "files" or len(path) == 1])
    tree = content
    for key in above:
        tree = tree[key]
    value = copy.deepcopy(draw.choice(ODD))
    if draw.random() < 0.1:
        del tree[last]
    else:
        tree[last] = value
    if file.name == "manifest.json":
        write_checked_json(file, content)
    else:
        file.write_text(json.dumps(content))
        manifest = folder / "eval/manifest.json"
        listed = json.loads(manifest.read_text())
        listed.pop("sha256")
        if isinstance(listed.get("files"), dict):
            listed["files"]["report.json"] = {"sha256": file_sha256(file), "bytes": file.stat().st_size}
        write_checked_json(manifest, listed)
    return f"{file.relative_to(folder)}: {'.'.join(map(str, (*above, last)))} = {value!r}"
