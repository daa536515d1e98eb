"""Set-up of the stages that TRL trains: tokenizer, packing, rows and batches; `rlhf check` and `plan` use it too.

It imports no TRL, which takes seconds.
"""

from collections.abc import Mapping, Sequence
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlhf_cli import data, distributed, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.dpo import DPOConfig
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.config.sft import SFTConfig
from rlhf_cli.config.stages import TRLConfig, settings_of
from rlhf_cli.errors import RLHFError, at_location, collect_errors
from rlhf_cli.models import build, devices, load, lora, row_trial, tokenizers
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages.common import lifecycle, model_loading, reading

TOKENIZER_DATA_KEY = "model.new.tokenizer.train"
SPLITTING_STRATEGIES = ("wrapped", "bfd_split")  # packing strategies that split long rows
IGNORE_INDEX = -100  # label of a token that is not trained
PAIR_SIDES = ("chosen_ids", "rejected_ids")
TOKEN_COLUMNS = ("input_ids", *PAIR_SIDES)


# Tokenizer and model


def prepare_tokenizer(config: TRLConfig, tokenizer: Any, parent_stage: str = "") -> Any:
    """Return a tokenizer for training, with its own pad token and `model.chat_template`. Raises RLHFError C17, T05.

    The reward and DPO stages must keep the template of their parent if that is an SFT stage.
    """
    template, original_size = tokenizers.template_sha256(tokenizer), len(tokenizer)
    if config.model.chat_template is not None:
        tokenizers.set_chat_template(tokenizer, config.model.chat_template)
        changed = tokenizers.template_sha256(tokenizer) != template
        if not isinstance(config, SFTConfig) and parent_stage == "sft" and changed:
            text = f"model.chat_template is not that of the SFT stage ({(template or 'none')[:12]} there)"
            hint = "remove it: the template comes with the SFT model"
            raise RLHFError("T05", text, where=config.where("model.chat_template"), hint=hint)
    lora.refuse_new_tokens(config, tokenizer, original_size)
    model_loading.set_template_variables(config, tokenizer, parent_stage)
    tokenizers.ensure_pad_token(tokenizer, stop_token_id=data.stop_token_id(tokenizer))
    return tokenizer


def train_tokenizer(config: SFTConfig) -> Any:
    """Train the tokenizer of model.new. Raises RLHFError C06, C07, D01-D05."""
    assert config.model.new is not None
    with at_location(config.where("model.new.tokenizer")):
        corpus, vocab_size = config.sources()[TOKENIZER_DATA_KEY], config.model.new.tokenizer.vocab_size
        return tokenizers.train_tokenizer(corpus, vocab_size)


def new_model_config(config: SFTConfig) -> Any:
    """Return the transformers config of model.new without special tokens. Raises RLHFError C01, C07, C13, C17."""
    new = config.model.new
    assert new is not None
    with at_location(config.where("model.new")):
        no_special_tokens = dict.fromkeys(f"{name}_token_id" for name in ("pad", "bos", "eos"))
        model_config = build.new_config(new.config_fields(), vocab_size=new.tokenizer.vocab_size, **no_special_tokens)
    _check_context_length(config, model_config, 0, strict=True)
    return model_config


def load_tokenizer_and_model(
    config: SFTConfig | DPOConfig, options: Options, parents: Mapping[str, Parent]
) -> tuple[Any, Any]:
    """Load or create the tokenizer and the model to train; the pad token is used for nothing else.

    Raises RLHFError C01, C06, C07, C13 and C17 for model.new, M01, M06-M08 and T05 for model.path, C07 and C17 for
    model.adapters.
    """
    from transformers import set_seed  # imports peft

    parent = parents.get("model.path")
    if isinstance(config, SFTConfig) and config.model.new is not None:
        new_model_config(config)
        tokenizer = prepare_tokenizer(config, train_tokenizer(config))
        set_seed(config.seed)
        with at_location(config.where("model.new")):
            fields, attention = config.model.new.config_fields(), config.model.attn_implementation
            model = build.new_causal_lm(fields, tokenizer, attn_implementation=attention)
    else:
        assert parent is not None
        tokenizer = model_loading.load_tokenizer(config, options, parent)
        bf16_base = lora.trains_on_bf16(config)
        model = model_loading.load_model(
            load.load_causal_lm, config, options, parent, tokenizer, bf16_matrices=bf16_base
        )
        tokenizer = prepare_tokenizer(config, tokenizer, parent.stage)
        set_seed(config.seed)
    row_trial.require_rows_alone(model, config.where("model.path" if parent else "model.new"))
    return tokenizer, lora.prepare_for_training(config, parent, model, tokenizer)


def load_sft_model(config: TRLConfig, options: Options, parent: Parent, tokenizer: Any) -> Any:
    """Load model.path as a language model."""
    kwargs = load.load_kwargs(
        config.model, options.trust_remote_code, bf16_matrices=devices.use_bf16(settings_of(config).bf16)
    )
    return grow_embeddings(load.load_causal_lm(parent.model, **kwargs), tokenizer)


def grow_embeddings(model: Any, tokenizer: Any) -> Any:
    """Return the language model with an embedding for each token, which draws no random number."""
    lora.grow_embeddings(model, tokenizers.vocabulary_size(tokenizer, model.get_input_embeddings().weight.shape[0]))
    return model


def check_can_sample(config: RewardConfig, model_config: Any) -> None:
    """Raise RLHFError C17 if reward.normalize samples from model.path and it is not a causal model."""
    if config.reward.normalize == "sft" and build.is_classifier(model_config):
        text = "reward.normalize: sft samples from model.path, which is not a causal model"
        raise RLHFError("C17", text, where=config.where("reward.normalize"), hint="set reward.normalize: none")


def use_own_lm_head(model: Any) -> None:
    """Make `model(..., labels=, fused_lm_head=True)` use the model's own LM head, for a CPU.

    TRL's fused head saves GPU memory by computing the logits twice, on a CPU also those of unlabelled tokens. The own
    head gives the same values in less than half the time.
    """
    from accelerate.utils import is_peft_model  # takes time

    model = model.get_base_model() if is_peft_model(model) else model
    original = type(model).forward

    def forward(*args: Any, fused_lm_head: bool = False, labels: Tensor | None = None, **inputs: Any) -> Any:
        if not fused_lm_head or labels is None:
            return original(model, *args, labels=labels, **inputs)
        mask = labels[:, 1:] != IGNORE_INDEX
        head = model.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda _, hidden: (hidden[0][:, :-1][mask][None],))
        try:
            logits = original(model, *args, **inputs).logits[0].float()
        finally:
            hook.remove()
        targets = labels[:, 1:][mask]
        logprobs = torch.log_softmax(logits, -1)
        with torch.no_grad():
            entropy, top = -(logprobs.exp() * logprobs).sum(-1), logits.argmax(-1) == targets
            mean = logits.mean(-1)
        outputs = {"log_probs": logprobs.gather(-1, targets[:, None]), "entropy": entropy, "mean_logits": mean}
        rows = {name: torch.zeros(mask.shape).masked_scatter(mask, values) for name, values in outputs.items()}
        return SimpleNamespace(**rows, is_top1=torch.zeros_like(mask).masked_scatter(mask, top), label_mask=mask)

    model.forward = wraps(original)(forward)


# Rows


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
    if strategy := packing_strategy(config):
        effect = "cut out of one long text, neighbours see each other" if strategy == "wrapped" else "rows stay apart"
        terminal.say(f"sft      packing: {strategy} ({effect}; trainer.packing_strategy changes it)")


def read_data(
    config: TRLConfig, key: str, tokenizer: Any, model_config: Any = None, *, sample: int | None = None
) -> data.Rows[Any]:
    """Read data.train or data.eval, up to max_length unless packing splits long rows. With best_of they are prompts.

    Of more than `sample` rows only a sample is read. `model_config` None: unknown context. Warns D16. Raises RLHFError
    C13, D01-D10, D12, D14, D16.
    """
    splits = packing_strategy(config) in SPLITTING_STRATEGIES
    options: dict[str, Any] = {
        "max_length": None if splits else settings_of(config).max_length, "on_long": config.data.on_long,
        "sample": sample,
    }  # fmt: skip
    read_rows: Any = data.sft_rows
    if isinstance(config, SFTConfig) and config.best_of:
        read_rows, length = data.prompt_rows, config.best_of.response_length
        where = config.where("best_of.response_length")
        room = None if model_config is None else load.max_prompt_tokens(model_config, length, where)
        options["max_length"] = min(limit for limit in (room, config.sft.max_length - length) if limit)
    elif not isinstance(config, SFTConfig):
        read_rows, options["on_identical"] = data.preference_rows, config.data.on_identical
    source = config.sources()[f"data.{key}"]
    hint = _longer_rows_hint(config, model_config)
    return reading.read_rows(config, f"data.{key}", hint, partial(read_rows, source, tokenizer, **options))


def read_rows(config: TRLConfig, tokenizer: Any, model_config: Any) -> tuple[data.Rows[Any], list[Any]]:
    """Read and check data.train and data.eval, [] without it; rows of SFT become {input_ids, labels}, without best_of.

    Raises RLHFError as `read_data` and `check_rows`.
    """
    rows = read_data(config, "train", tokenizer, model_config)
    eval_rows = read_data(config, "eval", tokenizer, model_config) if "data.eval" in config.sources() else None
    check_rows(config, rows, eval_rows, model_config)
    if isinstance(config, SFTConfig) and not config.best_of:
        rows, eval_rows = add_labels(config, rows), eval_rows and add_labels(config, eval_rows)
    return rows, eval_rows or []


def check_rows(config: TRLConfig, rows: data.Rows[Any], eval_rows: data.Rows[Any] | None, model_config: Any) -> None:
    """Raise RLHFError C13 or D11 if rows are too long or too few; `model_config` None: unknown context. Warns D13."""
    if eval_rows is not None:
        data.warn_shared(rows, eval_rows, where=config.where("data.eval"))
    longest = max(rows.longest, eval_rows.longest if eval_rows else 0)
    splits = packing_strategy(config) in SPLITTING_STRATEGIES
    strict = splits or (isinstance(config, SFTConfig) and config.model.new is not None)
    count, unit = len(rows), "usable rows"
    if splits and isinstance(config, SFTConfig):
        count, unit = num_sequences(config, rows), "packed sequences"
    collect_errors(
        lambda: _check_context_length(config, model_config, longest, strict=strict),
        lambda: _check_batch_size(config, rows, count, unit) if rows.longest or not splits else None,
    )


def num_sequences(config: SFTConfig, rows: data.Rows[Any]) -> int:
    """Return the least number of sequences of max_length that hold all tokens; packing may make a few more."""
    return -(-count_tokens(rows) // config.sft.max_length)


def add_labels(config: SFTConfig, rows: data.Rows[Any]) -> data.Rows[dict[str, list[int]]]:
    """Return {input_ids, labels} per row; completion_only_loss ignores the prompt tokens."""
    completion_only = config.sft.completion_only_loss
    return rows.with_rows(
        {
            "input_ids": row["input_ids"],
            "labels": [
                token if in_completion or not completion_only else IGNORE_INDEX
                for token, in_completion in zip(row["input_ids"], row["completion_mask"], strict=True)
            ],
        }
        for row in rows
    )


def _longer_rows_hint(config: TRLConfig, model_config: Any) -> str:
    """Return how to allow longer rows; `model_config` None: unknown context."""
    context = None if model_config is None else load.context_length(model_config)
    key, limit = f"{config.stage}.max_length", settings_of(config).max_length
    if context is None:
        return f"raise {key} (now {limit})"
    if limit < context:
        return f"raise {key} (now {limit}; the model has {context} positions)"
    return f"use a model with a longer context than {context} positions, or shorten the rows"


def _check_batch_size(config: TRLConfig, rows: data.Rows[Any], count: int, unit: str) -> None:
    """Raise RLHFError D11 if `count` rows or packed sequences do not fill one optimizer step of all processes."""
    settings, world_size, key = settings_of(config), distributed.world_size(), "per_device_train_batch_size"
    size, grad_accum_steps = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    if count < size * grad_accum_steps * world_size:
        text = f"{rows.source.shown()} has {count} {unit}, fewer than one optimizer step takes"
        text += f" ({lifecycle.batch_product(size, grad_accum_steps, world_size, unit)})"
        if count >= size * world_size:
            hint = f"set {config.stage}.gradient_accumulation_steps to {count // (size * world_size)} at most"
        elif count >= world_size:
            hint = f"set {config.stage}.{key} to {count // world_size} at most"
            hint += ", and gradient_accumulation_steps to 1" if grad_accum_steps > 1 else ""
        else:
            hint = f"start {count} processes at most, or bring more rows"
        raise RLHFError("D11", text, where=config.where(f"{config.stage}.{key}"), hint=hint)


def _check_context_length(config: TRLConfig, model_config: Any, longest: int, *, strict: bool = False) -> None:
    """Raise RLHFError C13 if the longest row exceeds the model's context; `model_config` None: unknown context.

    `strict`: max_length itself must fit, because sequences are filled up to it or the model is built for it.
    """
    key, limit = f"{config.stage}.max_length", settings_of(config).max_length
    context = None if model_config is None else load.context_length(model_config)
    required = limit if strict else longest
    if context is None or required <= context:
        return
    text = f"{key} {limit}" if strict else f"{key} {limit} admits rows of {required} tokens,"
    text += f" {'is' if strict else 'which is'} {required - context} more than the model's {context} positions"
    hint = f"lower {key} by {limit - context}, to {context}; longer rows are dropped then"
    raise RLHFError("C13", text, where=config.where(key), hint=hint)


# Batch arithmetic


def pair_lengths(config: TRLConfig, rows: Sequence[Mapping[str, Sequence[int]]]) -> list[int] | None:
    """Return the tokens of each pair's longer side, by which batches are grouped; None if they are not."""
    lengths = [max(len(row[side]) for side in PAIR_SIDES) for row in rows]
    return lengths if settings_of(config).group_by_length else None


def describe_batches(
    config: TRLConfig, rows: Sequence[Mapping[str, Sequence[int]]], processes: int = 1, *, packed: int | None = None
) -> str:
    """Return rows, batch size and steps as one line.

    `packed`: the number of sequences the rows were packed into, 0 if not known yet.
    """
    settings, unit = settings_of(config), "rows" if config.stage == "sft" else "pairs"
    num_tokens, count = count_tokens(rows), len(rows) if packed is None else packed
    text = reading.describe_rows(rows, unit)
    text += (f", {num_tokens} tokens" if num_tokens else "") + (f" in {packed} sequences" if packed else "")
    size, grad_accum_steps = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    step = lifecycle.batch_product(size, grad_accum_steps, processes, unit if packed is None else "sequences")
    total = f"; in all {settings.steps(count, processes)} steps" if count or settings.max_steps else ""
    return f"{text}; a step: {step}{total}"


def count_tokens(rows: Sequence[Mapping[str, Sequence[int]]]) -> int:
    """Return the number of tokens of all rows, 0 for prompts and if they were read without a tokenizer."""
    whole = [row for row in rows if not isinstance(row, data.Prompt)]
    return sum(len(row[column]) for row in whole for column in TOKEN_COLUMNS if column in row)
