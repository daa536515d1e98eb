"""The first layers of two models of one kind as one frozen copy."""

from typing import Any

from torch import nn


def share_layers(policy: Any, ref: Any, count: int) -> None:
    """Freeze the embeddings and first `count` layers of `policy`, and let `ref` use them in place of its own.

    Raises ValueError where there are no more than `count` layers: the policy could not move.
    """
    ours, theirs = _stack(policy), _stack(ref)
    layers = _layers(ours)
    if count >= len(layers):
        raise ValueError(f"num_shared_layers {count} of {len(layers)} layers leaves none to train")
    for name, child in list(ours.named_children()):
        if isinstance(child, nn.Embedding):
            child.requires_grad_(False)
            setattr(theirs, name, child)
    for index in range(count):
        layers[index].requires_grad_(False)
        _layers(theirs)[index] = layers[index]
    ref.tie_weights()


def _stack(model: Any) -> nn.Module:
    """The module that holds the embeddings and the list of layers."""
    size = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if any(isinstance(child, nn.ModuleList) and len(child) == size for child in module.children()):
            return module
    raise ValueError(f"no list of {size} layers in a {type(model).__name__}")


def _layers(stack: nn.Module) -> nn.ModuleList:
    return next(child for child in stack.children() if isinstance(child, nn.ModuleList))
