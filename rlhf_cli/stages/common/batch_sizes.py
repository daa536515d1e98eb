"""Batches, steps and intervals of a stage, as checks and as text."""

from collections.abc import Mapping, Sequence

from rlhf_cli import data, terminal
from rlhf_cli.config.base import Config
from rlhf_cli.config.stages import TRLConfig, settings_of
from rlhf_cli.errors import RLHFError
from rlhf_cli.stages.common import reading

PAIR_SIDES = ("chosen_ids", "rejected_ids")
TOKEN_COLUMNS = ("input_ids", *PAIR_SIDES)

TokenRow = Mapping[str, Sequence[int]]


def batch_product(size: int, grad_accum_steps: int, processes: int, unit: str) -> str:
    """Return the batch size of a step as text: `8 x 2 x 4 processes = 64 rows`."""
    group = f" x {processes} processes" if processes > 1 else ""
    return f"{size} x {grad_accum_steps}{group} = {size * grad_accum_steps * processes} {unit}"


def check_batch_size(config: TRLConfig, source: str, count: int, unit: str, *, processes: int) -> None:
    """Raise RLHFError D11 if `count` rows or packed sequences do not fill one optimizer step of all processes."""
    settings = settings_of(config)
    size = settings.per_device_train_batch_size
    grad_accum_steps = settings.gradient_accumulation_steps
    if count >= size * grad_accum_steps * processes:
        return

    batch = batch_product(size, grad_accum_steps, processes, unit)
    text = f"{source} has {count} {unit}, fewer than one optimizer step takes ({batch})"
    size_key = f"{config.stage}.per_device_train_batch_size"
    if count >= size * processes:
        hint = f"set {config.stage}.gradient_accumulation_steps to {count // (size * processes)} at most"
    elif count >= processes:
        hint = f"set {size_key} to {count // processes} at most"
        if grad_accum_steps > 1:
            hint += ", and gradient_accumulation_steps to 1"
    else:
        hint = f"start {count} processes at most, or bring more rows"
    raise RLHFError("D11", text, where=config.where(size_key), hint=hint)


def warn_long_intervals(config: Config, steps: int) -> None:
    """Warn (C14) if a save or evaluation interval is longer than the run."""
    intervals = {"save": ("output.save_steps", config.output.save_steps)}
    if isinstance(config, TRLConfig) and "data.eval" in config.sources():
        intervals["evaluation"] = (f"{config.stage}.eval_steps", settings_of(config).eval_steps)

    unit = "updates" if config.stage == "ppo" else "steps"
    for event, (key, every) in intervals.items():
        if every is not None and every > steps:
            text = f"one {event} every {every} {unit} exceeds the {steps} of the run: only the last one gets one"
            terminal.warn("C14", text, where=config.where(key), hint=f"lower {key}, or remove it")


def pair_lengths(config: TRLConfig, rows: Sequence[TokenRow]) -> list[int] | None:
    """Return the tokens of each pair's longer side, by which batches are grouped; None if they are not."""
    if not settings_of(config).group_by_length:
        return None
    return [max(len(row["chosen_ids"]), len(row["rejected_ids"])) for row in rows]


def describe_batches(
    config: TRLConfig, rows: Sequence[TokenRow], processes: int = 1, *, packed: int | None = None
) -> str:
    """Return rows, batch size and steps as one line.

    `packed`: the number of sequences the rows were packed into, 0 if not known yet.
    """
    settings = settings_of(config)
    unit = "rows" if config.stage == "sft" else "pairs"
    text = reading.describe_rows(rows, unit)
    num_tokens = count_tokens(rows)
    if num_tokens:
        text += f", {num_tokens} tokens"
    if packed:
        text += f" in {packed} sequences"

    batch = batch_product(
        settings.per_device_train_batch_size,
        settings.gradient_accumulation_steps,
        processes,
        unit if packed is None else "sequences",
    )
    text += f"; a step: {batch}"
    count = len(rows) if packed is None else packed
    if count or settings.max_steps:
        text += f"; in all {settings.steps(count, processes)} steps"
    return text


def count_tokens(rows: Sequence[TokenRow]) -> int:
    """Return the number of tokens of all rows, 0 for prompts and if they were read without a tokenizer."""
    total = 0
    for row in rows:
        if isinstance(row, data.Prompt):
            continue
        for column in TOKEN_COLUMNS:
            total += len(row.get(column, ()))
    return total
