"""Reading and tokenising data files. `encode` produces the tokens of all stages; TRL never tokenises."""

from typing import TYPE_CHECKING, Any

from rlhf_cli import import_on_first_use

if TYPE_CHECKING:
    from rlhf_cli.data.datasets import Prompt as Prompt
    from rlhf_cli.data.datasets import Rows as Rows
    from rlhf_cli.data.datasets import is_plain_text as is_plain_text
    from rlhf_cli.data.datasets import preference_pairs as preference_pairs
    from rlhf_cli.data.datasets import preference_rows as preference_rows
    from rlhf_cli.data.datasets import prompt_form as prompt_form
    from rlhf_cli.data.datasets import prompt_rows as prompt_rows
    from rlhf_cli.data.datasets import sft_rows as sft_rows
    from rlhf_cli.data.datasets import warn_shared as warn_shared
    from rlhf_cli.data.sampling import LengthGroupedSampler as LengthGroupedSampler
    from rlhf_cli.data.sampling import prompt_batch as prompt_batch
    from rlhf_cli.data.texts import split_key as split_key
    from rlhf_cli.data.tokens import decode_stream as decode_stream
    from rlhf_cli.data.tokens import encode as encode
    from rlhf_cli.data.tokens import encode_many as encode_many
    from rlhf_cli.data.tokens import stop_token_id as stop_token_id

# On first use, so that `rlhf_cli.ppo` can use data.sampling without the config.
__getattr__ = import_on_first_use(
    __name__,
    {
        "data.datasets": "Prompt Rows is_plain_text preference_pairs preference_rows prompt_form prompt_rows sft_rows "
        "warn_shared",
        "data.sampling": "LengthGroupedSampler prompt_batch",
        "data.texts": "Pair split_key",
        "data.tokens": "decode_stream encode encode_many stop_token_id",
    },
)


def as_dataset(rows: list[dict[str, Any]]) -> Any:
    """Return a `datasets.Dataset` of the rows (at least one) for TRL's trainers, with the first row's columns."""
    import datasets  # half a second; only SFT and reward need it

    datasets.disable_progress_bars()
    return datasets.Dataset.from_dict({name: [row[name] for row in rows] for name in rows[0]})
