"""How numbers are read off models: logits at response tokens, values before them, scores at the end. The one forward of
judge and update.

Rows come flush left (MicroBatch), so a causal model needs no attention mask: what stands right of a real token cannot
reach it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_cli.models import packing
from rlhf_cli.models.batch import MicroBatch, Rollout, micro_batches
from rlhf_cli.progress import counted


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


def response_hidden(model: Any, micro: MicroBatch) -> Tensor:
    """The hidden states (N, H) that a causal model's head makes the logits of each response token from."""
    return _before_tokens(model.get_decoder(), micro)


def _before_tokens(body: Any, micro: MicroBatch) -> Tensor:
    """Hidden states (N, H) before each response token. Behind a row's last token nothing is asked: it is not read."""
    return packing.hidden_at(body, micro.ids, micro.lengths - 1, micro.row_index, micro.logit_position)


def head_logits(model: Any, hidden: Tensor) -> Tensor:
    """Logits (N, V) of hidden states (N, H).

    By the model's own forward, whose decoder is given its answer: so each family's extras around the head (scaling,
    soft-capping) stay in force.
    """
    decoder = model.get_decoder()
    decoder.forward = lambda *_, **__: _Given(hidden[None])  # in front of the class's own
    try:
        nothing = torch.empty(1, 0, dtype=torch.int64, device=hidden.device)
        return model(input_ids=nothing, use_cache=False).logits[0]
    finally:
        del decoder.forward


@dataclass(frozen=True)
class _Given:
    """A decoder's output that has hidden states and nothing else."""

    last_hidden_state: Tensor

    def __getitem__(self, place: int) -> Tensor:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        """Families ask for outputs of their own, to hand them on."""


def response_logits(model: Any, micro: MicroBatch) -> Tensor:
    """Logits (N, V) that predict each response token of the micro-batch."""
    return head_logits(model, response_hidden(model, micro))


def _scores(model: Any, hidden: Tensor) -> Tensor:
    """Scores (N,), float32 or wider, of hidden states (N, H), on the scale of config.reward_mean and reward_std where
    set.
    """
    with torch.autocast(hidden.device.type, enabled=False):  # a score rounded to bfloat16 would lose two digits
        raw = model.score(hidden.to(model.score.weight.dtype))[:, 0]
    raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
    return (raw - getattr(model.config, "reward_mean", 0.0)) / getattr(model.config, "reward_std", 1.0)


def response_values(model: nn.Module, micro: MicroBatch, hidden: Tensor | None = None) -> Tensor:
    """Values (N,) before each response token: of a one-label sequence classifier, or of a head on the policy, whose
    `hidden` states (N, H) it reads.
    """
    return model(hidden) if isinstance(model, ValueHead) else _scores(model, _before_tokens(model.base_model, micro))


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
    everyone = torch.arange(len(micro.rows), device=micro.ids.device)
    return _scores(model, packing.hidden_at(model.base_model, micro.ids, micro.lengths, everyone, last))


@torch.no_grad()
def rollout_scores(model: Any, rollout: Rollout, *, max_rows: int, max_tokens: int | None = None) -> Tensor:
    """Score (B,) float32 of each row of a rollout, in micro-batches of rows of like length."""
    scores = torch.empty(len(rollout), device=rollout.ids.device)
    everyone, packed = torch.arange(len(rollout), device=rollout.ids.device), packing.packs(model)
    split = micro_batches(rollout.lengths, everyone, max_rows=max_rows, max_tokens=max_tokens, packed=packed)
    for rows in counted("score: micro-batch", list(split)):
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
