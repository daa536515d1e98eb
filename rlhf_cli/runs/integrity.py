"""Changes of parents: files that differ from what a stage wrote, or that changed while they were read."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from rlhf_cli.errors import RLHFError, collect_errors, shown
from rlhf_cli.files import find_damage, json_sha256, select_files
from rlhf_cli.runs.layout import MANIFEST
from rlhf_cli.runs.model_files import FileStats, file_stats, folder_sha256
from rlhf_cli.runs.parents import FOREIGN, Parent, damaged_stage_error


def verify_parents(parents: Mapping[str, Parent]) -> None:
    """Check the model files of all parents that stages wrote by hash. Raises M10 with all damaged parents.

    `open_parents` compares sizes only, because it runs each time a pipeline is inspected.
    """
    collect_errors(*(partial(_verify, parent) for parent in own_stages(parents)))


def own_stages(parents: Mapping[str, Parent]) -> list[Parent]:
    """Return the parents and their bases that stages wrote, each folder once."""
    return [parent for parent in _with_bases(parents) if parent.stage != FOREIGN]


def _with_bases(parents: Mapping[str, Parent]) -> list[Parent]:
    """Return the parents and their bases, each folder once."""
    by_folder: dict[Path, Parent] = {}
    for parent in parents.values():
        model: Parent | None = parent
        while model:
            by_folder.setdefault(model.model, model)
            model = model.base
    return list(by_folder.values())


def _verify(parent: Parent) -> None:
    problem = _find_difference(parent)
    if problem:
        where = shown(parent.path / MANIFEST)
        raise damaged_stage_error(parent.key, parent.path, parent.stage, problem, where)


def _find_difference(parent: Parent) -> str | None:
    """Return the first difference, by hash, between a stage's model and its manifest."""
    files = select_files(parent.manifest.files, "model/")
    return find_damage(parent.path, files, where=shown(parent.path / MANIFEST), content=True)


def require_unchanged(parents: Mapping[str, Parent], *, loaded: bool = False) -> None:
    """Raise RLHFError M14 with all parents that changed after their hashes were computed.

    If only the dates differ, the content is read again. A deleted folder is ignored. With `loaded`, everything was
    loaded before, so additional files are ignored.
    """
    collect_errors(*(partial(_require_unchanged, parent, loaded) for parent in _with_bases(parents)))


def _require_unchanged(parent: Parent, loaded: bool) -> None:
    before = parent.file_stats
    try:
        now = file_stats(parent.model)
    except (FileNotFoundError, NotADirectoryError):
        return

    if before is None or now == before or (loaded and now.items() >= before.items()):
        return
    if _content_changed(parent, before, now, loaded):
        names = sorted(name for name in before | now if before.get(name) != now.get(name))
        text = f"{parent.key}: {shown(parent.model)} changed while it was read ({', '.join(names[:3])})"
        raise RLHFError("M14", text, hint="undo the change and run the same command again; or start over with --fresh")


def _content_changed(parent: Parent, before: FileStats, now: FileStats, loaded: bool) -> bool:
    """Read the files again, whose dates differ, and return True if their content differs too."""
    if parent.stage == FOREIGN:
        own = folder_sha256(parent.model)
        return parent.sha256 != (json_sha256([own, parent.base.sha256]) if parent.base else own)

    has_same_names = loaded or now.keys() == before.keys()
    return _find_difference(parent) is not None or not has_same_names
