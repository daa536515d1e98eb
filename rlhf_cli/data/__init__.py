"""Reading and tokenising data files. `encode` produces the tokens of all stages; TRL never tokenises."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_cli.data.datasets import (
        Prompt,
        is_plain_text,
        preference_pairs,
        preference_rows,
        prompt_form,
        prompt_rows,
        sft_rows,
    )
    from rlhf_cli.data.sampling import LengthGroupedSampler, prompt_batch
    from rlhf_cli.data.texts import Pair, Rows, split_key, warn_shared
    from rlhf_cli.data.tokens import decode_stream, encode, encode_many, stop_token_id


_MODULES = {
    "Prompt": "datasets",
    "is_plain_text": "datasets",
    "preference_pairs": "datasets",
    "preference_rows": "datasets",
    "prompt_form": "datasets",
    "prompt_rows": "datasets",
    "sft_rows": "datasets",
    "Rows": "texts",
    "warn_shared": "texts",
    "LengthGroupedSampler": "sampling",
    "prompt_batch": "sampling",
    "Pair": "texts",
    "split_key": "texts",
    "decode_stream": "tokens",
    "encode": "tokens",
    "encode_many": "tokens",
    "stop_token_id": "tokens",
}
__all__ = [
    "LengthGroupedSampler",
    "Pair",
    "Prompt",
    "Rows",
    "as_dataset",
    "decode_stream",
    "encode",
    "encode_many",
    "is_plain_text",
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


def __getattr__(name: str) -> Any:
    """Import on first use, so that `rlhf_cli.ppo` can use data.sampling without the config."""
    from importlib import import_module

    if name in _MODULES:
        return getattr(import_module(f"rlhf_cli.data.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def as_dataset(rows: list[dict[str, Any]]) -> Any:
    """Return a `datasets.Dataset` of the rows (at least one) for TRL's trainers, with the first row's columns."""
    import datasets  # half a second; only SFT and reward need it

    datasets.disable_progress_bars()
    return datasets.Dataset.from_dict({name: [row[name] for row in rows] for name in rows[0]})
