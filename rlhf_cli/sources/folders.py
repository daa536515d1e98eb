"""Folders with the hub's layout: `datasets` finds the files of each split, for the hub itself too; we read them."""

import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.errors import RLHFError, nearest, shown
from rlhf_cli.sources.readers import ending

DATA = {".jsonl", ".ndjson", ".csv", ".tsv", ".parquet"}  # .json and .txt may well be notes
OF_PATTERNS = frozenset("*?[]")  # in a folder's own path they would be taken for a pattern of names


def splits(folder: Path, subset: str | None, where: str | None) -> dict[str, list[Path]]:
    """Split -> its files in order: by the README's `configs`, by names and by folders.

    Raises RLHFError D01 where there are none, or no such subset.
    """
    if not os.path.isdir(folder):
        raise RLHFError("D01", f"no such folder {shown(folder)}", where=where)
    real = folder.resolve()
    with TemporaryDirectory() as scratch:
        mirror = real
        if OF_PATTERNS & set(str(real)):
            mirror = Path(scratch).resolve() / "data"
            _link(real, mirror)
        try:
            found = builder(str(mirror), subset).config.data_files or {}
        except Exception as error:  # each of its many kinds of refusal is one of ours: nothing to read here
            raise refused(str(mirror), shown(folder), subset, where, error) from error
        files = {
            str(split): [folder / os.path.relpath(name, mirror) for name in of_it] for split, of_it in found.items()
        }
    _say_what_is_left_aside(folder, [path for of_it in files.values() for path in of_it])
    return files


@cache
def _say_once(text: str) -> None:
    terminal.say(text)


def _say_what_is_left_aside(folder: Path, files: Sequence[Path]) -> None:
    """Of data of several kinds `datasets` takes the commonest one; a README may mean that, else nobody does."""
    kinds = {ending(path) for path in files}
    others = DATA - kinds
    left = sorted(path.name for path in folder.rglob("*") if ending(path) in others and not path.name.startswith("."))
    if left and not (folder / "README.md").exists():
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        _say_once(
            f"data     {shown(folder)}: {left[0]}{more} left aside, the other files are {', '.join(sorted(kinds))}"
        )


def builder(name: str, subset: str | None, revision: str | None = None) -> Any:
    """What `datasets` knows of a folder or of a dataset of the hub. Leaves nothing in its cache."""
    datasets = _datasets()
    with TemporaryDirectory() as scratch:
        return datasets.load_dataset_builder(name, name=subset, revision=revision, cache_dir=scratch)


def refused(name: str, told: str, subset: str | None, where: str | None, error: Exception) -> RLHFError:
    """Why `builder` found nothing, as our D01; `told` is the name in the message."""
    names = _subsets(name) if isinstance(error, ValueError) else []  # its complaints about subsets are
    reason = " ".join(str(error).replace(name, told).split())
    if subset is not None and names and subset not in names:
        near = nearest(subset, names) or names[0]
        text = f'{told} has no subset "{subset}"; it has {", ".join(names)}'
        return RLHFError("D01", text, where=where, hint=f"set data.subset: {near}")
    if subset is None and len(names) > 1:
        text = f"{told} has the subsets {', '.join(names)}"
        return RLHFError("D01", text, where=where, hint=f"set data.subset: {names[0]}")
    return RLHFError("D01", f"{told} holds no data files: {reason}", where=where)


def pick(
    found: Mapping[str, list[Any]], split: str | None, usual: Sequence[str], name: str, where: str | None
) -> list[Any]:
    """The files of `split`; where none is asked for, of the first of the `usual` ones or of the only one there is.

    Raises RLHFError D01 where it is not there.
    """
    wanted = (split,) if split else usual
    for one in wanted:
        if one in found:
            return found[one]
    if not split and len(found) == 1:
        return next(iter(found.values()))
    near = nearest(wanted[0], found) or next(iter(found))
    text = f"{name} has no split {' or '.join(wanted)}; it has {', '.join(map(str, found))}"
    raise RLHFError("D01", text, where=where, hint=f"write the split behind the name: [{near}]")


def _link(folder: Path, mirror: Path) -> None:
    """The same tree of files elsewhere, each a link."""
    for here, _, names in os.walk(folder):
        there = mirror / os.path.relpath(here, folder)
        there.mkdir(parents=True)
        for name in names:
            (there / name).symlink_to(os.path.join(here, name))


def _subsets(name: str) -> list[str]:
    try:
        return list(_datasets().get_dataset_config_names(name))
    except Exception:
        return []


def _datasets() -> Any:
    import datasets
    from huggingface_hub.utils.logging import set_verbosity_error

    set_verbosity_error()  # it tells of every README without a head
    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    return datasets
