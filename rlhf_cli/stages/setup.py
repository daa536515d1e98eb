"""Inputs of the stages: load tokenizers and models, read rows, and check them. Shared with `rlhf check`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from rlhf_cli import config as configs
from rlhf_cli import data, distributed, runs, terminal
from rlhf_cli.config.base import Config, Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.training import RewardConfig, SFTConfig
from rlhf_cli.data.sources import is_local
from rlhf_cli.data.texts import Rows
from rlhf_cli.errors import RLHFError, at_location
from rlhf_cli.models import forward, load, tokenizers
from rlhf_cli.models.batch import Rollout
from rlhf_cli.rewards.model import ModelReward, RetokenizingReward
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages.hardware import POLICY_KEYS
from rlhf_cli.statistics import wilson

# Padding differently moves a score by about 1e-6 in float32; in bfloat16, with deviation 1, by some hundredths.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
PromptForm = Literal["text", "conversation", "transcript"]  # how a data file writes prompts
PromptFormat = Literal["template", "transcript", "text"]  # how they are passed to a model
DATA_KEYS = {"ppo": "data.prompts", "sft": "data.train", "reward": "data.train"}
WARN_DROPPED_FRACTION = 0.2
IDENTICAL_HINT = "look at how the pairs were made: identical answers hold no preference"
Row = TypeVar("Row")


# Tokenizers and models


def load_tokenizer(config: Config, options: Options, parent: Parent) -> Any:
    """Load the tokenizer of an input model. Raises RLHFError M01, M08."""
    with at_location(config.where(parent.key)):
        return tokenizers.load_tokenizer(parent.model, trust_remote_code=options.trust_remote_code)


def load_own_tokenizer(config: Any, options: Options, sft: Parent, parent: Parent) -> Any:
    """Load a reward model's tokenizer if it tokenizes differently from the policy, else return None.

    Raises RLHFError M01, M08.
    """
    with at_location(config.where(parent.key)):
        if tokenizers.same_tokenization(sft, parent, trust_remote_code=options.trust_remote_code):
            return None
    return load_tokenizer(config, options, parent)


def load_causal_lm(config: Any, options: Options, parent: Parent, tokenizer: Any) -> Any:
    """Load a causal language model on the CPU. Raises RLHFError M01, M06-M08, M10."""
    with at_location(config.where(parent.key)):
        model = load.load_causal_lm(parent.model, **_load_kwargs(config, options))
        tokenizers.check_vocabulary(model, tokenizer)
    return model


def load_reward_model(config: Any, options: Options, parent: Parent, tokenizer: Any) -> Any:
    """Load a trained reward model on the CPU. Raises RLHFError M01-M03, M06-M08."""
    with at_location(config.where(parent.key)):
        model = load.load_reward_model(parent.model, **_load_kwargs(config, options))
        tokenizers.check_vocabulary(model, tokenizer)
    return model


def init_reward_model(config: Any, options: Options, parent: Parent, tokenizer: Any) -> Any:
    """Load a causal language model with a new one-label head on the CPU. Raises RLHFError M01, M03, M06-M08."""
    with at_location(config.where(parent.key)):
        model = load.init_reward_model(parent.model, **_load_kwargs(config, options))
        tokenizers.check_vocabulary(model, tokenizer)
    return model


def load_classifier(config: Any, options: Options, parent: Parent, tokenizer: Any) -> Any:
    """Load the text classifier of a reward's `pipeline` on the CPU. Raises RLHFError M01, M02, M06-M08."""
    with at_location(config.where(parent.key)):
        model = load.load_classifier(parent.model, trust_remote_code=options.trust_remote_code)
        tokenizers.check_vocabulary(model, tokenizer)
    return model


def _load_kwargs(config: Any, options: Options) -> dict[str, Any]:
    section = config.model if config.stage in ("sft", "reward") else config.models
    return load.load_kwargs(section, options.trust_remote_code)


def check_same_tokenization(config: Any, options: Options, parents: Mapping[str, Parent]) -> None:
    """Raise RLHFError T04 or T05 if a policy or value model tokenizes differently from models.sft.

    Models that only score may differ; models.reward must not in a PPO run whose value model starts as its copy. The
    tokenizers of an evaluation's judges are still loaded, to raise M01 and M08 before anything is written.
    """
    keys = (*POLICY_KEYS, "models.value", *(["models.reward"] if config.stage == "ppo" else []))
    must_match = {key: parent for key, parent in parents.items() if key in keys}
    tokenizers.check_same_tokenization(must_match, config.where, trust_remote_code=options.trust_remote_code)
    for key, parent in parents.items() if config.stage == "eval" else ():
        if key not in must_match:
            with at_location(config.where(key)):
                tokenizers.same_tokenization(parents["models.sft"], parent, trust_remote_code=options.trust_remote_code)


# Reward models


@dataclass(frozen=True)
class PolicyText:
    """The policy's tokenizer, stop token and prompts, from which reward models with another tokenizer get text."""

    sft: Parent
    tokenizer: Any
    stop_token_id: int | None
    prompts: Sequence[data.Prompt]


def build_model_reward(
    config: Any, key: str, policy_text: PolicyText, model: Any, own_tokenizer: Any, *, rows: int, **options: bool
) -> ModelReward:
    """Build a reward source from a loaded reward model, scoring `rows` at a time.

    `own_tokenizer` is the result of `load_own_tokenizer`; `options` (packed, offloaded) are passed to ModelReward.
    Raises RLHFError as `retokenize_prompts` does.
    """
    if own_tokenizer is None:
        return ModelReward(model, rows, **options)
    terminal.say(f"{config.stage:<8} {key}: has its own tokenizer or template, so the policy's text is re-encoded")
    prompts = retokenize_prompts(config, key, own_tokenizer, policy_text.prompts, model.config)
    return RetokenizingReward(
        model, rows, **options, name=key, tokenizer=policy_text.tokenizer,
        encode=partial(data.encode_many, own_tokenizer), stop_token_id=policy_text.stop_token_id,
        context=load.context_length(model.config), prompts=prompts,
    )  # fmt: skip


def retokenize_prompts(
    config: Any, key: str, tokenizer: Any, prompts: Sequence[data.Prompt], model_config: Any
) -> dict[tuple[int, ...], list[int]]:
    """Map each prompt's token ids to the reward tokenizer's ids of the same text or conversation.

    Raises RLHFError C13 if a prompt fills the reward model's context, D06 or D14 if its template rejects or cannot
    render a conversation.
    """
    texts = {tuple(prompt.ids): prompt.text for prompt in prompts}
    with at_location(config.where(key)):
        encoded = data.encode_many(tokenizer, list(texts.values()), [None] * len(texts))
        longest, context = max((len(ids) for ids, _ in encoded), default=0), load.context_length(model_config)
        if context is not None and longest >= context:
            text = f"{key}: a prompt has {longest} of its tokens, and its model reads {context} at most"
            raise RLHFError("C13", text, hint="take longer prompts out, or name another reward model")
    return dict(zip(texts, (ids for ids, _ in encoded), strict=True))


def check_probes(model: Any, parent: Parent, *, where: str) -> None:
    """Raise RLHFError M09 if a reward model's scores, read as PPO reads them, differ from those stored with it."""
    probes = parent.manifest["probes"]
    rollout = Rollout.from_lists([probe["prompt_ids"] for probe in probes], [probe["response_ids"] for probe in probes])
    scores = forward.rollout_scores(model, rollout.to(model.device), max_rows=len(probes)).cpu()
    stored = torch.tensor([probe["score"] for probe in probes])
    differing = ((scores - stored).abs() > PROBE_TOLERANCE[model.dtype]).nonzero()[:, 0].tolist()
    if differing:
        rows = ", ".join(f"row {row}: {scores[row]:.4f}, stored {stored[row]:.4f}" for row in differing[:3])
        raise RLHFError(
            "M09",
            f"{len(differing)} of {len(probes)} held-out rows get another score than the reward stage stored ({rows}); "
            "nothing was trained",
            where=where,
            hint=f"run the reward stage again: {runs.shown(parent.path)} or a library under it changed",
        )


# Prompt format


def training_prompt_form(parent: Parent) -> PromptForm | None:
    """Return the form of the prompts a model was trained on, None if its data is not local or not readable."""
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


# Rows and batches


def read_rows(
    config: SFTConfig | RewardConfig | PPOConfig | EvalConfig, key: str, longer_hint: str, read: Callable[[], Rows[Row]]
) -> Rows[Row]:
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


def _check_dropped(
    config: SFTConfig | RewardConfig | PPOConfig | EvalConfig, key: str, longer_hint: str, rows: Rows[Any]
) -> None:
    limit, fraction = config.data.max_dropped, rows.dropped_share
    if key == f"data.{config.data.EVAL_KEY}" and config.sources()[key].share:
        fraction = wilson(rows.num_dropped, rows.num_expected)[
            0
        ]  # a small part of a file has more or fewer of them by chance
    if fraction <= min(WARN_DROPPED_FRACTION, limit):
        return
    causes = ", ".join(f"{dropped.rows} by {code} ({dropped})" for code, dropped in rows.dropped.items())
    sampled = "sampled " if rows.stride > 1 else ""
    text = f"{rows.num_dropped} of {rows.num_expected} {sampled}rows are left out: {causes}"
    hints = {"D10": f"{longer_hint}; the longest row has {rows.longest_read} tokens", "D07": IDENTICAL_HINT}
    hint = hints.get(next(iter(rows.dropped)), "data.on_bad: error shows each of them")
    if fraction > limit:
        text, hint = f"{text}; data.max_dropped allows {limit:.0%}", f"{hint}; or raise data.max_dropped"
        raise RLHFError("D16", text, where=config.where(key), hint=hint)
    terminal.warn("D16", text, where=config.where(key), hint=hint)


def longer_rows_hint(config: SFTConfig | RewardConfig, model_config: Any) -> str:
    """Return how to allow longer rows in SFT or reward training; `model_config` None: unknown context."""
    settings = config.sft if isinstance(config, SFTConfig) else config.reward
    context, key = None if model_config is None else load.context_length(model_config), f"{config.stage}.max_length"
    if context is None:
        return f"raise {key} (now {settings.max_length})"
    if settings.max_length < context:
        return f"raise {key} (now {settings.max_length}; the model has {context} positions)"
    return f"take a model with a longer context than {context} positions, or shorten the rows"


def longer_prompts_hint(stage: str, max_prompt_length: int | None, response_length: int) -> str:
    """Return how to allow longer prompts in a stage; `max_prompt_length` None: unknown."""
    budget = f"{response_length} tokens for a response leave {max_prompt_length} to a prompt"
    if max_prompt_length is not None and response_length >= max_prompt_length:
        return f"lower {stage}.response_length ({budget}), or take a model with a longer context"
    return f"take a model with a longer context ({budget}), shorten the prompts, or lower {stage}.response_length"


def check_batch_size(config: SFTConfig | RewardConfig, rows: Rows[Any], count: int, unit: str = "usable rows") -> None:
    """Raise RLHFError D11 if `count` rows or packed sequences do not fill one optimizer step of all processes."""
    settings, stage = config.sft if isinstance(config, SFTConfig) else config.reward, config.stage
    size, grad_accum_steps = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    world_size = distributed.world_size()
    if count >= size * grad_accum_steps * world_size:
        return
    product = f"per_device_train_batch_size {size} x gradient_accumulation_steps {grad_accum_steps}"
    product += f" x {world_size} processes" if world_size > 1 else ""
    text = f"{rows.source.shown()} has {count} {unit}, fewer than one optimizer step takes"
    text += f" ({product} = {size * grad_accum_steps * world_size})"
    if count >= size * world_size:
        hint = f"set {stage}.gradient_accumulation_steps to {count // (size * world_size)} at most"
    elif count >= world_size:
        hint = f"set {stage}.per_device_train_batch_size to {count // world_size} at most"
        hint += ", and gradient_accumulation_steps to 1" if grad_accum_steps > 1 else ""
    else:
        hint = f"start {count} processes at most, or bring more rows"
    raise RLHFError("D11", text, where=config.where(f"{stage}.per_device_train_batch_size"), hint=hint)


def check_prompt_count(config: PPOConfig, prompts: Rows[Any]) -> None:
    """Raise RLHFError D11 if there are fewer prompts than one update takes."""
    settings = config.ppo
    needed = settings.prompts_per_update
    if len(prompts) >= needed:
        return
    product = f"{settings.per_device_train_batch_size} x {settings.gradient_accumulation_steps} episodes"
    product += f" / {settings.num_samples_per_prompt} to a prompt" if settings.num_samples_per_prompt > 1 else ""
    text = f"{prompts.source.shown()} has {len(prompts)} usable prompts, fewer than one update takes"
    hint = f"lower ppo.gradient_accumulation_steps or per_device_train_batch_size, or bring {needed} prompts"
    where = config.where("ppo.per_device_train_batch_size")
    raise RLHFError("D11", f"{text} ({product} = {needed})", where=where, hint=hint)


def check_context_length(
    config: SFTConfig | RewardConfig, model_config: Any, longest: int, *, strict: bool = False
) -> None:
    """Raise RLHFError C13 if the longest row exceeds the model's context; `model_config` None: unknown context.

    `strict`: max_length itself must fit, because sequences are filled up to it or the model is built for it.
    """
    settings, stage = config.sft if isinstance(config, SFTConfig) else config.reward, config.stage
    context, limit = None if model_config is None else load.context_length(model_config), settings.max_length
    required = limit if strict else longest
    if context is None or required <= context:
        return
    text = f"{stage}.max_length {limit}" if strict else f"{stage}.max_length {limit} lets rows of {required} tokens in,"
    text += f" {'is' if strict else 'which is'} {required - context} more than the model's {context} positions"
    hint = f"lower {stage}.max_length by {limit - context}, to {context}; longer rows are left out then"
    raise RLHFError("C13", text, where=config.where(f"{stage}.max_length"), hint=hint)


def warn_long_intervals(config: Config, steps: int) -> None:
    """Warn (C14) if a save or evaluation interval is longer than the run."""
    intervals = {"save": ("output.save_steps", config.output.save_steps)}
    if isinstance(config, SFTConfig | RewardConfig) and "data.eval" in config.sources():
        settings = config.sft if isinstance(config, SFTConfig) else config.reward
        intervals["evaluation"] = (f"{config.stage}.eval_steps", settings.eval_steps)
    unit = "updates" if config.stage == "ppo" else "steps"
    for event, (key, every) in intervals.items():
        if every and every > steps:
            text = f"one {event} every {every} {unit} is more than the {steps} of the run: only the last one gets one"
            terminal.warn("C14", text, where=config.where(key), hint=f"lower {key}, or leave it out")


# Batch arithmetic

TOKEN_COLUMNS = ("input_ids", "chosen_ids", "rejected_ids")


def describe_batches(
    config: SFTConfig | RewardConfig,
    rows: Sequence[Mapping[str, Sequence[int]]],
    processes: int = 1,
    *,
    packed: int | None = None,
) -> str:
    """Return rows, batch size and steps of SFT or reward training as one line.

    `packed`: the number of sequences the rows were packed into, 0 if not known yet.
    """
    settings, unit = (config.sft, "rows") if isinstance(config, SFTConfig) else (config.reward, "pairs")
    num_tokens, count = count_tokens(rows), len(rows) if packed is None else packed
    text = describe_rows(rows, unit)
    text += (f", {num_tokens} tokens" if num_tokens else "") + (f" in {packed} sequences" if packed else "")
    size, grad_accum_steps = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    step = batch_product(size, grad_accum_steps, processes, unit if packed is None else "sequences")
    total = f"; in all {settings.steps(count, processes)} steps" if count or settings.max_steps else ""
    return f"{text}; a step: {step}{total}"


def batch_product(size: int, grad_accum_steps: int, processes: int, unit: str) -> str:
    """Return the batch size of a step as text: `8 x 2 x 4 processes = 64 rows`."""
    group = f" x {processes} processes" if processes > 1 else ""
    return f"{size} x {grad_accum_steps}{group} = {size * grad_accum_steps * processes} {unit}"


def count_tokens(rows: Iterable[Mapping[str, Sequence[int]]]) -> int:
    """Return the number of tokens of all rows, 0 if they were read without a tokenizer."""
    return sum(len(row[column]) for row in rows for column in TOKEN_COLUMNS if column in row)


def describe_rows(rows: Sequence[Any], unit: str) -> str:
    """Return the number of rows, and of dropped rows if there are any, as text."""
    left_out = rows.dropped_text() if isinstance(rows, Rows) else ""
    return f"{len(rows)} {unit}" + (f", {left_out}" if left_out else "")
