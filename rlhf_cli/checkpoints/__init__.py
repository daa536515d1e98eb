"""What stages leave on disk for one another: manifests, parents, states to resume from. Torch-free."""

from rlhf_cli.checkpoints.adapters import MERGED, SETTINGS, WEIGHTS, base_of
from rlhf_cli.checkpoints.alike import check_same_tokenizer
from rlhf_cli.checkpoints.cost import Cost
from rlhf_cli.checkpoints.exports import new_folder, passing_folder, require_free
from rlhf_cli.checkpoints.files import file_sha256, write_json
from rlhf_cli.checkpoints.locks import release
from rlhf_cli.checkpoints.naming import Reference, open_parents, open_reference, references
from rlhf_cli.checkpoints.outputs import (
    Status,
    begin,
    difference,
    examine,
    finish,
    identity,
    in_place,
    processes_of,
    usable,
    versions,
)
from rlhf_cli.checkpoints.parents import (
    FOREIGN,
    SNAPSHOTS,
    Parent,
    is_here,
    open_parent,
    read_manifest,
    require_unchanged,
    stands_on,
)
from rlhf_cli.checkpoints.quick import glance
from rlhf_cli.checkpoints.runs import LAST, SELECTED, Chosen, choose
from rlhf_cli.checkpoints.states import (
    commit_state,
    drop_state,
    latest_state,
    make_room,
    newest_step,
    seal_state,
    state_at,
    state_steps,
    whole_states,
)
from rlhf_cli.errors import shown

__all__ = [
    "FOREIGN",
    "LAST",
    "MERGED",
    "SELECTED",
    "SETTINGS",
    "SNAPSHOTS",
    "WEIGHTS",
    "Chosen",
    "Cost",
    "Parent",
    "Reference",
    "Status",
    "base_of",
    "begin",
    "check_same_tokenizer",
    "choose",
    "commit_state",
    "difference",
    "drop_state",
    "examine",
    "file_sha256",
    "finish",
    "glance",
    "identity",
    "in_place",
    "is_here",
    "latest_state",
    "make_room",
    "new_folder",
    "newest_step",
    "open_parent",
    "open_parents",
    "open_reference",
    "passing_folder",
    "processes_of",
    "read_manifest",
    "references",
    "release",
    "require_free",
    "require_unchanged",
    "seal_state",
    "shown",
    "stands_on",
    "state_at",
    "state_steps",
    "usable",
    "versions",
    "whole_states",
    "write_json",
]
