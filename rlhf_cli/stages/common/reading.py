"""Rows of a stage's data keys: one way to read them, `read_rows`, and the prompts of PPO and evaluations."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from rlhf_cli import data, terminal
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.stages import AnyConfig
from rlhf_cli.data import mixing
from rlhf_cli.data.datasets import Rows
from rlhf_cli.data.formats import dropped_causes
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import load
from rlhf_cli.statistics import wilson

WARN_DROPPED_FRACTION = 0.2
IDENTICAL_HINT = "look at how the pairs were made: identical answers express no preference"

Row = TypeVar("Row")


def read_rows(
    config: AnyConfig,
    key: str,
    read: Callable[..., Rows[Row]],
    tokenizer: Any,
    *,
    max_length: int | None,
    longer_hint: str,
    sample: int | None = None,
) -> Rows[Row]:
    """Read the rows of a data key with a function of `data`. `longer_hint`: how to allow longer rows.

    Of more than `sample` rows only a sample is read. Warns (D16) if more than WARN_DROPPED_FRACTION of the rows are
    dropped. Raises RLHFError D16 if they are more than data.max_dropped allows, and the errors of `read`, where D05 for
    rows that are all too long gets `longer_hint`.
    """
    on_long = "drop" if isinstance(config, EvalConfig) else config.data.on_long
    try:
        options = {"max_length": max_length, "on_long": on_long, "sample": sample}
        rows = mixing.read_parts(config.sources()[key], partial(read, tokenizer=tokenizer, **options), tokenizer)
    except RLHFError as error:
        problem = error.problems[0]
        if problem.code != "D05" or "longer than" not in problem.text:
            raise
        raise RLHFError("D05", problem.text, where=problem.where, hint=longer_hint) from error
    _check_dropped(config, key, longer_hint, rows)
    return rows


def _check_dropped(config: AnyConfig, key: str, longer_hint: str, rows: Rows[Any]) -> None:
    """Warn (D16) if many rows are dropped. Raise RLHFError D16 if they are more than data.max_dropped allows."""
    limit = config.data.max_dropped
    fraction = rows.dropped_share
    if key == f"data.{config.data.EVAL_KEY}" and config.sources()[key].share:
        fraction, _ = wilson(rows.num_dropped, rows.num_expected)  # a small part of a file varies by chance
    if fraction <= min(WARN_DROPPED_FRACTION, limit):
        return

    sampled = "sampled " if rows.stride > 1 else ""
    text = f"{rows.num_dropped} of {rows.num_expected} {sampled}rows are dropped: {dropped_causes(rows.dropped)}"
    main_cause = next(iter(rows.dropped))
    hint = "data.on_bad: error shows each of them"
    if main_cause == "D10":
        hint = f"{longer_hint}; the longest row has {rows.longest_read} tokens"
    elif main_cause == "D07":
        hint = IDENTICAL_HINT

    if fraction > limit:
        text += f"; data.max_dropped allows {limit:.0%}"
        hint += "; or raise data.max_dropped"
        raise RLHFError("D16", text, where=config.where(key), hint=hint)
    terminal.warn("D16", text, where=config.where(key), hint=hint)


def read_prompts(
    config: PPOConfig | EvalConfig,
    key: str,
    tokenizer: Any,
    model_config: Any,
    response_length: int,
    *,
    sample: int | None = None,
) -> Rows[data.Prompt]:
    """Read the prompts of a data key that leave room for a response in the model's context.

    Of more than `sample` rows only a sample is read. `model_config` None: unknown context. Warns D16. Raises RLHFError
    C13 if no prompt can fit, D01-D14, D16.
    """
    length_key = f"{config.stage}.response_length"
    max_length = None
    if model_config is not None:
        max_length = load.max_prompt_tokens(model_config, response_length, config.where(length_key))

    budget = f"{response_length} tokens for a response leave {max_length} to a prompt"
    hint = f"use a model with a longer context ({budget}), shorten the prompts, or lower {length_key}"
    if max_length is not None and response_length >= max_length:
        hint = f"lower {length_key} ({budget}), or use a model with a longer context"

    return read_rows(
        config,
        key,
        data.prompt_rows,
        tokenizer,
        max_length=max_length,
        longer_hint=hint,
        sample=sample,
    )


def describe_rows(rows: Sequence[Any], unit: str) -> str:
    """Return the number of rows, and of dropped rows if there are any, as text."""
    dropped = rows.dropped_text() if isinstance(rows, Rows) else ""
    return f"{len(rows)} {unit}, {dropped}" if dropped else f"{len(rows)} {unit}"
