"""Numbers that must fit each other: rows and batches, rows and the model's context, intervals and steps."""

from collections.abc import Callable
from typing import Any, TypeVar

from rlhf_cli import processes, terminal
from rlhf_cli.config import Config, EvalConfig, PPOConfig, RewardConfig, SFTConfig
from rlhf_cli.data import Rows
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import load
from rlhf_cli.statistics import wilson

Row = TypeVar("Row")
MANY = 0.2  # share of left out rows above which a stage warns
IDENTICAL = "look at how the pairs were made: identical answers hold no preference"


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
    context, limit = None if body is None else load.context_length(body), settings.max_length
    reaches = limit if strict else longest
    if context is None or reaches <= context:
        return
    text = f"{stage}.max_length {limit}" if strict else f"{stage}.max_length {limit} lets rows of {reaches} tokens in,"
    text += f" {'is' if strict else 'which is'} {reaches - context} more than the model's {context} positions"
    hint = f"lower {stage}.max_length by {limit - context}, to {context}; longer rows are left out then"
    raise RLHFError("C13", text, where=config.where(f"{stage}.max_length"), hint=hint)


def read_usable(
    config: SFTConfig | RewardConfig | PPOConfig | EvalConfig, key: str, longer: str, read: Callable[[], Rows[Row]]
) -> Rows[Row]:
    """The rows that `read` finds for a data key. `longer`: what lets longer rows in, for hints.

    Warns (D16) where more than MANY of the rows are left out. Raises RLHFError D16 where they are more than
    data.max_dropped allows, and what `read` raises: D05 of rows that are all too long says what to change.
    """
    try:
        rows = read()
    except RLHFError as error:
        problem = error.problems[0]
        if problem.code != "D05" or "longer than" not in problem.text:
            raise
        raise RLHFError("D05", problem.text, where=problem.where, hint=longer) from error
    _check_left_out(config, key, longer, rows)
    return rows


def _check_left_out(
    config: SFTConfig | RewardConfig | PPOConfig | EvalConfig, key: str, longer: str, rows: Rows[Any]
) -> None:
    most, share = config.data.max_dropped, rows.share_left_out
    if key == f"data.{config.data.HELD_OUT}" and config.sources()[key].share:
        share = wilson(rows.left_out, rows.asked)[0]  # a small part of a file has more or fewer of them by chance
    if share <= min(MANY, most):
        return
    causes = ", ".join(f"{lost.rows} by {code} ({lost})" for code, lost in rows.lost.items())
    sampled = "sampled " if rows.every > 1 else ""
    text = f"{rows.left_out} of {rows.asked} {sampled}rows are left out: {causes}"
    remedies = {"D10": f"{longer}; the longest row has {rows.longest_read} tokens", "D07": IDENTICAL}
    hint = remedies.get(next(iter(rows.lost)), "data.on_bad: error shows each of them")
    if share > most:
        text, hint = f"{text}; data.max_dropped allows {most:.0%}", f"{hint}; or raise data.max_dropped"
        raise RLHFError("D16", text, where=config.where(key), hint=hint)
    terminal.warn("D16", text, where=config.where(key), hint=hint)


def longer_rows(config: SFTConfig | RewardConfig, body: Any) -> str:
    """What lets longer rows into SFT or reward training of a model `body`; None: its context is not known."""
    settings = config.sft if isinstance(config, SFTConfig) else config.reward
    context, key = None if body is None else load.context_length(body), f"{config.stage}.max_length"
    if context is None:
        return f"raise {key} (now {settings.max_length})"
    if settings.max_length < context:
        return f"raise {key} (now {settings.max_length}; the model has {context} positions)"
    return f"take a model with a longer context than {context} positions, or shorten the rows"


def longer_prompts(stage: str, room: int | None, response_length: int) -> str:
    """What lets longer prompts into a stage, whose responses leave them `room` tokens; None: that is not known."""
    there = f"{response_length} tokens for a response leave {room} to a prompt"
    if room is not None and response_length >= room:
        return f"lower {stage}.response_length ({there}), or take a model with a longer context"
    return f"take a model with a longer context ({there}), shorten the prompts, or lower {stage}.response_length"


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
