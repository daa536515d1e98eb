"""Run folders: manifests, parents, checkpoints, locks and the status of stages. Imports no torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_cli.errors import shown
    from rlhf_cli.files import file_sha256, write_json
    from rlhf_cli.runs.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MERGED, find_base
    from rlhf_cli.runs.checkpoints import (
        commit_state,
        delete_state,
        latest_state,
        newest_step,
        prepare_state_folder,
        seal_state,
        state_at,
        state_steps,
        valid_states,
    )
    from rlhf_cli.runs.locks import new_folder, release, require_empty, scratch_folder
    from rlhf_cli.runs.parents import (
        FOREIGN,
        SNAPSHOTS,
        Parent,
        is_adapter_of,
        is_available_locally,
        open_parent,
        read_manifest,
        require_unchanged,
    )
    from rlhf_cli.runs.quick_status import quick_stage_status
    from rlhf_cli.runs.resolve import (
        LAST,
        SELECTED,
        Reference,
        ResolvedModel,
        open_parents,
        open_reference,
        references,
        resolve_model,
    )
    from rlhf_cli.runs.stage_folder import (
        CheckpointTimer,
        StageStatus,
        complete_stage,
        compute_identity,
        detect_moved_folder,
        identity_difference,
        recorded_num_processes,
        require_current,
        stage_status,
        start_stage,
        versions,
    )
    from rlhf_cli.runs.tokenizers import check_same_tokenizer

_MODULES = {
    "ADAPTER_CONFIG": "runs.adapters",
    "ADAPTER_WEIGHTS": "runs.adapters",
    "CheckpointTimer": "runs.stage_folder",
    "FOREIGN": "runs.parents",
    "LAST": "runs.resolve",
    "MERGED": "runs.adapters",
    "Parent": "runs.parents",
    "Reference": "runs.resolve",
    "ResolvedModel": "runs.resolve",
    "SELECTED": "runs.resolve",
    "SNAPSHOTS": "runs.parents",
    "StageStatus": "runs.stage_folder",
    "check_same_tokenizer": "runs.tokenizers",
    "commit_state": "runs.checkpoints",
    "complete_stage": "runs.stage_folder",
    "compute_identity": "runs.stage_folder",
    "delete_state": "runs.checkpoints",
    "detect_moved_folder": "runs.stage_folder",
    "file_sha256": "files",
    "find_base": "runs.adapters",
    "identity_difference": "runs.stage_folder",
    "is_adapter_of": "runs.parents",
    "is_available_locally": "runs.parents",
    "latest_state": "runs.checkpoints",
    "new_folder": "runs.locks",
    "newest_step": "runs.checkpoints",
    "open_parent": "runs.parents",
    "open_parents": "runs.resolve",
    "open_reference": "runs.resolve",
    "prepare_state_folder": "runs.checkpoints",
    "quick_stage_status": "runs.quick_status",
    "read_manifest": "runs.parents",
    "recorded_num_processes": "runs.stage_folder",
    "references": "runs.resolve",
    "release": "runs.locks",
    "require_current": "runs.stage_folder",
    "require_empty": "runs.locks",
    "require_unchanged": "runs.parents",
    "resolve_model": "runs.resolve",
    "scratch_folder": "runs.locks",
    "seal_state": "runs.checkpoints",
    "shown": "errors",
    "stage_status": "runs.stage_folder",
    "start_stage": "runs.stage_folder",
    "state_at": "runs.checkpoints",
    "state_steps": "runs.checkpoints",
    "valid_states": "runs.checkpoints",
    "versions": "runs.stage_folder",
    "write_json": "files",
}
__all__ = [
    "ADAPTER_CONFIG",
    "ADAPTER_WEIGHTS",
    "FOREIGN",
    "LAST",
    "MERGED",
    "SELECTED",
    "SNAPSHOTS",
    "CheckpointTimer",
    "Parent",
    "Reference",
    "ResolvedModel",
    "StageStatus",
    "check_same_tokenizer",
    "commit_state",
    "complete_stage",
    "compute_identity",
    "delete_state",
    "detect_moved_folder",
    "file_sha256",
    "find_base",
    "identity_difference",
    "is_adapter_of",
    "is_available_locally",
    "latest_state",
    "new_folder",
    "newest_step",
    "open_parent",
    "open_parents",
    "open_reference",
    "prepare_state_folder",
    "quick_stage_status",
    "read_manifest",
    "recorded_num_processes",
    "references",
    "release",
    "require_current",
    "require_empty",
    "require_unchanged",
    "resolve_model",
    "scratch_folder",
    "seal_state",
    "shown",
    "stage_status",
    "start_stage",
    "state_at",
    "state_steps",
    "valid_states",
    "versions",
    "write_json",
]


def __getattr__(name: str) -> Any:
    """Import on first use: `rlhf --help` needs none of it."""
    from importlib import import_module

    if name in _MODULES:
        return getattr(import_module(f"rlhf_cli.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
