"""What stages leave on disk for one another: manifests, parents, states to resume from. Torch-free."""

from rlhf_cli.checkpoints.files import file_sha256, write_json
from rlhf_cli.checkpoints.locks import release
from rlhf_cli.checkpoints.outputs import (
    Status,
    begin,
    difference,
    examine,
    finish,
    identity,
    versions,
)
from rlhf_cli.checkpoints.parents import (
    FOREIGN,
    Parent,
    check_same_tokenizer,
    open_parent,
    open_parents,
    open_reference,
    references,
)
from rlhf_cli.checkpoints.states import commit_state, latest_state, newest_step
from rlhf_cli.errors import shown

__all__ = [
    "FOREIGN",
    "Parent",
    "Status",
    "begin",
    "check_same_tokenizer",
    "commit_state",
    "difference",
    "examine",
    "file_sha256",
    "finish",
    "identity",
    "latest_state",
    "newest_step",
    "open_parent",
    "open_parents",
    "open_reference",
    "references",
    "release",
    "shown",
    "versions",
    "write_json",
]
