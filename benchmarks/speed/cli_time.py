"""CPU seconds of the command line: `rlhf --help`, and each process of the demo's chain.

`watch/sitecustomize.py` instruments the processes from outside, so rlhf_cli needs no option for it. The seconds of a
phase exclude nested phases: imports count as imports wherever they happen.
"""

import json
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.speed.processes import ROOT, child_environment, run_command
from rlhf_cli.distributed import RLHF_COMMAND

HELP_RUNS = 5
HEAVY = ("torch", "transformers")
WATCH = Path(__file__).parent / "watch"
# Phases before the actual work of a process.
START_UP = ("interpreter", "imports", "loading tokenizers", "loading models", "hashing", "reading rows", "tokenising")
# Kind of a repeated call -> its verb in the report.
VERBS = {
    "models": "loads",
    "tokenizers": "loads the tokenizer of",
    "hashes": "hashes",
    "reads": "reads the rows of",
    "tokenised": "tokenizes",
}
SLOWEST_IMPORTS = 8  # packages listed by name


def measure_help() -> dict[str, Any]:
    """Return the CPU seconds of `rlhf --help`, the minimum of several runs, and the heavy modules that it imports."""
    command, environment = [*RLHF_COMMAND, "--help"], child_environment(threads=1)
    seconds = []
    for _ in range(HELP_RUNS):
        child = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise RuntimeError(f"{' '.join(command)} exited with {child.returncode}")
        seconds.append(usage.ru_utime + usage.ru_stime)
    environment["PYTHONPROFILEIMPORTTIME"] = "1"
    result = subprocess.run(
        command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    return {"cpu_s": round(min(seconds), 3), "heavy": [name for name in HEAVY if name in imported]}


def measure_chain(folder: Path, preset: str = "demo", threads: int = 1) -> dict[str, Any]:
    """Run the chain of a preset in `folder`, which is deleted first, and profile it."""
    shutil.rmtree(folder, ignore_errors=True)
    profiles = folder / "watched"
    profiles.mkdir(parents=True)
    run = (folder / preset).resolve()
    environment = child_environment(threads, WATCH_OUT=str(profiles.resolve()), WATCH_BELOW=str(run))
    environment["PYTHONPATH"] = os.pathsep.join([str(WATCH), environment["PYTHONPATH"]])
    for command in (["init", preset, str(run)], ["run", str(run)]):
        run_command([*RLHF_COMMAND, *command], environment)
    return merge_profiles([json.loads(path.read_text(encoding="utf-8")) for path in profiles.glob("*.json")])


def merge_profiles(processes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return seconds by command and phase, and the repeated work of each command.

    Processes of the same command (`rlhf run` starts `rlhf check` and the stages) are added; work counts as repeated
    only within one process.
    """
    stages: dict[str, dict[str, Any]] = {}
    for process in processes:
        empty = {"processes": 0, "phases": Counter(), "imports": Counter(), "counts": {}, "doubles": []}
        stage = stages.setdefault(stage_name(process["command"]), empty)
        stage["processes"] += 1
        for phase, seconds in process["phases"].items():
            name, _, package = phase.partition(" ") if phase.startswith("imports ") else (phase, "", "")
            stage["phases"][name] += seconds
            if package:
                stage["imports"][package] += seconds
        stage["doubles"] += repeated_work(process["counts"])
        for kind, counts in process["counts"].items():
            stage["counts"][kind] = stage["counts"].get(kind, 0) + sum(counts.values())
    for stage in stages.values():
        stage["phases"] = {name: round(seconds, 3) for name, seconds in stage["phases"].most_common()}
        stage["imports"] = {name: round(seconds, 3) for name, seconds in stage["imports"].most_common(SLOWEST_IMPORTS)}
        stage["cpu_s"] = round(sum(stage["phases"].values()), 3)
    total = sum(stage["cpu_s"] for stage in stages.values())
    return {"cpu_s": round(total, 2), "stages": dict(sorted(stages.items(), key=lambda item: -item[1]["cpu_s"]))}


def stage_name(command: list[str]) -> str:
    """Return the subcommand of `rlhf`, marked if it trains the demo's base model."""
    words = [word for word in command[1:] if not word.startswith("-")]
    name = words[0] if words else "python"
    return f"{name} (base)" if any("base" in Path(word).parts[-2:] for word in words[1:]) else name


def repeated_work(counts: dict[str, dict[str, int]]) -> list[str]:
    """Describe what one process did more than once with the same file, model or rows."""
    return [
        f"{VERBS[kind]} {name} {times} times"
        for kind, names in counts.items()
        for name, times in names.items()
        if times > 1
    ]


def start_up_seconds(stage: dict[str, Any]) -> float:
    return sum(stage["phases"].get(name, 0.0) for name in START_UP)
