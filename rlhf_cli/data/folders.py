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

    files = {}
    for split, paths in linked.items():
        files[split] = [links[link] for link in paths]
    if not has_configs:
        files = _with_unnamed(folder, name, files, data, where=where)

    found = {}
    for split, relative in files.items():
        found[split] = [folder / path for path in relative]
    return found


def _no_data_files(folder: Path, name: str, where: str | None) -> RLHFError:
    files = [path for path in folder.rglob("*") if path.is_file()]
    others = sorted(path.relative_to(folder) for path in files)
    text = f"{name} contains no data files"
    if others:
        text += f", but {first_names(others)}"

    endings = ", ".join(READERS)
    hint = f"data files end in {endings}, optionally followed by .gz"
    if any(path.suffix == ".arrow" for path in others):
        hint = 'convert Arrow to Parquet: datasets.load_from_disk(FOLDER).to_parquet("train.parquet")'
    return RLHFError("D01", text, where=where, hint=hint)


def _with_unnamed(folder: Path, name: str, files: Files, data: Sequence[Path], *, where: str | None) -> Files:
    """Add the files without a split in their name as `train`; `datasets` only uses those of the most common suffix.

    Next to named files it ignores them.
    """
    named = dict(files)
    train = files.get("train", [])
    if not any(map(_is_named, train)):
        named.pop("train", None)

    placed = set(chain.from_iterable(named.values()))
    rest = [path for path in data if path not in placed]
    if (folder / README).exists():  # a hub dataset: other suffixes are copies in other formats
        found = chain.from_iterable(files.values())
        suffixes = set(map(suffix, found))
        rest = [path for path in rest if suffix(path) in suffixes]
    elif rest and "train" in named:
        ignored = first_names(rest)
        used = first_names(named["train"])
        terminal.log_once(f"data     {name}: {ignored} ignored: train is {used}")
    if not rest or "train" in named:
        return named

    suffixes = set(map(suffix, rest))
    if len(suffixes) > 1:
        text = f"{name} contains data files of several formats: {first_names(rest)}"
        hint = f"set one of them: {shown(folder / rest[0])}"
        raise RLHFError("D01", text, where=where, hint=hint)

    text = f"data     {name}: train is {first_names(rest)}"
    if named:
        text += ", the rest"
    for split, paths in named.items():
        text += f"; {split} is {first_names(paths)}"
    terminal.log_once(text)
    return {"train": rest, **named}


def _is_named(path: Path) -> bool:
    """Return True if a file name or a folder above it contains a split keyword."""
    by_split = _datasets().data_files.SPLIT_KEYWORDS
    keywords = chain.from_iterable(by_split.values())
    name = path.as_posix().lower()
    words = re.split(r"[-._ 0-9/]+", name)
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
    visible = [path for path in relative if not _is_hidden(path)]
    data = [path for path in visible if suffix(path) in DATA_SUFFIXES]
    if data:
        return data
    readable = [path for path in visible if suffix(path) in READERS]
    return [path for path in readable if path.name not in METADATA_FILES]


def _is_hidden(path: Path) -> bool:
    """Return True if a file name or a folder above it starts with a dot or two underscores."""
    return any(part.startswith((".", "__")) for part in path.parts)


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
        is_data = path.name != README
        if lowercase and is_data and not lowercased.is_symlink():
            link = lowercased

        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder / path)
        links[str(link)] = path
    return links


def data_files(name: str, subset: str | None, revision: str | None = None) -> dict[str, list[str]]:
    """Return the paths or URLs of each split of a folder or hub dataset."""
    with TemporaryDirectory() as scratch:  # nothing stays in the cache of `datasets`
        builder = _datasets().load_dataset_builder(
            name,
            name=subset,
            revision=revision,
            cache_dir=scratch,
        )
    files_by_split = builder.config.data_files or {}

    files = {}
    for split, paths in files_by_split.items():
        files[str(split)] = list(map(str, paths))
    return files


def load_error(name: str, shown_name: str, subset: str | None, where: str | None, error: Exception) -> RLHFError:
    """Translate an exception of `data_files` to D01; `shown_name` is the name in the message."""
    names: list[str] = []
    if isinstance(error, ValueError):  # raised for subsets
        with suppress(Exception):
            names = list(_datasets().get_dataset_config_names(name))

    hint = None
    listed = ", ".join(names)
    if subset is None and len(names) > 1:
        text = f"{shown_name} has the subsets {listed}"
        hint = f"set data.subset: {names[0]}"
    elif subset is not None and names and subset not in names:
        near = closest_match(subset, names) or names[0]
        text = f'{shown_name} has no subset "{subset}"; it has {listed}'
        hint = f"set data.subset: {near}"
    else:
        said = str(error).replace(name, shown_name)
        reason = " ".join(said.split())
        text = f"{shown_name} contains no data files: {reason}"
    return RLHFError("D01", text, where=where, hint=hint)


def select_split(
    files_by_split: Mapping[str, list[Any]], split: str | None, defaults: Sequence[str], name: str, where: str | None
) -> list[Any]:
    """Return the files of `split`, the first existing default split or the only split. Raises RLHFError D01."""
    candidates = (split,) if split else defaults
    for candidate in candidates:
        if candidate in files_by_split:
            return files_by_split[candidate]

    wanted = " or ".join(candidates)
    splits = list(files_by_split)
    if not split and len(splits) == 1:
        only = splits[0]
        terminal.log_once(f"data     {name}: no split {wanted}; {only} is used")
        return files_by_split[only]

    near = closest_match(candidates[0], splits) or splits[0]
    existing = ", ".join(splits)
    text = f"{name} has no split {wanted}; it has {existing}"
    raise RLHFError("D01", text, where=where, hint=f"append the split to the name: [{near}]")


def _datasets() -> Any:
    import datasets
    from huggingface_hub.utils.logging import set_verbosity_error

    if not terminal.has_mode("verbose"):
        set_verbosity_error()  # it warns about every README without metadata
        datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    return datasets
