"""Find the data files of each split in a folder or hub dataset, with the rules of the `datasets` library."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
        others = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        text = f"{name} contains no data files" + (f", but {first_names(others)}" if others else "")
        hint = f"data files end in {', '.join(READERS)}, optionally followed by .gz"
        if any(path.suffix == ".arrow" for path in others):
            hint = 'convert Arrow to Parquet: datasets.load_from_disk(FOLDER).to_parquet("train.parquet")'
        raise RLHFError("D01", text, where=where, hint=hint)
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
        files = _with_unnamed(folder, name, files, data, where)
    return {split: [folder / path for path in paths] for split, paths in files.items()}


def _with_unnamed(folder: Path, name: str, files: Files, data: Sequence[Path], where: str | None) -> Files:
    """Add the files without a split in their name as `train`; `datasets` only uses those of the most common suffix.

    Next to named files it ignores them.
    """
    chosen = {path for paths in files.values() for path in paths}
    by_name = {split: paths for split, paths in files.items() if split != "train" or any(map(_is_named, paths))}
    rest = [path for path in data if not any(path in paths for paths in by_name.values())]
    if (folder / README).exists():  # a hub dataset: other suffixes are copies in other formats
        rest = [path for path in rest if suffix(path) in set(map(suffix, chosen))]
    elif rest and "train" in by_name:
        terminal.log_once(f"data     {name}: {first_names(rest)} ignored: train is {first_names(by_name['train'])}")
    if not rest or "train" in by_name:
        return by_name
    if len(set(map(suffix, rest))) > 1:
        text = f"{name} contains data files of several formats: {first_names(rest)}"
        raise RLHFError("D01", text, where=where, hint=f"set one of them: {shown(folder / rest[0])}")
    others = "".join(f"; {split} is {first_names(paths)}" for split, paths in by_name.items())
    terminal.log_once(f"data     {name}: train is {first_names(rest)}{', the rest' if others else ''}{others}")
    return {"train": rest, **by_name}


def _is_named(path: Path) -> bool:
    """Return True if a file name or a folder above it contains a split keyword."""
    keywords = {word for words in _datasets().data_files.SPLIT_KEYWORDS.values() for word in words}
    return bool(keywords & set(re.split(r"[-._ 0-9/]+", path.as_posix().lower())))


def _data_files(folder: Path) -> list[Path]:
    """Return the data files below a folder, relative to it. Raises E08 if a part cannot be read."""

    def raise_error(error: OSError) -> None:
        raise error

    with translate_read_errors(folder):  # Path.rglob would skip unreadable folders
        walked = os.walk(folder, onerror=raise_error)
        paths = [Path(parent, name) for parent, folders, files in walked for name in [*folders, *files]]
    relative = [path.relative_to(folder) for path in sorted(paths, key=Path.as_posix)]
    visible = [path for path in relative if not any(part.startswith((".", "__")) for part in path.parts)]
    data = [path for path in visible if suffix(path) in DATA_SUFFIXES]
    return data or [path for path in visible if suffix(path) in READERS and path.name not in METADATA_FILES]


def _link(folder: Path, data: Sequence[Path], mirror: Path, *, lowercase: bool) -> dict[str, Path]:
    """Link data files and README into the empty folder `mirror`; return link -> file.

    `datasets` would also count other files: eval.yaml would become a split. With `lowercase`, Test.CSV is linked as
    test.csv, because the keywords of `datasets` are in lower case.
    """
    links = {}
    for path in [*data, *([Path(README)] if (folder / README).exists() else [])]:
        link = mirror / path.as_posix().lower() if lowercase and path.name != README else mirror / path
        link = mirror / path if link.is_symlink() else link
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder / path)
        links[str(link)] = path
    return links


def data_files(name: str, subset: str | None, revision: str | None = None) -> dict[str, list[str]]:
    """Return the paths or URLs of each split of a folder or hub dataset."""
    with TemporaryDirectory() as scratch:  # nothing stays in the cache of `datasets`
        builder = _datasets().load_dataset_builder(name, name=subset, revision=revision, cache_dir=scratch)
    return {str(split): list(map(str, paths)) for split, paths in (builder.config.data_files or {}).items()}


def load_error(name: str, shown_name: str, subset: str | None, where: str | None, error: Exception) -> RLHFError:
    """Translate an exception of `data_files` to D01; `shown_name` is the name in the message."""
    names: list[str] = []
    if isinstance(error, ValueError):  # raised for subsets
        with suppress(Exception):
            names = list(_datasets().get_dataset_config_names(name))
    reason = " ".join(str(error).replace(name, shown_name).split())
    if subset is not None and names and subset not in names:
        text = f'{shown_name} has no subset "{subset}"; it has {", ".join(names)}'
        return RLHFError("D01", text, where=where, hint=f"set data.subset: {closest_match(subset, names) or names[0]}")
    if subset is None and len(names) > 1:
        text = f"{shown_name} has the subsets {', '.join(names)}"
        return RLHFError("D01", text, where=where, hint=f"set data.subset: {names[0]}")
    return RLHFError("D01", f"{shown_name} contains no data files: {reason}", where=where)


def select_split(
    files_by_split: Mapping[str, list[Any]], split: str | None, defaults: Sequence[str], name: str, where: str | None
) -> list[Any]:
    """Return the files of `split`, the first existing default split or the only split. Raises RLHFError D01."""
    candidates = (split,) if split else defaults
    for candidate in candidates:
        if candidate in files_by_split:
            return files_by_split[candidate]
    if not split and len(files_by_split) == 1:
        ((only, files),) = files_by_split.items()
        terminal.log_once(f"data     {name}: no split {' or '.join(defaults)}; {only} is used")
        return files
    near = closest_match(candidates[0], files_by_split) or next(iter(files_by_split))
    text = f"{name} has no split {' or '.join(candidates)}; it has {', '.join(map(str, files_by_split))}"
    raise RLHFError("D01", text, where=where, hint=f"append the split to the name: [{near}]")


def _datasets() -> Any:
    import datasets
    from huggingface_hub.utils.logging import set_verbosity_error

    set_verbosity_error()  # it warns about every README without metadata
    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    return datasets
