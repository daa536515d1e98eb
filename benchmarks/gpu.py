"""Cost of PPO on one GPU: rollout tokens/s, update MFU, peak memory. Random weights, no files, no network.

    python -m benchmarks.gpu --json gpu.json                      # everything, about five minutes on an H200
    python -m benchmarks.gpu --only rollout --models 0.5b         # one part, one model
    python -m benchmarks.gpu --tiny                               # tiny sizes: seconds on the CPU, a smoke test

It needs torch, transformers and pydantic; LoRA also needs peft. Each row is printed and written to the JSON file when
it is measured. An error or lack of memory becomes a row; the other measurements continue, and the exit code is 1.

card      bf16 matmul rate and copy bandwidth, next to the vendor's rate
rollout   tokens/s of our engine, `generate` and `generate_batch` (continuous batching) at temperature 1, with all rows
          up to the limit ("full") or with a raised stop-token logit and geometric lengths ("ragged")
update    scoring and update on given responses, with two models or a value head, gradient checkpointing, LoRA

MFU: 2 x the multiply-adds that the real tokens need (the head on response tokens only; backward twice the forward, or
once if weights are frozen; nothing for padding or recomputation) / seconds / the bf16 peak of the card.
"""

import argparse
import copy
import gc
import importlib.metadata
import json
import logging
import math
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.generation import ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging as transformers_logging

from benchmarks.speed.floor import Shape, forward_flops
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.models import forward
from rlhf_cli.models.batch import Prompts, Rollout
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer

STOP, PAD = 1, 0

# Qwen2.5's config.json of each size
MODELS = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
}

# Part of a card's name -> dense bf16 TFLOP/s of the vendor's data sheet; the first match counts
VENDOR = {"B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "L4": 121}


@dataclass(frozen=True)
class Sizes:
    """Sizes of models and batches."""

    models: tuple[str, ...] = ("0.5b", "1.5b")
    vocabulary: int = 151936
    rollout_rows: tuple[int, ...] = (64, 512)
    update_rows: int = 64
    micro_batch_rows: int = 8
    prompt: int = 128  # longest prompt; the shortest has a quarter of it
    response: int = 192  # token limit of a rollout
    update_response: int = 512  # token limit of a response in an update
    matmul: int = 8192
    timed: int = 2  # measured updates, after a warm-up


TINY = Sizes(("tiny",), 256, (8,), 8, 4, 8, 12, 12, 64, 1)


class Bench:
    """The device, the sizes, and the rows measured so far."""

    def __init__(self, sizes: Sizes, device: torch.device, path: Path | None):
        self.sizes, self.device, self.path = sizes, device, path
        self.cuda = device.type == "cuda"
        self.rows: list[dict[str, Any]] = []
        self.peaks: dict[str, float] = {}
        self.card = torch.cuda.get_device_name(device) if self.cuda else "CPU"
        self.about = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "card": self.card,
            "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
            "cuda": torch.version.cuda,
            "sizes": asdict(sizes),
        }

    def row(self, part: str, what: str, **numbers: Any) -> None:
        """Add and print a row, and write the file."""
        self.rows.append({"part": part, "what": what, **numbers})
        shown = "  ".join(f"{name} {value}" for name, value in numbers.items())
        print(f"{part:8} {what:46} {shown}", flush=True)
        if self.path:
            self.path.write_text(json.dumps({**self.about, "rows": self.rows}, indent=1) + "\n", encoding="utf-8")

    def seconds(self, work: Callable[[], Any]) -> float:
        """Return the wall time of `work` until the device is idle."""
        wait = (lambda: torch.cuda.synchronize(self.device)) if self.cuda else (lambda: None)
        wait()
        start = time.perf_counter()
        work()
        wait()
        return time.perf_counter() - start

    @contextmanager
    def attempt(self, part: str, what: str) -> Iterator[None]:
        """Context manager that turns an error into a row, and frees unused memory before and after."""
        self.clean()
        try:
            yield
        except Exception as error:  # GPU time is scarce: the other parts must still be measured
            first_line = str(error).partition("\n")[0]
            self.row(part, what, failed=f"{type(error).__name__}: {first_line}")
            if not isinstance(error, torch.OutOfMemoryError):
                traceback.print_exc()
        finally:
            self.clean()

    def clean(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def gib(self, statistic: Callable[[torch.device], int]) -> float | None:
        """Return a statistic of torch.cuda in GiB; None on the CPU."""
        return round(statistic(self.device) / 2**30, 2) if self.cuda else None


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def config(name: str, vocabulary: int, **more: Any) -> Any:
    shape = {"num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 32768, **MODELS[name]}
    return AutoConfig.for_model("qwen2", vocab_size=vocabulary, pad_token_id=PAD, eos_token_id=STOP, **shape, **more)


def model(bench: Bench, name: str, *, scorer: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model with random weights on the device."""
    torch.manual_seed(0)
    kind, more = (AutoModelForSequenceClassification, {"num_labels": 1}) if scorer else (AutoModelForCausalLM, {})
    with torch.device(bench.device):
        return kind.from_config(config(name, bench.sizes.vocabulary, **more)).to(dtype).eval()


def card(bench: Bench) -> None:
    """Measure the matmul rate and the copy bandwidth, and set the peaks of MFU."""
    size, dtype = bench.sizes.matmul, torch.bfloat16 if bench.cuda else torch.float32
    left, right = (torch.randn(size, size, device=bench.device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        left @ right
    repeats = 20
    seconds = bench.seconds(lambda: [left @ right for _ in range(repeats)]) / repeats
    bench.peaks["measured"] = 2.0 * size**3 / seconds
    name = next((name for name in VENDOR if name in bench.card), None)
    if name:
        bench.peaks["vendor"] = VENDOR[name] * 1e12
    source = torch.empty(size * size * 4, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    target.copy_(source)
    copied = bench.seconds(lambda: [target.copy_(source) for _ in range(repeats)]) / repeats
    rates = {"matmul_tflops": round(bench.peaks["measured"] / 1e12, 3), "vendor_tflops": VENDOR[name] if name else None}
    bench.row("card", bench.card, **rates, copy_gb_s=round(2 * source.numel() / copied / 1e9))


def queries(sizes: Sizes, rows: int) -> list[list[int]]:
    """Return random prompts with uniform lengths from a quarter of the limit to the limit."""
    rng = random.Random(0)
    lengths = [rng.randint(max(1, sizes.prompt // 4), sizes.prompt) for _ in range(rows)]
    return [[rng.randrange(2, sizes.vocabulary) for _ in range(length)] for length in lengths]


def prompts(bench: Bench, rows: int) -> Prompts:
    batch = Prompts.from_lists(queries(bench.sizes, rows))
    ids, mask = batch.ids.to(bench.device), batch.mask.to(bench.device)
    return Prompts(ids, mask, seeds=tuple(range(rows)), response_length=bench.sizes.response)


@contextmanager
def stopping(policy: Any, mean_length: float | None) -> Iterator[int | None]:
    """Context manager in which each token is the stop token with probability 1 / mean_length; never if None.

    The logits of random weights have a standard deviation of about initializer_range * sqrt(hidden).
    """
    if mean_length is None:
        yield None
        return
    shape = policy.config
    variance = shape.initializer_range**2 * shape.hidden_size
    stop_logit = math.log(shape.vocab_size / (mean_length - 1)) + variance / 2

    def raise_stop(_: nn.Module, __: Any, logits: Tensor) -> None:
        logits[..., STOP] = stop_logit

    handle = policy.get_output_embeddings().register_forward_hook(raise_stop)
    try:
        yield STOP
    finally:
        handle.remove()


def sampling(batch: Prompts, stop: int | None) -> GenerationConfig:
    eos = -1 if stop is None else stop
    plain = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(**plain, max_new_tokens=batch.response_length, eos_token_id=eos, pad_token_id=PAD)


def generate(policy: Any, stop: int | None, bf16: bool, batch: Prompts) -> list[int]:
    """Return the lengths, through the first stop token, of the responses of transformers' `generate`."""
    with torch.no_grad(), torch.autocast(policy.device.type, dtype=torch.bfloat16, enabled=bf16):
        ids = policy.generate(batch.ids, attention_mask=batch.mask.long(), generation_config=sampling(batch, stop))
    responses = ids[:, batch.ids.shape[1] :].tolist()
    return [row.index(stop) + 1 if stop in row else len(row) for row in responses]


def generate_batch(policy: Any, stop: int | None, bf16: bool, batch: Prompts) -> list[int]:
    """Return the response lengths of transformers' continuous batching, whose thread ignores autocast and `bf16`."""
    prompts = [ids[mask].tolist() for ids, mask in zip(batch.ids, batch.mask, strict=True)]
    rows, longest = len(prompts), batch.ids.shape[1] + batch.response_length
    page = 256 if longest > 64 else 16  # flash attention requires 256
    known = {field.name for field in fields(ContinuousBatchingConfig)}
    options = ContinuousBatchingConfig(  # space for all rows; the default takes half of the memory or more
        **{"page_size" if "page_size" in known else "block_size": page},  # block_size in transformers 5.17
        num_blocks=rows * (math.ceil(longest / page) + 1),
        max_batch_tokens=max(rows, min(4096, sum(map(len, prompts)))),
        seed=0,
    )
    sampled = sampling(batch, stop)
    outputs = policy.generate_batch(prompts, generation_config=sampled, continuous_batching_config=options)
    lengths = [len(output.generated_tokens) for output in outputs.values()]
    if len(lengths) < rows:  # it only logs errors
        raise RuntimeError(f"generate_batch returned {len(lengths)} of {rows} responses")
    return lengths


def hf(policy: Any, stop: int | None, bf16: bool, batch: Prompts) -> list[int]:
    return HFEngine(policy, stop, PAD, bf16=bf16).generate(batch).response_lengths.tolist()


ENGINES = {"generate": generate, "generate_batch": generate_batch, "hf": hf}


def rollouts(bench: Bench, name: str) -> None:
    """Measure each engine on float32 weights under autocast, as in a run, and transformers also on bfloat16 weights."""
    engines = [(engine, torch.float32) for engine in ENGINES]
    if bench.cuda:
        engines = [("generate", torch.bfloat16), ("generate_batch", torch.bfloat16)]
        engines += [("generate", torch.float32), ("hf", torch.float32)]
    policies: dict[torch.dtype, Any] = {}
    fastest: dict[tuple[int, str], float] = {}  # tokens/s of `generate`
    shapes = (("full", None), ("ragged", bench.sizes.response / 4))
    for rows, (shape, mean_length), (engine, dtype) in product(bench.sizes.rollout_rows, shapes, engines):
        what = f"{name} {engine}, {rows} rows, {shape}, {str(dtype).removeprefix('torch.')} weights"
        with bench.attempt("rollout", what):
            if dtype not in policies:
                policies[dtype] = model(bench, name, dtype=dtype)
            lengths, seconds, memory = timed_rollout(bench, engine, policies[dtype], rows, mean_length)
            rate = sum(lengths) / seconds
            if engine == "generate":
                fastest[rows, shape] = max(fastest.get((rows, shape), 0.0), rate)
            ratio = round(rate / fastest[rows, shape], 2) if (rows, shape) in fastest else None
            bench.row(
                "rollout",
                what,
                tokens_per_s=round(rate),
                over_generate=ratio,
                mean_length=round(sum(lengths) / rows, 1),
                ms_per_step=round(1e3 * seconds / max(lengths), 2),
                gib_above_weights=memory,
            )


def timed_rollout(
    bench: Bench, engine: str, policy: Any, rows: int, mean_length: float | None
) -> tuple[list[int], float, float | None]:
    """Return response lengths, seconds and GiB of one rollout, after a short warm-up."""
    run, batch, before = ENGINES[engine], prompts(bench, rows), bench.gib(torch.cuda.memory_allocated)
    lengths: list[int] = []
    with stopping(policy, mean_length) as stop:
        run(policy, stop, bench.cuda, replace(batch, response_length=min(4, batch.response_length)))
        seconds = bench.seconds(lambda: lengths.extend(run(policy, stop, bench.cuda, batch)))
    peak = bench.gib(torch.cuda.max_memory_allocated)
    return lengths, seconds, round(peak - before, 2) if peak is not None and before is not None else None


VARIANTS: dict[str, set[str]] = {
    "policy and value model": set(),
    "policy and value model, gradient checkpointing": {"checkpointing"},
    "value head": {"head"},
    "value head, LoRA": {"head", "lora"},
}


def updates(bench: Bench, name: str) -> None:
    """Measure scoring and update of every variant."""
    for variant, options in VARIANTS.items():
        what = f"{name} {variant}"
        if "lora" in options and version("peft") is None:
            bench.row("update", what, skipped="peft is not installed")
            continue
        with bench.attempt("update", what):
            timed_update(bench, name, what, options)


def timed_update(bench: Bench, name: str, what: str, options: set[str]) -> None:
    """Add a row with the minimum times of scoring and update, after a warm-up."""
    sizes, policy = bench.sizes, model(bench, name)
    ref = copy.deepcopy(policy)
    if "lora" in options:
        from peft import LoraConfig, get_peft_model

        policy = get_peft_model(policy, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    value = forward.ValueHead(policy) if "head" in options else model(bench, name, scorer=True)
    settings = PPOSettings(
        total_episodes=sizes.update_rows * (sizes.timed + 1),
        per_device_train_batch_size=sizes.micro_batch_rows,
        gradient_accumulation_steps=sizes.update_rows // sizes.micro_batch_rows,
        num_ppo_epochs=1,
        response_length=sizes.update_response,
        temperature=1.0,
        bf16=bench.cuda,
        gradient_checkpointing="checkpointing" in options,
    )
    trainer = PPOTrainer(policy, ref, value, {}, HFEngine(policy, STOP, PAD, bf16=bench.cuda), settings)
    weights = bench.gib(torch.cuda.memory_allocated)
    scoring, updating, experiences = [], [], []
    rollout = responses(bench)
    scores = torch.linspace(-1, 1, sizes.update_rows, device=bench.device)
    for _ in range(sizes.timed + 1):
        scoring.append(bench.seconds(lambda: experiences.append(trainer.make_experience(rollout, scores))))
        updating.append(bench.seconds(lambda: trainer.update(experiences.pop())))
    seconds = min(updating[1:])
    shape, lengths = Shape.of(config(name, sizes.vocabulary)), rollout.lengths.tolist()
    policy_flops = forward_flops(shape, lengths, int(rollout.response_mask.sum()))
    value_flops = 0.0 if "head" in options else forward_flops(shape, lengths)
    flops = (2 if "lora" in options else 3) * policy_flops + 3 * value_flops
    bench.row(
        "update",
        what,
        update_s=round(seconds, 3),
        judge_s=round(min(scoring[1:]), 3),
        tokens_per_s=round(sum(lengths) / seconds),
        tflops=round(flops / seconds / 1e12, 3),
        **{f"mfu_of_{peak}": f"{flops / seconds / rate:.1%}" for peak, rate in bench.peaks.items()},
        weights_gib=weights,
        peak_gib=bench.gib(torch.cuda.max_memory_allocated),
    )


def responses(bench: Bench) -> Rollout:
    """Return random responses with uniform lengths from 1 to the limit."""
    sizes, rng = bench.sizes, random.Random(1)
    lengths = [rng.randint(1, sizes.update_response) for _ in range(sizes.update_rows)]
    tokens = [[rng.randrange(2, sizes.vocabulary) for _ in range(length)] for length in lengths]
    return Rollout.from_lists(queries(sizes, sizes.update_rows), tokens, stop_token_id=STOP).to(bench.device)


PARTS: dict[str, Callable[[Bench, str], None]] = {"rollout": rollouts, "update": updates}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts besides card")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: 0.5b and 1.5b")
    parser.add_argument("--device", type=torch.device, help="default: the GPU if there is one, else the CPU")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and tiny sizes, for a smoke test")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    args = parser.parse_args(arguments)
    sizes = TINY if args.tiny else Sizes()
    sizes = replace(sizes, models=tuple(args.models or sizes.models))
    bench = Bench(sizes, args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu"), args.json)
    print(json.dumps(bench.about), flush=True)
    card(bench)
    for name in sizes.models:
        for part in args.only:
            PARTS[part](bench, name)
    return int(any("failed" in row for row in bench.rows))


if __name__ == "__main__":
    transformers_logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    sys.exit(main())
