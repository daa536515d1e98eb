"""Adapters: put beside a model's frozen weights, written down, read again, and added into the weights. peft and
bitsandbytes enter here, and only where adapters are asked for.
"""

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import GenerationConfig
from transformers.pytorch_utils import Conv1D

from rlhf_cli.checkpoints import MERGED, SETTINGS, WEIGHTS
from rlhf_cli.config.adapters import LoRA
from rlhf_cli.errors import RLHFError, nearest, shown

# What an adapter's file decides of the sum. Nothing else in it is believed: peft would import modules that it names.
DECIDES = ("r", "lora_alpha", "target_modules", "use_rslora", "use_dora")
LEARNS = (".lora_", ".modules_to_save.")  # in the names of an adapter's weights, and of its head
# Weights of 4 bits that share a scale. Where rows are no multiple of it, bitsandbytes 0.50 reads them wrongly on a CPU,
# by a fifth to a half of their size, and says nothing.
BLOCK = 64
# What training adds to the base's config.
CARRIED = ("pad_token_id", "reward_mean", "reward_std")


def are_on(model: Any) -> bool:
    """Whether `put_on` or `beside` made this model."""
    return type(model).__module__.startswith("peft.")


def inside(model: Any) -> Any:
    """The plain model in one that `put_on` or `beside` made; another as it is."""
    return model.get_base_model() if are_on(model) else model


def put_on(
    model: Any,
    ours: LoRA,
    *,
    rows: int,
    base: Path | str,
    revision: str | None,
    device: torch.device,
    bf16: bool,
    key: str = "model.adapters",
) -> Any:
    """The model with adapters that learn, a new classifier's head too, and nothing else.

    `rows` are the tokens that it must have embeddings for, `base` the folder or hub id where its weights will be found,
    `device` and `bf16` where and in what it will be trained, `key` the config's for `ours`.
    Raises RLHFError C07 for targets that it does not have, C17 where 4 bits can hold none of its layers.
    """
    from peft import LoraConfig, get_peft_model

    targets = targets_of(model, ours, key)
    grow(model, rows)
    if ours.kind == "qlora":
        _pack(model, device, torch.bfloat16 if bf16 else torch.float32)
    names = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora")
    told = {name: getattr(ours, name) for name in names if name in type(ours).model_fields}
    task = "CAUSAL_LM" if model.can_generate() else "SEQ_CLS"
    with _quietly():
        made = get_peft_model(model, LoraConfig(task_type=task, target_modules=targets, **told))
    if ours.kind == "qlora":
        del model.is_loaded_in_4bit  # TRL would make the adapters bfloat16, in which small updates get lost
    _name_base(made, base, revision)
    return made


def _name_base(made: Any, base: Path | str, revision: str | None) -> None:
    """Let what is saved of peft's model tell its base: a folder as seen from its own, or a hub id."""
    settings, plain = made.peft_config["default"], made.save_pretrained
    settings.revision = revision
    settings.target_modules = sorted(settings.target_modules)  # a set would be written in another order each time

    def save(folder: Path | str, **how: Any) -> None:
        path = Path(os.path.relpath(base, folder)).as_posix() if isinstance(base, Path) else base
        settings.base_model_name_or_path = path
        # Grown rows are made again from the base; peft would ask the hub whether there are any.
        plain(folder, save_embedding_layers=False, **how)

    made.save_pretrained = save
    made.create_or_update_model_card = lambda *_: None  # ours is written with the model


def targets_of(model: Any, ours: LoRA, key: str = "model.adapters") -> list[str]:
    """The last names, sorted, of the layers that get adapters. Raises RLHFError C07 for a name that no layer has."""
    known = sorted({name for _, name, _ in linear_layers(model)})
    if ours.target_modules == "all-linear":
        return known
    for wanted in ours.target_modules:
        if wanted not in known:
            near = nearest(wanted, known)
            text = f"{key}.target_modules: no linear layer inside of the model is called {wanted}"
            raise RLHFError("C07", text, hint=f"did you mean {near}?" if near else f"there are {', '.join(known)}")
    return sorted(set(ours.target_modules))


def linear_layers(model: Any) -> Iterator[tuple[nn.Module, str, Any]]:
    """Owner, name there and layer of each linear layer in a model's body; transformers' Conv1D is one too."""
    for owner in list(model.base_model.modules()):
        for name, layer in list(owner.named_children()):
            if isinstance(layer, nn.Linear | Conv1D):
                yield owner, name, layer


def can_pack(layer: Any) -> bool:
    """Whether 4 bits can hold a linear layer."""
    return (layer.nx if isinstance(layer, Conv1D) else layer.in_features) % BLOCK == 0


def grow(model: Any, rows: int) -> None:
    """Embeddings for `rows` tokens: new ones, which nothing trains, are the mean of the others, whoever makes them."""
    before = model.get_input_embeddings().weight.shape[0]
    if rows <= before:
        return
    model.resize_token_embeddings(rows, mean_resizing=False)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        for weight in (getattr(layer, "weight", None), getattr(layer, "bias", None)):
            if weight is not None:
                weight.data[before:] = weight.data[:before].mean(0)


def _pack(model: Any, device: torch.device, compute: torch.dtype) -> None:
    """Hold the body's linear layers in 4 bits on a device, but narrow ones, and multiply in `compute`.

    Not by from_pretrained: what is packed may itself be a sum of base and adapter, and 4 bits would swallow an adapter
    that is added to them.
    """
    import bitsandbytes as bnb

    layers = [(owner, name, layer) for owner, name, layer in linear_layers(model) if can_pack(layer)]
    if not layers:
        text = f"model.adapters.kind: 4 bits hold layers of a width that {BLOCK} divides, and the model has none"
        raise RLHFError("C17", text, hint="set it to lora")
    for owner, name, layer in layers:
        weight = layer.weight.data.T if isinstance(layer, Conv1D) else layer.weight.data
        height, width = weight.shape
        packed = bnb.nn.Linear4bit(width, height, layer.bias is not None, compute, True, "nf4", device="meta")
        packed.weight = bnb.nn.Params4bit(weight.contiguous(), False, quant_type="nf4", compress_statistics=True)
        packed.bias = layer.bias
        # Else an evaluation on some CPUs rounds the scales to bfloat16, and a run that resumes behind it would not.
        packed.support_avx512bf16_for_cpu = False
        setattr(owner, name, packed.to(device))
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, bnb.nn.Params4bit):  # the view of a mapped file keeps all of it in memory
            tensor.data = tensor.data.clone()
    model.is_loaded_in_4bit = True  # what peft asks


def held(folder: Path) -> set[str]:
    """The names of weights that a readable adapter holds itself: a reward model's head."""
    with safe_open(folder / WEIGHTS, "pt") as file:
        own = [name for name in list(file.keys()) if ".lora_" not in name]
    return {name.removeprefix("base_model.model.") for name in own}


def merge(model: Any, folder: Path, config: Any) -> None:
    """Add the adapter in `folder` into the weights of its base, `model`, whose config becomes that of the two.

    Raises RLHFError M01 for an adapter that does not fit.
    """
    grow(model, config.get_text_config().vocab_size)
    made, _ = _read(model, folder)
    made.merge_and_unload()
    model.requires_grad_(True)  # peft froze it
    _carry(model, folder, config)


def beside(model: Any, folder: Path, config: Any, base: Path | str, revision: str | None = None) -> Any:
    """As `merge`, but the adapter stays apart: peft's model, in which adapter and head alone learn.

    `base` as in `put_on`. Raises RLHFError M01 for an adapter that does not fit.
    """
    from peft import set_peft_model_state_dict

    made, tensors = _read(model, folder)
    made.peft_config["default"].task_type = "CAUSAL_LM" if model.can_generate() else "SEQ_CLS"
    for name, weight in made.named_parameters():
        weight.requires_grad_(any(part in name for part in LEARNS))
        if weight.requires_grad:
            weight.data = weight.data.float()  # peft gave it the base's format, in which small updates get lost
    set_peft_model_state_dict(made, tensors)  # once more, for that format rounded them
    _carry(model, folder, config)
    _name_base(made, base, revision)
    return made


def fold(model: Any) -> Any:
    """Add the adapters of a model that `beside` made into its weights: the plain model. Another comes as it is."""
    return model.merge_and_unload() if are_on(model) else model


def take_over(made: Any, folder: Path) -> None:
    """Give peft's model the numbers of an adapter in a folder, which one like it was saved in."""
    from peft import set_peft_model_state_dict

    set_peft_model_state_dict(made, load_file(folder / WEIGHTS))


def copy_numbers(of: Any, to: Any) -> None:
    """Give peft's model `to` the adapters of another on a body of the same layers; a head of its own stays."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    own, theirs = (get_peft_model_state_dict(made, save_embedding_layers=False) for made in (to, of))
    set_peft_model_state_dict(to, {**own, **theirs})


def _read(model: Any, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """peft's model of a base and the adapter in a folder, and what is in its file. Raises RLHFError M01."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    try:
        told = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        heads = [name for name in told["modules_to_save"] or () if hasattr(model, name)]
        settings = LoraConfig(modules_to_save=heads, **{name: told[name] for name in DECIDES})
        tensors = load_file(folder / WEIGHTS)
        with _quietly():
            # Without numbers at first: drawing some would move torch's generator.
            made = get_peft_model(model, settings, low_cpu_mem_usage=True)
            left = set_peft_model_state_dict(made, tensors, low_cpu_mem_usage=True).unexpected_keys
            bare = [name for name, weight in made.named_parameters() if weight.is_meta]
            if left or bare:
                raise ValueError(f"{(left or bare)[0]} has no place there, or no numbers")
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        text = f"{shown(folder)} does not fit its base: {str(error).partition(chr(10))[0]}"
        raise RLHFError("M01", text, hint="train the adapter again") from error
    return made, tensors


def _carry(model: Any, folder: Path, config: Any) -> None:
    """What training added to the config of the base."""
    for name in CARRIED:
        if hasattr(config, name):
            setattr(model.config, name, getattr(config, name))
    if model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(folder / MERGED)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without peft's remarks: that GPT-2's matrices lie the other way, which it sees to itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
