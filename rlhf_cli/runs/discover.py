"""Which folders are runs: those that hold a stage's config or its output; and where the presets are, which are none.

Imports nothing, and answers at once.
"""

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

STAGES = ("sft", "reward", "ppo", "eval")  # in the order of the chain
POLICY_STAGES = ("ppo", "sft")  # whose models write text


def configs_folder() -> Path:
    """The presets: configs/, which the wheel carries inside the package and a source checkout has beside it."""
    inside = Path(__file__).parents[1] / "configs"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "configs"


def is_preset(folder: Path) -> bool:
    """Whether it lies among the presets, which nobody runs where they are."""
    return configs_folder().resolve() in folder.resolve().parents


def has_output(folder: Path) -> bool:
    """Whether a stage wrote this folder. One that is there and may not be looked into counts: who reads it says so."""
    names = ("identity.json", "manifest.json")
    return any(os.path.isfile(folder / name) for name in names) or _is_shut(folder)


def _is_shut(folder: Path) -> bool:
    if not os.path.isdir(folder):
        return False
    try:
        os.scandir(folder).close()
        os.stat(folder / "identity.json")
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def configs_in(folder: Path) -> list[Path]:
    """The stages' configs that lie in a folder."""
    return [path for stage in STAGES if os.path.isfile(path := folder / f"{stage}.yaml")]


def is_run(folder: Path) -> bool:
    """Whether a folder holds a stage's config or its output."""
    return folder in find_run_folders(folder, 0)


def find_run_folders(folder: Path, depth: int, most: int | None = None) -> Iterator[Path]:
    """The run's folders at or below `folder`, the nearest first, but those inside of a stage's output.

    Hidden folders and links are passed over. `most`: so many folders are looked at, and no more.
    """
    ahead, seen = deque([(folder, 0)]), 0
    while ahead and (most is None or seen < most):
        here, level = ahead.popleft()
        seen += 1
        begun = {stage for stage in STAGES if has_output(here / stage)}
        if begun or configs_in(here):
            yield here
        if level < depth:
            ahead.extend((here / name, level + 1) for name in _folders_in(here) if name not in begun)


def _folders_in(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:  # not ours to read
        return []
    return sorted(name for name in names if not name.startswith("."))
