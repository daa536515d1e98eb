"""Models without their weights: on torch's meta device, with every shape of the real ones and no memory, or random."""

import copy
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache

from rlhf_cli.models import devices

META = torch.device("meta")


def causal(
    body: Any, *, dtype: str = "auto", attn_implementation: str | None = None, device: torch.device = META
) -> Any:
    """The language model of a transformers config, as `loading.load_causal` would load it."""
    return _made(AutoModelForCausalLM, body, dtype, attn_implementation, device)


def scorer(
    body: Any, *, dtype: str = "auto", attn_implementation: str | None = None, device: torch.device = META
) -> Any:
    """The one-label classifier on the body of a transformers config."""
    body = copy.deepcopy(body)
    body.num_labels = 1
    return _made(AutoModelForSequenceClassification, body, dtype, attn_implementation, device)


def backbone(body: Any) -> Any:
    """The layers of a transformers config, and what is before and behind them, without a head."""
    return _made(AutoModel, body, "auto", None, META)


def cache(model: Any) -> DynamicCache:
    """The empty key-value cache of a rollout."""
    return DynamicCache(config=model.config)


def _made(kind: Any, body: Any, dtype: str, attn_implementation: str | None, device: torch.device) -> Any:
    with device:
        return kind.from_config(body, dtype=devices.number_format(dtype), attn_implementation=attn_implementation)
