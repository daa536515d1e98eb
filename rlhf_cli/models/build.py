"""Models from a transformers config: with new weights, or without any on torch's meta device; checks of stored weights.

transformers fills missing weights with random values, drops unused ones, and continues. `check_headers` and
`require_fit` use its loader's report: first with names and shapes only, on the meta device, which needs no memory;
then for the actual load.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlhf_cli import system, terminal
from rlhf_cli.errors import RLHFError, did_you_mean, first_names, short_reason, shown
from rlhf_cli.models import devices, sharding
from rlhf_cli.models.weight_files import BUFFERS, require_float_formats, stored_weights, weight_files
from rlhf_cli.runs.model_files import file_stats

META = torch.device("meta")
VALUE_HEAD = "v_head."  # stored by TRL's AutoModelForCausalLMWithValueHead with a language model

# Auto class, labels, folder and its files' stats -> the missing head. Several config keys and stages name one model.
_checked: dict[tuple[Any, ...], tuple[str, ...]] = {}


def new_causal_lm(fields: Mapping[str, Any], tokenizer: Any, *, attn_implementation: str | None = None) -> Any:
    """Return a causal LM with new float32 weights. Raises what `new_config` raises, and C17 for invalid values."""
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = new_config(fields, vocab_size=len(tokenizer), **special)
    with _translate_field_errors():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attn_implementation)
    devices.set_num_threads(model.num_parameters())
    return model


def new_config(fields: Mapping[str, Any], **from_tokenizer: int | None) -> Any:
    """Return a causal LM's config. Raises RLHFError C07 (model type), C01 (unknown field), C17 (`from_tokenizer`)."""
    settings = dict(fields)
    model_type = settings.pop("model_type", "llama")
    if model_type not in CONFIG_MAPPING:
        text = f"model.new.model_type: unknown model type {model_type!r}"
        raise RLHFError("C07", text, hint=did_you_mean(model_type, CONFIG_MAPPING.keys()))

    known = AutoConfig.for_model(model_type).to_dict().keys() | {"tie_word_embeddings"}
    for name in fields:
        if name in from_tokenizer:
            raise RLHFError("C17", f"model.new.{name} follows from the tokenizer", hint="remove the line")
        if name not in known:
            text = f"model.new.{name}: a {model_type} config has no such field"
            raise RLHFError("C01", text, hint=did_you_mean(name, known))
    with _translate_field_errors():
        return AutoConfig.for_model(model_type, **settings, **from_tokenizer)


@contextmanager
def _translate_field_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each model family validates its config with different exceptions
        text = f"model.new: transformers refuses these fields: {short_reason(error)}"
        raise RLHFError("C17", text, hint="hidden_size must be a multiple of num_attention_heads, for one") from error


def causal_lm_from_config(config: Any, **options: Any) -> Any:
    """Return the causal LM of a transformers config, by default on the meta device; `options` as `_from_config`."""
    return _from_config(AutoModelForCausalLM, config, **options)


def reward_model_from_config(config: Any, **options: Any) -> Any:
    """Return a one-label sequence classifier with the backbone of a transformers config."""
    return _from_config(AutoModelForSequenceClassification, one_label(config), **options)


def empty_model(auto_class: Any, config: Any, **options: Any) -> Any:
    """Return an auto class's model on the meta device, in the state in which transformers loads one."""
    return _from_config(auto_class, config, **options).eval()


def one_label(config: Any) -> Any:
    """Return a copy of a config for a classifier with one label."""
    config = copy.deepcopy(config)
    config.num_labels = 1
    return config


def _from_config(
    auto_class: Any,
    config: Any,
    *,
    dtype: str = "auto",
    attn_implementation: str | None = None,
    trust_remote_code: bool | None = None,
    device: torch.device = META,
) -> Any:
    """Return an auto class's model, with the dtype that `load` uses.

    Raises RLHFError M01 for a bad config, M10 for a classifier of a family that has none.
    """
    if auto_class is AutoModelForSequenceClassification:
        require_classifier(config)
    resolved = devices.resolve_dtype(dtype)
    try:
        with device:
            return auto_class.from_config(
                config, dtype=resolved, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # each model family validates its config with different exceptions
        if isinstance(error, RLHFError) or system.is_out_of_memory(error):
            raise
        text = f"no model can be built from this config: {type(error).__name__}: {short_reason(error)}"
        raise RLHFError("M01", text) from error


def check_headers(auto_class: Any, folder: Path, config: Any) -> tuple[str, ...]:
    """Return the weights of a classifier's head that the folder lacks, reading only the headers of its files.

    Quantized weights and models with custom code are not checked here but by `require_fit`, after loading.
    Raises RLHFError M13 for weights that do not fit, M01 for a config that no model can be built from.
    """
    if getattr(config, "quantization_config", None) or getattr(config, "auto_map", None):
        return ()
    versions = tuple(file_stats(folder).items())
    key = (auto_class, config.num_labels, folder, versions)
    if key not in _checked:
        model, report = _load_on_meta(auto_class, folder, config)
        _checked[key] = require_fit(folder, model, report, auto_class, config)
    return _checked[key]


def _load_on_meta(auto_class: Any, folder: Path, config: Any) -> tuple[Any, dict[str, Any]]:
    if not weight_files(folder):
        raise RLHFError("M01", f"{shown(folder)} has no weights (model.safetensors)")
    state: dict[str, torch.Tensor] = {}
    for name, stored in stored_weights(folder):
        state[name] = torch.empty(stored.get_shape(), device=META)

    model = _from_config(auto_class, copy.deepcopy(config), dtype="float32")
    with sharding.zero3_disabled():
        return type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=state,
            device_map={"": "meta"},
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            local_files_only=True,
        )


def require_fit(
    folder: Path | str,
    model: Any,
    report: dict[str, Any],
    auto_class: Any,
    config: Any,
) -> tuple[str, ...]:
    """Return the weights of a classifier's head that a folder lacks. Raises RLHFError M13 for other mismatches, M15.

    `report` is transformers' loading report, which omits tied weights and names that a model class ignores; `config` is
    the folder's own, possibly of a composite model. Intended mismatches are: heads of other tasks in a classifier's
    folder, the other towers of a composite model of which `model` is the text model, and stored masks and angles.
    Warns M18 of such towers.
    """
    require_float_formats(Path(folder), model)
    missing = sorted(report["missing_keys"])
    missing_head: list[str] = []
    if auto_class is AutoModelForSequenceClassification:
        backbone = f"{model.base_model_prefix}."
        missing_head = [name for name in missing if not name.startswith(backbone)]
    missing_backbone = [name for name in missing if name not in missing_head]
    # The head of a reward model that is trained from a causal LM is new.
    lost = [*missing_head, *missing_backbone] if is_classifier(config) else missing_backbone

    unexpected = set(report["unexpected_keys"])
    if auto_class is AutoModelForSequenceClassification and not lost:
        unexpected -= _other_heads(model, unexpected)
    unintended = _unintended_weights(folder, model, unexpected, config)
    reshaped = [f"{name} {list(stored)}, not {list(own)}" for name, stored, own in sorted(report["mismatched_keys"])]
    if not (missing_backbone or unintended or reshaped):
        return tuple(missing_head)

    unfit = {
        "missing": lost,
        "not in the model": unintended,
        "of another shape": reshaped,
    }
    listed = "; ".join(f"{len(names)} {group} ({first_names(names)})" for group, names in unfit.items() if names)
    text = f"{shown(folder)}: the weights do not fit config.json: {listed}"
    raise RLHFError("M13", text, hint="copy or download the folder again: weights and config.json must be of one model")


def _unintended_weights(folder: Path | str, model: Any, unexpected: set[str], config: Any) -> list[str]:
    """Return which weights that are not in the model `require_fit` does not intend to leave out. Warns M18."""
    towers = _other_towers(model, config)
    if towers:
        text = f"{shown(folder)}: only the text model is read, not {' and '.join(sorted(towers))}"
        terminal.warn("M18", text, hint="no model that is made from it reads images or sound")

    unintended = []
    for name in sorted(unexpected):
        is_known = name.startswith(VALUE_HEAD) or name.endswith(BUFFERS)
        if not is_known and towers.isdisjoint(name.split(".")):
            unintended.append(name)
    return unintended


def check_tied_embeddings(folder: Path | str, model: Any) -> None:
    """Raise RLHFError M13 if the config ties embeddings and head, but the files have two different matrices.

    transformers keeps both until the embeddings are resized, and then replaces one by the other.
    """
    head = model.get_output_embeddings()
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if tied and head is not None and head.weight is not model.get_input_embeddings().weight:
        reason = "config.json has tie_word_embeddings, but the head differs from the embeddings"
        raise RLHFError("M13", f"{shown(folder)}: {reason}", hint="set tie_word_embeddings to false in config.json")


def backbone(model: Any) -> Any:
    """Return a model without its head. `base_model` of Llama 4's text model is the whole model."""
    base = model.base_model
    return base.model if base is model and hasattr(base, "model") else base


def decoder(model: Any) -> Any:
    """Return a causal LM's text decoder, which its forward() calls."""
    found = model.get_decoder()  # ModernBERT's is its output head
    return backbone(model) if found is model or isinstance(found, nn.Linear) else found


def can_load_bf16(folder: Path, config: Any) -> bool:
    """Return True if all weights of a folder are stored in bfloat16, and loading them so rounds nothing else.

    Buffers that no file stores take the format of the load; only rotary frequencies are always float32 in transformers.
    """
    if any(stored.get_dtype() != "BF16" for _, stored in stored_weights(folder)):
        return False
    if getattr(config, "auto_map", None):  # custom code
        return False
    for name, buffer in empty_model(AutoModel, config).named_buffers():
        if buffer.is_floating_point() and not name.endswith("inv_freq"):
            return False
    return True


def disable_router_logits(model: Any) -> None:
    """Turn off the balancing loss of a mixture of experts, which TRL turns on: with a key-value cache it fails."""
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False


def pad_token_id(config: Any) -> int | None:
    """Return a config's pad token id; a composite config has it in its text config."""
    return getattr(config.get_text_config(), "pad_token_id", None)


def has_classifier(config: Any) -> bool:
    """Return True if transformers has a sequence classifier of a config's family, or its folder has one as code."""
    own_code = "AutoModelForSequenceClassification" in (getattr(config, "auto_map", None) or {})
    return own_code or type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING


def scores_by_one_matrix(config: Any) -> bool:
    """Return True if the sequence classifier of a config's family has a linear `score`, or is custom code."""
    if getattr(config, "auto_map", None):
        return True
    if not has_classifier(config):
        return False
    model = reward_model_from_config(config)
    return isinstance(getattr(model, "score", None), nn.Linear)


def require_classifier(config: Any) -> None:
    """Raise RLHFError M10 if transformers has no sequence classifier of a config's family."""
    if not has_classifier(config):
        kind = f"transformers has no sequence classifier for {config.model_type}"
        hint = "use a reward model of another family, and models.value: policy_head in ppo.yaml"
        raise RLHFError("M10", f"{kind}, so no reward or value model can be one", hint=hint)


def is_classifier(config: Any) -> bool:
    """Return True if a config belongs to a trained sequence classifier."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or [])


def _other_heads(model: Any, unexpected: set[str]) -> set[str]:
    """Return the names of other tasks' heads, under any name, and of a pooler; the backbone must be complete."""
    backbone = {model.base_model_prefix, *dict(model.base_model.named_children())}
    heads = set()
    for name in unexpected:
        parts = name.split(".")
        if parts[0] not in backbone or "pooler" in parts:
            heads.add(name)
    return heads


def _other_towers(model: Any, config: Any) -> set[str]:
    """Return the names of a composite model's modules other than its text model; empty if `model` is composite."""
    if type(model.config) is type(config):
        return set()
    composite = _from_config(AutoModel, config)
    embeddings = composite.get_input_embeddings()
    children = composite.named_children()
    return {name for name, child in children if all(module is not embeddings for module in child.modules())}
