"""Reward models of a stage: their tokens, where they are read, and their stored scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rlhf_cli import data, runs, terminal
from rlhf_cli.config.base import Config, Options
from rlhf_cli.errors import RLHFError, at_location
from rlhf_cli.models import build, forward, load, lora, tokenizers
from rlhf_cli.models.batch import Rollout, StopTokenId, stop_ids
from rlhf_cli.models.devices import autocast
from rlhf_cli.rewards.model import ModelReward, RetokenizingReward
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages.common.model_loading import load_tokenizer

# Difference from a stored score that rounding explains. Padding differently moves a score by about 1e-6 in float32; in
# bfloat16, with deviation 1, by some hundredths.
PROBE_TOLERANCE = 1e-3
PROBE_TOLERANCE_BF16 = 0.25  # share of the stored scores' standard deviation
PROBE_TOLERANCE_4_BITS = 1.0  # likewise


def load_own_tokenizer(config: Config, options: Options, sft: Parent, parent: Parent) -> Any:
    """Load a reward model's tokenizer if it tokenizes differently from the policy, else return None.

    Raises RLHFError M01, M08.
    """
    with at_location(config.where(parent.key)):
        if tokenizers.same_tokenization(sft, parent, trust_remote_code=options.trust_remote_code):
            return None
    return load_tokenizer(config, options, parent)


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
    others = [stop for stop in stop_ids(stop_token_id) if stop in special and stop != end]
    return (end, *others)


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

    `own_tokenizer` is the result of `load_own_tokenizer`; `options` (packed, offloaded, bf16) are
    ModelReward's. Raises RLHFError as `retokenize_prompts` does.
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
    config: Config,
    key: str,
    tokenizer: Any,
    prompts: Sequence[data.Prompt],
    model_config: Any,
) -> dict[tuple[int, ...], list[int]]:
    """Map each prompt's token ids to the reward tokenizer's ids of the same text or conversation.

    Raises RLHFError C13 if a prompt fills the reward model's context, D06 or D14 if its template rejects or cannot
    render a conversation.
    """
    texts = {tuple(prompt.ids): prompt.text for prompt in prompts}
    context = load.context_length(model_config)
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
        prompt_ids = [ids for ids, _ in encoded]
        longest = max(map(len, prompt_ids), default=0)
        if context is not None and longest >= context:
            text = f"{key}: a prompt has {longest} tokens in this model's tokenizer, and its context is {context}"
            raise RLHFError("C13", text, hint="remove longer prompts, or name another reward model")
    return dict(zip(texts, prompt_ids, strict=True))


def check_probes(model: Any, parent: Parent, *, where: str) -> None:
    """Raise RLHFError M09 if a reward model's scores, in the format of those stored with it, differ from these."""
    probes = parent.manifest.probes
    stored = torch.tensor([probe.score for probe in probes])
    stored_in_bf16 = parent.manifest.probes_dtype == "bfloat16" or lora.has_bf16_matrices(model)

    prompts = [probe.prompt_ids for probe in probes]
    responses = [probe.response_ids for probe in probes]
    rollout = Rollout.from_lists(prompts, responses).to(model.device)
    with autocast(bf16=stored_in_bf16):
        scores = forward.rollout_scores(model, rollout, max_rows=len(probes)).cpu()

    tolerance = _probe_tolerance(model, stored, bf16=stored_in_bf16)
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


def _probe_tolerance(model: Any, stored: torch.Tensor, *, bf16: bool) -> float:
    """Return the difference from `stored` scores (n,) that rounding explains, with or without `bf16` autocast."""
    spread = float(stored.std(correction=0))
    if lora.is_quantized(model):
        return max(PROBE_TOLERANCE, PROBE_TOLERANCE_4_BITS * spread)
    if bf16 or model.dtype == torch.bfloat16:
        return max(PROBE_TOLERANCE, PROBE_TOLERANCE_BF16 * spread)
    return PROBE_TOLERANCE


def warn_pad_is_end_token(model_config: Any, end_token_ids: tuple[int, ...], where: str) -> None:
    """Warn (T01) if an external reward model's pad token is also the (first) token that ends its training pairs."""
    if end_token_ids and build.pad_token_id(model_config) == end_token_ids[0]:
        text = "the reward model's pad token is its EOS: scores are read at the token before it, as in its training"
        terminal.warn("T01", text, where=where)
