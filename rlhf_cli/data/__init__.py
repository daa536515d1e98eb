"""Data files to tokens. `encode` makes the tokens of all stages; TRL never tokenises."""

from typing import Any

from rlhf_cli.data.examples import (
    Prompt,
    is_plain_text,
    preference_pairs,
    preference_rows,
    prompt_form,
    prompt_rows,
    sft_rows,
)
from rlhf_cli.data.found import Rows, warn_shared
from rlhf_cli.data.sampling import LengthGroupedSampler, prompt_batch
from rlhf_cli.data.texts import Pair, split_key
from rlhf_cli.data.tokens import encode, encode_many, pieces, stop_token_id

__all__ = [
    "LengthGroupedSampler",
    "Pair",
    "Prompt",
    "Rows",
    "as_dataset",
    "encode",
    "encode_many",
    "is_plain_text",
    "pieces",
    "preference_pairs",
    "preference_rows",
    "prompt_batch",
    "prompt_form",
    "prompt_rows",
    "sft_rows",
    "split_key",
    "stop_token_id",
    "warn_shared",
]


def as_dataset(rows: list[dict[str, Any]]) -> Any:
    """A `datasets.Dataset` of the rows (at least one), all with the columns of the first; what TRL's trainers take."""
    import datasets  # half a second, and only TRL's stages need it

    datasets.disable_progress_bars()
    return datasets.Dataset.from_dict({name: [row[name] for row in rows] for name in rows[0]})
