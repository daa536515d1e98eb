"""Memory that is given back to the system, and dtypes that a device has."""

import platform
from pathlib import Path

import pytest
import torch

from rlhf_cli import system
from rlhf_cli.models import devices
from rlhf_cli.models.load import load_causal_lm
from tests.conftest import World


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float32)],  # E01: float16 on a CPU
)
def test_dtype_auto_and_unsupported_dtypes_load_in_float32(
    world: World, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    if name == "float16" and devices.supports_dtype(name):
        pytest.skip("this machine supports float16")
    load_causal_lm(world.base).bfloat16().save_pretrained(tmp_path)
    assert load_causal_lm(tmp_path, dtype=name).dtype == dtype


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library gives memory back by itself or never")
def test_freed_memory_is_given_back_to_the_system() -> None:
    tensors = [torch.ones(25_000) for _ in range(2000)]  # 200 MB in pieces that malloc keeps
    used = system.process_memory()
    del tensors[:-1]  # the last one is at the end of the heap
    devices.release_memory()
    assert system.process_memory() < used - 150e6


@pytest.mark.parametrize(("used", "released"), [(2**28 - 1, 0), (2**28, 1)])
def test_memory_is_given_back_once_a_process_has_grown(
    used: int, released: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(system, "process_memory", lambda: 10**9 + (7 if calls else used))
    monkeypatch.setattr(devices, "release_memory", lambda: calls.append(1))
    assert devices.limit_memory(10**9) == 10**9 + 7 * released and len(calls) == released


def test_bfloat16_that_a_gpu_only_emulates_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert not devices.use_bf16(None) and not devices.use_bf16(True)
