"""Folders with the hub's layout, and the hub itself: where `datasets` and `huggingface_hub` find the data."""

import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.errors import RLHFError, nearest, shown
from rlhf_cli.rows import write_jsonl

LARGE = 20e9  # bytes; more is not fetched unasked


def splits(folder: Path, subset: str | None, where: str | None) -> dict[str, list[Path]]:
    """Split -> its files, as `datasets` finds them: by the README's `configs`, by names and by folders.

    Raises RLHFError D01 where there are none, or no such subset.
    """
    if not folder.is_dir():
        raise RLHFError("D01", f"no such folder {shown(folder)}", where=where)
    datasets = _datasets()
    try:
        builder = datasets.load_dataset_builder(str(folder), name=subset)
        found = {str(split): [Path(file) for file in files] for split, files in builder.config.data_files.items()}
    except Exception as error:  # each of its many kinds of refusal is one of ours: nothing to read here
        names = _subsets(folder)
        if subset not in names and len(names) > 1:
            near = nearest(subset or "", names)
            text = f"{shown(folder)} has the subsets {', '.join(names)}"
            raise RLHFError("D01", text, where=where, hint=f"set data.subset: {near or names[0]}") from error
        reason = " ".join(str(error).split())
        raise RLHFError("D01", f"{shown(folder)} holds no data files: {reason}", where=where) from error
    return found


def _subsets(folder: Path) -> list[str]:
    try:
        return list(_datasets().get_dataset_config_names(str(folder)))
    except Exception:
        return []


def _datasets() -> Any:
    import datasets

    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    return datasets


def cached(name: str, revision: str | None) -> Path | None:
    """The folder of a dataset in the hub's cache; None where it was never fetched."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, repo_type="dataset", revision=revision, local_files_only=True))
    except (OSError, ValueError):  # not there, or not even the form of an id
        return None


def fetch(name: str, revision: str | None, where: str | None) -> Path:
    """The folder of a dataset of the hub, fetched whole into the hub's cache.

    Raises RLHFError D01 offline, for a name that the hub does not know, and for more than 20 GB.
    """
    from huggingface_hub import HfApi, snapshot_download

    try:
        if _offline():
            raise OSError("the hub may not be asked (HF_HUB_OFFLINE)")
        info = HfApi().dataset_info(name, revision=revision, files_metadata=True)
        size = sum(file.size or 0 for file in info.siblings or [])
        if size > LARGE:
            text = f"{name} has {size / 1e9:.0f} GB on the hub, which is not fetched unasked"
            hint = f"set data.max_rows, or fetch a part: hf download --repo-type dataset {name} --include PATTERN"
            raise RLHFError("D01", text, where=where, hint=hint)
        terminal.say(f"data     fetching {name} from the hub, {size / 1e6:.0f} MB")
        return Path(snapshot_download(name, repo_type="dataset", revision=info.sha))
    except (OSError, ValueError) as error:  # the hub's errors of HTTP and of names are among them
        raise _not_on_the_hub(name, error, where) from error


def first_rows(
    name: str, subset: str | None, splits: Sequence[str], revision: str | None, count: int, where: str | None
) -> Path:
    """A JSON lines file with the first `count` rows of a dataset, streamed from the hub once and kept in our cache."""
    key = sha256("\0".join(map(str, (name, subset, splits, revision, count))).encode()).hexdigest()[:16]
    path = cache_folder() / "first_rows" / f"{name.rpartition('/')[2]}-{count}-{key}.jsonl"
    if path.is_file():
        return path
    datasets = _datasets()
    try:
        found = list(datasets.load_dataset_builder(name, name=subset, revision=revision).config.data_files)
        picked = next((str(one) for one in splits if one in found), str(found[0]))
        terminal.say(f"data     streaming the first {count} rows of {name}[{picked}] from the hub")
        stream = datasets.load_dataset(name, name=subset, split=picked, revision=revision, streaming=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        write_jsonl(partial, stream.take(count))
        partial.replace(path)
    except (OSError, ValueError) as error:
        raise _not_on_the_hub(name, error, where) from error
    return path


def cache_folder() -> Path:
    """Where we keep what can be made again: RLHF_CACHE, or `rlhf` in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf"
    return Path(os.environ.get("RLHF_CACHE") or default)


def _offline() -> bool:
    from huggingface_hub import constants

    return constants.is_offline_mode()


def _not_on_the_hub(name: str, error: Exception, where: str | None) -> RLHFError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return RLHFError(
        "D01",
        f'"{name}" is no file or folder here, and not to be had from the hub: {reason}',
        where=where,
        hint=f"fetch it where there is a network: hf download --repo-type dataset {name}; a path starts with ./ or /",
    )
