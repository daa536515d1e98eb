"""Names of a run's stages and files, and where the folders of runs and presets are. Imports no other module."""

import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

STAGES = ("sft", "reward", "dpo", "ppo", "eval")  # in pipeline order
OPTIONAL_STAGES = ("dpo",)  # not missing in a run without them
POLICY_STAGES = ("ppo", "sft", "dpo")  # their models generate text
MODEL_STAGES = (*POLICY_STAGES, "reward")  # in the order in which a command looks for a model
COMPARED_STAGES = ("ppo", "sft")  # by `rlhf chat --compare`

MANIFEST = "manifest.json"  # the last file of a stage
REPORT = "report.json"
RECOMMENDED = "recommended.json"  # of an evaluation: the policy to take
REPORT_PAGE = "report.html"  # written from existing files at any time; not part of a stage
SNAPSHOTS = "snapshots"  # folder of a PPO run with the policies saved during training
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
SEEDS_FOLDER = "seeds"  # of a run: a run for each seed of `rlhf run --seeds`
LABELS_FOLDER = "labels"  # of a run: what `rlhf label` writes
MERGED = "merged"  # folder of the merged model's config.json; at the top level it would indicate full weights


def configs_folder() -> Path:
    """Return the folder of presets: configs/ in the package of a wheel, or in the root of a source checkout."""
    inside = Path(__file__).parents[1] / "configs"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "configs"


def is_preset(folder: Path) -> bool:
    """Return True if the folder is inside the presets, which are never run in place."""
    return configs_folder().resolve() in folder.resolve().parents


def has_output(folder: Path) -> bool:
    """Return True if a stage wrote this folder. An unreadable folder counts, so that its reader reports the error."""
    if not os.path.isdir(folder):
        return False
    try:
        os.scandir(folder).close()
        os.stat(folder / "identity.json")
    except FileNotFoundError:
        return os.path.isfile(folder / MANIFEST)
    except OSError:
        return True
    return any(os.path.isfile(folder / name) for name in ("identity.json", MANIFEST))


def configs_in(folder: Path) -> list[Path]:
    """Return the paths of the stage configs in a folder."""
    paths = [folder / f"{stage}.yaml" for stage in STAGES]
    return [path for path in paths if os.path.isfile(path)]


def seed_folder(folder: Path, seed: int) -> Path:
    """Return the folder of the run of one of several seeds."""
    return folder / SEEDS_FOLDER / str(seed)


def seed_of(folder: Path) -> tuple[Path, int] | None:
    """Return the folder with the configs and the seed of a run that is one of several seeds, or None."""
    path = Path(os.path.abspath(folder))
    if path.parent.name != SEEDS_FOLDER or not path.name.isdecimal() or configs_in(path):
        return None
    study = path.parent.parent
    return (study, int(path.name)) if configs_in(study) else None


def seeds_in(folder: Path) -> list[int]:
    """Return the seeds that have a run in a run's folder."""
    names = _folders_in(folder / SEEDS_FOLDER)
    return sorted(int(name) for name in names if name.isdecimal())


def find_run_folders(folder: Path, depth: int, max_folders: int | None = None) -> Iterator[Path]:
    """Yield the run folders at or below `folder`, nearest first, without those inside a stage's output.

    Skips hidden folders and links, and looks at `max_folders` folders at most.
    """
    queue = deque([(folder, 0)])
    visited = 0
    while queue and (max_folders is None or visited < max_folders):
        current, level = queue.popleft()
        visited += 1
        outputs = {stage for stage in STAGES if has_output(current / stage)}
        if outputs or configs_in(current):
            yield current
        if level < depth:
            queue.extend((current / name, level + 1) for name in _folders_in(current) if name not in outputs)


def _folders_in(folder: Path) -> list[str]:
    with suppress(OSError), os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        return sorted(name for name in names if not name.startswith("."))
    return []  # unreadable
