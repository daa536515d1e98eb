"""Run folders: parents, checkpoints, locks, manifests and the state of stages. Imports its modules on first use."""

from typing import TYPE_CHECKING

from rlhf_cli import import_on_first_use

if TYPE_CHECKING:
    from rlhf_cli.runs.checkpoints import *  # noqa: F403
    from rlhf_cli.runs.identity import *  # noqa: F403
    from rlhf_cli.runs.integrity import *  # noqa: F403
    from rlhf_cli.runs.layout import *  # noqa: F403
    from rlhf_cli.runs.locks import *  # noqa: F403
    from rlhf_cli.runs.manifest import *  # noqa: F403
    from rlhf_cli.runs.parents import *  # noqa: F403
    from rlhf_cli.runs.resolve import *  # noqa: F403
    from rlhf_cli.runs.stage_folder import *  # noqa: F403

__getattr__ = import_on_first_use(
    __name__,
    {
        "runs.checkpoints": "begin_state commit_state delete_state latest_state newest_step require_free seal_state "
        "state_at state_steps step_name valid_states",
        "runs.locks": "new_folder release require_empty scratch_folder",
        "runs.integrity": "require_unchanged verify_parents",
        "runs.layout": "MERGED SNAPSHOTS",
        "runs.manifest": "Manifest read_manifest",
        "runs.parents": "FOREIGN Parent find_base is_adapter_of is_available_locally open_parent parent_entry",
        "runs.resolve": "LAST RECOMMENDED SELECTED Reference check_same_tokenizer open_parents open_reference "
        "references resolve_model sft_of",
        "runs.stage_folder": "CheckpointTimer complete_stage detect_moved_folder environment_changes "
        "recorded_num_processes start_stage shown versions write_json",
        "runs.identity": "StageStatus compute_identity identity_difference quick_stage_status require_current "
        "stage_status",
    },
)
