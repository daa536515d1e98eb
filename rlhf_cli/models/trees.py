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

    def encode(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            name = str(len(tensors))
            tensors[name] = value.detach().to("cpu", copy=True).contiguous()
            return {"tensor": name}
        if isinstance(value, dict):
            return {"dict": [[key, encode(item)] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            return {type(value).__name__: [encode(item) for item in value]}
        assert value is None or isinstance(value, bool | int | float | str), (
            f"{type(value).__name__} cannot be kept exactly"
        )
        return {"value": value}

    structure = encode(tree)
    save_file(tensors, folder / TENSORS)
    (folder / STRUCTURE).write_text(json.dumps(structure), encoding="utf-8")


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
