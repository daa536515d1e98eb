"""Facts about the machine for `rlhf env`: versions, processors and GPUs."""

import os
import platform

import torch

from rlhf_cli import runs


def environment() -> dict[str, str | int]:
    """Return versions of the libraries, and the devices that torch has."""
    facts: dict[str, str | int] = {
        **runs.versions(),
        "platform": platform.platform(),
        "cpus": os.cpu_count() or 0,
        "torch_threads": torch.get_num_threads(),
        "gpus": torch.cuda.device_count(),
    }
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("RLHF_")]
    if variables:
        facts["variables"] = " ".join(variables)
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = str(torch.version.cuda)
    return facts
