"""Files on disk: hashes, crash-safe writes, and names that stay inside their folder."""

import errno
import hashlib
import io
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import orjson

from rlhf_cli.errors import RLHFError, shown, translate_read_errors
from rlhf_cli.jsonl import BOM, numbered_rows, to_json
from rlhf_cli.system import format_bytes

MODEL_CARDS = ("README.md",)  # not part of a model
HASH_THREADS = 8
HASH_DIFFERS = "its content is not what was written (sha256 differs)"
MAX_FILE_BYTES = 2**27  # of a file that is read as a whole: manifests, reports and settings have a few MB
MAX_LOG_BYTES = 2**30  # half a million updates of PPO
KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}  # of what is there in place of a file


# Files and folders that may not be plain: read, changed or removed without following what leads elsewhere


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading. Raises RLHFError E08 for a pipe, a device or a socket, which may never end."""
    if kind := KINDS.get(stat.S_IFMT(path.stat().st_mode)):
        text = f"{shown(path)} cannot be read now: it is {kind}, not a file"
        raise RLHFError("E08", text, hint="put the file back in its place, then run the same command again")
    with path.open("rb") as file:
        yield file


def read_regular(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a file. Raises RLHFError E08 as `open_regular`, and for one of more than `max_bytes`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            text = f"{shown(path)} cannot be read now: it has {format_bytes(size)}, more than such a file can have"
            raise RLHFError("E08", text, hint=f"put the file of at most {format_bytes(max_bytes)} back in its place")
        return file.read()


def require_inside(path: Path) -> None:
    """Raise RLHFError S03 if a link leads out of the file's folder: it must not be appended to or truncated."""
    if not path.resolve().is_relative_to(path.parent.resolve()):
        text = f"{shown(path)} is a link to {path.resolve()}, which would be changed"
        raise RLHFError("S03", text, hint="replace the link by a copy of the file, then run the same command again")


def make_folder(folder: Path) -> None:
    """Create a folder unless it exists. Raises RLHFError C15 if its name is taken by a file or a broken link."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        is_dangling = folder.is_symlink() and not folder.exists()
        text = f"{shown(folder)} is {'a link to nothing' if is_dangling else 'a file'}, and a folder is needed"
        hint = "restore what it leads to, or move it away" if is_dangling else "move it away"
        raise RLHFError("C15", text, hint=f"{hint}; then run the same command again") from None


def remove(path: Path, *, ignore_errors: bool = False) -> None:
    """Delete a file, a link or a folder, if it exists; what a link leads to is kept."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=ignore_errors)
    else:
        path.unlink(missing_ok=True)


# Hashes


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_sha256(paths: Sequence[Path]) -> str:
    """Return one hash of the contents of files, in order; for one file its own. File hashes are cached."""
    hashes = []
    for path in paths:
        status = path.stat()
        hashes.append(_sha256_of(path, status.st_ino, status.st_size, status.st_mtime_ns))
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()


@lru_cache(maxsize=1024)
def _sha256_of(path: Path, *_file_state: int) -> str:
    """Return a file's hash, cached in the process by inode, size and modification time."""
    return file_sha256(path)


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return {name: {"sha256", "bytes"}} of files in `folder`; names are relative POSIX paths.

    Several files are hashed at a time, one per thread.
    """
    paths = {name: folder / name for name in names}
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        hashes = dict(zip(paths, pool.map(file_sha256, paths.values()), strict=True))
    return {name: {"sha256": hashes[name], "bytes": path.stat().st_size} for name, path in paths.items()}


def model_sha256(files: Mapping[str, Mapping[str, Any]], prefix: str = "model/") -> str:
    """Return one hash of the names and hashes of the files under `prefix`, without the model card.

    `files` is as in a manifest: {relative POSIX name: {"sha256": hex, ...}}. The prefix is not hashed: a copy of
    RUN/sft/model elsewhere is the same model.
    """
    digest = hashlib.sha256()
    for name in sorted(files):
        rest = name.removeprefix(prefix)
        if name.startswith(prefix) and rest not in MODEL_CARDS:
            digest.update(f"{rest}\0{files[name]['sha256']}\n".encode())
    return digest.hexdigest()


def cached_model(name: str, revision: str | None) -> Path | None:
    """Return the folder of a hub id in the local cache; None if it is not cached or not a hub id."""
    from huggingface_hub import snapshot_download

    with suppress(OSError, ValueError):
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    return None


def json_sha256(value: object) -> str:
    """Return the sha256 of a JSON-serializable value, independent of the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def list_folder(folder: Path) -> list[str]:
    """Return the sorted names in a folder, [] if it is missing. Raises RLHFError E08 if it cannot be read now."""
    with suppress(OSError), translate_read_errors(folder):
        return sorted(os.listdir(folder))
    return []


def path_exists(path: Path) -> bool:
    """Return True if a path exists. Raises RLHFError E08 if that cannot be determined now."""
    with suppress(OSError), translate_read_errors(path):
        path.stat()
        return True
    return False


def list_files(folder: Path) -> list[str]:
    """Return the sorted relative POSIX names of all regular files below `folder`, without hidden files and folders."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts))


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to disk; folders only where the file system supports it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def sync_files(folder: Path, names: Iterable[str]) -> None:
    """Flush the named files below `folder`, and the folders that contain them, to disk."""
    paths = [folder / name for name in names]
    folders = {folder}
    for path in paths:
        folders.update(parent for parent in path.parents if parent.is_relative_to(folder))
    for path in (*paths, *folders):
        sync(path)


@contextmanager
def atomic_folder(folder: Path, mark: str = "") -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder`, which must be missing or empty, at the end of the context.

    On an exception the temporary folder is deleted. The caller must flush the files to disk. Its name begins with
    `.tmp-` and `mark`.
    """
    scratch = folder.with_name(f".tmp-{mark}{folder.name}-{os.getpid()}")
    scratch.mkdir()
    try:
        yield scratch
        scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    sync(folder.parent)


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: readers see the old content or the new, even after a crash."""
    scratch = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        sync(scratch)
        scratch.rename(path)
    finally:
        scratch.unlink(missing_ok=True)
    sync(path.parent)


def write_json(path: Path, value: object) -> None:
    """Replace a file atomically with the value as indented JSON."""
    write_text(path, to_json(value, indent=2) + "\n")


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file is missing or holds anything else.

    Raises RLHFError E08 if it cannot be read now, or as `read_regular`.
    """
    with suppress(OSError, ValueError, RecursionError), translate_read_errors(path):
        value = json.loads(read_regular(path).decode("utf-8"))
        return value if isinstance(value, dict) else None
    return None


def write_checked_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as JSON, with the hash of its content under `sha256`."""
    write_json(path, {**value, "sha256": json_sha256(value)})


def read_checked_json(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return the object that `write_checked_json` wrote, without its hash, and the problem with the file, or None."""
    value = read_json_object(path)
    if value is None:
        return {}, f"{path.name} is missing or not readable"
    recorded = value.pop("sha256", None)
    return value, None if recorded == json_sha256(value) else f"{path.name}: {HASH_DIFFERS}"


# JSON Lines that grow. A last line without its line break is a row if it is whole (an editor may have removed the line
# break); else a killed process left it, which had not acknowledged it.


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows, and wait until the disk has them. On an OSError the file is as before."""
    lines = "".join(to_json(row, allow_nan=False) + "\n" for row in rows)
    path.touch()
    size = path.stat().st_size
    try:
        with path.open("ab") as file:
            file.write(lines.encode("utf-8"))
        sync(path)
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)
        raise


def appended_rows(path: Path, *, hint: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, row) of a file that `append_rows` writes.

    Raises RLHFError D03, D04, D12 with the hint for a line that is no row, E08.
    """
    if not path.exists():
        return
    content = read_regular(path, MAX_LOG_BYTES)
    try:
        yield from numbered_rows(io.BytesIO(content[: _whole_rows(content)]), path)
    except RLHFError as error:
        raise RLHFError.from_problems([replace(problem, hint=hint) for problem in error.problems]) from error


def repair_end(path: Path) -> int:
    """Make a file of rows ready for `append_rows`; return how many bytes of an unfinished line were removed.

    Raises RLHFError S03 for a link out of the folder.
    """
    require_inside(path)
    content = read_regular(path, MAX_LOG_BYTES) if path.exists() else b""
    whole = _whole_rows(content)
    if whole < len(content):
        os.truncate(path, whole)
    elif content and not content.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
    return len(content) - whole


def _whole_rows(content: bytes) -> int:
    """Return the number of bytes before an unfinished last line."""
    last_line = content.rfind(b"\n") + 1
    try:
        orjson.loads(content[last_line:].removeprefix(BOM))
    except orjson.JSONDecodeError:
        return last_line
    return len(content)


# Files that a manifest lists


def safe_join(folder: Path, name: str, *, where: str) -> Path:
    """Return folder / name, for a name that was read from a file.

    Raises S03 for an absolute name, one with `..`, or one that a link leads out of the folder.
    """
    pure = PurePosixPath(name)
    path = folder / pure
    if not name or pure.is_absolute() or ".." in pure.parts or not path.resolve().is_relative_to(folder.resolve()):
        raise RLHFError("S03", f'the entry "{name}" points outside its folder', where=where)
    return path


def select_files(files: Mapping[str, Any], prefixes: str | tuple[str, ...]) -> dict[str, Any]:
    """Return the entries of a manifest's files under the prefixes, without model cards."""
    names = [name for name in files if name.startswith(prefixes) and not name.endswith(MODEL_CARDS)]
    return {name: files[name] for name in names}


def find_damage(folder: Path, files: Mapping[str, Any], *, where: str, content: bool) -> str | None:
    """Return the problem with the first damaged file of those listed ({name: {"sha256", "bytes"}}), or None.

    Sizes are always compared; hashes only with `content`. Raises S03 for a name that leads out of the folder, E08 for a
    file that cannot be read now.
    """
    for name, entry in files.items():
        path = safe_join(folder, name, where=where)
        if not isinstance(entry, Mapping) or not {"sha256", "bytes"} <= entry.keys():
            return f"{name}: its entry is not readable"
        try:
            with translate_read_errors(path):
                status = path.stat()
                if not stat.S_ISREG(status.st_mode):
                    return f"{name} is missing"
                if status.st_size != entry["bytes"]:
                    return f"{name} has {status.st_size} bytes, {entry['bytes']} were written"
                if content and file_sha256(path) != entry["sha256"]:
                    return f"{name}: {HASH_DIFFERS}"
        except OSError:
            return f"{name} is missing"
    return None
