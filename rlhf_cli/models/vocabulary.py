"""Gradients of the matrices that have a row for each word, added where they stand.

Autograd makes such a gradient as a matrix of its own and adds that to the one before: for the embedding once a
micro-batch, nearly all of it zeros, for the head once for each part of the logits. For 8192 words of width 256 that is
8 MB each time, for 152,000 of width 1536 933 MB. Here the product of the head is added to the gradient by the matrix
multiplication itself, and of the embedding only the rows of words that were read are touched.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@contextmanager
def gradients_in_place(*models: Any) -> Iterator[None]:
    """Within, the models' embeddings and heads are read so that the backward pass adds to their `.grad` in place.

    Only plain ones: a layer of another class, or one whose gradient a hook may change, stays autograd's.
    """
    with ExitStack() as undo:
        for model in models:
            layers: list[tuple[Any, Any, Any]] = [
                (model.get_input_embeddings(), nn.Embedding, _embed),
                (model.get_output_embeddings(), nn.Linear, _project),
            ]
            for layer, kind, forward in layers:
                if type(layer) is kind and layer.weight.requires_grad and not layer.weight._backward_hooks:
                    layer.forward = partial(forward, layer)  # in front of the class's own
                    undo.callback(delattr, layer, "forward")
        yield


def _embed(layer: nn.Embedding, ids: Tensor) -> Tensor:
    if not torch.is_grad_enabled() or layer.max_norm is not None or layer.scale_grad_by_freq:
        return nn.Embedding.forward(layer, ids)
    found = F.embedding(ids, layer.weight.detach()).requires_grad_()

    def add(gradient: Tensor) -> None:
        words, rows = ids.flatten(), gradient.flatten(0, -2)
        if layer.padding_idx is not None:  # which learns nothing
            rows = rows.masked_fill((words == layer.padding_idx)[:, None], 0)
        _add(layer.weight, lambda total: _add_rows(total, words, rows))

    found.register_hook(add)
    return found


def _add_rows(total: Tensor, places: Tensor, rows: Tensor) -> None:
    """By the operator that adds up rows of one place in a fixed order: the same numbers in each run."""
    if total.device.type == "cpu":
        total.index_add_(0, places, rows)
    else:
        total.index_put_((places,), rows, accumulate=True)


def _project(layer: nn.Linear, hidden: Tensor) -> Tensor:
    if not hidden.requires_grad or not torch.is_grad_enabled():
        return nn.Linear.forward(layer, hidden)
    logits = F.linear(hidden, layer.weight.detach(), layer.bias)

    def add(gradient: Tensor) -> None:
        left, right = gradient.flatten(0, -2).t(), hidden.detach().flatten(0, -2)
        if gradient.dtype == layer.weight.dtype:
            _add(layer.weight, lambda total: total.addmm_(left, right))
        else:  # under autocast
            _add(layer.weight, lambda total: total.add_(left @ right.to(left.dtype)))

    logits.register_hook(add)
    return logits


def _add(weight: Any, add: Callable[[Tensor], Any]) -> None:
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    add(weight.grad)
    for hook in (weight._post_accumulate_grad_hooks or {}).values():  # as autograd does
        hook(weight)
