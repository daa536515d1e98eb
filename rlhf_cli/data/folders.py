"""Find the data files of each split in a folder or hub dataset, with the rules of the `datasets` library."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.config.sources import suffix
from rlhf_cli.data.readers import READERS
from rlhf_cli.errors import RLHFError, closest_match, first_names, shown, translate_read_errors

README = "README.md"
DATA_SUFFIXES = READERS.keys() - {".json", ".txt"}  # these two are data only if there is nothing else
METADATA_FILES = {"config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"}
Files = dict[str, list[Path]]  # split -> its files in order, relative to the folder


def find_splits(folder: Path, name: str, subset: str | None, where: str | None) -> Files:
    """Return the files of each split in order, from the README's `configs`, folder names and file names.

    `name` is the folder in messages. Files without a split in their name become `train`, with a message, if no file is
    named so. Raises RLHFError D01 without files or subset, or if such files differ in format.
    """
    if not os.path.isdir(folder):
        raise RLHFError("D01", f"no such folder {name}", where=where)
    data = _data_files(folder)
    if not data:
        raise _no_data_files(folder, name, where)

    readme = folder / README
    has_configs = readme.is_file() and b"\nconfigs:" in readme.read_bytes()
    with TemporaryDirectory() as scratch:
        mirror = Path(scratch).resolve() / "data"
        links = _link(folder.resolve(), data, mirror, lowercase=not has_configs)
        try:
            linked = data_files(str(mirror), subset)
        except Exception as error:  # datasets raises many types
            raise load_error(str(mirror), name, subset, where, error) from error
        files = {split: [links[link] for link in paths] for split, paths in linked.items()}
    if not has_configs:
        files = _with_unnamed(folder, name, files, data, where=where)
    return {split: [folder / path for path in paths] for split, paths in files.items()}


def _no_data_files(folder: Path, name: str, where: str | None) -> RLHFError:
    others = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    text = f"{name} contains no data files"
    if others:
        text += f", but {first_names(others)}"
    hint = f"data files end in {', '.join(READERS)}, optionally followed by .gz"
    if any(path.suffix == ".arrow" for path in others):
        hint = 'convert Arrow to Parquet: datasets.load_from_disk(FOLDER).to_parquet("train.parquet")'
    return RLHFError("D01", text, where=where, hint=hint)


def _with_unnamed(folder: Path, name: str, files: Files, data: Sequence[Path], *, where: str | None) -> Files:
    """Add the files without a split in their name as `train`; `datasets` only uses those of the most common suffix.

    Next to named files it ignores them.
    """
    named = dict(files)
    if not any(map(_is_named, files.get("train", ()))):
        named.pop("train", None)
    placed = set(chain.from_iterable(named.values()))
    rest = [path for path in data if path not in placed]
    if (folder / README).exists():  # a hub dataset: other suffixes are copies in other formats
        suffixes = set(map(suffix, chain.from_iterable(files.values())))
        rest = [path for path in rest if suffix(path) in suffixes]
    elif rest and "train" in named:
        terminal.log_once(f"data     {name}: {first_names(rest)} ignored: train is {first_names(named['train'])}")
    if not rest or "train" in named:
        return named

    if len(set(map(suffix, rest))) > 1:
        text = f"{name} contains data files of several formats: {first_names(rest)}"
        raise RLHFError("D01", text, where=where, hint=f"set one of them: {shown(folder / rest[0])}")
    text = f"data     {name}: train is {first_names(rest)}"
    if named:
        text += ", the rest"
    for split, paths in named.items():
        text += f"; {split} is {first_names(paths)}"
    terminal.log_once(text)
    return {"train": rest, **named}


def _is_named(path: Path) -> bool:
    """Return True if a file name or a folder above it contains a split keyword."""
    keywords = chain.from_iterable(_datasets().data_files.SPLIT_KEYWORDS.values())
    words = re.split(r"[-._ 0-9/]+", path.as_posix().lower())
    return not set(words).isdisjoint(keywords)


def _data_files(folder: Path) -> list[Path]:
    """Return the data files below a folder, relative to it. Raises E08 if a part cannot be read."""

    def raise_error(error: OSError) -> None:
        raise error

    paths: list[Path] = []
    with translate_read_errors(folder):  # Path.rglob would skip unreadable folders
        for parent, folders, files in os.walk(folder, onerror=raise_error):
            paths += [Path(parent, name) for name in (*folders, *files)]
    paths.sort(key=Path.as_posix)

    relative = [path.relative_to(folder) for path in paths]
    visible = [path for path in relative if not any(part.startswith((".", "__")) for part in path.parts)]
    data = [path for path in visible if suffix(path) in DATA_SUFFIXES]
    return data or [path for path in visible if suffix(path) in READERS and path.name not in METADATA_FILES]


def _link(folder: Path, data: Sequence[Path], mirror: Path, *, lowercase: bool) -> dict[str, Path]:
    """Link data files and README into the empty folder `mirror`; return link -> file.

    `datasets` would also count other files: eval.yaml would become a split. With `lowercase`, Test.CSV is linked as
    test.csv, because the keywords of `datasets` are in lower case.
    """
    links = {}
    paths = [*data, Path(README)] if (folder / README).exists() else data
    for path in paths:
        link = mirror / path
        lowercased = mirror / path.as_posix().lower()
        if lowercase and path.name != README and not lowercased.is_symlink():
            link = lowercased
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder / path)
        links[str(link)] = path
    return links


def data_files(name: str, subset: str | None, revision: str | None = None) -> dict[str, list[str]]:
    """Return the paths or URLs of each split of a folder or hub dataset."""
    with TemporaryDirectory() as scratch:  # nothing stays in the cache of `datasets`
        builder = _datasets().load_dataset_builder(name, name=subset, revision=revision, cache_dir=scratch)
    files_by_split = builder.config.data_files or {}
    return {str(split): [str(path) for path in paths] for split, paths in files_by_split.items()}


def load_error(name: str, shown_name: str, subset: str | None, where: str | None, error: Exception) -> RLHFError:
    """Translate an exception of `data_files` to D01; `shown_name` is the name in the message."""
    names: list[str] = []
    if isinstance(error, ValueError):  # raised for subsets
        with suppress(Exception):
            names = list(_datasets().get_dataset_config_names(name))

    listed = ", ".join(names)
    if subset is not None and names and subset not in names:
        near = closest_match(subset, names) or names[0]
        text = f'{shown_name} has no subset "{subset}"; it has {listed}'
        return RLHFError("D01", text, where=where, hint=f"set data.subset: {near}")
    if subset is None and len(names) > 1:
        text = f"{shown_name} has the subsets {listed}"
        return RLHFError("D01", text, where=where, hint=f"set data.subset: {names[0]}")
    reason = " ".join(str(error).replace(name, shown_name).split())
    return RLHFError("D01", f"{shown_name} contains no data files: {reason}", where=where)


def select_split(
    files_by_split: Mapping[str, list[Any]], split: str | None, defaults: Sequence[str], name: str, where: str | None
) -> list[Any]:
    """Return the files of `split`, the first existing default split or the only split. Raises RLHFError D01."""
    candidates = (split,) if split else defaults
    for candidate in candidates:
        if candidate in files_by_split:
            return files_by_split[candidate]
    no_split = f"no split {' or '.join(candidates)}"
    splits = list(files_by_split)
    if not split and len(splits) == 1:
        only = splits[0]
        terminal.log_once(f"data     {name}: {no_split}; {only} is used")
        return files_by_split[only]
    near = closest_match(candidates[0], splits) or splits[0]
    text = f"{name} has {no_split}; it has {', '.join(splits)}"
    raise RLHFError("D01", text, where=where, hint=f"append the split to the name: [{near}]")


def _datasets() -> Any:
    import datasets
    from huggingface_hub.utils.logging import set_verbosity_error

    if not terminal.has_mode("verbose"):
        set_verbosity_error()  # it warns about every README without metadata
        datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    return datasets
