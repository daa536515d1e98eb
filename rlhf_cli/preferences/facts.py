"""What the sizes of a run follow from: lengths of the texts, the model, and how fast this machine is."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rlhf_cli import checkpoints, data
from rlhf_cli.models import devices, loading
from rlhf_cli.ppo.records import Prompts
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.preferences.split import Parts, distinct

SAMPLED = 20_000  # pairs whose tokens are counted
PROBE_ROWS, PROBE_TOKENS, PROBE_WRITTEN = 8, 64, 16


@dataclass(frozen=True)
class Facts:
    """Lengths are in tokens of the base model's tokenizer."""

    prompts: dict[str, int]  # part -> different prompts
    pairs: dict[str, int]  # part -> pairs
    prompt_mean: float
    prompt_p99: int
    answer_mean: float
    answer_p95: int
    row_mean: float  # prompt and answer
    row_p99: int
    row_max: int
    parameters: int
    hidden: int
    layers: int
    vocabulary: int
    context: int | None
    device: str
    memory: int  # bytes
    trained: float | None  # tokens a second, forward and backward; None where the model does not fit
    written: float | None  # tokens a second

    def __str__(self) -> str:
        speed = f", trains {self.trained:.0f} and writes {self.written:.0f} tokens a second" if self.trained else ""
        return (
            f"prompts of {self.prompt_mean:.0f} tokens, answers of {self.answer_mean:.0f}; the base model has "
            f"{_short(self.parameters)} parameters; {self.device} with {self.memory / 1e9:.0f} GB{speed}"
        )


def gather(folder: Path, tokenizer: Any, parts: Parts) -> Facts:
    """Measure the texts, the model of a folder, and the machine. Raises RLHFError M01, M07, M08."""
    pairs = [pair for part in parts.values() for pair in part]
    pairs = pairs[:: -(-len(pairs) // SAMPLED)]
    answers = [text for pair in pairs for text in (pair.chosen, pair.rejected)]
    encoded = data.encode_many(tokenizer, [pair.prompt for pair in pairs for _ in "cr"], answers)
    rows = [(len(prompt), len(answer)) for prompt, answer in encoded]
    asked, chosen, both = [p for p, _ in rows], [a for _, a in rows[::2]], [p + a for p, a in rows]
    config = loading.read_config(folder).get_text_config()
    parameters = count_parameters(folder)
    memory = _memory()
    fits = 20 * parameters < memory  # weights, gradients and some activations
    trained, written = _speed(folder) if fits else (None, None)
    return Facts(
        prompts={name: len(distinct(part)) for name, part in parts.items()},
        pairs={name: len(part) for name, part in parts.items()},
        prompt_mean=sum(asked) / len(asked),
        prompt_p99=quantile(asked, 0.99),
        answer_mean=sum(chosen) / len(chosen),
        answer_p95=quantile(chosen, 0.95),
        row_mean=sum(both) / len(both),
        row_p99=quantile(both, 0.99),
        row_max=max(both),
        parameters=parameters,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
        context=getattr(config, "max_position_embeddings", None),
        device=_device_name(),
        memory=memory,
        trained=trained,
        written=written,
    )


def quantile(values: Sequence[int], share: float) -> int:
    """The smallest value that at least `share` of them do not pass."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


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
    if devices.device().type == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _device_name() -> str:
    return torch.cuda.get_device_name() if devices.device().type == "cuda" else f"CPU, {os.cpu_count()} cores"


def _speed(folder: Path) -> tuple[float, float]:
    """Tokens a second that a model learns from, and that it writes, on this machine as it is now."""
    model = loading.load_causal(folder).to(devices.device())
    config = model.config.get_text_config()
    width = min(PROBE_TOKENS, getattr(config, "max_position_embeddings", None) or PROBE_TOKENS)
    count = PROBE_ROWS * width
    ids = torch.arange(count, device=model.device).remainder(config.vocab_size).reshape(PROBE_ROWS, width)

    def train() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    engine = HFEngine(model, None, 0)
    written = min(PROBE_WRITTEN, width // 2)
    prompts = Prompts.from_lists(ids.cpu()[:, :written].tolist())
    asked = Prompts(prompts.ids, prompts.mask, tuple(range(PROBE_ROWS)), written)
    return count / _seconds(train), PROBE_ROWS * written / _seconds(lambda: engine.generate(asked))


def _seconds(call: Callable[[], Any]) -> float:
    """The faster of two calls: the first one warms up."""
    taken = []
    for _ in range(2):
        began = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken)


def _short(count: int) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return str(count)
