"""Models without their weights: on torch's meta device, with every shape of the real ones and no memory, or random."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache

from rlhf_cli import room
from rlhf_cli.errors import RLHFError
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


def of_kind(kind: Any, body: Any) -> Any:
    """The model that one of transformers' auto classes makes of a config."""
    return _made(kind, copy.deepcopy(body), "float32", None, META)


def cache(model: Any) -> DynamicCache:
    """The empty key-value cache of a rollout."""
    return DynamicCache(config=model.config)


def _made(kind: Any, body: Any, dtype: str, attn_implementation: str | None, device: torch.device) -> Any:
    with device, odd_configs_refused():
        return kind.from_config(body, dtype=devices.number_format(dtype), attn_implementation=attn_implementation)


@contextmanager
def odd_configs_refused() -> Iterator[None]:
    """Within, a config that makes no model is RLHFError M01: each family checks its numbers in a way of its own."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RLHFError) or room.is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200]
        text = f"no model can be made by this config: {type(error).__name__}: {reason}"
        raise RLHFError("M01", text) from error
