"""Models from a transformers config: with new weights, or without any on torch's meta device."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlhf_cli import system
from rlhf_cli.errors import RLHFError, closest_match
from rlhf_cli.models import devices

META = torch.device("meta")


def new_causal_lm(fields: Mapping[str, Any], tokenizer: Any, *, attn_implementation: str | None = None) -> Any:
    """Return a causal LM with new float32 weights, from config `fields` and the tokenizer's size and special ids.

    Raises what `new_config` raises, and C17 for values that define no valid model.
    """
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = new_config(fields, vocab_size=len(tokenizer), **special)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attn_implementation)
    except Exception as error:  # each model family validates its config with different exceptions
        raise _invalid_fields(error) from error
    devices.set_num_threads(model.num_parameters())
    return model


def new_config(fields: Mapping[str, Any], **from_tokenizer: int | None) -> Any:
    """Return the config of a causal LM: `fields` as written, and the fields `from_tokenizer`.

    Raises RLHFError C07 for an unknown model_type, C01 for an unknown field, C17 for a field set by the tokenizer.
    """
    model_type = fields.get("model_type", "llama")
    if model_type not in CONFIG_MAPPING:
        near = closest_match(model_type, CONFIG_MAPPING.keys())
        hint = f"did you mean {near}?" if near else None
        raise RLHFError("C07", f"model.new.model_type: unknown model type {model_type!r}", hint=hint)
    known = AutoConfig.for_model(model_type).to_dict().keys() | {"tie_word_embeddings"}
    for name in fields:
        if name in from_tokenizer:
            raise RLHFError("C17", f"model.new.{name} follows from the tokenizer", hint="take the line out")
        if name not in known:
            near = closest_match(name, known)
            text = f"model.new.{name}: a {model_type} config has no such field"
            raise RLHFError("C01", text, hint=near and f"did you mean {near}?")
    settings = {name: value for name, value in fields.items() if name != "model_type"}
    try:
        return AutoConfig.for_model(model_type, **settings, **from_tokenizer)
    except Exception as error:  # each model family validates its config with different exceptions
        raise _invalid_fields(error) from error


def _invalid_fields(error: Exception) -> RLHFError:
    text = f"model.new: transformers refuses these fields: {' '.join(str(error).split())}"
    return RLHFError("C17", text, hint="hidden_size must be a multiple of num_attention_heads, for one")


def causal_lm_from_config(
    config: Any, *, dtype: str = "auto", attn_implementation: str | None = None, device: torch.device = META
) -> Any:
    """Return the causal LM of a transformers config, with the dtype that `load.load_causal_lm` would use."""
    return _from_config(AutoModelForCausalLM, config, dtype, attn_implementation, device)


def reward_model_from_config(
    config: Any, *, dtype: str = "auto", attn_implementation: str | None = None, device: torch.device = META
) -> Any:
    """Return a one-label sequence classifier with the backbone of a transformers config."""
    config = copy.deepcopy(config)
    config.num_labels = 1
    return _from_config(AutoModelForSequenceClassification, config, dtype, attn_implementation, device)


def backbone_from_config(config: Any) -> Any:
    """Return the model of a transformers config without a head, on the meta device."""
    return _from_config(AutoModel, config, "auto", None, META)


def meta_model(auto_class: Any, config: Any) -> Any:
    """Return the float32 model that a transformers auto class creates from a config, on the meta device."""
    return _from_config(auto_class, copy.deepcopy(config), "float32", None, META)


def kv_cache(model: Any) -> DynamicCache:
    """Return an empty key-value cache for a rollout."""
    return DynamicCache(config=model.config)


def _from_config(
    auto_class: Any, config: Any, dtype: str, attn_implementation: str | None, device: torch.device
) -> Any:
    with device, translate_config_errors():
        return auto_class.from_config(
            config, dtype=devices.resolve_dtype(dtype), attn_implementation=attn_implementation
        )


@contextmanager
def translate_config_errors() -> Iterator[None]:
    """Context manager that raises RLHFError M01 for a config that transformers cannot build a model from."""
    try:
        yield
    except Exception as error:  # each model family validates its config with different exceptions
        if isinstance(error, RLHFError) or system.is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200]
        text = f"no model can be made by this config: {type(error).__name__}: {reason}"
        raise RLHFError("M01", text) from error
