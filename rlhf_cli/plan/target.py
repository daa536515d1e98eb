"""The machine that a plan is for: this one, or GPUs that are not here."""

from dataclasses import dataclass

from rlhf_cli.inputs import machine
from rlhf_cli.models import devices
from rlhf_cli.ppo.settings import PPOSettings


@dataclass(frozen=True)
class Target:
    """What each of `processes` has to itself."""

    gpu: bool
    memory: int  # bytes
    name: str
    processes: int = 1

    @classmethod
    def of(cls, gib: float | None, processes: int) -> "Target":
        """GPUs of so many GiB; none: this machine, whose memory several processes on a CPU share."""
        if gib is not None:
            return cls(True, round(gib * 2**30), f"a GPU of {gib:g} GiB", processes)
        gpu = devices.device().type == "cuda"
        return cls(gpu, devices.memory_bytes() // (1 if gpu else processes), devices.device_name(), processes)

    def computes_in_bf16(self, wish: bool | None) -> bool:
        """As devices.use_bf16; a GPU that is not here is taken to be able to."""
        return devices.use_bf16(wish) if not self.gpu else wish is not False

    def usable(self, settings: PPOSettings) -> PPOSettings:
        """The settings that it can follow."""
        bf16 = self.gpu or devices.supports_dtype("bfloat16")
        return machine.usable(settings, bf16=bf16, gpu=self.gpu, group=self.processes > 1)
