"""Where the CPU seconds of a whole chain go, process by process, and what is done twice in one of them.

Every process of `rlhf init demo` and `rlhf run` is watched from outside (`watch/sitecustomize.py`): the product has no
option for it. A phase's seconds are its own: what it imports counts as imports, wherever that happens.
"""

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.speed.children import output, surroundings
from rlhf_cli.distributed import RLHF_COMMAND

WATCH = Path(__file__).parent / "watch"
# What a process does before its own work; all else that is named is its work.
START_UP = ("interpreter", "imports", "loading tokenizers", "loading models", "hashing", "reading rows", "tokenising")
WORDS = {"models": "loads", "tokenizers": "loads the tokenizer of", "hashes": "hashes", "reads": "reads the rows of"}
WORDS["tokenised"] = "tokenises"
PACKAGES = 8  # the slowest to import, by name


def measure(folder: Path, preset: str = "demo", threads: int = 1) -> dict[str, Any]:
    """Run a preset's chain anew in `folder`, and profile it."""
    shutil.rmtree(folder, ignore_errors=True)
    watched = folder / "watched"
    watched.mkdir(parents=True)
    run = (folder / preset).resolve()
    environment = surroundings(threads, WATCH_OUT=str(watched.resolve()), WATCH_BELOW=str(run))
    environment["PYTHONPATH"] = os.pathsep.join([str(WATCH), environment["PYTHONPATH"]])
    for command in (["init", preset, str(run)], ["run", str(run)]):
        output([*RLHF_COMMAND, *command], environment)
    return profile([json.loads(path.read_text(encoding="utf-8")) for path in watched.glob("*.json")])


def profile(processes: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds by command and phase, and the doubles of each command's processes.

    A command that ran in several processes (`rlhf run` starts `rlhf check` and the stages) is told as one, its doubles
    are those of single processes.
    """
    stages: dict[str, dict[str, Any]] = {}
    for process in processes:
        name = stage_of(process["command"])
        empty = {"processes": 0, "phases": Counter(), "imports": Counter(), "counts": {}, "doubles": []}
        stage = stages.setdefault(name, empty)
        stage["processes"] += 1
        for phase, seconds in process["phases"].items():
            name, _, package = phase.partition(" ") if phase.startswith("imports ") else (phase, "", "")
            stage["phases"][name] += seconds
            if package:
                stage["imports"][package] += seconds
        stage["doubles"] += doubles(process["counts"])
        for kind, counts in process["counts"].items():
            stage["counts"][kind] = stage["counts"].get(kind, 0) + sum(counts.values())
    for stage in stages.values():
        stage["phases"] = {name: round(seconds, 3) for name, seconds in stage["phases"].most_common()}
        stage["imports"] = {name: round(seconds, 3) for name, seconds in stage["imports"].most_common(PACKAGES)}
        stage["cpu_s"] = round(sum(stage["phases"].values()), 3)
    total = sum(stage["cpu_s"] for stage in stages.values())
    return {"cpu_s": round(total, 2), "stages": dict(sorted(stages.items(), key=lambda item: -item[1]["cpu_s"]))}


def stage_of(command: list[str]) -> str:
    """The command of `rlhf` that a process is, with the config that is not the run's own (the demo's base model)."""
    words = [word for word in command[1:] if not word.startswith("-")]
    name = words[0] if words else "python"
    return f"{name} (base)" if any("base" in Path(word).parts[-2:] for word in words[1:]) else name


def doubles(counts: dict[str, dict[str, int]]) -> list[str]:
    """What one process did more than once with the same thing."""
    return [
        f"{WORDS[kind]} {name} {times} times"
        for kind, named in counts.items()
        for name, times in named.items()
        if times > 1
    ]


def start_up(stage: dict[str, Any]) -> float:
    """CPU seconds of a stage before its own work."""
    return sum(stage["phases"].get(name, 0.0) for name in START_UP)
