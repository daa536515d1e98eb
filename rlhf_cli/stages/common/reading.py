"""Rows and prompts of a stage, and the form in which prompts reach a model."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, cast

from rlhf_cli import config as configs
from rlhf_cli import data, terminal
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.stages import AnyConfig
from rlhf_cli.data.datasets import Rows
from rlhf_cli.data.formats import dropped_causes
from rlhf_cli.data.sources import is_local
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import load
from rlhf_cli.runs.parents import Parent
from rlhf_cli.statistics import wilson

PromptForm = Literal["text", "conversation", "transcript"]  # how a data file writes prompts


PromptFormat = Literal["template", "transcript", "text"]  # how they are passed to a model


DATA_KEYS = {"ppo": "data.prompts"} | dict.fromkeys(("sft", "reward", "dpo"), "data.train")


WARN_DROPPED_FRACTION = 0.2


IDENTICAL_HINT = "look at how the pairs were made: identical answers express no preference"


Row = TypeVar("Row")


def training_prompt_form(parent: Parent) -> PromptForm | None:
    """Return the form of the prompts a model was trained on.

    Of a stage whose manifest does not have it, that of its data; None if that is not local or not readable.
    """
    if parent.stage not in DATA_KEYS:
        return None
    form = parent.manifest.prompt_form
    if form in ("text", "conversation", "transcript"):
        return cast(PromptForm, form)
    try:
        source = configs.load(parent.stage, parent.path / "config.yaml").sources()[DATA_KEYS[parent.stage]]
        return data.prompt_form(source) if is_local(source) else None
    except RLHFError:
        return None


def prompt_format(form: PromptForm | None, tokenizer: Any) -> PromptFormat:
    """Return how prompts of this form are passed to the model; None: unknown form.

    A tokenizer may have a chat template that its training data did not use.
    """
    if tokenizer.chat_template and form != "text":
        return "template"
    return "transcript" if form == "transcript" else "text"


def read_rows(config: AnyConfig, key: str, longer_hint: str, read: Callable[[], Rows[Row]]) -> Rows[Row]:
    """Read the rows of a data key with `read`. `longer_hint`: how to allow longer rows.

    Warns (D16) if more than WARN_DROPPED_FRACTION of the rows are dropped. Raises RLHFError D16 if they are more than
    data.max_dropped allows, and the errors of `read`, where D05 for rows that are all too long gets `longer_hint`.
    """
    try:
        rows = read()
    except RLHFError as error:
        problem = error.problems[0]
        if problem.code != "D05" or "longer than" not in problem.text:
            raise
        raise RLHFError("D05", problem.text, where=problem.where, hint=longer_hint) from error
    _check_dropped(config, key, longer_hint, rows)
    return rows


def _check_dropped(config: AnyConfig, key: str, longer_hint: str, rows: Rows[Any]) -> None:
    limit, fraction = config.data.max_dropped, rows.dropped_share
    if key == f"data.{config.data.EVAL_KEY}" and config.sources()[key].share:
        fraction = wilson(rows.num_dropped, rows.num_expected)[0]  # a small part of a file varies by chance
    if fraction <= min(WARN_DROPPED_FRACTION, limit):
        return
    sampled = "sampled " if rows.stride > 1 else ""
    text = f"{rows.num_dropped} of {rows.num_expected} {sampled}rows are dropped: {dropped_causes(rows.dropped)}"
    hints = {"D10": f"{longer_hint}; the longest row has {rows.longest_read} tokens", "D07": IDENTICAL_HINT}
    hint = hints.get(next(iter(rows.dropped)), "data.on_bad: error shows each of them")
    if fraction > limit:
        text, hint = f"{text}; data.max_dropped allows {limit:.0%}", f"{hint}; or raise data.max_dropped"
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
    length_key, max_length = f"{config.stage}.response_length", None
    if model_config is not None:
        max_length = load.max_prompt_tokens(model_config, response_length, config.where(length_key))
    budget = f"{response_length} tokens for a response leave {max_length} to a prompt"
    hint = f"use a model with a longer context ({budget}), shorten the prompts, or lower {length_key}"
    if max_length is not None and response_length >= max_length:
        hint = f"lower {length_key} ({budget}), or use a model with a longer context"
    on_long = config.data.on_long if isinstance(config, PPOConfig) else "drop"
    source = config.sources()[key]
    read = partial(data.prompt_rows, source, tokenizer, max_length=max_length, on_long=on_long, sample=sample)
    return read_rows(config, key, hint, read)


def describe_rows(rows: Sequence[Any], unit: str) -> str:
    """Return the number of rows, and of dropped rows if there are any, as text."""
    dropped = rows.dropped_text() if isinstance(rows, Rows) else ""
    return f"{len(rows)} {unit}" + (f", {dropped}" if dropped else "")
