"""What batch sizes come to: a sentence of one form for each stage that trains, which `rlhf check` says too."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlhf_cli.config import RewardConfig, SFTConfig
from rlhf_cli.data import Rows

TOKENS = ("input_ids", "chosen_ids", "rejected_ids")  # columns of the rows that are read


def product(size: int, parts: int, processes: int, unit: str) -> str:
    """The batch of a step: `8 x 2 x 4 processes = 64 rows`."""
    group = f" x {processes} processes" if processes > 1 else ""
    return f"{size} x {parts}{group} = {size * parts * processes} {unit}"


def tokens_of(rows: Iterable[Mapping[str, Sequence[int]]]) -> int:
    """Tokens of all rows; 0 where they were read without a tokenizer."""
    return sum(len(row[column]) for row in rows for column in TOKENS if column in row)


def counted(rows: Sequence[Any], unit: str) -> str:
    """How many rows there are, and how many were left out of how many where some were."""
    left_out = rows.told_left_out() if isinstance(rows, Rows) else ""
    return f"{len(rows)} {unit}" + (f", {left_out}" if left_out else "")


def arithmetic(
    config: SFTConfig | RewardConfig,
    rows: Sequence[Mapping[str, Sequence[int]]],
    processes: int = 1,
    *,
    packed: int | None = None,
) -> str:
    """Of SFT and reward training. `packed`: the sequences that the rows were packed into, 0 before that is known."""
    settings, unit = (config.sft, "rows") if isinstance(config, SFTConfig) else (config.reward, "pairs")
    tokens, count = tokens_of(rows), len(rows) if packed is None else packed
    there = (
        counted(rows, unit) + (f", {tokens} tokens" if tokens else "") + (f" in {packed} sequences" if packed else "")
    )
    size, parts = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    step = product(size, parts, processes, unit if packed is None else "sequences")
    whole = f"; in all {settings.steps(count, processes)} steps" if count or settings.max_steps else ""
    return f"{there}; a step: {step}{whole}"
