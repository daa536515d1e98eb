"""The prompts and ptx rows of a PPO run, and its batch arithmetic."""

from collections.abc import Sequence
from typing import Any

from rlhf_cli import data
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.data.datasets import Prompt, Rows
from rlhf_cli.errors import RLHFError, collect_errors
from rlhf_cli.models import load
from rlhf_cli.stages.common import batch_sizes, reading

PromptRows = Rows[Prompt]


def read_train_and_eval(config: PPOConfig, tokenizer: Any, model_config: Any) -> tuple[PromptRows, PromptRows | None]:
    """Read and check data.prompts and data.eval_prompts, None without it.

    Raises RLHFError as `reading.read_prompts` and `check_prompt_counts`.
    """
    length = config.ppo.max_response_length
    prompts = reading.read_prompts(config, "data.prompts", tokenizer, model_config, length)
    eval_prompts = None
    if "data.eval_prompts" in config.sources():
        eval_prompts = reading.read_prompts(config, "data.eval_prompts", tokenizer, model_config, length)
    check_prompt_counts(config, prompts, eval_prompts)
    return prompts, eval_prompts


def check_prompt_counts(config: PPOConfig, prompts: PromptRows, eval_prompts: PromptRows | None) -> None:
    """Raise RLHFError D11 or C17 if the prompts make no update, or none after value_only_updates. Warns D13, C14."""
    if eval_prompts is not None:
        data.warn_shared(prompts, eval_prompts, where=config.where("data.eval_prompts"))
    num_updates = config.ppo.num_updates(len(prompts))

    def check_value_only_updates() -> None:
        problem = config.ppo.value_only_problem(num_updates)
        if problem:
            text, hint = problem
            raise RLHFError("C17", text, where=config.where("ppo.value_only_updates"), hint=hint)

    collect_errors(lambda: _check_prompts_per_update(config, prompts), check_value_only_updates)
    batch_sizes.warn_long_intervals(config, num_updates)


def _check_prompts_per_update(config: PPOConfig, prompts: PromptRows) -> None:
    """Raise RLHFError D11 if there are fewer prompts than an update takes."""
    settings = config.ppo
    needed = settings.prompts_per_update
    if len(prompts) >= needed:
        return

    product = f"{settings.per_device_train_batch_size} x {settings.gradient_accumulation_steps} episodes"
    if settings.num_samples_per_prompt > 1:
        product += f" / {settings.num_samples_per_prompt} per prompt"
    text = f"{prompts.source.shown()} has {len(prompts)} usable prompts, fewer than one update takes"
    hint = f"lower ppo.gradient_accumulation_steps or per_device_train_batch_size, or bring {needed} prompts"
    where = config.where("ppo.per_device_train_batch_size")
    raise RLHFError("D11", f"{text} ({product} = {needed})", where=where, hint=hint)


def read_ptx(config: PPOConfig, tokenizer: Any, model_config: Any) -> data.Rows[dict[str, list[int]]]:
    """Read data.ptx_data, which must be set, as rows of `data.sft_rows`.

    Warns D16. Raises RLHFError D01-D10, D12, D14, D16.
    """
    key = "data.ptx_data"
    max_length = None if model_config is None else load.context_length(model_config)
    hint = f"use a model with a longer context than {max_length} positions, or shorten the rows"
    return reading.read_rows(config, key, data.sft_rows, tokenizer, max_length=max_length, longer_hint=hint)


def read_ptx_pairs(config: PPOConfig, tokenizer: Any, model_config: Any) -> list[tuple[list[int], list[int]]]:
    """Return (prompt ids, completion ids) per row of data.ptx_data; without a prompt, the first token is one."""
    if config.data.ptx_data is None:
        return []
    pairs = []
    for row in read_ptx(config, tokenizer, model_config):
        start = max(1, row["completion_mask"].index(1))
        completion = row["input_ids"][start:]
        if completion:
            pairs.append((row["input_ids"][:start], completion))
    return pairs


def prompts_of_update(config: PPOConfig, prompts: Sequence[Prompt], step: int) -> list[Prompt]:
    """Return the prompts of update `step`; `config` has the batch sizes of all processes together."""
    rows = data.prompt_batch(len(prompts), step, config.ppo.prompts_per_update, config.seed)
    return [prompts[row] for row in rows]


def describe_batches(config: PPOConfig, prompts: Sequence[data.Prompt], world_size: int = 1) -> str:
    """Return the batch arithmetic as one line; `config` has the batch sizes of all processes together."""
    settings = config.ppo
    num_updates = settings.num_updates(len(prompts))
    update = batch_sizes.batch_product(
        settings.per_device_train_batch_size,
        settings.gradient_accumulation_steps // world_size,
        world_size,
        "episodes",
    )
    epochs = settings.num_ppo_epochs
    minibatches = settings.num_mini_batches
    return (
        f"{reading.describe_rows(prompts, 'prompts')}; "
        f"an update: {update}, {settings.num_samples_per_prompt} per prompt; "
        f"{epochs} epochs x {minibatches} minibatches = {epochs * minibatches} optimizer steps; "
        f"in all {num_updates} updates, {num_updates * settings.episodes_per_update} episodes"
    )
