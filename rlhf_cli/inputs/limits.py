"""Numbers that must fit each other: rows and batches, rows and the model's context, intervals and steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlhf_cli import processes, terminal
from rlhf_cli.config import Config, PPOConfig, RewardConfig, SFTConfig
from rlhf_cli.data import Rows
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import loading


def check_batch(config: SFTConfig | RewardConfig, rows: Rows[Any], count: int, unit: str = "usable rows") -> None:
    """Raises RLHFError D11 where `count` (rows, or the sequences they are packed into) fill no optimizer step.

    It takes rows in each of the processes that train together.
    """
    settings, stage = config.sft if isinstance(config, SFTConfig) else config.reward, config.stage
    size, parts, group = settings.per_device_train_batch_size, settings.gradient_accumulation_steps, processes.count()
    if count >= size * parts * group:
        return
    product = f"per_device_train_batch_size {size} x gradient_accumulation_steps {parts}"
    product += f" x {group} processes" if group > 1 else ""
    text = f"{rows.source.shown()} has {count} {unit}, fewer than one optimizer step takes"
    text += f" ({product} = {size * parts * group})"
    if count >= size * group:
        hint = f"set {stage}.gradient_accumulation_steps to {count // (size * group)} at most"
    elif count >= group:
        hint = f"set {stage}.per_device_train_batch_size to {count // group} at most"
        hint += ", and gradient_accumulation_steps to 1" if parts > 1 else ""
    else:
        hint = f"start {count} processes at most, or bring more rows"
    raise RLHFError("D11", text, where=config.where(f"{stage}.per_device_train_batch_size"), hint=hint)


def check_prompts(config: PPOConfig, prompts: Rows[Any]) -> None:
    """Raises RLHFError D11 where there are fewer prompts than an update takes."""
    ours = config.ppo
    needed = ours.prompts_per_update
    if len(prompts) >= needed:
        return
    product = f"{ours.per_device_train_batch_size} x {ours.gradient_accumulation_steps} episodes"
    product += f" / {ours.num_samples_per_prompt} to a prompt" if ours.num_samples_per_prompt > 1 else ""
    text = f"{prompts.source.shown()} has {len(prompts)} usable prompts, fewer than one update takes"
    hint = f"lower ppo.gradient_accumulation_steps or per_device_train_batch_size, or bring {needed} prompts"
    where = config.where("ppo.per_device_train_batch_size")
    raise RLHFError("D11", f"{text} ({product} = {needed})", where=where, hint=hint)


def check_context(config: SFTConfig | RewardConfig, body: Any, longest: int, *, strict: bool = False) -> None:
    """Raises RLHFError C13 where rows within max_length are longer than the context of a model `body`; None: not known.

    `strict`: max_length itself must fit, as where sequences are filled up to it, or the model is made for it.
    """
    settings, stage = config.sft if isinstance(config, SFTConfig) else config.reward, config.stage
    context, limit = None if body is None else loading.context_of(body), settings.max_length
    reaches = limit if strict else longest
    if context is None or reaches <= context:
        return
    text = f"{stage}.max_length {limit}" if strict else f"{stage}.max_length {limit} lets rows of {reaches} tokens in,"
    text += f" {'is' if strict else 'which is'} {reaches - context} more than the model's {context} positions"
    hint = f"lower {stage}.max_length by {limit - context}, to {context}; longer rows are left out then"
    raise RLHFError("C13", text, where=config.where(f"{stage}.max_length"), hint=hint)


def warn_intervals(config: Config, steps: int) -> None:
    """C14: a save or an evaluation that is due later than the run ends."""
    intervals = {"save": ("output.save_steps", config.output.save_steps)}
    if isinstance(config, SFTConfig | RewardConfig) and "data.eval" in config.sources():
        settings = config.sft if isinstance(config, SFTConfig) else config.reward
        intervals["evaluation"] = (f"{config.stage}.eval_steps", settings.eval_steps)
    unit = "updates" if config.stage == "ppo" else "steps"
    for what, (key, every) in intervals.items():
        if every and every > steps:
            text = f"one {what} every {every} {unit} is more than the {steps} of the run: only the last one gets one"
            terminal.warn("C14", text, where=config.where(key), hint=f"lower {key}, or leave it out")


@contextmanager
def room_explained(room: int | None, response_length: int) -> Iterator[None]:
    """Within, D05 of prompts that are all too long says what leaves them so little room."""
    try:
        yield
    except RLHFError as error:
        problem = error.problems[0]
        if room is None or problem.code != "D05" or "longer than" not in problem.text:
            raise
        hint = (
            f"the model's context leaves {room} tokens to a prompt beside a response of {response_length}: lower that"
        )
        raise RLHFError("D05", problem.text, where=problem.where, hint=hint) from error
