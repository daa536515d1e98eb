"""What the sizes of a run follow from: lengths of the texts, the model, and how fast this machine is."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from rlhf_cli import checkpoints
from rlhf_cli.models import devices, load
from rlhf_cli.preferences import speed
from rlhf_cli.preferences.lengths import Lengths
from rlhf_cli.preferences.speed import Speed
from rlhf_cli.preferences.split import Parts, distinct


@dataclass(frozen=True)
class Facts:
    """What is known of the data, the model and the machine."""

    prompts: Mapping[str, int]  # part -> different prompts
    pairs: Mapping[str, int]  # part -> pairs
    rows: Mapping[str, int]  # file of data/ -> its rows, where all of them are taken
    lengths: Lengths
    parameters: int
    hidden: int
    layers: int
    vocabulary: int
    device: str
    memory: int  # bytes
    speed: Speed | None  # None where the model does not fit

    def __str__(self) -> str:
        speed = ""
        if self.speed:
            speed = f", trains {self.speed.trained:.0f} and writes {self.speed.written:.0f} tokens a second"
        return (
            f"prompts of {self.lengths.prompt_mean:.0f} tokens, answers of {self.lengths.answer_mean:.0f}; the base "
            f"model has {_short(self.parameters)} parameters; {self.device} with {self.memory / 1e9:.0f} GB{speed}"
        )


def gather(folder: Path, lengths: Lengths, parts: Parts, rows: Mapping[str, int]) -> Facts:
    """Look at the model of a folder, and measure the machine. Raises RLHFError M01, M07, M08."""
    config = load.read_config(folder).get_text_config()
    parameters = count_parameters(folder)
    memory = _memory()
    fits = 20 * parameters < memory  # weights, gradients and some activations
    return Facts(
        prompts={name: len(distinct(part)) for name, part in parts.items()},
        pairs={name: len(part) for name, part in parts.items()},
        rows=rows,
        lengths=lengths,
        parameters=parameters,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
        device=_device_name(),
        memory=memory,
        speed=speed.measure(folder) if fits else None,
    )


def count_parameters(folder: Path) -> int:
    """Parameters in the safetensors files of a folder, by their headers alone; of an adapter those of its base."""
    if base := checkpoints.base_of(folder):
        return count_parameters(base)
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no dict)
                shape = file.get_slice(name).get_shape()
                total += torch.Size(shape).numel()
    return total


def _memory() -> int:
    return devices.memory_bytes()


def _device_name() -> str:
    return torch.cuda.get_device_name() if devices.device().type == "cuda" else f"CPU, {os.cpu_count()} cores"


def _short(count: int) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return str(count)
