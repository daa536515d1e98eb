"""Decoder layers compiled by torch.compile (Ansel et al. 2024, ASPLOS, section 4), for scoring and training.

Layers are alike, so one compiled function serves all of them, whatever the rows' lengths. Half of a pass on a GPU is
elementwise work between matrix products, which the compiler fuses. Rollouts by `hf` run the plain layers: their
key-value cache grows with each token.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.stages import adapter_kind
from rlhf_cli.errors import short_reason
from rlhf_cli.models.sharding import decoder_layers

BACKEND = "inductor"
MIN_PARAMETERS = 100_000_000  # of `models.compile: auto`: smaller models save less time than compiling takes
RECOMPILE_LIMIT = 64  # graphs of one function, by the layers' dtypes and which gradients are needed; torch allows 8


def is_supported(device: torch.device) -> bool:
    """Return True if compiling pays on a device: a GPU that Triton can generate code for.

    On a CPU the passes take 1.2 to 1.3 times less time, after 20 to 60 s of compilation.
    """
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def is_wanted(config: PPOConfig, parameters: int) -> bool:
    """Return True if `models.compile` asks for it. `auto`: not with shards, a 4-bit base or a small model."""
    if config.models.compile != "auto":
        return config.models.compile
    return not config.ppo.fsdp and adapter_kind(config) != "qlora" and parameters >= MIN_PARAMETERS


def compiler_problem(device: torch.device) -> str | None:
    """Return why a small function cannot be compiled for a device, such as a missing C compiler; None if it can."""
    try:
        compiled(_double)(torch.ones(8, device=device))
    except Exception as error:  # of the compiler's many parts, each fails in its own way
        return f"{type(error).__name__}: {short_reason(error)}"
    return None


def _double(x: torch.Tensor) -> torch.Tensor:
    return x + x


def enable(model: Any) -> None:
    """Compile a model's decoder layers wherever `compiled_layers` is entered for it."""
    model.runs_compiled = True


def is_enabled(model: Any) -> bool:
    """Return True after `enable`."""
    return getattr(model, "runs_compiled", False)


def compiled_layers(*models: Any) -> AbstractContextManager[None]:
    """Return a context in which the decoder layers of the models that are enabled run compiled."""
    layers: set[Any] = set()  # models may share some
    for model in filter(is_enabled, models):
        layers.update(decoder_layers(model))
    plain = [layer for layer in layers if "forward" not in vars(layer)]  # not those that another program has wrapped
    return _layers_run({layer: partial(compiled(_layer_forward), layer) for layer in plain})


def compiled_token_step(model: Any, cache_layers: Sequence[Any]) -> AbstractContextManager[None]:
    """Return a context in which the decoder layers run compiled, with a static key-value cache.

    A layer gets its own part of the cache in place of the whole, which it would read at its number: a constant, and so
    a compiled function for each layer.
    """
    functions = {}
    for layer, cache_layer in zip(decoder_layers(model), cache_layers, strict=True):
        if "forward" not in vars(layer):  # else another program has wrapped it
            functions[layer] = partial(_layer_token_step, layer, cache_layer)
    return _layers_run(functions)


@contextmanager
def _layers_run(functions: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Context manager in which layers run these functions in place of their class's method `forward`."""
    for layer, function in functions.items():
        layer.forward = function
    try:
        yield
    finally:
        for layer in functions:
            del layer.forward


def _layer_token_step(layer: nn.Module, cache: Any, *args: Any, **kwargs: Any) -> Any:
    if "past_key_values" not in kwargs:  # passed by position, as by GPT-2: not compiled
        return _layer_forward(layer, *args, **kwargs)
    kwargs["past_key_values"] = cache
    return compiled(_layer_forward)(layer, *args, **kwargs)


def _layer_forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled for tensors of any size; it is compiled at its first call."""
    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    return torch.compile(function, dynamic=True, backend=BACKEND)
