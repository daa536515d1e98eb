"""AdamW whose averages take 8 bits a number (Dettmers et al. 2021, arXiv 2110.02861): bitsandbytes enters here, and
only where it is asked for.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def embeddings(models: Iterable[nn.Module]) -> set[torch.Tensor]:
    """The weights whose averages stay in 32 bits, as transformers has it: gradients of single words vary too much."""
    return {module.weight for model in models for module in model.modules() if isinstance(module, nn.Embedding)}


def adamw(groups: list[dict[str, Any]], *, words: set[torch.Tensor], **same: Any) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW over parameter groups; `words` are kept in 32 bits, and so is what has few numbers."""
    import bitsandbytes as bnb

    class AdamW8bit(bnb.optim.AdamW8bit):
        """Its own register of exceptions is of the whole process, by id, and is never emptied."""

        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            exception = {"optim_bits": 32} if group["params"][pindex] in words else {}
            return {**super().get_config(gindex, pindex, group), **exception}

    return AdamW8bit(groups, **same)
