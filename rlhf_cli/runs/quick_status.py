"""Status of a stage without hashing large files, for commands that only display it.

Commands that act on the status hash every byte (`stage_folder.compute_identity`). Here, a large file that was not
modified since the stage started is assumed to be unchanged.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_cli.data import sources
from rlhf_cli.files import files_sha256
from rlhf_cli.runs.parents import Parent, list_model_files
from rlhf_cli.runs.resolve import open_parents, open_reference, references
from rlhf_cli.runs.stage_folder import StageStatus, identity_from_hashes, read_identity, stage_status

SMALL_FILES_BYTES = 32_000_000  # files of up to this size are hashed, in under a tenth of a second


def quick_stage_status(config: Any) -> StageStatus:
    """Return the status of a stage without hashing large files; `unread` names the keys that were not verified.

    Downloads nothing. Raises RLHFError D01, M01, M04, M10 for missing data and parents.
    """
    identity = read_identity(config.folder)
    parents = open_parents(config, hashed=False)
    local = {key: source for key, source in config.sources().items() if sources.is_local(source)}
    data = sources.locate(local)
    if identity is None:
        return stage_status(config, {})  # new, or the files of no known run
    recorded = _RecordedHashes(identity, (config.folder / "identity.json").stat().st_mtime_ns)
    hashes = {key: parent.sha256 for key, parent in parents.items()}
    for reference in references(config):
        if not hashes[reference.key]:
            read = partial(_read_hash, config, reference)
            hashes[reference.key] = recorded.hash("parents", reference.key, _weights(parents[reference.key]), read)
    contents = {key: recorded.hash("data", key, paths, partial(files_sha256, paths)) for key, paths in data.items()}
    remote = {key: recorded.unverified("data", key) for key in config.sources().keys() - local.keys()}
    status = stage_status(config, identity_from_hashes(config, hashes, contents | remote))
    return replace(status, unread=tuple(recorded.unread))


def _read_hash(config: Any, reference: Any) -> str:
    return open_reference(config, reference).sha256


def _weights(parent: Parent) -> list[Path]:
    """Return the model files of a foreign parent and their folder, whose modification time shows deletions."""
    own = [parent.model, *list_model_files(parent.model)]
    return own + (_weights(parent.base) if parent.base and not parent.base.sha256 else [])


class _RecordedHashes:
    """Hashes that a stage recorded when it started, at a time in nanoseconds since the epoch."""

    def __init__(self, identity: dict[str, Any], started: int) -> None:
        self.identity, self.started = identity, started
        self.unread: list[str] = []

    def hash(self, section: str, key: str, paths: Iterable[Path], read: Callable[[], str]) -> str:
        """Return the hash of files: computed for small files, recorded for those older than the stage."""
        stats = [path.stat() for path in paths]
        if sum(stat.st_size for stat in stats) <= SMALL_FILES_BYTES:
            return read()
        if any(max(stat.st_mtime_ns, stat.st_ctime_ns) >= self.started for stat in stats):
            return self.unverified(section, key)
        return self._recorded(section, key)

    def unverified(self, section: str, key: str) -> str:
        """Return the recorded hash, and mark the key as unverified."""
        self.unread.append(key)
        return self._recorded(section, key)

    def _recorded(self, section: str, key: str) -> str:
        return str(self.identity.get(section, {}).get(key))
