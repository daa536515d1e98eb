"""What models run on: the first GPU or the CPU, its memory, the number formats that it has, its threads."""

import os
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from rlhf_cli import room

SMALL = 5_000_000  # parameters
ALL_THREADS = torch.get_num_threads()
BUSY = 0.9  # share of the processor below which other work is worth a line
T = TypeVar("T")


def fit_threads(parameters: int) -> None:
    """One CPU thread for a model of few parameters, unless OMP_NUM_THREADS says otherwise.

    Its matrices are too small to share out: on two busy cores the demo's base model (0.6 M parameters) made 1.2 steps a
    second with two threads and 10.9 with one.
    """
    small = parameters < SMALL and device().type == "cpu" and "OMP_NUM_THREADS" not in os.environ
    torch.set_num_threads(1 if small else ALL_THREADS)


def device() -> torch.device:
    """The first GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    """What `device` is called: the GPU's name, or the CPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"


def can_use(name: str) -> bool:
    """Whether `device` computes in the number format "float16", "bfloat16" or "float32"."""
    if device().type == "cpu":
        return name != "float16"
    return name != "bfloat16" or torch.cuda.is_bf16_supported()


def computes_in_bf16(wish: bool | None) -> bool:
    """Whether training computes in bfloat16: as wished where `device` can, and unasked on a GPU."""
    return can_use("bfloat16") and (device().type == "cuda" if wish is None else wish)


def memory() -> int:
    """The bytes of the memory of `device`."""
    return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else room.memory()


def number_format(name: str) -> torch.dtype:
    """float32 for `auto`: what is trained keeps full-precision weights, and bf16 enters as autocast.

    float32 too in place of a format that this device lacks, which E01 tells.
    """
    return getattr(torch, name) if name != "auto" and can_use(name) else torch.float32


def shared(measure: Callable[[], T]) -> tuple[T, float]:
    """What `measure` returns, and the share of its time that this thread had the processor: other work leaves less.

    1 on a GPU, which a thread only waits for.
    """
    began, busy = time.perf_counter(), time.thread_time()
    measured = measure()
    share = (time.thread_time() - busy) / (time.perf_counter() - began)
    return measured, share if device().type == "cpu" else 1.0
