"""Models without content, on torch's meta device: every shape of the real ones, no weights, no memory."""

import copy
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache

from rlhf_cli.models import loading


def causal(body: Any, *, dtype: str = "auto", attn_implementation: str | None = None) -> Any:
    """The language model of a transformers config, as `loading.load_causal` would load it."""
    return _made(AutoModelForCausalLM, body, dtype, attn_implementation)


def scorer(body: Any, *, dtype: str = "auto", attn_implementation: str | None = None) -> Any:
    """The one-label classifier on the body of a transformers config."""
    body = copy.deepcopy(body)
    body.num_labels = 1
    return _made(AutoModelForSequenceClassification, body, dtype, attn_implementation)


def backbone(body: Any) -> Any:
    """The layers of a transformers config, and what is before and behind them, without a head."""
    return _made(AutoModel, body, "auto", None)


def cache(model: Any) -> DynamicCache:
    """The empty key-value cache of a rollout."""
    return DynamicCache(config=model.config)


def _made(kind: Any, body: Any, dtype: str, attn_implementation: str | None) -> Any:
    with torch.device("meta"):
        return kind.from_config(body, dtype=loading.number_format(dtype), attn_implementation=attn_implementation)
