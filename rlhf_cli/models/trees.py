"""Nested state (dicts, lists, tuples, tensors, plain values) on disk as safetensors + JSON: exact, and no pickle.

Tensors that are cut up over several processes (FSDP2) lie beside them, as torch.distributed.checkpoint writes them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlhf_cli import processes
from rlhf_cli.models import sharing

TENSORS, STRUCTURE, SHARDS = "tensors.safetensors", "structure.json", "shards"


def save_tree(folder: Path, tree: Any) -> None:
    """Write `tree` into `folder`. A tensor shared by two places is written twice, so each comes back by itself.

    All processes of a group must ask for it: each writes its part of what is cut up, the first one all that is whole.
    """
    if parts := dict(_cut_up(tree, "")):
        from rlhf_cli.models import sharding

        sharding.write(folder / SHARDS, parts)
    if not processes.is_first():
        return
    tensors: dict[str, torch.Tensor] = {}
    structure = _encoded(tree, tensors, set(), "")
    save_file(tensors, folder / TENSORS)
    (folder / STRUCTURE).write_text(json.dumps(structure), encoding="utf-8")


def _cut_up(value: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    """What each process has a part of, by its place in the tree."""
    if isinstance(value, torch.Tensor) and sharing.is_cut(value):
        yield place, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        yield from _cut_up(item, f"{place}/{key}")


def _encoded(value: Any, tensors: dict[str, torch.Tensor], seen: set[int], at: str) -> dict[str, Any]:
    """The structure of `value`; its tensors go into `tensors`, copied only where they must be: a state is large.

    Not a function inside of `save_tree`: one that calls itself holds what it closes over until Python's collector
    comes by, here a copy of all weights.
    """
    if isinstance(value, torch.Tensor) and sharing.is_cut(value):
        return {"shard": [at, list(value.shape), str(value.dtype).removeprefix("torch.")]}
    if isinstance(value, torch.Tensor):
        name, own = str(len(tensors)), value.detach().to("cpu").contiguous()
        place = own.untyped_storage().data_ptr()
        tensors[name] = own.clone() if place in seen else own  # safetensors refuses two that share their bytes
        seen.add(place)
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[key, _encoded(item, tensors, seen, f"{at}/{key}")] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_encoded(item, tensors, seen, f"{at}/{i}") for i, item in enumerate(value)]}
    assert value is None or isinstance(value, bool | int | float | str), (
        f"{type(value).__name__} cannot be kept exactly"
    )
    return {"value": value}


def load_tree(folder: Path) -> Any:
    """What `save_tree` wrote, tensors on the CPU; of what was cut up each process's part, all of it in a process alone.

    Raises RLHFError M05 where the parts come with anything but a list of their places.
    """
    tensors = load_file(folder / TENSORS)
    structure = json.loads((folder / STRUCTURE).read_text(encoding="utf-8"))
    if kinds := {name: (shape, getattr(torch, dtype)) for name, shape, dtype in _shards(structure)}:
        from rlhf_cli.models import sharding

        tensors |= sharding.read(folder / SHARDS, kinds)

    def decode(node: dict[str, Any]) -> Any:
        ((kind, content),) = node.items()
        if kind in ("tensor", "shard"):
            return tensors[content if kind == "tensor" else content[0]]
        if kind == "dict":
            return {key: decode(item) for key, item in content}
        if kind in ("list", "tuple"):
            items = [decode(item) for item in content]
            return items if kind == "list" else tuple(items)
        return content

    return decode(structure)


def _shards(node: dict[str, Any]) -> Iterator[list[Any]]:
    ((kind, content),) = node.items()
    if kind == "shard":
        yield content
    for item in content if kind in ("dict", "list", "tuple") else ():
        yield from _shards(item[1] if kind == "dict" else item)
