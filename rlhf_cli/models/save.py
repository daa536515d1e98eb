"""Save models as plain Hugging Face folders, and nested state (a tree) as safetensors and JSON: exact, no pickle.

A tree consists of dicts, lists, tuples, tensors and plain values. Sharded tensors (FSDP2) are stored in a subfolder,
in torch.distributed.checkpoint's format.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import GenerationConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rlhf_cli import distributed, files, terminal
from rlhf_cli.errors import RLHFError, first_names, short_reason, shown
from rlhf_cli.models import load, lora, sharding
from rlhf_cli.models.batch import stop_ids
from rlhf_cli.models.load import config_folder
from rlhf_cli.runs.layout import ADAPTER_WEIGHTS

TENSORS = "tensors.safetensors"
STRUCTURE = "structure.json"
SHARDS = "shards"  # a folder


def save_model(model: Any, tokenizer: Any, folder: Path, card: str) -> None:
    """Write a plain Hugging Face folder: safetensors, tokenizer, chat template, and `card` as its README.

    For a peft model only the adapters are written. All processes must call it, because each may have a shard of the
    weights; the main process writes.
    """
    state = None
    if sharding.is_zero3_sharded(model):  # in a single process too
        state = sharding.zero3_full_state_dict(model)
    elif distributed.world_size() > 1:
        state = sharding.full_state_dict(model)
    if not distributed.is_main_process():
        return

    files.remove(folder)
    model.save_pretrained(folder, state_dict=state)
    if lora.is_peft_model(model):
        save_config(model.get_base_model(), folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(terminal.clean(card).rstrip() + "\n", encoding="utf-8")


def save_trained(model: Any, tokenizer: Any, folder: Path, card: str) -> None:
    """Write a stage's result as `save_model` does. Raises RLHFError R21 if the files lack weights of the model."""
    save_model(model, tokenizer, folder, card)
    if not distributed.is_main_process():
        return
    find_lost = _lost_adapters if lora.is_peft_model(model) else load.lost_weights
    try:
        lost = find_lost(model, folder)
    except RLHFError as error:
        lost = error.problems[0].text
    except (OSError, SafetensorError) as error:
        lost = short_reason(error)
    if lost:
        text = f"{shown(folder)} does not hold the weights that were trained: {lost}"
        raise RLHFError("R21", text, hint="the last checkpoint is kept: run the same command again")


def _lost_adapters(model: Any, folder: Path) -> str:
    """Return which of a peft model's trained weights its file lacks, "" for none."""
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
        lost = lora.adapter_names(model) - set(file.keys())
    return f"missing {first_names(sorted(lost))}" if lost else ""


def save_untied(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a language model as `save_model` does, with a separate output head also where it is the embedding.

    All processes must call it. A server that reloads tied weights may keep the head that it had.
    """
    save_model(model, tokenizer, folder, "Weights for a rollout server.")
    head = model.get_output_embeddings()
    is_tied = head.weight is model.get_input_embeddings().weight
    if not is_tied or not distributed.is_main_process():
        return

    single = folder / SAFE_WEIGHTS_NAME
    index_file = folder / SAFE_WEIGHTS_INDEX_NAME
    if single.exists():
        first = single.rename(folder / "model-00001-of-00002.safetensors")
        with safe_open(first, "pt") as tensors:
            index = {"metadata": {}, "weight_map": dict.fromkeys(tensors.keys(), first.name)}
    else:
        index = json.loads(index_file.read_text(encoding="utf-8"))
    name = next(name for name, module in model.named_modules() if module is head) + ".weight"
    if name not in index["weight_map"]:  # the whole weights of a sharded model have it
        save_file({name: head.weight.detach().cpu().clone()}, folder / "head.safetensors", {"format": "pt"})
        index["weight_map"][name] = "head.safetensors"
    index_file.write_text(json.dumps(index), encoding="utf-8")

    config_file = folder / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    for part in (config, config.get("text_config") or {}):
        part["tie_word_embeddings"] = False
    config_file.write_text(json.dumps(config, indent=2), encoding="utf-8")


def set_special_token_ids(model: Any, tokenizer: Any, stop_token_id: int) -> None:
    """Set the pad token id in the config, and a language model's BOS, stop and pad ids in its generation config.

    Tokens that ended the model's texts before still do: Llama 3 has three of them.
    """
    model = lora.unwrap(model)
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if not model.can_generate():
        return
    known = stop_ids(model.generation_config.eos_token_id)
    stops = list(dict.fromkeys((stop_token_id, *known)))
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=stops if len(stops) > 1 else stop_token_id,
    )


def save_config(model: Any, folder: Path) -> None:
    """Write the config of a model whose weights, or whose adapters, are in `folder` already."""
    model.config.architectures = [type(model).__name__]  # an adapter's config is that of its base
    model.config.save_pretrained(config_folder(folder))
    if model.can_generate():
        model.generation_config.save_pretrained(config_folder(folder))


def save_tree(folder: Path, tree: Any) -> None:
    """Write `tree` into `folder`. A tensor that occurs twice is written twice, and loaded as two tensors.

    All processes must call it: each writes its shards, and the main process everything else.
    """
    shards = dict(_sharded_tensors(tree, ""))
    if shards:
        sharding.save_shards(folder / SHARDS, shards)
    if not distributed.is_main_process():
        return
    tensors: dict[str, torch.Tensor] = {}
    structure = _encode(tree, tensors, set(), "")
    save_file(tensors, folder / TENSORS)
    (folder / STRUCTURE).write_text(json.dumps(structure), encoding="utf-8")


def _sharded_tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the sharded tensors of a tree by their paths."""
    if sharding.is_sharded_tensor(value):
        yield path, value
    for key, item in _items(value):
        yield from _sharded_tensors(item, f"{path}/{key}")


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys or positions of a container with its items; none for any other value."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, list | tuple):
        return enumerate(value)
    return ()


def _encode(value: Any, tensors: dict[str, torch.Tensor], storages: set[int], path: str) -> dict[str, Any]:
    """Return the JSON structure of `value`, and add its tensors to `tensors`, copied only if they share a storage.

    A recursive closure in `save_tree` would keep a copy of all weights alive until the next garbage collection.
    """
    if sharding.is_sharded_tensor(value):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"shard": [path, list(value.shape), dtype]}
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensor = value.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage().data_ptr()
        if storage in storages:  # safetensors rejects shared storages
            tensor = tensor.clone()
        storages.add(storage)
        tensors[name] = tensor
        return {"tensor": name}

    items = [(key, _encode(item, tensors, storages, f"{path}/{key}")) for key, item in _items(value)]
    if isinstance(value, dict):
        return {"dict": items}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [item for _, item in items]}
    assert value is None or isinstance(value, bool | int | float | str), f"{type(value).__name__} has no exact form"
    return {"value": value}


def load_tree(folder: Path, mesh: DeviceMesh | None = None) -> Any:
    """Load what `save_tree` wrote: shards as on `mesh` and its device, or in full, all else on the CPU.

    Raises RLHFError M05.
    """
    tensors = load_file(folder / TENSORS)
    structure = json.loads((folder / STRUCTURE).read_text(encoding="utf-8"))
    shards = {name: (shape, getattr(torch, dtype)) for name, shape, dtype in _shard_specs(structure)}
    if shards:
        tensors |= sharding.load_shards(folder / SHARDS, shards, mesh)
    return _decode(structure, tensors)


def _decode(node: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    ((kind, content),) = node.items()
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in content}
    if kind == "list":
        return [_decode(item, tensors) for item in content]
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in content)
    if kind == "shard":
        return tensors[content[0]]
    if kind == "tensor":
        return tensors[content]
    return content


def _shard_specs(node: dict[str, Any]) -> Iterator[list[Any]]:
    """Yield [path, shape, dtype] of each sharded tensor in a JSON structure."""
    ((kind, content),) = node.items()
    if kind == "shard":
        yield content
    elif kind == "dict":
        for _, item in content:
            yield from _shard_specs(item)
    elif kind in ("list", "tuple"):
        for item in content:
            yield from _shard_specs(item)
