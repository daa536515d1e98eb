"""Bytes on disk: hashes, writes that survive a crash, and names that may not leave their folder."""

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from rlhf_cli.errors import RLHFError, translate_read_errors
from rlhf_cli.jsonl import to_json

# A model card says how a model came to be; it cannot change what the model does.
MODEL_CARDS = ("README.md",)
HASH_DIFFERS = "its content is not what was written (sha256 differs)"


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_sha256(paths: Sequence[Path]) -> str:
    """One hash over the contents of files in their order; of one file its own. For data: several keys may name one."""
    hashes = []
    for path in paths:
        now = path.stat()
        hashes.append(_sha256_of(path, now.st_ino, now.st_size, now.st_mtime_ns))
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()


@lru_cache(maxsize=1024)
def _sha256_of(path: Path, *_as_it_is: int) -> str:
    """A file's hash, made once in a process while inode, size and time stay."""
    return file_sha256(path)


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """{name: {"sha256", "bytes"}} of the files of `folder` named in `names` (relative POSIX names)."""
    return {name: {"sha256": file_sha256(folder / name), "bytes": (folder / name).stat().st_size} for name in names}


def model_sha256(files: Mapping[str, Mapping[str, Any]], prefix: str = "model/") -> str:
    """One hash over the names and hashes of the files under `prefix`, model card left out.

    `files` has the form of a manifest's: {relative POSIX name: {"sha256": hex, ...}}. The prefix does not enter the
    hash: a copy of RUN/sft/model elsewhere is the same model.
    """
    total = hashlib.sha256()
    for name in sorted(files):
        rest = name.removeprefix(prefix)
        if name.startswith(prefix) and rest not in MODEL_CARDS:
            total.update(f"{rest}\0{files[name]['sha256']}\n".encode())
    return total.hexdigest()


def cached_model(name: str, revision: str | None) -> Path | None:
    """The folder of a hub id in the local cache; None where it is not there, or the name is no id."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):
        return None


def json_sha256(value: object) -> str:
    """The sha256 of a JSON-able value, independent of the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def list_folder(folder: Path) -> list[str]:
    """The names in a folder; none where it is not there. Raises RLHFError E08 where it cannot be read now."""
    try:
        with translate_read_errors(folder):
            return sorted(os.listdir(folder))
    except OSError:
        return []


def path_exists(path: Path) -> bool:
    """Whether a path names anything. Raises RLHFError E08 where that cannot be known now."""
    try:
        with translate_read_errors(path):
            path.stat()
    except OSError:
        return False
    return True


def list_files(folder: Path) -> list[str]:
    """Relative POSIX names of all regular files below `folder`, hidden files and folders left out, sorted."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts))


def sync(path: Path) -> None:
    """Force a file or a folder's entries to the disk. Some file systems cannot do so for a folder: they go without."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def sync_files(folder: Path, names: Iterable[str]) -> None:
    """Force the named files below `folder`, and the folders that lead to them, to the disk."""
    paths = [folder / name for name in names]
    for path in paths:
        sync(path)
    for parent in {parent for path in paths for parent in path.parents if parent.is_relative_to(folder)} | {folder}:
        sync(parent)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Within, a folder beside `folder` to write into; at the end it takes that place, where at most an empty one was.

    Whatever is raised within comes through, and leaves nothing. Forcing the files to the disk is left to the caller.
    """
    scratch = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
    scratch.mkdir()
    try:
        yield scratch
        scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    sync(folder.parent)


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step: a reader, or a crash, finds the old content or the new, never half of it."""
    scratch = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        sync(scratch)
        scratch.rename(path)
    finally:
        scratch.unlink(missing_ok=True)
    sync(path.parent)


def write_json(path: Path, value: object) -> None:
    """`write_text` of the value as indented JSON."""
    write_text(path, to_json(value, indent=2) + "\n")


def read_json_object(path: Path) -> dict[str, Any] | None:
    """The JSON object that a file of ours holds; None where it is missing or no such thing.

    Raises RLHFError E08 where it cannot be read now.
    """
    try:
        with translate_read_errors(path):
            value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def write_checked_json(path: Path, value: Mapping[str, Any]) -> None:
    """`write_json` of an object with the hash of its content in it."""
    write_json(path, {**value, "sha256": json_sha256(value)})


def read_checked_json(path: Path) -> tuple[dict[str, Any], str | None]:
    """The object that `write_checked_json` wrote, without its hash, and what is wrong with the file, or None."""
    value = read_json_object(path)
    if value is None:
        return {}, f"{path.name} is missing or not readable"
    told = value.pop("sha256", None)
    return value, None if told == json_sha256(value) else f"{path.name}: {HASH_DIFFERS}"


def safe_join(folder: Path, name: str, *, where: str) -> Path:
    """folder / name, for a name that came out of a file.

    Raises S03 for an absolute name, one with `..`, or one that a link leads out of the folder.
    """
    pure = PurePosixPath(name)
    path = folder / pure
    if not name or pure.is_absolute() or ".." in pure.parts or not path.resolve().is_relative_to(folder.resolve()):
        raise RLHFError("S03", f'the entry "{name}" leads out of its folder', where=where)
    return path


def select_files(files: Mapping[str, Any], prefixes: str | tuple[str, ...]) -> dict[str, Any]:
    """Those of a manifest's files that somebody loads: under the prefixes, model cards left out."""
    names = [name for name in files if name.startswith(prefixes) and not name.endswith(MODEL_CARDS)]
    return {name: files[name] for name in names}


def find_damage(folder: Path, files: Mapping[str, Any], *, where: str, content: bool) -> str | None:
    """What is wrong with the first bad file of those listed ({name: {"sha256", "bytes"}}), or None.

    Sizes are always compared; hashes where `content` is set. Raises S03 for a name that leads out of the folder, E08
    for a file that cannot be read now.
    """
    for name, entry in files.items():
        path = safe_join(folder, name, where=where)
        if not isinstance(entry, Mapping) or not {"sha256", "bytes"} <= entry.keys():
            return f"{name}: its entry is not readable"
        try:
            with translate_read_errors(path):
                found = path.stat()
                if not stat.S_ISREG(found.st_mode):
                    return f"{name} is missing"
                if found.st_size != entry["bytes"]:
                    return f"{name} has {found.st_size} bytes, {entry['bytes']} were written"
                if content and file_sha256(path) != entry["sha256"]:
                    return f"{name}: {HASH_DIFFERS}"
        except OSError:
            return f"{name} is missing"
    return None
