"""LoRA and QLoRA adapters: add, save, load, merge. peft and bitsandbytes are imported only here, and only if used."""

import copy
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GenerationConfig
from transformers.pytorch_utils import Conv1D

from rlhf_cli import terminal
from rlhf_cli.config.base import Config
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sections import LoRA
from rlhf_cli.config.stages import TRLConfig, adapter_kind
from rlhf_cli.errors import RLHFError, at_location, did_you_mean, first_names, install_hint, shown
from rlhf_cli.models import build, devices, sharding, tokenizers
from rlhf_cli.runs.layout import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MERGED
from rlhf_cli.runs.parents import Parent

# The fields read from an adapter_config.json. All others are ignored: peft would import modules that they name.
TRUSTED_FIELDS = ("r", "lora_alpha", "target_modules", "use_rslora", "use_dora")
TRAINABLE = (".lora_", ".modules_to_save.")  # in the names of an adapter's parameters and of its head
# 4-bit weights that share a scale. If the row length is not a multiple of it, bitsandbytes 0.50 reads the rows wrongly
# on a CPU, by a fifth to a half of their size, without an error.
BLOCK_SIZE = 64
MIN_REACHED = 0.5  # of the weights in matrices: adapters on fewer are warned of
MIN_COUNTED = 0.01  # of these weights: smaller kinds of matrices, such as routers, are not named
# Fields that training adds to the base model's config.
SCALE_FIELDS = ("reward_mean", "reward_std", "reward_length_slope", "reward_length_mean")  # `forward.scale_scores`
TRAINED_CONFIG_FIELDS = (*SCALE_FIELDS, "reward_at_stop_token")


def prepare_for_training(config: TRLConfig, parent: Parent | None, model: Any, tokenizer: Any) -> Any:
    """Resize the embeddings to the tokenizer, and add the configured adapters to a model loaded from `parent`."""
    settings = config.model.adapters
    if settings is None:
        tokenizers.resize_to_tokenizer(model, tokenizer)
        return model
    assert parent is not None, "model.new takes no adapters"
    check_adapters(config, model.config)
    with at_location(config.where("model.adapters.target_modules")):
        return add_adapters(
            model,
            settings,
            vocab_size=tokenizers.vocabulary_size(tokenizer, model.get_input_embeddings().weight.shape[0]),
            base=parent.hub or parent.model,
            revision=parent.revision,
            device=devices.device(),
            bf16=_computes_in_bf16(config),
        )


def trains_on_bf16(config: TRLConfig) -> bool:
    """Return True if a stage trains adapters on a base whose matrices are stored in bfloat16."""
    adapters = config.model.adapters
    return adapters is not None and adapters.kind == "lora" and _computes_in_bf16(config)


def _computes_in_bf16(config: TRLConfig) -> bool:
    return devices.use_bf16(getattr(config, config.stage).bf16)


def check_adapters(config: TRLConfig | PPOConfig, model_config: Any) -> None:
    """Raise RLHFError C07 if a model with this transformers config has no layers named as in target_modules.

    Logs which share of the model's matrices the adapters reach, if they are meant for all; warns (C18) below half.
    """
    section = "models" if isinstance(config, PPOConfig) else "model"
    key = f"{section}.adapters"
    settings: LoRA | None = getattr(config, section).adapters
    if settings is None or getattr(model_config, "auto_map", None):
        return

    where = config.where(f"{key}.target_modules")
    with at_location(where):
        empty = _empty_model(model_config)
        target_modules(empty, settings, key)
    if settings.target_modules == "all-linear":
        _report_reach(empty, key, where, four_bits=settings.kind == "qlora")


def _empty_model(model_config: Any) -> Any:
    """Return a model of a transformers config without weights."""
    is_classifier = build.is_classifier(model_config)
    from_config = build.reward_model_from_config if is_classifier else build.causal_lm_from_config
    return from_config(copy.deepcopy(model_config))  # which may write its dtype into the config


def _report_reach(model: Any, key: str, where: str, *, four_bits: bool) -> None:
    share, left_out = reached_share(model)
    if not left_out:
        return
    stored = " and 4 bits store" if four_bits else ""
    text = f"{key}: adapters are added to{stored} {share:.0%} of the weights in the model's matrices"
    text = f"{text}; not to {first_names(left_out)}, which are no linear layers"
    if share >= MIN_REACHED:
        terminal.log_once(f"models   {text}")
    else:
        hint = "remove the adapters to train all weights, or start from a dense model"
        terminal.warn("C18", text, where=where, hint=hint)


def reached_share(model: Any) -> tuple[float, list[str]]:
    """Return the share of a backbone's weights that is in linear layers, and the names of the other matrices.

    Embeddings and vectors are not counted; others of less than 1 %, such as routers, are not named. transformers stores
    the experts of a layer as one array (experts, rows, columns).
    """
    embedded = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    reached = {layer.weight for _, _, layer in linear_layers(model)}
    total = 0
    others: dict[str, int] = {}
    for name, weight in build.backbone(model).named_parameters():
        if weight.ndim < 2 or weight in embedded:
            continue
        size = weight.numel()
        total += size
        if weight not in reached:
            kind = ".".join(name.split(".")[-2:])
            others[kind] = others.get(kind, 0) + size
    left_out = [kind for kind, size in others.items() if size >= MIN_COUNTED * total]
    return 1 - sum(others.values()) / total, left_out


def refuse_new_tokens(config: TRLConfig, tokenizer: Any, size_before: int) -> None:
    """Raise RLHFError C17 if a template added tokens to a tokenizer of `size_before`: adapters do not train them."""
    size = len(tokenizer)
    if config.model.adapters is not None and size > size_before:
        names = tokenizer.convert_ids_to_tokens(list(range(size_before, size)))
        text = f"model.chat_template adds {' and '.join(names)}, whose embeddings adapters do not train"
        hint = "take a template of tokens that the model knows, or remove model.adapters"
        raise RLHFError("C17", text, where=config.where("model.chat_template"), hint=hint)


def is_peft_model(model: Any) -> bool:
    """Return True if `add_adapters` or `load_adapter` created this model."""
    return type(model).__module__.startswith("peft.")


def unwrap(model: Any) -> Any:
    """Return the transformers model inside a peft model; any other model is returned unchanged."""
    return model.get_base_model() if is_peft_model(model) else model


def add_adapters(
    model: Any,
    settings: LoRA,
    *,
    vocab_size: int,
    base: Path | str,
    revision: str | None,
    device: torch.device,
    bf16: bool,
    key: str = "model.adapters",
) -> Any:
    """Return a peft model in which only the new adapters, and a classifier's new head, are trainable.

    `vocab_size` is the minimum number of embeddings, `base` the folder or hub id of the base weights, `device` and
    `bf16` the device and precision of training, `key` the config key of `settings`.
    Raises RLHFError C07 for missing target modules, C17 if no layer can be quantized to 4 bits.
    """
    from peft import LoraConfig, get_peft_model

    targets = target_modules(model, settings, key)
    grow_embeddings(model, vocab_size)
    quantizes = settings.kind == "qlora" and not is_quantized(model)
    if quantizes:
        quantize(model, device, bf16=bf16)

    names = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora")
    known = type(settings).model_fields
    options = {name: getattr(settings, name) for name in names if name in known}
    lora_config = LoraConfig(task_type=_task_type(model), target_modules=targets, **options)
    with warnings.catch_warnings(action="ignore"):  # such as the one about GPT-2's transposed weights
        peft_model = get_peft_model(model, lora_config)
    if quantizes:
        del model.is_loaded_in_4bit  # TRL would cast the adapters to bfloat16, which loses small updates
    if bf16:
        autocast_matrices(peft_model.get_base_model())  # of the peft model, the head would be one of the layers
    _record_base(peft_model, base, revision)
    return peft_model


def _task_type(model: Any) -> str:
    return "CAUSAL_LM" if model.can_generate() else "SEQ_CLS"


def _record_base(peft_model: Any, base: Path | str, revision: str | None) -> None:
    """Make save_pretrained() write the location of the base: a hub id, or a path relative to the saved folder."""
    save_pretrained = peft_model.save_pretrained
    settings = peft_model.peft_config["default"]
    settings.revision = revision
    settings.target_modules = sorted(settings.target_modules)  # a set has no fixed order on disk

    def save(folder: Path | str, **options: Any) -> None:
        location = base
        if isinstance(base, Path):
            location = Path(os.path.relpath(base, folder)).as_posix()
        settings.base_model_name_or_path = location
        # New embedding rows are recomputed from the base; peft would ask the hub whether there are any.
        save_pretrained(folder, save_embedding_layers=False, **options)

    peft_model.save_pretrained = save
    peft_model.create_or_update_model_card = lambda *_: None  # save.save_model writes the card


def target_modules(model: Any, settings: LoRA, key: str = "model.adapters") -> list[str]:
    """Return the sorted names of the layers that get adapters. Raises RLHFError C07 for a name that no layer has."""
    known = sorted({name for _, name, _ in linear_layers(model)})
    if settings.target_modules == "all-linear":
        return known
    for target in settings.target_modules:
        if target not in known:
            text = f"{key}.target_modules: no linear layer inside of the model is called {target}"
            raise RLHFError("C07", text, hint=did_you_mean(target, known) or f"known layers: {', '.join(known)}")
    return sorted(set(settings.target_modules))


def linear_layers(model: Any) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield (parent module, attribute name, layer) of each linear layer or Conv1D in a model's backbone."""
    for module in list(build.backbone(model).modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear | Conv1D):
                yield module, name, layer


def frozen_state_keys(model: Any) -> set[str]:
    """Return the state dict keys of frozen parameters and of their 4-bit constants; tied parameters have several."""
    frozen = {name for name, weight in model.named_parameters(remove_duplicate=False) if not weight.requires_grad}
    keys = set()
    for key in model.state_dict():
        starts = accumulate(key.split("."), "{}.{}".format)  # "a", "a.b", "a.b.c"
        if not frozen.isdisjoint(starts):
            keys.add(key)
    return keys


def autocast_matrices(model: Any) -> None:
    """Store the frozen float32 matrices of a model's layers in bfloat16, as autocast would copy them in each pass.

    Under autocast the numbers stay the same, to the bit. Embeddings, norms, heads and biases stay float32.
    """
    for _, _, layer in linear_layers(model):
        if not layer.weight.requires_grad and layer.weight.dtype == torch.float32:
            layer.weight.data = layer.weight.data.bfloat16()
    devices.release_memory()  # of the float32 matrices


def widen_all_but_matrices(model: Any) -> None:
    """Convert a bfloat16 model to the formats of `autocast_matrices`, without its matrices in float32 on the way."""
    matrices = {layer.weight for _, _, layer in linear_layers(model)}
    for tensor in sharding.parameters_and_buffers(model):
        if tensor.is_floating_point() and tensor not in matrices:
            tensor.data = tensor.data.float()
    for config in (model.config, model.config.get_text_config()):
        config.dtype = torch.float32


def has_bf16_matrices(model: Any) -> bool:
    """Return True if a model computes under autocast only: `autocast_matrices` was applied to it."""
    return any(layer.weight.dtype == torch.bfloat16 for _, _, layer in linear_layers(model))


def can_quantize(layer: Any) -> bool:
    """Return True if a linear layer can be stored in 4 bits."""
    width = layer.nx if isinstance(layer, Conv1D) else layer.in_features
    return width % BLOCK_SIZE == 0


def grow_embeddings(model: Any, vocab_size: int) -> None:
    """Resize embeddings and head to at least `vocab_size` rows.

    New rows are not trained; as the mean of the old ones they are the same wherever the adapter is loaded.
    """
    before = model.get_input_embeddings().weight.shape[0]
    if vocab_size <= before:
        return
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        for name in ("weight", "bias"):
            weight = getattr(layer, name, None)
            if weight is not None:
                weight.data[before:] = weight.data[:before].mean(0)


def is_quantized(model: Any) -> bool:
    """Return True if `quantize` was applied to the model, or to the one that it is a clone of."""
    return bool(getattr(model, "is_loaded_in_4bit", False))


def quantize(model: Any, device: torch.device, *, bf16: bool) -> None:
    """Quantize the backbone's linear layers to 4-bit NF4 on `device`, except those that `can_quantize` excludes.

    from_pretrained() is not used: the weights may already be the sum of a base and an adapter, and an adapter
    merged into 4-bit weights is lost to rounding. Raises RLHFError C17 if no layer can be quantized.
    """
    import bitsandbytes as bnb

    layers = [each for each in linear_layers(model) if can_quantize(each[2])]
    if not layers:
        text = f"model.adapters.kind: 4 bits hold layers of a width that {BLOCK_SIZE} divides, and the model has none"
        raise RLHFError("C17", text, hint="set it to lora")
    for module, name, layer in layers:
        weight = layer.weight.data
        if isinstance(layer, Conv1D):
            weight = weight.T
        height, width = weight.shape
        quantized = bnb.nn.Linear4bit(
            width,
            height,
            bias=layer.bias is not None,
            compute_dtype=torch.bfloat16 if bf16 else torch.float32,
            compress_statistics=True,
            quant_type="nf4",
            device="meta",
        )
        quantized.weight = bnb.nn.Params4bit(weight.contiguous(), False, quant_type="nf4", compress_statistics=True)
        quantized.bias = layer.bias
        # Otherwise an evaluation on some CPUs rounds the scales to bfloat16, and a resumed run would differ.
        quantized.support_avx512bf16_for_cpu = False
        setattr(module, name, quantized.to(device))
    for tensor in sharding.parameters_and_buffers(model):
        if not isinstance(tensor, bnb.nn.Params4bit):  # a view of a memory-mapped file keeps all of it in memory
            tensor.data = tensor.data.clone()
    model.is_loaded_in_4bit = True  # read by peft


def head_weights(folder: Path) -> set[str]:
    """Return the names of the full weights in an adapter's file: a reward model's head."""
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
        names = [name for name in list(file.keys()) if ".lora_" not in name]
    return {name.removeprefix("base_model.model.") for name in names}


def merge_adapter(model: Any, folder: Path, config: Any) -> None:
    """Merge the adapter in `folder` into its base `model`; `config` is that of the result. Raises RLHFError M01.

    A layer at a time is added in float32: in bfloat16 a change of less than 1/512 of a weight would often be lost.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    peft_model = _attach(model, folder, TRAINABLE[:1])
    for layer in list(peft_model.modules()):
        if isinstance(layer, BaseTunerLayer):
            weight = layer.get_base_layer().weight
            dtype = weight.dtype
            weight.data = weight.data.float()
            layer.merge()
            weight.data = weight.data.to(dtype)
    with warnings.catch_warnings(action="ignore"):  # that all are merged
        peft_model.merge_and_unload()
    model.requires_grad_(True)  # peft froze it
    _copy_trained_config(model, folder, config)


def load_adapter(model: Any, folder: Path, config: Any, base: Path | str, revision: str | None = None) -> Any:
    """Return a peft model of `model` and the adapter in `folder`; only adapter and head are trainable. Raises M01."""
    peft_model = _attach(model, folder, TRAINABLE)
    peft_model.peft_config["default"].task_type = _task_type(model)
    for name, weight in peft_model.named_parameters():
        weight.requires_grad_(any(part in name for part in TRAINABLE))
    _copy_trained_config(model, folder, config)
    _record_base(peft_model, base, revision)
    return peft_model


def scale_adapters(model: Any, share: float) -> None:
    """Multiply what the adapters add to the weights of their base by `share`; not exact for DoRA."""
    from peft.tuners.lora import LoraLayer

    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.scale_layer(share)


def copy_scaled(source: Path, folder: Path, share: float) -> None:
    """Write the adapter in `source` to `folder`, with `share` of what it adds to its base; not exact for DoRA."""
    tensors = load_file(source / ADAPTER_WEIGHTS)
    for name, tensor in tensors.items():
        if ".lora_B." in name:
            tensor *= share
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    shutil.copyfile(source / ADAPTER_CONFIG, folder / ADAPTER_CONFIG)


def merge_and_unload(model: Any) -> Any:
    """Return the transformers model with a peft model's adapters merged; any other model is returned unchanged."""
    return model.merge_and_unload() if is_peft_model(model) else model


def compare_settings(folder: Path, settings: LoRA, model_config: Any, key: str) -> dict[str, tuple[Any, Any]]:
    """Return the differences of the adapter in `folder`: by name, its value and that of `settings`.

    `model_config` is of the base, `key` the config key of `settings`.
    """
    stored = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    wanted = {name: getattr(settings, name) for name in TRUSTED_FIELDS}
    wanted["target_modules"] = target_modules(_empty_model(model_config), settings, key)
    return {name: (stored[name], value) for name, value in wanted.items() if stored[name] != value}


def load_adapter_weights(peft_model: Any, folder: Path) -> None:
    """Load the adapter weights in `folder` into a peft model with the same architecture and adapter settings."""
    from peft import set_peft_model_state_dict

    set_peft_model_state_dict(peft_model, load_file(folder / ADAPTER_WEIGHTS))


def adapter_names(peft_model: Any) -> set[str]:
    """Return the names under which the trained weights of a peft model are saved."""
    from peft import get_peft_model_state_dict

    return set(get_peft_model_state_dict(peft_model, save_embedding_layers=False))


def copy_adapter_weights(source: Any, target: Any) -> None:
    """Copy the adapter weights of one peft model to another with the same backbone; the target keeps its head."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    own = get_peft_model_state_dict(target, save_embedding_layers=False)
    copied = get_peft_model_state_dict(source, save_embedding_layers=False)
    set_peft_model_state_dict(target, {**own, **copied})


def _attach(model: Any, folder: Path, parts: Sequence[str]) -> Any:
    """Return the peft model of a base and the adapter in `folder`. Raises RLHFError M01.

    Parameters whose name contains one of `parts` are stored in float32, others as their layer of the base.
    """
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    try:
        stored = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        heads = [name for name in stored["modules_to_save"] or () if hasattr(model, name)]
        settings = LoraConfig(modules_to_save=heads, **{name: stored[name] for name in TRUSTED_FIELDS})
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        with warnings.catch_warnings(action="ignore"):
            # On the meta device at first: random initial weights would advance torch's generator.
            peft_model = get_peft_model(model, settings, low_cpu_mem_usage=True)
            result = set_peft_model_state_dict(peft_model, tensors, low_cpu_mem_usage=True)
        missing = [name for name, weight in peft_model.named_parameters() if weight.is_meta]
        wrong = result.unexpected_keys or missing
        if wrong:
            raise ValueError(f"{wrong[0]} is unknown to the model, or missing in the file")
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        text = f"{shown(folder)} does not fit its base: {str(error).partition(chr(10))[0]}"
        raise RLHFError("M01", text, hint="train the adapter again") from error

    for name, weight in peft_model.named_parameters():
        if any(part in name for part in parts):
            weight.data = weight.data.float()  # peft gave it the base's dtype, in which small updates are lost
    set_peft_model_state_dict(peft_model, tensors)  # again, because that dtype rounded the tensors
    return peft_model


def _copy_trained_config(model: Any, folder: Path, config: Any) -> None:
    for name in TRAINED_CONFIG_FIELDS:
        if hasattr(config, name):
            setattr(model.config, name, getattr(config, name))
    model.config.get_text_config().pad_token_id = build.pad_token_id(config)
    if model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(folder / MERGED)


# Values of the `optim` keys and of adapters.kind that need bitsandbytes; the names are transformers'.
BITSANDBYTES = {
    "qlora", "adamw_8bit", "adamw_bnb_8bit", "ademamix", "ademamix_8bit", "lion_8bit", "lion_32bit",
    "paged_adamw_8bit", "paged_adamw_32bit", "paged_ademamix_8bit", "paged_ademamix_32bit", "paged_lion_8bit",
    "paged_lion_32bit", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "galore_adamw_8bit",
    "galore_adamw_8bit_layerwise",
}  # fmt: skip


def require_bitsandbytes(config: Config) -> None:
    """Raise RLHFError E09 if the config asks for 4 or 8 bits and bitsandbytes is not installed."""
    section = "models" if isinstance(config, PPOConfig) else "model"
    requested = {f"{section}.adapters.kind": adapter_kind(config)}
    if isinstance(config, PPOConfig):
        requested["ppo.optim"] = config.ppo.optim
    elif isinstance(config, TRLConfig) and "optim" in config.trainer:
        requested["trainer.optim"] = config.trainer["optim"]
    for key, value in requested.items():
        if value in BITSANDBYTES and find_spec("bitsandbytes") is None:
            text = f"{key}: {value} needs bitsandbytes, which is not installed"
            raise RLHFError("E09", text, where=config.where(key), hint=install_hint("qlora"))
