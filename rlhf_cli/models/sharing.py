"""Weights that several models use: all of them, or the first layers of two."""

import copy
from typing import Any

import torch
from torch import Tensor, nn


def twin(model: Any) -> Any:
    """A model with modules of its own over the very tensors of another.

    What is put into its modules stays in it. Where tensors are moved or frozen, they are so in both.
    """
    return copy.deepcopy(model, memo={id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]})


def is_cut(tensor: Tensor) -> bool:
    """Whether a process has a part of it alone (models/sharding.py, which takes over half a second to import)."""
    return hasattr(tensor, "device_mesh")


def share_layers(policy: Any, ref: Any, count: int) -> None:
    """Freeze the embeddings and first `count` layers of `policy`, and let `ref` use them in place of its own.

    Raises ValueError where there are no more than `count` layers: the policy could not move; and where the two differ
    in what they would share: the reference would become another.
    """
    ours, theirs = _stack(policy), _stack(ref)
    own = layers(policy)
    if count >= len(own):
        raise ValueError(f"num_shared_layers {count} of {len(own)} layers leaves none to train")
    embeddings = {name: child for name, child in ours.named_children() if isinstance(child, nn.Embedding)}
    replaced = [*(getattr(theirs, name) for name in embeddings), *layers(ref)[:count]]
    if not all(map(_equal, [*embeddings.values(), *own[:count]], replaced)):
        raise ValueError("policy and reference differ in the layers that num_shared_layers would have them share")
    for name, child in embeddings.items():
        setattr(theirs, name, child.requires_grad_(False))
    for index in range(count):
        layers(ref)[index] = own[index].requires_grad_(False)
    ref.tie_weights()


def _equal(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def _stack(model: Any) -> nn.Module:
    """The module that holds the embeddings and the list of layers."""
    size = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if any(isinstance(child, nn.ModuleList) and len(child) == size for child in module.children()):
            return module
    raise ValueError(f"no list of {size} layers in a {type(model).__name__}")


def layers(model: Any) -> nn.ModuleList:
    """The layers of a model, one after the other."""
    return next(child for child in _stack(model).children() if isinstance(child, nn.ModuleList))
