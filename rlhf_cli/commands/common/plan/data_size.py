"""Measure the data that a stage will read: how many rows, how long they are, and how many are dropped."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rlhf_cli import data, terminal
from rlhf_cli.config import stages
from rlhf_cli.config.base import Config
from rlhf_cli.config.dpo import DPOConfig
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.config.sft import SFTConfig
from rlhf_cli.config.sources import DataSource
from rlhf_cli.config.stages import TRLConfig
from rlhf_cli.data import sources
from rlhf_cli.planning.estimate import DataSize, steps_follow_rows
from rlhf_cli.planning.model_size import Lengths
from rlhf_cli.stages.common import reading, training_rows
from rlhf_cli.stages.common.batch_sizes import PAIR_SIDES

MAX_TOKENIZED_ROWS = 5000  # of a larger file so many rows are tokenized, spread over the file


def measure_data(config: Config, body: Any, tokenizer: Any, response: int) -> DataSize:
    """Read the data of a stage that starts from a model with config `body`. Raises RLHFError D01-D14, D16, C13."""
    sources.locate({key: source for key, source in config.sources().items() if sources.is_local(source)})
    with terminal.muted_warnings():
        if isinstance(config, SFTConfig) and not config.best_of:
            size = _measure_examples(config, tokenizer, body)
        elif isinstance(config, RewardConfig | DPOConfig):
            size = _measure_pairs(config, tokenizer, body)
        else:
            size = _measure_prompts(config, tokenizer, body, response)
    if isinstance(config, EvalConfig):
        return replace(size, rows=min(config.eval.n, size.rows))
    return size


def max_data_size(config: Config, prompt: int, response: int) -> DataSize:
    """Return the size of data that is not tokenized: rows have their maximum length. Raises RLHFError D01-D04, D12."""
    if isinstance(config, EvalConfig):
        return DataSize(Lengths(prompt, response), "prompts", config.eval.n, how="at most")

    lengths = Lengths(prompt, response)
    if isinstance(config, TRLConfig) and not response:
        longest = stages.settings_of(config).max_length - 1
        lengths = Lengths(longest, 1) if isinstance(config, RewardConfig) else Lengths(1, longest)

    rows = 0
    if steps_follow_rows(config):
        key = "data.prompts" if isinstance(config, PPOConfig) else "data.train"
        rows = _count_rows(config.sources()[key])
    # A conversation gives an example for each of its answers, and a part may be held out.
    return DataSize(lengths, "rows", rows, how="about" if isinstance(config, SFTConfig) else "at most")


def _measure_examples(config: SFTConfig, tokenizer: Any, body: Any) -> DataSize:
    """Return the longest row as prompt and response: the response is the most tokens of a row that the loss counts."""
    rows = training_rows.read_split(config, "train", tokenizer, body, sample=MAX_TOKENIZED_ROWS)
    evaluated = _count_evaluated(config)
    if config.sft.packing:
        size = _data_size(rows, Lengths(1, config.sft.max_length - 1), "sequences")
        sequences = training_rows.num_sequences(config, rows) * rows.stride
        packed = round(evaluated * sequences / max(1, size.rows))
        return replace(size, rows=sequences, how="about", evaluated=packed)

    counted = rows.longest - 1
    if config.sft.completion_only_loss:
        most = max((sum(row["completion_mask"]) for row in rows), default=1)
        counted = min(most, counted)
    mean = _mean_length(row["input_ids"] for row in rows)
    size = _data_size(rows, Lengths(rows.longest - counted, counted, mean), "rows")
    return replace(size, evaluated=evaluated)


def _measure_pairs(config: RewardConfig | DPOConfig, tokenizer: Any, body: Any) -> DataSize:
    """Return the longest side of a pair; of DPO, as prompt and response, whose logits are computed."""
    pairs = training_rows.read_split(config, "train", tokenizer, body, sample=MAX_TOKENIZED_ROWS)
    sides: list[int] = []
    answers: list[int] = []
    for side in PAIR_SIDES:
        sides += [len(row[side]) for row in pairs]
        answers += [len(row[side]) - len(row["prompt_ids"]) for row in pairs]
    prompts = [len(row["prompt_ids"]) for row in pairs]
    longest = max((len(row["chosen_ids"]) - len(row["prompt_ids"]) for row in pairs), default=1)
    logits = 1  # of a row
    if isinstance(config, DPOConfig):
        logits = min(max(answers, default=1), pairs.longest - 1)

    size = _data_size(pairs, Lengths(pairs.longest - logits, logits, _mean(sides)), "pairs")
    return replace(size, evaluated=_count_evaluated(config), answers=Lengths(round(_mean(prompts)), longest))


def _measure_prompts(config: Config, tokenizer: Any, body: Any, response: int) -> DataSize:
    """Return the longest prompt, and the limit of the responses."""
    if isinstance(config, SFTConfig):
        prompts = training_rows.read_split(config, "train", tokenizer, body, sample=MAX_TOKENIZED_ROWS)
    else:
        assert isinstance(config, PPOConfig | EvalConfig)
        prompts = reading.read_prompts(config, "data.prompts", tokenizer, body, response, sample=MAX_TOKENIZED_ROWS)
    mean = _mean_length(prompt.ids for prompt in prompts)
    size = _data_size(prompts, Lengths(prompts.longest, response, prompt_mean=mean), "prompts")
    return replace(size, evaluated=_count_evaluated(config))


def _count_evaluated(config: Config) -> int:
    """Return the rows of data.eval."""
    source = config.sources().get("data.eval")
    if source is None:
        return 0
    share = source.share.fraction if source.share else 1
    return round(share * _count_rows(source))


def _count_rows(source: DataSource) -> int:
    return sum(round(part.weight * sum(1 for _ in sources.raw_rows(part))) for part in source.each())


def _data_size(rows: data.Rows[Any], lengths: Lengths, unit: str) -> DataSize:
    """Return the size of a sample of rows, scaled to all of them."""
    stride = rows.stride
    return DataSize(
        lengths,
        unit,
        rows=len(rows) * stride,
        left_out=rows.num_dropped * stride,
        asked=rows.num_expected * stride,
        how="exact" if stride == 1 else "about",
    )


def _mean_length(rows: Iterable[list[int]]) -> float:
    return _mean([len(row) for row in rows])


def _mean(lengths: list[int]) -> float:
    return sum(lengths) / max(1, len(lengths))
