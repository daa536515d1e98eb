"""What each stage starts from: tokenizer, rows, models. A stage takes it, `rlhf check` looks whether it could."""

from collections.abc import Callable, Mapping, Sequence
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
from rlhf_cli.errors import RLHFError, placed
from rlhf_cli.models import forward, load, tokenizers
from rlhf_cli.models.batch import Rollout
from rlhf_cli.rewards.model import ModelReward, RetokenizingReward
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages.hardware import POLICIES
from rlhf_cli.statistics import wilson

# Another padding moves a score by about 1e-6 in float32; in bfloat16, with deviation 1, by some hundredths.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}

RETOLD = "has a tokenizer or template of its own, so the policy's text is encoded for it anew"


def tokenizer(config: Config, options: Options, parent: Parent) -> Any:
    """The tokenizer in a parent's folder. Raises RLHFError M01, M08."""
    with placed(config.where(parent.key)):
        return tokenizers.load_tokenizer(parent.model, trust_remote_code=options.trust_remote_code)


def causal(config: Any, options: Options, parent: Parent, tokenizer: Any) -> Any:
    """A language model, on the CPU. Raises RLHFError M01, M06-M08, M10."""
    with placed(config.where(parent.key)):
        model = load.load_causal_lm(parent.model, **_how(config, options))
        tokenizers.check_vocabulary(model, tokenizer)
    return model


def scorer(config: Any, options: Options, parent: Parent, tokenizer: Any) -> Any:
    """A trained reward model, on the CPU. Raises RLHFError M01-M03, M06-M08."""
    with placed(config.where(parent.key)):
        model = load.load_reward_model(parent.model, **_how(config, options))
        tokenizers.check_vocabulary(model, tokenizer)
    return model


def check_alike(config: Any, options: Options, parents: Mapping[str, Parent]) -> None:
    """Refuses policies and value models that read text in another way than models.sft (T04, T05).

    What only scores may: models.reward stands in a PPO run only where the value model starts as its copy. But what
    evaluation scores with is looked at before anything is written, too: M01, M08.
    """
    same = (*POLICIES, "models.value", *(["models.reward"] if config.stage == "ppo" else []))
    known = {key: parent for key, parent in parents.items() if key in same}
    tokenizers.check_same_tokenization(known, config.where, trust_remote_code=options.trust_remote_code)
    for key, parent in parents.items() if config.stage == "eval" else ():
        if key not in known:
            with placed(config.where(key)):
                tokenizers.same_tokenization(parents["models.sft"], parent, trust_remote_code=options.trust_remote_code)


@dataclass(frozen=True)
class Writing:
    """What reward models are given to read: how the policy writes, and to which prompts."""

    sft: Parent
    tokenizer: Any
    stop_token_id: int | None
    prompts: Sequence[data.Prompt]


def own_tokenizer(config: Any, options: Options, sft: Parent, parent: Parent) -> Any:
    """The tokenizer of a reward model that reads text in another way than the policy; None where it reads its tokens.

    Raises RLHFError M01, M08.
    """
    with placed(config.where(parent.key)):
        if tokenizers.same_tokenization(sft, parent, trust_remote_code=options.trust_remote_code):
            return None
    return tokenizer(config, options, parent)


def retold_prompts(
    config: Any, key: str, theirs: Any, prompts: Sequence[data.Prompt], body: Any
) -> dict[tuple[int, ...], list[int]]:
    """Each prompt's tokens -> those that `theirs` makes of its text or conversation, for a model of config `body`.

    Raises RLHFError C13 for a prompt that fills its context, D06, D14 for a conversation that its template refuses or
    cannot render.
    """
    texts = {tuple(prompt.ids): prompt.text for prompt in prompts}
    with placed(config.where(key)):
        encoded = data.encode_many(theirs, list(texts.values()), [None] * len(texts))
        longest, context = max((len(ids) for ids, _ in encoded), default=0), load.context_length(body)
        if context is not None and longest >= context:
            text = f"{key}: a prompt has {longest} of its tokens, and its model reads {context} at most"
            raise RLHFError("C13", text, hint="take longer prompts out, or name another reward model")
    return dict(zip(texts, (ids for ids, _ in encoded), strict=True))


def reward(config: Any, key: str, writing: Writing, model: Any, theirs: Any, *, rows: int, **how: bool) -> ModelReward:
    """A loaded reward model as a source that reads `rows` at a time; `theirs` as `own_tokenizer` gives it.

    `how` (packed, offloaded) is as ModelReward takes it.

    Raises RLHFError as `retold_prompts` does.
    """
    if theirs is None:
        return ModelReward(model, rows, **how)
    terminal.say(f"{config.stage:<8} {key}: {RETOLD}")
    prompts = retold_prompts(config, key, theirs, writing.prompts, model.config)
    return RetokenizingReward(
        model, rows, **how, name=key, tokenizer=writing.tokenizer, encode=partial(data.encode_many, theirs),
        stop_token_id=writing.stop_token_id, context=load.context_length(model.config), prompts=prompts,
    )  # fmt: skip


def classifier(config: Any, options: Options, parent: Parent, tokenizer: Any) -> Any:
    """The text classifier of a reward's `pipeline`, on the CPU. Raises RLHFError M01, M02, M06-M08."""
    with placed(config.where(parent.key)):
        model = load.load_classifier(parent.model, trust_remote_code=options.trust_remote_code)
        tokenizers.check_vocabulary(model, tokenizer)
    return model


def scorer_to_train(config: Any, options: Options, parent: Parent, tokenizer: Any) -> Any:
    """A language model with a fresh one-label head, on the CPU. Raises RLHFError M01, M03, M06-M08."""
    with placed(config.where(parent.key)):
        model = load.init_reward_model(parent.model, **_how(config, options))
        tokenizers.check_vocabulary(model, tokenizer)
    return model


def check_probes(model: Any, parent: Parent, *, where: str) -> None:
    """The reward model must give the scores that its stage stored with it, read in PPO's own way (M09)."""
    probes = parent.manifest["probes"]
    rollout = Rollout.from_lists([probe["prompt_ids"] for probe in probes], [probe["response_ids"] for probe in probes])
    scores = forward.rollout_scores(model, rollout.to(model.device), max_rows=len(probes)).cpu()
    stored = torch.tensor([probe["score"] for probe in probes])
    off = ((scores - stored).abs() > PROBE_TOLERANCE[model.dtype]).nonzero()[:, 0].tolist()
    if off:
        rows = ", ".join(f"row {row}: {scores[row]:.4f}, stored {stored[row]:.4f}" for row in off[:3])
        raise RLHFError(
            "M09",
            f"{len(off)} of {len(probes)} held-out rows get another score than the reward stage stored ({rows}); "
            "nothing was trained",
            where=where,
            hint=f"run the reward stage again: {runs.shown(parent.path)} or a library under it changed",
        )


def _how(config: Any, options: Options) -> dict[str, Any]:
    section = config.model if config.stage in ("sft", "reward") else config.models
    return load.load_kwargs(section, options.trust_remote_code)


Written = Literal["text", "conversation", "transcript"]
Kind = Literal["template", "transcript", "text"]
KEYS = {"ppo": "data.prompts", "sft": "data.train", "reward": "data.train"}


def written(model: Parent) -> Written | None:
    """How the data of a stage's model writes prompts; None where that is not here, or cannot be read."""
    try:
        source = configs.load(model.stage, model.path / "config.yaml").sources()[KEYS[model.stage]]
        return data.prompt_form(source) if is_local(source) else None
    except RLHFError:
        return None


def kind(how: Written | None, tokenizer: Any) -> Kind:
    """What becomes of prompts that are written so, None: unknown. A tokenizer may bring a chat template that its data
    had no use for.
    """
    if tokenizer.chat_template and how != "text":
        return "template"
    return "transcript" if how == "transcript" else "text"


Row = TypeVar("Row")
MANY = 0.2  # share of left out rows above which a stage warns
IDENTICAL = "look at how the pairs were made: identical answers hold no preference"


def check_batch(config: SFTConfig | RewardConfig, rows: Rows[Any], count: int, unit: str = "usable rows") -> None:
    """Raises RLHFError D11 where `count` (rows, or the sequences they are packed into) fill no optimizer step.

    It takes rows in each of the processes that train together.
    """
    settings, stage = config.sft if isinstance(config, SFTConfig) else config.reward, config.stage
    size, parts, group = (
        settings.per_device_train_batch_size,
        settings.gradient_accumulation_steps,
        distributed.world_size(),
    )
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
    most, share = config.data.max_dropped, rows.dropped_share
    if key == f"data.{config.data.EVAL_KEY}" and config.sources()[key].share:
        share = wilson(rows.num_dropped, rows.num_expected)[0]  # in a small part their number varies by chance
    if share <= min(MANY, most):
        return
    causes = ", ".join(f"{lost.rows} by {code} ({lost})" for code, lost in rows.dropped.items())
    sampled = "sampled " if rows.stride > 1 else ""
    text = f"{rows.num_dropped} of {rows.num_expected} {sampled}rows are left out: {causes}"
    remedies = {"D10": f"{longer}; the longest row has {rows.longest_read} tokens", "D07": IDENTICAL}
    hint = remedies.get(next(iter(rows.dropped)), "data.on_bad: error shows each of them")
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
