"""Models from fresh weights, by the fields of a transformers config."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlhf_cli.errors import RLHFError, nearest
from rlhf_cli.models.devices import fit_threads


def new_causal(fields: Mapping[str, Any], tokenizer: Any, *, attn_implementation: str | None = None) -> Any:
    """A causal model with fresh float32 weights: `fields` of its config, vocabulary and special ids of the tokenizer.

    Raises what `new_config` raises, and C17 for numbers that make no model.
    """
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = new_config(fields, vocab_size=len(tokenizer), **special)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attn_implementation)
    except Exception as error:  # each family checks its numbers in a way of its own
        raise _odd_fields(error) from error
    fit_threads(model.num_parameters())
    return model


def new_config(fields: Mapping[str, Any], **decided: int | None) -> Any:
    """The config of a causal model: `fields` as written, and what the tokenizer has `decided`.

    Raises RLHFError C07 for an unknown model_type, C01 for an unknown field, C17 for what the tokenizer decides.
    """
    kind = fields.get("model_type", "llama")
    if kind not in CONFIG_MAPPING:
        near = nearest(kind, CONFIG_MAPPING.keys())
        hint = f"did you mean {near}?" if near else None
        raise RLHFError("C07", f"model.new.model_type: unknown model type {kind!r}", hint=hint)
    known = AutoConfig.for_model(kind).to_dict().keys() | {"tie_word_embeddings"}
    for name in fields:
        if name in decided:
            raise RLHFError("C17", f"model.new.{name} follows from the tokenizer", hint="take the line out")
        if name not in known:
            near = nearest(name, known)
            text = f"model.new.{name}: a {kind} config has no such field"
            raise RLHFError("C01", text, hint=near and f"did you mean {near}?")
    settings = {name: value for name, value in fields.items() if name != "model_type"}
    try:
        return AutoConfig.for_model(kind, **settings, **decided)
    except Exception as error:  # each family checks its numbers in a way of its own
        raise _odd_fields(error) from error


def _odd_fields(error: Exception) -> RLHFError:
    text = f"model.new: transformers refuses these fields: {' '.join(str(error).split())}"
    return RLHFError("C17", text, hint="hidden_size must be a multiple of num_attention_heads, for one")
