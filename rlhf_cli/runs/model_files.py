"""The files of a model's folder, its adapter and its hash: of a stage, a plain folder, or a cached hub model."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_cli.errors import RLHFError, shown, translate_read_errors
from rlhf_cli.files import (
    MAX_FILE_BYTES,
    MAX_LOG_BYTES,
    files_sha256,
    model_sha256,
    path_exists,
    read_json_object,
)
from rlhf_cli.runs.layout import ADAPTER_CONFIG
from rlhf_cli.system import format_bytes

# Files of a plain folder that make up the model. Cards, pictures and pickles (never loaded) are ignored.
MODEL_SUFFIXES = {".safetensors", ".json", ".model", ".txt", ".jinja", ".tiktoken", ".py"}

FileStats = dict[str, tuple[int, int, int]]  # name -> size, modification time in nanoseconds, inode


def is_model_file(name: str) -> bool:
    """Return True for the name of a file that the hash of a plain folder covers."""
    return name == Path(name).name and not name.startswith(".") and Path(name).suffix in MODEL_SUFFIXES


def list_model_files(folder: Path) -> list[Path]:
    """Return the files of a plain folder that make up the model, by name.

    Raises RLHFError E08 if it is unreadable, M01 for a pipe or a device, or a file that cannot be so large.
    """
    with translate_read_errors(folder):
        paths = [path for path in folder.iterdir() if is_model_file(path.name)]
        files = sorted(path for path in paths if path_exists(path) and not path.is_dir())
        for path in files:
            _require_plain(path)
        return files


def _require_plain(path: Path) -> None:
    """Raise RLHFError M01 for a file that cannot be of a model, and that takes forever to read."""
    size = path.stat().st_size
    if not path.is_file():
        raise RLHFError("M01", "not a regular file, and reading it may never end", where=shown(path))
    if size <= MAX_LOG_BYTES:
        return

    expected = _weights_bytes(path) if path.suffix == ".safetensors" else None
    if size != expected:
        text = f"has {format_bytes(size)}, which is not the size of a file of a model"
        hint = "copy or download it again, or move it out of the model's folder"
        raise RLHFError("M01", text, where=shown(path), hint=hint)


def _weights_bytes(path: Path) -> int | None:
    """Return the size of a safetensors file by its header, None without one."""
    with path.open("rb") as file, suppress(ValueError, TypeError, LookupError, AttributeError, RecursionError):
        length = int.from_bytes(file.read(8), "little")
        tensors = json.loads(file.read(min(length, MAX_FILE_BYTES)))
        ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"]
        end: int = max(ends)
        return 8 + length + end
    return None


def file_stats(folder: Path) -> FileStats:
    """Return size, modification time and inode of each model file: while these stay, so does the content."""
    stats = {path.name: path.stat() for path in list_model_files(folder)}
    return {name: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats.items()}


def folder_sha256(folder: Path) -> str:
    """Return the hash of the model in a plain folder."""
    files = {path.name: {"sha256": files_sha256([path])} for path in list_model_files(folder)}
    return model_sha256(files, prefix="")


def read_adapter(folder: Path) -> dict[str, Any] | None:
    """Return the settings of the adapter in a folder; None if it holds no adapter, or full weights too."""
    settings = read_json_object(folder / ADAPTER_CONFIG)
    if settings is None:
        return None
    has_full_weights = (folder / "config.json").is_file() and any(folder.glob("model*.safetensors"))
    return None if has_full_weights else settings
