"""The machine that a plan is for: this one, or GPUs that need not be here (gpus.toml)."""

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlhf_cli import system
from rlhf_cli.errors import RLHFError, did_you_mean
from rlhf_cli.models import devices

# Share of the memory left free where sizes are chosen for the user: placements of `rlhf init`, rollout rows on a
# GPU. It is for kernels and their caches, and comes on top of an estimate that is itself 0 to 15 % too large. Settings
# that a user has written are compared with all of the memory (`rlhf plan`, start of a stage): they may just fit.
MEMORY_MARGIN = 0.15


@dataclass(frozen=True)
class Card:
    """What the manufacturer says of a GPU."""

    peak_flops: float  # per second, of dense products in bfloat16
    bandwidth: float  # bytes per second of its memory


@dataclass(frozen=True)
class Target:
    """Hardware available to each of `processes`, of which `per_machine` (None: all) are on a machine."""

    gpu: bool
    memory: int  # bytes
    name: str
    processes: int = 1
    planned: bool = False  # not here; a planned GPU computes in bfloat16

    card: Card | None = None  # of a GPU of the table
    per_machine: int | None = None

    @property
    def usable(self) -> float:
        """Bytes that sizes chosen for the user may fill."""
        return (1 - MEMORY_MARGIN) * self.memory

    def describe_usable(self) -> str:
        """Return for example "a GPU of 24 GiB has 21.9 GB for it (85% of its memory)"."""
        return f"{self.name} has {system.format_bytes(self.usable)} for it ({1 - MEMORY_MARGIN:.0%} of its memory)"

    @classmethod
    def of(cls, planned: str | None, processes: int, *, sharing: int | None = None) -> "Target":
        """Return a target of planned GPUs, or this machine, with `sharing` (None: all) processes on a machine.

        `planned` is a name of gpus.toml or a size in GiB. CPU processes share this machine's memory. Raises RLHFError
        C07 for an unknown GPU.
        """
        if planned is not None:
            return cls._planned(planned, processes, sharing)
        gpu = devices.device().type == "cuda"
        name = devices.device_name()
        parts = 1 if gpu else sharing or processes
        memory = devices.memory_bytes() // parts
        card = next((card_of(each) for each in gpu_table().values() if re.search(each["driver"], name)), None)
        return cls(gpu, memory, name, processes, card=card, per_machine=sharing)

    @classmethod
    def _planned(cls, planned: str, processes: int, sharing: int | None) -> "Target":
        name = planned.lower()
        known = gpu_table()
        gib = known[name]["gib"] if name in known else as_number(planned)
        if gib is None or gib <= 0:
            text = f"--gpu {planned}: not a size in GiB, and not one of {', '.join(known)}"
            raise RLHFError("C07", text, hint=did_you_mean(name, known) or "for example --gpu h100")
        return cls(
            gpu=True,
            memory=round(gib * 2**30),
            name=f"a GPU {name} of {gib:g} GiB" if name in known else f"a GPU of {gib:g} GiB",
            processes=processes,
            planned=True,
            card=card_of(known[name]) if name in known else None,
            per_machine=sharing,
        )

    def computes_in_bf16(self, requested: bool | None) -> bool:
        """Return devices.use_bf16; a planned GPU is assumed to support it."""
        return requested is not False if self.planned else devices.use_bf16(requested)


def as_number(text: str) -> float | None:
    """Return a finite number, or None for any other text."""
    try:
        return float(text) if math.isfinite(float(text)) else None
    except ValueError:
        return None


def card_of(row: Mapping[str, Any]) -> Card:
    """Return what a row of the table says of speed."""
    return Card(peak_flops=row["flops"], bandwidth=row["bandwidth"])


@cache
def gpu_table() -> dict[str, dict[str, Any]]:
    """Return the known GPUs by name: memory in GiB, peak FLOP/s, bandwidth, and their source."""
    return tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
