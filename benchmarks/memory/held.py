"""What a training holds, seen from outside: bytes of its tensors, and the most memory that the process had.

Of this repository it imports what the peer's environment can: `benchmarks.speed.job`.
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.speed.job import memory_mb

Found = dict[str, int]  # bytes


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind tensors."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def weights(models: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Parameters and buffers, and the scales of what is held in 4 bits."""
    for model in models:
        for weight in (*model.parameters(), *model.buffers()):
            yield weight
            yield from _scales(getattr(weight, "quant_state", None))


def _scales(state: Any) -> Iterator[Tensor]:
    """bitsandbytes keeps them in an object beside the weight; in double quantization it holds another one."""
    for each in vars(state).values() if state is not None else ():
        if isinstance(each, Tensor):
            yield each
        elif hasattr(each, "absmax"):
            yield from _scales(each)


@contextmanager
def watched(models: dict[str, nn.Module]) -> Iterator[Found]:
    """Within, a training of these models; afterwards the most that it held, by kind, when an optimizer step was done:
    then the gradients still are there. `peak` is the most memory while it lasted, `before` the most until it began,
    `mapped` what of it are pages of the weights' files.
    """
    found = {"weights": 0, "gradients": 0, "optimizer": 0, "mapped": 0, "before": _most()}

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        kept = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
        learning = [
            weight.grad for model in models.values() for weight in model.parameters() if weight.grad is not None
        ]
        seen = {"weights": size(weights(models.values())), "gradients": size(learning), "optimizer": size(kept)}
        seen["mapped"] = _mapped()
        found.update({kind: max(found[kind], count) for kind, count in seen.items()})
        if "reference" in models:
            found["one"] = size(weights([models["reference"]]))

    _forget_most()
    hook = register_optimizer_step_post_hook(look)
    try:
        yield found
    finally:
        hook.remove()
        models.clear()  # who trained may want their memory back
    found["peak"] = _most()


def _mapped() -> int:
    """Bytes in memory of weights' files, as they are read: pages that stay until no tensor of the file is left.

    Where nothing changed them the kernel may take them back, needed or not: VmHWM counts them all the same.
    """
    count, path = 0, ""
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            path = line
        elif words[0] == "Rss:" and ".safetensors" in path:
            count += int(words[1]) * 1024
    return count


def libraries() -> int:
    """Bytes that the process holds now, before anything large; on a GPU that is what torch's allocator handed out."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())
    return round(memory_mb("VmRSS") * 2**20)


def told(found: Found, before: int) -> Found:
    """Peaks above the libraries: of the whole process, and of the training alone."""
    whole = max(found.pop("before"), found["peak"], _most())
    return {**found, "libraries": before, "peak": whole - before, "training": found["peak"] - before}


def _most() -> int:
    """The most memory since `_forget_most`."""
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else round(memory_mb("VmHWM") * 2**20)


def _forget_most() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # Linux: VmHWM begins anew
