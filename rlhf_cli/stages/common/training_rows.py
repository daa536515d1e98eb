"""Rows that SFT, the reward model and DPO train on: reading, packing, labels and checks.

It imports no TRL, which takes seconds: `rlhf check` and `plan` read the same rows.
"""

from functools import partial
from pathlib import Path
from typing import Any

from rlhf_cli import data, distributed, terminal
from rlhf_cli.config.sft import SFTConfig
from rlhf_cli.config.stages import TRLConfig, settings_of
from rlhf_cli.data.labels import are_of_held_out_prompts
from rlhf_cli.errors import RLHFError, collect_errors
from rlhf_cli.models import load
from rlhf_cli.models.batch import IGNORE_INDEX
from rlhf_cli.stages.common import batch_sizes, reading

PairRows = list[dict[str, Any]]  # of `data.preference_rows`
SPLITTING_STRATEGIES = ("wrapped", "bfd_split")  # packing strategies that split long rows


def read_train_and_eval(config: TRLConfig, tokenizer: Any, model_config: Any) -> tuple[data.Rows[Any], list[Any]]:
    """Read and check data.train and data.eval, [] without it; rows of SFT become {input_ids, labels}, without best_of.

    Raises RLHFError as `read_split` and `check_rows`.
    """
    rows = read_split(config, "train", tokenizer, model_config)
    eval_rows = None
    if "data.eval" in config.sources():
        eval_rows = read_split(config, "eval", tokenizer, model_config)
    check_rows(config, rows, eval_rows, model_config, processes=distributed.world_size())

    if isinstance(config, SFTConfig) and not config.best_of:
        rows = add_labels(config, rows)
        eval_rows = add_labels(config, eval_rows) if eval_rows else None
    return rows, eval_rows or []


def read_split(
    config: TRLConfig,
    split: str,
    tokenizer: Any,
    model_config: Any = None,
    *,
    sample: int | None = None,
) -> data.Rows[Any]:
    """Read data.train or data.eval, up to max_length unless packing splits long rows. With best_of they are prompts.

    Of more than `sample` rows only a sample is read. `model_config` None: unknown context. Warns D16. Raises RLHFError
    C13, C17, D01-D10, D12, D14, D16.
    """
    key = f"data.{split}"
    if split == "train":
        _refuse_held_out_labels(config)
    max_length: int | None = settings_of(config).max_length
    read: Any
    if isinstance(config, SFTConfig) and config.best_of:
        read = data.prompt_rows
        max_length = _max_prompt_length(config, model_config)
    elif isinstance(config, SFTConfig):
        read = data.sft_rows
        if packing_strategy(config) in SPLITTING_STRATEGIES:
            max_length = None
    else:
        has_margins = config.stage == "reward"
        read = partial(data.preference_rows, on_identical=config.data.on_identical, margins=has_margins)

    hint = _longer_rows_hint(config, model_config)
    return reading.read_rows(config, key, read, tokenizer, max_length=max_length, longer_hint=hint, sample=sample)


def _refuse_held_out_labels(config: TRLConfig) -> None:
    """Raise RLHFError C17 if data.train is labels of the prompts that the evaluation asks."""
    for source in config.sources()["data.train"].each():
        if are_of_held_out_prompts(Path(source.name)):
            text = f"data.train: {source.shown()} holds labels of the evaluation's prompts (rlhf label --compare)"
            hint = "train on labels that were made without --compare; these can be a judge in eval.yaml"
            raise RLHFError("C17", text, where=source.where, hint=hint)


def _max_prompt_length(config: SFTConfig, model_config: Any) -> int:
    """Return the tokens that best_of's answers leave to a prompt. Raises RLHFError C13 if they leave none."""
    assert config.best_of
    length = config.best_of.response_length
    limit = config.sft.max_length - length
    if model_config is None:
        return limit
    room = load.max_prompt_tokens(model_config, length, config.where("best_of.response_length"))
    return min(room, limit) if room else limit


def packing_strategy(config: TRLConfig) -> str | None:
    """Return how rows are packed into sequences of max_length, None without packing.

    `bfd` keeps rows separate, by flash attention or a mask of (tokens of the batch)^2. `wrapped` splits one long text
    whose neighbouring rows attend to each other: usual for plain text, and about twice as fast on a CPU.
    """
    if not isinstance(config, SFTConfig) or not config.sft.packing:
        return None
    plain = data.is_plain_text(config.sources()["data.train"])
    strategy: str = config.trainer.get("packing_strategy", "wrapped" if plain else "bfd")
    return strategy


def log_packing(config: SFTConfig) -> None:
    """Print how rows are packed, if they are."""
    strategy = packing_strategy(config)
    if strategy is None:
        return
    effect = "cut out of one long text, neighbours see each other" if strategy == "wrapped" else "rows stay apart"
    terminal.say(f"sft      packing: {strategy} ({effect}; trainer.packing_strategy changes it)")


def check_rows(
    config: TRLConfig, rows: data.Rows[Any], eval_rows: data.Rows[Any] | None, model_config: Any, *, processes: int
) -> None:
    """Raise RLHFError C13 or D11 if rows are too long or too few; `model_config` None: unknown context. Warns D13."""
    longest = rows.longest
    if eval_rows is not None:
        data.warn_shared(rows, eval_rows, where=config.where("data.eval"))
        longest = max(longest, eval_rows.longest)

    splits = packing_strategy(config) in SPLITTING_STRATEGIES
    is_new = isinstance(config, SFTConfig) and config.model.new is not None
    count = len(rows)
    unit = "usable rows"
    if splits and isinstance(config, SFTConfig):
        count = num_sequences(config, rows)
        unit = "packed sequences"

    def check_batch_size() -> None:
        if rows.longest or not splits:  # without tokens the number of sequences is unknown
            batch_sizes.check_batch_size(config, rows.source.shown(), count, unit, processes=processes)

    collect_errors(
        lambda: check_context_length(config, model_config, longest, strict=splits or is_new),
        check_batch_size,
    )


def check_context_length(config: TRLConfig, model_config: Any, longest: int, *, strict: bool = False) -> None:
    """Raise RLHFError C13 if the longest row exceeds the model's context; `model_config` None: unknown context.

    `strict`: max_length itself must fit, because sequences are filled up to it or the model is built for it.
    """
    key = f"{config.stage}.max_length"
    limit = settings_of(config).max_length
    context = None if model_config is None else load.context_length(model_config)
    required = limit if strict else longest
    if context is None or required <= context:
        return

    excess = f"{required - context} more than the model's {context} positions"
    text = f"{key} {limit} admits rows of {required} tokens, which is {excess}"
    if strict:
        text = f"{key} {limit} is {excess}"
    hint = f"lower {key} by {limit - context}, to {context}; longer rows are dropped then"
    raise RLHFError("C13", text, where=config.where(key), hint=hint)


def num_sequences(config: SFTConfig, rows: data.Rows[Any]) -> int:
    """Return the least number of sequences of max_length that hold all tokens; packing may make a few more."""
    return -(-batch_sizes.count_tokens(rows) // config.sft.max_length)


def add_labels(config: SFTConfig, rows: data.Rows[Any]) -> data.Rows[dict[str, list[int]]]:
    """Return {input_ids, labels} per row; completion_only_loss ignores the prompt tokens."""
    labelled = []
    for row in rows:
        labels = row["input_ids"]
        if config.sft.completion_only_loss:
            labels = _completion_labels(row["input_ids"], row["completion_mask"])
        labelled.append({"input_ids": row["input_ids"], "labels": labels})
    return rows.with_rows(labelled)


def _completion_labels(input_ids: list[int], completion_mask: list[int]) -> list[int]:
    """Return the labels that ignore the prompt's tokens."""
    pairs = zip(input_ids, completion_mask, strict=True)
    return [token if in_completion else IGNORE_INDEX for token, in_completion in pairs]


def _longer_rows_hint(config: TRLConfig, model_config: Any) -> str:
    """Return how to allow longer rows; `model_config` None: unknown context."""
    key = f"{config.stage}.max_length"
    limit = settings_of(config).max_length
    context = None if model_config is None else load.context_length(model_config)
    if context is None:
        return f"raise {key} (now {limit})"
    if limit < context:
        return f"raise {key} (now {limit}; the model has {context} positions)"
    return f"use a model with a longer context than {context} positions, or shorten the rows"
