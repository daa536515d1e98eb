"""A faster loss of TRL's SFT and DPO trainers on a CPU."""

from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.models.batch import IGNORE_INDEX


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

        targets = labels[:, 1:]
        mask = targets != IGNORE_INDEX

        def keep_labelled(_: Any, hidden: tuple[Tensor]) -> tuple[Tensor]:
            return (hidden[0][:, :-1][mask][None],)

        hook = model.get_output_embeddings().register_forward_pre_hook(keep_labelled)
        try:
            logits = original(model, *args, **inputs).logits[0].float()
        finally:
            hook.remove()
        return _fused_head_outputs(logits, targets, mask)

    model.forward = wraps(original)(forward)


def _fused_head_outputs(logits: Tensor, targets: Tensor, mask: Tensor) -> SimpleNamespace:
    """Return what TRL's fused head returns, (B, T) each, from the logits (N, V) of the labelled tokens of `targets`."""
    labelled = targets[mask]
    logprobs = torch.log_softmax(logits, -1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        is_top1 = logits.argmax(-1) == labelled
        mean_logits = logits.mean(-1)

    def spread(values: Tensor) -> Tensor:
        return torch.zeros(mask.shape).masked_scatter(mask, values)

    return SimpleNamespace(
        log_probs=spread(logprobs.gather(-1, labelled[:, None])),
        entropy=spread(entropy),
        mean_logits=spread(mean_logits),
        is_top1=torch.zeros_like(mask).masked_scatter(mask, is_top1),
        label_mask=mask,
    )
