"""How numbers are read off models: logits at response tokens, values before them, scores at the end. The one forward of
judge and update.

Rows come flush left (MicroBatch), so a causal model needs no attention mask: what stands right of a real token cannot
reach it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_cli.ppo.records import MicroBatch, Rollout, micro_batches


class ValueHead(nn.Module):
    """A value model that is no model: one number from a causal model's own last hidden state (..., H) -> (...).

    It starts at zero, and so does every value. TRL 0.11's AutoModelForCausalLMWithValueHead.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        width = model.get_output_embeddings().weight.shape[1]
        self.score = nn.Linear(width, 1, bias=False, device=model.device, dtype=model.dtype)
        nn.init.zeros_(self.score.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):  # a value rounded to bfloat16 would lose two digits
            values = self.score(hidden.to(self.score.weight.dtype))[..., 0]
        return values.to(torch.promote_types(values.dtype, torch.float32))


@contextmanager
def _head_on(model: Any, row: Tensor, column: Tensor) -> Iterator[list[Tensor]]:
    """Within, the output head sees only the hidden states at (row, column): (1, N, H) in place of (n, L, H).

    Every family's own extras around the head (soft-capping, scaling) stay in force, and no logits are made that nobody
    needs. Yields a list that receives those hidden states (N, H).
    """
    seen: list[Tensor] = []

    def select(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(inputs[0][row, column])
        return (seen[0][None], *inputs[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(select)
    try:
        yield seen
    finally:
        handle.remove()


def response_logits(model: Any, micro: MicroBatch) -> Tensor:
    """Logits (N, V) that predict each response token of the micro-batch."""
    with _head_on(model, micro.row, micro.column):
        return model(input_ids=micro.ids, use_cache=False).logits[0]


def policy_and_value(
    policy: Any, value: nn.Module, micro: MicroBatch, *, learn_policy: bool = True
) -> tuple[Tensor, Tensor]:
    """Logits (N, V) and values (N,); one forward pass where the value model is a head on the policy.

    Without `learn_policy` no gradient goes into the policy.
    """
    learns = learn_policy and torch.is_grad_enabled()
    with torch.set_grad_enabled(learns), _head_on(policy, micro.row, micro.column) as seen:
        logits = policy(input_ids=micro.ids, use_cache=False).logits[0]
    return logits, value(seen[0]) if isinstance(value, ValueHead) else response_values(value, micro)


def _scores_at(model: Any, ids: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Scores (N,), float32 or wider, at the given places of ids (n, L), on the scale of config.reward_mean and
    reward_std where set.
    """
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    with torch.autocast(ids.device.type, enabled=False):  # a score rounded to bfloat16 would lose two digits
        raw = model.score(hidden[row, column].to(model.score.weight.dtype))[:, 0]
    raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
    return (raw - getattr(model.config, "reward_mean", 0.0)) / getattr(model.config, "reward_std", 1.0)


def response_values(model: nn.Module, micro: MicroBatch) -> Tensor:
    """Values (N,) before each response token, from a one-label sequence classifier."""
    return _scores_at(model, micro.ids, micro.row, micro.column)


def final_scores(model: Any, micro: MicroBatch) -> Tensor:
    """Score (n,) of each row, where transformers pools it: at the last real token that is not the model's pad token.

    That is the EOS for models of ours, whose pad token is never in a text. A foreign model whose pad token is its EOS
    was trained on the token before, and is read there.
    """
    places = torch.arange(micro.ids.shape[1], device=micro.ids.device)
    counts = places < micro.lengths[:, None]
    if model.config.pad_token_id is not None:
        counts &= micro.ids != model.config.pad_token_id
    last = torch.where(counts, places, 0).amax(1)
    return _scores_at(model, micro.ids, torch.arange(len(micro.rows), device=micro.ids.device), last)


@torch.no_grad()
def rollout_scores(model: nn.Module, rollout: Rollout, *, max_rows: int, max_tokens: int | None = None) -> Tensor:
    """Score (B,) float32 of each row of a rollout, in micro-batches of rows of like length."""
    scores = torch.empty(len(rollout), device=rollout.ids.device)
    for rows in micro_batches(
        rollout.lengths, torch.arange(len(rollout), device=rollout.ids.device), max_rows=max_rows, max_tokens=max_tokens
    ):
        scores[rows] = final_scores(model, rollout.micro_batch(rows))
    return scores


def disable_dropout(model: nn.Module) -> None:
    """Dropout off for good:

    the policy that is trained must be the one that wrote the responses. The config, and so what is saved, keeps it.
    """
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (
                "drop" in name or (name == "p" and isinstance(module, nn.modules.dropout._DropoutNd))
            ):
                setattr(module, name, 0.0)
    model.eval()


def checkpoint_activations(model: Any) -> None:
    """Let `recomputing` take effect on this model. Raises ValueError where it knows no gradient checkpointing."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


@contextmanager
def recomputing(*models: nn.Module) -> Iterator[None]:
    """Within, checkpointed layers recompute their activations in the backward pass.

    transformers does so only for layers in training mode, and then drops their key-value cache: so only here, only
    those layers.
    """
    layers = [
        module for model in models for module in model.modules() if getattr(module, "gradient_checkpointing", False)
    ]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
