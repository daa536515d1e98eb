"""State of a stage's folder by its own files, for display: absent, unfinished, finished, damaged or unreadable."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_cli.errors import RLHFError
from rlhf_cli.files import find_damage, list_folder, path_exists, select_files
from rlhf_cli.runs.discover import has_output
from rlhf_cli.runs.parents import FOREIGN, read_manifest
from rlhf_cli.runs.stage_folder import read_identity

State = Literal["absent", "begun", "finished", "damaged", "unreadable"]


@dataclass(frozen=True)
class StageState:
    """State of a stage's folder; `problem` names the damage or read error."""

    state: State = "absent"
    problem: str | None = None
    manifest: Mapping[str, Any] | None = None
    identity: Mapping[str, Any] | None = None


def read_stage_state(folder: Path) -> StageState:
    """Return the state of a stage's folder. Files of the manifest are checked by size, reports also by hash."""
    if not has_output(folder):
        return StageState()
    identity = manifest = None
    try:
        list_folder(folder)
        identity = read_identity(folder)
        if not path_exists(folder / "manifest.json"):
            return StageState("begun", identity=identity)
        manifest, problem = read_manifest(folder)
        problem = problem or _damage(folder, manifest["files"])
    except RLHFError as error:
        return StageState("unreadable", error.problems[0].text, manifest, identity)
    return StageState("damaged" if problem else "finished", problem, manifest, identity)


def describe_changed_parents(folder: Path, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parents that have changed since: `another ppo than the one that is there now (models.ppo)`."""
    parents = manifest.get("parents")
    for key, entry in parents.items() if isinstance(parents, Mapping) else ():
        stage, path = (entry.get("stage"), entry.get("path")) if isinstance(entry, Mapping) else (None, None)
        if stage == FOREIGN or not isinstance(path, str):
            continue
        parent = read_stage_state(folder / path)
        sha256 = (parent.manifest or {}).get("model_sha256")
        if sha256 and sha256 != entry.get("sha256"):
            yield f"another {stage} than the one that is there now ({key})"
        elif parent.state == "begun":
            yield f"another {stage} than the one that is being made now ({key})"


def _damage(folder: Path, files: Mapping[str, Any]) -> str | None:
    try:
        models = find_damage(folder, select_files(files, ("model/", "value/")), where=str(folder), content=False)
        return models or find_damage(folder, select_files(files, "report.json"), where=str(folder), content=True)
    except RLHFError as error:
        if error.problems[0].code == "E08":
            raise
        return error.problems[0].text  # a name that leads out of the folder
