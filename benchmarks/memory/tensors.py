"""Bytes of the tensors of a training, and the peak memory of its process.

The environment of TRL 1.12 imports this module, so it imports nothing from rlhf_cli.
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.speed.counters import memory_mb

Bytes = dict[str, int]


def size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages of tensors."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def weights(models: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Return parameters, buffers, and the scales of 4-bit weights."""
    for model in models:
        for weight in (*model.parameters(), *model.buffers()):
            yield weight
            yield from _scales(getattr(weight, "quant_state", None))


def _scales(state: Any) -> Iterator[Tensor]:
    """Return the tensors of bitsandbytes' QuantState, which contains another one in double quantization."""
    for value in vars(state).values() if state is not None else ():
        if isinstance(value, Tensor):
            yield value
        elif hasattr(value, "absmax"):
            yield from _scales(value)


@contextmanager
def watch_training(models: dict[str, nn.Module]) -> Iterator[Bytes]:
    """Context manager that yields a dict and fills it with the bytes of the training inside.

    `weights`, `gradients` and `optimizer` are maxima after an optimizer step, while the gradients exist. `one` is the
    size of the reference model, `mapped` that of memory-mapped weight files, `before` and `peak` are the peak memory of
    the process before and during the training. `models` is emptied at the end, so that their memory can be freed.
    """
    maxima = {"weights": 0, "gradients": 0, "optimizer": 0, "mapped": 0, "before": _peak()}

    def measure(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        parameters = [parameter for model in models.values() for parameter in model.parameters()]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        sizes = {"weights": size(weights(models.values())), "gradients": size(gradients), "optimizer": size(moments)}
        sizes["mapped"] = mapped_bytes()
        maxima.update({kind: max(maxima[kind], count) for kind, count in sizes.items()})
        if "reference" in models:
            maxima["one"] = size(weights([models["reference"]]))

    _reset_peak()
    hook = register_optimizer_step_post_hook(measure)
    try:
        yield maxima
    finally:
        hook.remove()
        models.clear()
    maxima["peak"] = _peak()


def mapped_bytes() -> int:
    """Return the resident bytes of mapped weight files, which stay until no tensor of the file is left.

    VmHWM counts these pages, although the kernel may reclaim unchanged ones at any time.
    """
    count, path = 0, ""
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            path = line
        elif words[0] == "Rss:" and ".safetensors" in path:
            count += int(words[1]) * 1024
    return count


def current_bytes() -> int:
    """Return the memory of the process now; on a GPU the memory that torch's allocator has handed out."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())
    return round(memory_mb("VmRSS") * 2**20)


def above_libraries(maxima: Bytes, libraries: int) -> Bytes:
    """Return the peaks of the process and of the training without the memory of the libraries."""
    process = max(maxima.pop("before"), maxima["peak"], _peak())
    training = maxima["peak"] - libraries
    return {**maxima, "libraries": libraries, "peak": process - libraries, "training": training}


def _peak() -> int:
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else round(memory_mb("VmHWM") * 2**20)


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM on Linux
