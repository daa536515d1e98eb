"""Reading and tokenising data files. `encode` produces the tokens of all stages; TRL never tokenises."""

from typing import TYPE_CHECKING

from rlhf_cli import import_on_first_use

if TYPE_CHECKING:
    from rlhf_cli.data.datasets import *  # noqa: F403
    from rlhf_cli.data.sampling import *  # noqa: F403
    from rlhf_cli.data.texts import *  # noqa: F403
    from rlhf_cli.data.tokens import *  # noqa: F403

# On first use, so that `rlhf_cli.ppo` can use data.sampling without the config.
__getattr__ = import_on_first_use(
    __name__,
    {
        "data.datasets": "PairFile Prompt Rows as_dataset is_plain_text preference_pairs preference_rows prompt_form "
        "prompt_rows sft_rows warn_shared",
        "data.sampling": "LengthGroupedSampler prompt_batch",
        "data.texts": "split_key",
        "data.tokens": "closing_ids decode_stream encode encode_answer encode_many set_speaks_in_turns speaks_in_turns "
        "special_ids stop_token_id token_texts",
    },
)
