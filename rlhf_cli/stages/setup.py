"""What the stages share: start and completion of a stage, loading models, reading rows. `rlhf check` uses it too."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch

from rlhf_cli import config as configs
from rlhf_cli import data, runs, system, terminal
from rlhf_cli.config.base import Config, Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.training import DPOConfig, RewardConfig, SFTConfig, TRLConfig
from rlhf_cli.data.datasets import Rows
from rlhf_cli.data.formats import dropped_causes
from rlhf_cli.data.sources import is_local
from rlhf_cli.errors import RLHFError, at_location
from rlhf_cli.models import chat_templates, devices, forward, load, lora, tokenizers
from rlhf_cli.models.batch import Rollout, StopTokenId, stop_ids
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup, open_process_group
from rlhf_cli.rewards.model import ModelReward, RetokenizingReward
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages import hardware
from rlhf_cli.stages.plan_models import is_policy_key
from rlhf_cli.statistics import wilson

# Padding differently moves a score by about 1e-6 in float32; in bfloat16, with deviation 1, by some hundredths.
# Difference from a stored score that rounding explains: in float32, and in bfloat16 or 4 bits as a share of the stored
# scores' standard deviation.
PROBE_TOLERANCE, PROBE_TOLERANCE_BF16, PROBE_TOLERANCE_4_BITS = 1e-3, 0.25, 1.0
PromptForm = Literal["text", "conversation", "transcript"]  # how a data file writes prompts
PromptFormat = Literal["template", "transcript", "text"]  # how they are passed to a model
DATA_KEYS = {"ppo": "data.prompts"} | dict.fromkeys(("sft", "reward", "dpo"), "data.train")
WARN_DROPPED_FRACTION = 0.2
IDENTICAL_HINT = "look at how the pairs were made: identical answers express no preference"
Row = TypeVar("Row")
AnyConfig = TRLConfig | PPOConfig | EvalConfig
Check = Callable[[Mapping[str, Parent]], None]
C = TypeVar("C", SFTConfig, RewardConfig, DPOConfig, PPOConfig, EvalConfig)


# Start and completion


@dataclass(frozen=True)
class StageRun:
    """A stage that was started by `run_stage`."""

    config: Config
    options: Options
    parents: dict[str, Parent]
    process_group: ProcessGroup
    identity: dict[str, Any]
    resumes: bool
    memory: str

    def begin_training(self) -> None:
        """Print the memory of a stage whose inputs are loaded. Raises RLHFError as `runs.require_unchanged`."""
        runs.require_unchanged(self.parents)
        if self.memory:
            terminal.say(f"{self.config.stage:<8} {self.memory}")

    def complete(self, fields: Mapping[str, Any]) -> None:
        """Write the manifest with these fields, which completes the stage."""
        fields = {**fields, "trust_remote_code": self.options.trust_remote_code}
        self.process_group.run_on_main(
            lambda: runs.complete_stage(self.config, self.identity, parents=self.parents, fields=fields)
        )


def run_stage(config: C, options: Options, train: Callable[[C, StageRun], None], check: Check | None = None) -> None:
    """Start a stage on all ranks and call `train`, unless the stage is finished already.

    `check` is called before --fresh archives anything. Warns as `system.remove_accelerate_variables`. Raises RLHFError
    E04 and R14 as `ProcessGroup` does, as `runs.start_stage`, and as `hardware.check`.
    """
    system.remove_accelerate_variables()
    with open_process_group() as process_group:
        parents = runs.open_parents(config)
        identity = runs.compute_identity(config, parents, config.sources())
        if check and (options.fresh or runs.stage_status(config, identity).state != "finished"):
            check(parents)
        status = process_group.run_on_main(
            lambda: runs.start_stage(config, identity, parents, fresh=options.fresh, device=devices.device_name())
        )
        if status == "finished":
            terminal.say(f"{config.stage:<8} finished already: {runs.shown(config.folder)}")
        else:
            memory = hardware.check(config, parents)
            train(config, StageRun(config, options, parents, process_group, identity, status == "resume", memory))


# Tokenizers and models


def load_tokenizer(config: Config, options: Options, parent: Parent) -> Any:
    """Load the tokenizer of an input model. Raises RLHFError M01, M08.

    Policies of PPO and evaluation get data.chat_template_kwargs: C17, T05 as `set_template_variables`.
    """
    with at_location(config.where(parent.key)):
        tokenizer = tokenizers.load_tokenizer(parent.model, trust_remote_code=options.trust_remote_code)
    if config.stage in ("ppo", "eval") and is_policy_key(parent.key):
        set_template_variables(config, tokenizer, parent.stage)
    if tokenizer.chat_template and (form := training_prompt_form(parent)):
        data.set_speaks_in_turns(tokenizer, form != "text")
    return tokenizer


def set_template_variables(config: Any, tokenizer: Any, parent_stage: str) -> None:
    """Write data.chat_template_kwargs into the chat template. Raises RLHFError C17 if one has no effect.

    A later stage must keep the template of its parent if that was trained here: T05.
    """
    template, where = tokenizer.chat_template, config.where("data.chat_template_kwargs")
    trained_here = parent_stage not in ("", runs.FOREIGN) and config.stage != "sft"
    if trained_here and config.data.chat_template_kwargs is None:
        return
    chat_templates.set_template_variables(tokenizer, config.data.chat_template_kwargs, where=where)
    if trained_here and tokenizer.chat_template != template:
        text = "data.chat_template_kwargs is not that of the stage which trained the model"
        raise RLHFError("T05", text, where=where, hint="remove it: the values come with the model")


def load_own_tokenizer(config: Config, options: Options, sft: Parent, parent: Parent) -> Any:
    """Load a reward model's tokenizer if it tokenizes differently from the policy, else return None.

    Raises RLHFError M01, M08.
    """
    with at_location(config.where(parent.key)):
        if tokenizers.same_tokenization(sft, parent, trust_remote_code=options.trust_remote_code):
            return None
    return load_tokenizer(config, options, parent)


def load_model(
    loader: Callable[..., Any],
    config: Config,
    options: Options,
    parent: Parent,
    tokenizer: Any,
    loading: ProcessGroup = SINGLE_PROCESS,
    *,
    bf16_matrices: bool = False,
) -> Any:
    """Load a model on the CPU with `loader`, of models.load, and check that it has an embedding for each token.

    Of the processes `loading` only the main one loads weights (`sharding.broadcast_weights`). Raises RLHFError as the
    loader does, and M06 if the vocabulary is too small.
    """
    assert isinstance(config, AnyConfig)
    section = config.model if isinstance(config, TRLConfig) else config.models
    kwargs = load.load_kwargs(section, options.trust_remote_code, bf16_matrices=bf16_matrices)
    if loader is load.load_classifier:  # of a reward's `pipeline`, which keeps its own dtype
        kwargs = {"trust_remote_code": options.trust_remote_code}
    with at_location(config.where(parent.key)):
        model = loading.load_on_main(lambda empty: loader(parent.model, **kwargs, **({"empty": True} if empty else {})))
        tokenizers.check_vocabulary(model, tokenizer, guarded=loader is not load.load_classifier)
    return model


def check_same_tokenization(config: Config, options: Options, parents: Mapping[str, Parent]) -> None:
    """Raise RLHFError T04 or T05 if a policy or value model tokenizes differently from models.sft.

    Models that only score may differ; models.reward must not in a PPO run whose value model starts as its copy. The
    tokenizers of an evaluation's judges are still loaded, to raise M01 and M08 before anything is written.
    """
    keys = ("models.value", *(["models.reward"] if config.stage == "ppo" else []))
    must_match = {key: parent for key, parent in parents.items() if is_policy_key(key) or key in keys}
    tokenizers.check_same_tokenization(
        must_match, config.where, trust_remote_code=options.trust_remote_code,
        template_variables=config.data.chat_template_kwargs,
    )  # fmt: skip
    for key, parent in parents.items() if config.stage == "eval" else ():
        if key not in must_match:
            with at_location(config.where(key)):
                tokenizers.same_tokenization(parents["models.sft"], parent, trust_remote_code=options.trust_remote_code)


# Reward models


def stop_token_id(tokenizer: Any, parent: Parent, vocab_size: int) -> StopTokenId:
    """Return the tokens that end a response: the chat template's, and those of the model's generation config.

    Llama 3 has <|eot_id|>, <|end_of_text|> and <|eom_id|>, Qwen <|im_end|> and <|endoftext|>.
    """
    known = [stop for stop in load.read_eos_token_ids(parent.model) if stop < vocab_size]
    stops = dict.fromkeys([data.stop_token_id(tokenizer), *known])
    return tuple(stops) if len(stops) > 1 else next(iter(stops))


def end_token_ids(tokenizer: Any, stop_token_id: StopTokenId = None) -> tuple[int, ...]:
    """Return the end tokens of `forward.rollout_scores` for a reward model that reads this tokenizer's tokens.

    The first is that of `data.encode`; the others are the special tokens among the policy's stop tokens. Empty if the
    tokenizer can end no answer.
    """
    try:
        end = data.stop_token_id(tokenizer)
    except RLHFError:  # T06; the policy has other stop tokens, or none
        return ()
    special = data.special_ids(tokenizer)
    return (end, *(stop for stop in stop_ids(stop_token_id) if stop != end and stop in special))


@dataclass(frozen=True)
class PolicyText:
    """The policy's tokenizer, stop tokens and prompts, from which reward models with another tokenizer get text."""

    sft: Parent
    tokenizer: Any
    stop_token_id: StopTokenId
    prompts: Sequence[data.Prompt]


def closing_ids(parent: Parent, model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the `closing_ids` of `forward.rollout_scores`: empty for a model that `rlhf reward` trained.

    Others were trained on the whole rendering of their chat template, as by TRL's RewardTrainer.
    """
    fields = ("reward_at_stop_token", "reward_mean")
    trained_here = parent.stage != "foreign" or any(hasattr(model.config, field) for field in fields)
    if trained_here or not end_token_ids(tokenizer):
        return ()
    closing = data.closing_ids(tokenizer)
    if closing:
        text = f"its score is read behind {tokenizer.decode(closing)!r}, which its chat template writes after an answer"
        terminal.log_once(f"{parent.key}: {text}")
    return closing


def build_model_reward(
    config: Config,
    key: str,
    policy_text: PolicyText,
    parent: Parent,
    model: Any,
    own_tokenizer: Any,
    *,
    rows: int,
    **options: bool,
) -> ModelReward:
    """Build a reward source from a reward model that was loaded from `parent`, scoring `rows` at a time.

    `own_tokenizer` is the result of `load_own_tokenizer`; `options` (packed, offloaded) are passed to ModelReward.
    Raises RLHFError as `retokenize_prompts` does.
    """
    closing = closing_ids(parent, model, own_tokenizer or policy_text.tokenizer)
    if own_tokenizer is None:
        ends = end_token_ids(policy_text.tokenizer, policy_text.stop_token_id)
        return ModelReward(model, rows, end_token_ids=ends, closing_ids=closing, **options)
    terminal.say(f"{config.stage:<8} {key}: has its own tokenizer or template, so the policy's text is re-encoded")
    prompts = retokenize_prompts(config, key, own_tokenizer, policy_text.prompts, model.config)
    return RetokenizingReward(
        model,
        rows,
        **options,
        end_token_ids=end_token_ids(own_tokenizer),
        closing_ids=closing,
        name=key,
        tokenizer=policy_text.tokenizer,
        encode=partial(data.encode_many, own_tokenizer, any_text=True),
        stop_token_id=policy_text.stop_token_id,
        context=load.context_length(model.config),
        prompts=prompts,
        conversations={tuple(prompt.ids) for prompt in policy_text.prompts if not isinstance(prompt.text, str)},
    )


def retokenize_prompts(
    config: Config, key: str, tokenizer: Any, prompts: Sequence[data.Prompt], model_config: Any
) -> dict[tuple[int, ...], list[int]]:
    """Map each prompt's token ids to the reward tokenizer's ids of the same text or conversation.

    Raises RLHFError C13 if a prompt fills the reward model's context, D06 or D14 if its template rejects or cannot
    render a conversation.
    """
    texts = {tuple(prompt.ids): prompt.text for prompt in prompts}
    with at_location(config.where(key)):
        try:
            encoded = data.encode_many(tokenizer, list(texts.values()), [None] * len(texts))
        except RLHFError as error:
            problem = error.problems[0]
            if problem.code != "D14":
                raise
            text = f"{key}: the prompts are conversations, and this model has no chat template"
            hint = "name a reward model with one, or set data.format: plain if the file's prompts are texts"
            raise RLHFError("D14", text, hint=hint) from error
        longest, context = max((len(ids) for ids, _ in encoded), default=0), load.context_length(model_config)
        if context is not None and longest >= context:
            text = f"{key}: a prompt has {longest} tokens in this model's tokenizer, and its context is {context}"
            raise RLHFError("C13", text, hint="remove longer prompts, or name another reward model")
    return dict(zip(texts, (ids for ids, _ in encoded), strict=True))


def place_frozen(model: Any, *, bf16: bool) -> Any:
    """Freeze a model and move it to the device; with bf16 its matrices are stored in bfloat16, for `autocast`."""
    model.requires_grad_(False).eval()
    if bf16 and not lora.has_bf16_matrices(model):
        lora.autocast_matrices(model)
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dtype == torch.float32:  # a view of a memory-mapped file keeps all of it in memory
                tensor.data = tensor.data.clone()
    return model.to(devices.device())


def autocast(*, bf16: bool) -> torch.autocast:
    """Return the context manager in which models compute in bfloat16, if set."""
    return torch.autocast(devices.device().type, dtype=torch.bfloat16, enabled=bf16)


def check_probes(model: Any, parent: Parent, *, where: str) -> None:
    """Raise RLHFError M09 if a reward model's scores, in the format of those stored with it, differ from these."""
    probes = parent.manifest["probes"]
    rollout = Rollout.from_lists([probe["prompt_ids"] for probe in probes], [probe["response_ids"] for probe in probes])
    stored_in_bf16 = parent.manifest.get("probes_dtype") == "bfloat16" or lora.has_bf16_matrices(model)
    with autocast(bf16=stored_in_bf16):
        scores = forward.rollout_scores(model, rollout.to(model.device), max_rows=len(probes)).cpu()
    stored = torch.tensor([probe["score"] for probe in probes])
    tolerance, spread = PROBE_TOLERANCE, float(stored.std(correction=0))
    if lora.is_quantized(model) or model.dtype == torch.bfloat16 or stored_in_bf16:
        share = PROBE_TOLERANCE_4_BITS if lora.is_quantized(model) else PROBE_TOLERANCE_BF16
        tolerance = max(tolerance, share * spread)
    differing = ((scores - stored).abs() > tolerance).nonzero()[:, 0].tolist()
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


def manifest_fields(config: Config, tokenizer: Any, stop_token_id: StopTokenId) -> dict[str, Any]:
    """Return the manifest's fields about the tokenizer and the form of the prompts that the stage trained on."""
    source = config.sources()[DATA_KEYS[config.stage]]
    form = data.prompt_form(source, in_turns=data.speaks_in_turns(tokenizer))
    return {**tokenizers.manifest_fields(tokenizer, stop_token_id), "prompt_form": form}


def training_prompt_form(parent: Parent) -> PromptForm | None:
    """Return the form of the prompts a model was trained on.

    Of a stage whose manifest does not have it, that of its data; None if that is not local or not readable.
    """
    if parent.stage not in DATA_KEYS:
        return None
    form = parent.manifest.get("prompt_form")
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


# Rows and batches


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


def warn_long_intervals(config: Config, steps: int) -> None:
    """Warn (C14) if a save or evaluation interval is longer than the run."""
    intervals = {"save": ("output.save_steps", config.output.save_steps)}
    if isinstance(config, TRLConfig) and "data.eval" in config.sources():
        intervals["evaluation"] = (f"{config.stage}.eval_steps", getattr(config, config.stage).eval_steps)
    unit = "updates" if config.stage == "ppo" else "steps"
    for event, (key, every) in intervals.items():
        if every and every > steps:
            text = f"one {event} every {every} {unit} exceeds the {steps} of the run: only the last one gets one"
            terminal.warn("C14", text, where=config.where(key), hint=f"lower {key}, or remove it")


def batch_product(size: int, grad_accum_steps: int, processes: int, unit: str) -> str:
    """Return the batch size of a step as text: `8 x 2 x 4 processes = 64 rows`."""
    group = f" x {processes} processes" if processes > 1 else ""
    return f"{size} x {grad_accum_steps}{group} = {size * grad_accum_steps * processes} {unit}"


def describe_rows(rows: Sequence[Any], unit: str) -> str:
    """Return the number of rows, and of dropped rows if there are any, as text."""
    dropped = rows.dropped_text() if isinstance(rows, Rows) else ""
    return f"{len(rows)} {unit}" + (f", {dropped}" if dropped else "")
