"""The device that models run on: the first GPU or the CPU, its memory, its dtypes and its threads."""

import ctypes
import gc
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

from rlhf_cli import distributed, system, terminal
from rlhf_cli.config.base import Config
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.stages import TRLConfig, adapter_kind

SMALL_MODEL_PARAMETERS = 5_000_000
MAX_GROWTH = 2**28  # bytes of a process that are too many to keep if most of them are free
DEFAULT_THREADS = torch.get_num_threads()
MIN_CPU_SHARE = 0.9  # share of CPU time below which a measurement was disturbed by other processes
T = TypeVar("T")


def set_num_threads(parameters: int) -> None:
    """Use one CPU thread for models with few parameters, unless OMP_NUM_THREADS is set.

    Their matrices are too small to parallelise: on two busy cores the demo's base model (0.6 M parameters) ran 1.2
    steps per second with two threads and 10.9 with one.
    """
    is_small = parameters < SMALL_MODEL_PARAMETERS and _on_cpu()
    chooses = "OMP_NUM_THREADS" not in os.environ
    torch.set_num_threads(1 if is_small and chooses else DEFAULT_THREADS)


def device() -> torch.device:
    """Return the first GPU, or the CPU if there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    """Return the GPU's name, or "the CPU"."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"


def supports_dtype(name: str) -> bool:
    """Return True if `device` can compute in "float16", "bfloat16" or "float32"."""
    if device().type == "cpu":
        return name != "float16"
    return name != "bfloat16" or torch.cuda.is_bf16_supported(including_emulation=False)


def use_bf16(requested: bool | None) -> bool:
    """Return True if training uses bfloat16: if requested, or by default on a GPU, and only if it is supported."""
    return supports_dtype("bfloat16") and (device().type == "cuda" if requested is None else requested)


def cpu_multiplies_bf16() -> bool:
    """Return True if the models run on a CPU with instructions for products in bfloat16; others emulate them."""
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return device().type == "cpu" and any(known.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def memory_bytes() -> int:
    """Return the total memory of `device` in bytes."""
    return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else system.total_memory()


def available_bytes() -> int:
    """Return the bytes of the GPU that this process has, or can take beside other processes."""
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()


def release_memory() -> None:
    """Give freed memory back to the system, which glibc's malloc keeps (malloc_trim(3)); elsewhere only collect it."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def limit_memory(before: int) -> int:
    """Give freed memory back if the process grew by more than MAX_GROWTH since it had `before` bytes; return its bytes.

    Batches of many widths leave holes that no later tensor fits: in 40 steps of the reward stage a process of 8 layers
    grew from 2.3 to 5.2 GB, and 3.1 GB were enough for the longest rows.
    """
    if system.process_memory() - before < MAX_GROWTH:
        return before
    release_memory()
    return system.process_memory()


def resolve_dtype(name: str) -> torch.dtype:
    """Return the dtype to load weights in: float32 for "auto" (autocast computes in bf16) and if unsupported (E01)."""
    return getattr(torch, name) if name != "auto" and supports_dtype(name) else torch.float32


def measure_cpu_share(function: Callable[[], T]) -> tuple[T, float]:
    """Return a function's result and the share of its time that this thread used the CPU; 1 on a GPU."""
    wall_start = time.perf_counter()
    cpu_start = time.thread_time()
    result = function()
    cpu_time = time.thread_time() - cpu_start
    share = cpu_time / (time.perf_counter() - wall_start)
    return result, share if _on_cpu() else 1.0


def autocast(*, bf16: bool | None, on: torch.device | None = None) -> torch.autocast:
    """Return the context manager in which models `on` a device, by default `device`, compute in bfloat16, if set."""
    where = on or device()
    return torch.autocast(where.type, dtype=torch.bfloat16, enabled=bool(bf16))


def _on_cpu() -> bool:
    return device().type == "cpu"


def warn_unsupported(config: Config) -> None:
    """Warn of settings that have no effect here (E01) or are slow (E02)."""
    section = "model" if isinstance(config, TRLConfig) else "models"
    dtypes = {f"{section}.dtype": getattr(config, section).dtype}
    if getattr(config, config.stage).bf16:
        dtypes[f"{config.stage}.bf16"] = "bfloat16"
    for key, dtype in dtypes.items():
        if dtype != "auto" and not supports_dtype(dtype):
            text = f"{dtype} does not work on {device_name()}, float32 is used"
            terminal.warn("E01", text, where=config.where(key), hint=f"leave {key} out")

    if isinstance(config, PPOConfig):
        _warn_unused(config)
    if adapter_kind(config) == "qlora" and _on_cpu():
        text = f"weights in 4 bits work on {device_name()}, but slowly"
        where = config.where(f"{section}.adapters.kind")
        terminal.warn("E02", text, where=where, hint="lora is faster if the weights fit in memory without quantization")


def _warn_unused(config: PPOConfig) -> None:
    """Warn of E01 for offload without a GPU, and for fsdp without several processes or machines."""
    processes = distributed.world_size()
    fsdp = config.ppo.fsdp
    if config.ppo.offload and _on_cpu():
        text = "offload moves models from a GPU to CPU memory, and this machine has no GPU: it has no effect"
        terminal.warn("E01", text, where=config.where("ppo.offload"), hint="leave ppo.offload out")
    if fsdp and processes == 1:
        text = "fsdp shards models over several processes, and this is one process: it has no effect"
        terminal.warn("E01", text, where=config.where("ppo.fsdp"), hint="start several: --nproc N")
    elif fsdp == "hybrid" and distributed.num_machines() == 1:
        text = f"fsdp: hybrid replicates models over machines, and all {processes} processes are on one"
        hint = "ppo.fsdp: true is the same; a launcher for several machines sets LOCAL_WORLD_SIZE"
        terminal.warn("E01", text, where=config.where("ppo.fsdp"), hint=hint)
