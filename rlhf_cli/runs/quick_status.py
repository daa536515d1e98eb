"""How a stage stands, told at once: for commands that only look, where weights may have gigabytes.

What acts on the answer reads every byte (`outputs.identity`). Here a large file that nothing has touched since the
stage began counts as what it was then.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_cli.data import sources
from rlhf_cli.files import files_sha256
from rlhf_cli.runs.parents import Parent, list_model_files
from rlhf_cli.runs.references import open_parents, open_reference, references
from rlhf_cli.runs.stage_folder import StageStatus, identity_from_hashes, read_identity, stage_status

SMALL_FILES_BYTES = 32_000_000  # bytes that are read all the same, in less than a tenth of a second


def quick_stage_status(config: Any) -> StageStatus:
    """Return the status of a stage without hashing large files; `unread` names the keys that were not verified.

    Downloads nothing. Raises RLHFError D01, M01, M04, M10 for missing data and parents.
    """
    made = read_identity(config.folder)
    parents = open_parents(config, hashed=False)
    here = {key: source for key, source in config.sources().items() if sources.is_local(source)}
    data = sources.locate(here)
    if made is None:
        return stage_status(config, {})  # new or of no known run, whatever is asked of it
    told = _Told(made, (config.folder / "identity.json").stat().st_mtime_ns)
    hashes = {key: parent.sha256 for key, parent in parents.items()}
    for reference in references(config):
        if not hashes[reference.key]:
            read = partial(_read, config, reference)
            hashes[reference.key] = told.hash("parents", reference.key, _weights(parents[reference.key]), read)
    contents = {key: told.hash("data", key, paths, partial(files_sha256, paths)) for key, paths in data.items()}
    absent = {key: told.as_it_was("data", key) for key in config.sources().keys() - here.keys()}
    status = stage_status(config, identity_from_hashes(config, hashes, contents | absent))
    return replace(status, unread=tuple(told.unread))


def _read(config: Any, reference: Any) -> str:
    return open_reference(config, reference).sha256


def _weights(parent: Parent) -> list[Path]:
    """The files that make a model which no stage of ours wrote, and their folder: its date tells that one is gone."""
    own = [parent.model, *list_model_files(parent.model)]
    return own + (_weights(parent.base) if parent.base and not parent.base.sha256 else [])


class _Told:
    """The hashes that a stage noted when it began, at a time in nanoseconds of the epoch."""

    def __init__(self, made: dict[str, Any], began: int) -> None:
        self.made, self.began = made, began
        self.unread: list[str] = []

    def hash(self, section: str, key: str, paths: Iterable[Path], read: Callable[[], str]) -> str:
        """The hash of files: read where they are small, as it was where their dates are older than the stage."""
        found = [path.stat() for path in paths]
        if sum(one.st_size for one in found) <= SMALL_FILES_BYTES:
            return read()
        if any(max(one.st_mtime_ns, one.st_ctime_ns) >= self.began for one in found):
            return self.as_it_was(section, key)
        return self._noted(section, key)

    def as_it_was(self, section: str, key: str) -> str:
        """For what cannot be known without reading it, or fetching it."""
        self.unread.append(key)
        return self._noted(section, key)

    def _noted(self, section: str, key: str) -> str:
        return str(self.made.get(section, {}).get(key))
