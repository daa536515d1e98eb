"""Nested state (dicts, lists, tuples, tensors, plain values) on disk as safetensors + JSON: exact, and no pickle."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

TENSORS, STRUCTURE = "tensors.safetensors", "structure.json"


def save_tree(folder: Path, tree: Any) -> None:
    """Write `tree` into `folder`. A tensor shared by two places is written twice, so each comes back by itself."""
    tensors: dict[str, torch.Tensor] = {}
    structure = _encoded(tree, tensors, set())
    save_file(tensors, folder / TENSORS)
    (folder / STRUCTURE).write_text(json.dumps(structure), encoding="utf-8")


def _encoded(value: Any, tensors: dict[str, torch.Tensor], seen: set[int]) -> dict[str, Any]:
    """The structure of `value`; its tensors go into `tensors`, copied only where they must be: a state is large.

    Not a function inside of `save_tree`: one that calls itself holds what it closes over until Python's collector
    comes by, here a copy of all weights.
    """
    if isinstance(value, torch.Tensor):
        name, own = str(len(tensors)), value.detach().to("cpu").contiguous()
        place = own.untyped_storage().data_ptr()
        tensors[name] = own.clone() if place in seen else own  # safetensors refuses two that share their bytes
        seen.add(place)
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[key, _encoded(item, tensors, seen)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_encoded(item, tensors, seen) for item in value]}
    assert value is None or isinstance(value, bool | int | float | str), (
        f"{type(value).__name__} cannot be kept exactly"
    )
    return {"value": value}


def load_tree(folder: Path) -> Any:
    """What `save_tree` wrote, tensors on the CPU."""
    tensors = load_file(folder / TENSORS)

    def decode(node: dict[str, Any]) -> Any:
        ((kind, content),) = node.items()
        if kind == "tensor":
            return tensors[content]
        if kind == "dict":
            return {key: decode(item) for key, item in content}
        if kind in ("list", "tuple"):
            items = [decode(item) for item in content]
            return items if kind == "list" else tuple(items)
        return content

    return decode(json.loads((folder / STRUCTURE).read_text(encoding="utf-8")))
