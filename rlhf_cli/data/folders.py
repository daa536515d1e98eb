"""Folders of data files: `datasets` finds the files of each split, for the hub itself too; we read them."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.config.sources import suffix
from rlhf_cli.data.readers import READERS, lacks_header, read, told
from rlhf_cli.errors import RLHFError, closest_match, shown, translate_read_errors

README = "README.md"
DATA = READERS.keys() - {".json", ".txt"}  # these two may well be notes: they are data where nothing else is
NO_DATA = {"config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"}
SHOWN = 3  # names of files in a message
Files = dict[str, list[Path]]  # split -> its files in order, relative to the folder


def splits(folder: Path, name: str, subset: str | None, where: str | None) -> Files:
    """Split -> its files in order: by the README's `configs`, by folders and by names.

    `name` is the folder's in messages. Files that no name gives to a split are `train` where no others are, which is
    said. Raises RLHFError D01 where there are none, no such subset, or where such files are of several kinds or have
    other columns.
    """
    if not os.path.isdir(folder):
        raise RLHFError("D01", f"no such folder {name}", where=where)
    data = _data_files(folder)
    if not data:
        raise _none_there(folder, name, where)
    declared = _declares_splits(folder)
    with TemporaryDirectory() as scratch:
        mirror = Path(scratch).resolve() / "data"
        links = _link(folder.resolve(), data, mirror, small=not declared)
        try:
            found = builder(str(mirror), subset).config.data_files or {}
        except Exception as error:  # each of its many kinds of refusal is one of ours: nothing to read here
            raise refused(str(mirror), name, subset, where, error) from error
        files = {str(split): [links[str(link)] for link in of_it] for split, of_it in found.items()}
    if not declared:
        files = _with_unnamed(folder, name, files, data, where)
    return {split: [folder / path for path in of_it] for split, of_it in files.items()}


def _with_unnamed(folder: Path, name: str, files: Files, data: Sequence[Path], where: str | None) -> Files:
    """Of files without a split's word in their names `datasets` takes the commonest kind; beside named ones, none."""
    taken = {path for of_it in files.values() for path in of_it}
    by_name = {split: of_it for split, of_it in files.items() if split != "train" or any(map(_is_named, of_it))}
    rest = [path for path in data if not any(path in of_it for of_it in by_name.values())]
    if (folder / README).exists():  # a dataset as the hub has it: other kinds are its other forms
        rest = [path for path in rest if suffix(path) in set(map(suffix, taken))]
    elif rest and "train" in by_name:
        terminal.log_once(f"data     {name}: {_listed(rest)} ignored: train is {_listed(by_name['train'])}")
    if not rest or "train" in by_name:
        return by_name
    _refuse_unlike(folder, name, rest, where)
    others = "".join(f"; {split} is {_listed(of_it)}" for split, of_it in by_name.items())
    terminal.log_once(f"data     {name}: train is {_listed(rest)}{', the rest' if others else ''}{others}")
    return {"train": rest, **by_name}


def _refuse_unlike(folder: Path, name: str, files: Sequence[Path], where: str | None) -> None:
    """D01 where files that would be read as one are of several kinds, or have other columns in their first rows."""
    hint = f"set one of them: {shown(folder / files[0])}"
    if len(set(map(suffix, files))) > 1:
        text = f"{name} contains data files of several formats: {_listed(files)}"
        raise RLHFError("D01", text, where=where, hint=hint)
    filled = [(path, columns) for path in files if (columns := _columns(folder / path))]
    for path, columns in filled[1:]:
        first, its = filled[0]
        if _are_unlike(its, columns, suffix(path)):
            text = f"{name} contains files with different columns: {first} ({told(its)}) and {path} ({told(columns)})"
            hint = lacks_header(first, its) or lacks_header(path, columns) or hint
            raise RLHFError("D01", text, where=where, hint=hint)


def _are_unlike(one: Sequence[str], other: Sequence[str], kind: str) -> bool:
    """JSON may leave a column out that a row has no use for; a table has all of its columns."""
    if kind in (".jsonl", ".ndjson", ".json"):
        return not (set(one) <= set(other) or set(other) <= set(one))
    return one != other


def _columns(path: Path) -> list[str]:
    """Those of the first row; of no row, none."""
    return next((sorted(row) for _, row in read(path)), [])


def _listed(files: Sequence[Path]) -> str:
    names = [str(path) for path in files]
    if len(names) > SHOWN:
        return f"{', '.join(names[:SHOWN])} and {len(names) - SHOWN} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _is_named(path: Path) -> bool:
    """Whether a split's word stands in a file's name or in a folder's above it."""
    words = {word for words in _datasets().data_files.SPLIT_KEYWORDS.values() for word in words}
    return bool(words & set(re.split(r"[-._ 0-9/]+", path.as_posix().lower())))


def _data_files(folder: Path) -> list[Path]:
    """All files of a folder that are data by their names, relative to it. Raises E08 for a part that cannot be read."""
    found = [path.relative_to(folder) for path in sorted(_below(folder), key=Path.as_posix)]
    seen = [path for path in found if not any(part.startswith((".", "__")) for part in path.parts)]
    data = [path for path in seen if suffix(path) in DATA]
    return data or [path for path in seen if suffix(path) in READERS and path.name not in NO_DATA]


def _below(folder: Path) -> Iterator[Path]:
    """All that lies below a folder. Unlike Path.rglob it passes over nothing: fewer files would be other data."""

    def stop(error: OSError) -> None:
        raise error

    with translate_read_errors(folder):
        for where, inner, files in os.walk(folder, onerror=stop):
            yield from (Path(where, name) for name in [*inner, *files])


def _none_there(folder: Path, name: str, where: str | None) -> RLHFError:
    found = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    text = f"{name} contains no data files" + (f", but {_listed(found)}" if found else "")
    hint = f"data files end in {', '.join(READERS)}, optionally followed by .gz"
    if any(path.suffix == ".arrow" for path in found):
        hint = 'convert Arrow to Parquet: datasets.load_from_disk(FOLDER).to_parquet("train.parquet")'
    return RLHFError("D01", text, where=where, hint=hint)


def _declares_splits(folder: Path) -> bool:
    """Whether the README says which files are which split."""
    readme = folder / README
    return readme.is_file() and b"\nconfigs:" in readme.read_bytes()


def _link(folder: Path, data: Sequence[Path], mirror: Path, *, small: bool) -> dict[str, Path]:
    """Data and README of a folder elsewhere, each a link: link -> file. What else is there would count for `datasets`:
    eval.yaml would be the whole of a split.

    `small` gives small letters to names: Test.CSV is test.csv to everybody else.
    """
    links = {}
    for path in [*data, *([Path(README)] if (folder / README).exists() else [])]:
        link = mirror / path.as_posix().lower() if small and path.name != README else mirror / path
        link = mirror / path if link.is_symlink() else link
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder / path)
        links[str(link)] = path
    return links


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
        near = closest_match(subset, names) or names[0]
        text = f'{told} has no subset "{subset}"; it has {", ".join(names)}'
        return RLHFError("D01", text, where=where, hint=f"set data.subset: {near}")
    if subset is None and len(names) > 1:
        text = f"{told} has the subsets {', '.join(names)}"
        return RLHFError("D01", text, where=where, hint=f"set data.subset: {names[0]}")
    return RLHFError("D01", f"{told} contains no data files: {reason}", where=where)


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
        ((only, files),) = found.items()
        terminal.log_once(f"data     {name}: no split {' or '.join(usual)}; {only} is used")
        return files
    near = closest_match(wanted[0], found) or next(iter(found))
    text = f"{name} has no split {' or '.join(wanted)}; it has {', '.join(map(str, found))}"
    raise RLHFError("D01", text, where=where, hint=f"append the split to the name: [{near}]")


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
