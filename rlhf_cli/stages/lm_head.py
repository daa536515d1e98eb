"""The loss of TRL's trainers of language models on a CPU."""

from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor

from rlhf_cli.stages.training_setup import IGNORE_INDEX


def use_own_lm_head(model: Any) -> None:
    """Make `model(..., labels=, fused_lm_head=True)` use the model's own LM head, for a CPU.

    TRL's fused head saves GPU memory by computing the logits twice, on a CPU also those of unlabelled tokens. The own
    head gives the same values in less than half the time.
    """
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
