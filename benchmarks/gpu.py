"""Where the time of PPO goes on one GPU: one update by its phases. Random weights, no files, no network.

    python -m benchmarks.gpu --json gpu.json             # everything, at most ten minutes on an H100
    python -m benchmarks.gpu --cases 0.5b-512            # one case
    python -m benchmarks.gpu --tiny                      # tiny sizes: seconds on a CPU, a smoke test

It needs torch, transformers and pydantic. Each row is printed and written to the JSON file when measured. An error
or lack of memory becomes a row; the other measurements continue, and the exit code is 1.

card      bf16 matmul rate and copy bandwidth, next to the vendor's rate
rollout   a token step of each engine, with its share of reading the prompts and of capturing the step; a replayed
          step alone; and what reading the weights and the cache once costs at the copy bandwidth
update    one update of four models (policy, reference, reward, value) by phases: seconds, MFU, peak memory
kernels   the ten longest kernels of each phase, its launches, and the share of its time in which no kernel ran

All answers have the full length, so nothing is computed for padding behind them; prompts differ in length.
MFU: 2 x the multiply-adds that the real tokens need (the head on response tokens only; backward twice the forward;
nothing for padding or recomputation) / seconds / the vendor's bf16 rate of the card.
"""

import argparse
import copy
import gc
import importlib.metadata
import json
import random
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from benchmarks.speed.floor import Shape, forward_flops
from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.models import compiled, packing
from rlhf_cli.models.batch import Prompts, Rollout
from rlhf_cli.ppo.graph_engine import GraphEngine
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.model import ModelReward

STOP, PAD = 1, 0

# Sizes of each model's config.json: Qwen2.5's, and SmolLM2's as a Llama
SHAPES: dict[str, dict[str, Any]] = {
    "135m": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    },
    "0.5b": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    },
    "1.5b": {
        "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
    },
    "tiny": {
        "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    },
}  # fmt: skip
ENGINES = {"hf": HFEngine, "graph": GraphEngine}
PROFILED_TOKENS = 16  # of a rollout: its token steps are alike

# Part of a card's name -> dense bf16 TFLOP/s of the vendor's data sheet; the first match counts
VENDOR = {"B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "L4": 121}


@dataclass(frozen=True)
class Case:
    """A model and the batch of one update."""

    shape: str
    rows: int
    micro_batch_rows: int
    response: int = 256  # tokens of each answer
    prompt: int = 128  # tokens of the longest prompt; the shortest has a quarter of it
    timed: int = 2  # measured updates, after one to warm up


CASES = {
    "135m-128": Case("135m", 128, 128, response=160),
    "0.5b-128": Case("0.5b", 128, 64),
    "0.5b-512": Case("0.5b", 512, 64),
    "1.5b-128": Case("1.5b", 128, 32),
}
TINY = {"tiny-8": Case("tiny", 8, 4, response=12, prompt=8, timed=1)}


class Bench:
    """The device, and the rows measured so far."""

    def __init__(self, device: torch.device, path: Path | None, *, compiles: bool = False, engines: Sequence[str] = ()):
        self.device, self.path, self.compiles, self.engines = device, path, compiles, engines or list(ENGINES)
        self.cuda = device.type == "cuda"
        self.rows: list[dict[str, Any]] = []
        self.card = torch.cuda.get_device_name(device) if self.cuda else "CPU"
        self.flops_per_s = self.bytes_per_s = 0.0
        self.about = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "card": self.card,
            "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
            "cuda": torch.version.cuda,
        }

    def row(self, part: str, what: str, **numbers: Any) -> None:
        """Add and print a row, and write the file."""
        self.rows.append({"part": part, "what": what, **numbers})
        shown = "  ".join(f"{name} {value}" for name, value in numbers.items() if value is not None)
        print(f"{part:8} {what:28} {shown}", flush=True)
        if self.path:
            self.path.write_text(json.dumps({**self.about, "rows": self.rows}, indent=1) + "\n", encoding="utf-8")

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], Any]) -> float:
        """Return the wall time of `work` until the device is idle."""
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
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

    def mfu(self, flops: float, seconds: float) -> str | None:
        return f"{flops / seconds / self.flops_per_s:.1%}" if self.flops_per_s else None


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def config(shape: str, **more: Any) -> Any:
    sizes = dict(SHAPES[shape])
    ids = {"pad_token_id": PAD, "eos_token_id": STOP, "bos_token_id": None}
    return AutoConfig.for_model(
        sizes.pop("model_type"), tie_word_embeddings=True, max_position_embeddings=8192, **ids, **sizes, **more
    )


def model(bench: Bench, shape: str, *, scorer: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model with random weights on the device."""
    torch.manual_seed(0)
    kind, more = (AutoModelForSequenceClassification, {"num_labels": 1}) if scorer else (AutoModelForCausalLM, {})
    with torch.device(bench.device):
        return kind.from_config(config(shape, **more), dtype=dtype).eval()


def card(bench: Bench) -> None:
    """Measure the matmul rate and the copy bandwidth, and note the rates that the other rows are held against."""
    size, dtype, repeats = (8192, torch.bfloat16, 20) if bench.cuda else (64, torch.float32, 2)
    left, right = (torch.randn(size, size, device=bench.device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        left @ right
    seconds = bench.seconds(lambda: [left @ right for _ in range(repeats)]) / repeats
    name = next((name for name in VENDOR if name in bench.card), None)
    source = torch.empty(size * size * 16, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    target.copy_(source)
    copied = bench.seconds(lambda: [target.copy_(source) for _ in range(repeats)]) / repeats
    bench.flops_per_s = VENDOR[name] * 1e12 if name else 0.0
    bench.bytes_per_s = 2 * source.numel() / copied
    measured = round(2 * size**3 / seconds / 1e12, 3)
    copy_gb_s = round(bench.bytes_per_s / 1e9)
    bench.row("card", bench.card, matmul_tflops=measured, vendor_tflops=name and VENDOR[name], copy_gb_s=copy_gb_s)


def prompts(case: Case) -> Prompts:
    """Return random prompts with uniform lengths from a quarter of the limit to the limit."""
    draw = random.Random(0)
    lengths = [draw.randint(max(1, case.prompt // 4), case.prompt) for _ in range(case.rows)]
    words = SHAPES[case.shape]["vocab_size"]
    batch = Prompts.from_lists([[draw.randrange(2, words) for _ in range(length)] for length in lengths])
    return replace(batch, seeds=tuple(range(case.rows)), response_length=case.response)


def kernels(bench: Bench, what: str, work: Callable[[], Any]) -> None:
    """Add a row with the ten longest kernels of `work`, how many there were, and when none ran."""
    activity = ProfilerActivity.CUDA if bench.cuda else ProfilerActivity.CPU
    bench.synchronize()
    with torch.profiler.profile(activities=[activity]) as profiler:
        seconds = bench.seconds(work)
    kind = DeviceType.CUDA if bench.cuda else DeviceType.CPU
    events = [each for each in profiler.profiler.kineto_results.events() if each.device_type() == kind]
    spans = sorted((each.start_ns(), each.end_ns(), each.name()) for each in events)
    busy, end, longest = 0.0, 0.0, defaultdict[str, list[float]](list)
    for start, stop, name in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
        longest[name].append(stop - start)
    order = sorted(longest.items(), key=lambda item: -sum(item[1]))[:10]
    bench.row(
        "kernels",
        what,
        ms=round(1e3 * seconds, 1),
        idle=f"{max(0.0, 1 - busy / 1e9 / seconds):.0%}",
        launches=len(spans),
        longest={name[:90]: f"{sum(times) / 1e6:.1f} ms, {len(times)} x" for name, times in order},
    )


def rollouts(bench: Bench, name: str, case: Case, policy: Any) -> Rollout:
    """Measure a token step of each engine, and return the first rollout."""
    shape, batch = Shape.of(policy.config), prompts(case)
    weights = sum(weight.numel() for weight in policy.parameters())
    context = float(batch.mask.sum(1).float().mean()) + case.response / 2
    cache = case.rows * context * shape.layers * 2 * shape.kv_heads * shape.head_size
    floor_ms = 1e3 * 2 * (weights + cache) / bench.bytes_per_s  # bfloat16
    parts: list[Rollout] = []
    for kind in bench.engines:
        engine_type, what = ENGINES[kind], f"{name} {kind}"
        with bench.attempt("rollout", what):
            engine = engine_type(policy, None, PAD, bf16=bench.cuda, compiles=bench.compiles)
            engine.update_weights(0, policy)
            engine.generate(replace(batch, response_length=min(8, case.response)))
            engine.release_memory()
            seconds = bench.seconds(lambda: parts.append(engine.generate(batch)))  # noqa: B023
            step = 1e3 * seconds / case.response
            replay = 1e3 * replay_seconds(bench, engine) if kind == "graph" else None
            bench.row(
                "rollout", what, seconds=round(seconds, 3), step_ms=round(step, 2), floor_ms=round(floor_ms, 2),
                replay_ms=replay and round(replay, 2), over_floor=round((replay or step) / floor_ms, 1),
                tokens_per_s=round(case.rows * case.response / seconds),
                peak_gib=bench.gib(torch.cuda.max_memory_allocated),
            )  # fmt: skip
            short = replace(batch, response_length=min(PROFILED_TOKENS, case.response))
            engine.generate(short)  # captures the step
            kernels(bench, f"{what} rollout, {short.response_length} tokens", lambda: engine.generate(short))  # noqa: B023
    return replace(parts[0], logprobs=None)  # the updates draw no new answers from the weights that they change


def replay_seconds(bench: Bench, engine: GraphEngine) -> float:
    """Return the seconds of a step of the last rollout's shape, whose cache is half full."""
    step = list(engine.steps.values())[-1]
    middle = step.mask.shape[3] // 2
    step.column.fill_(middle)
    step.number.zero_()
    for layer in step.cache.layers:
        layer.cumulative_length.fill_(middle)
    repeats = middle // 2
    with torch.no_grad():
        return bench.seconds(lambda: [step() for _ in range(repeats)]) / repeats


def updates(bench: Bench, name: str, case: Case) -> None:
    """Measure a case: rollouts, then reward, judge and update of `timed` updates, and the kernels of one more."""
    policy = model(bench, case.shape)
    packing.enable([policy])  # as a stage does
    rollout = rollouts(bench, name, case, policy)
    ref, value = copy.deepcopy(policy), model(bench, case.shape, scorer=True)
    reward = ModelReward(model(bench, case.shape, scorer=True).requires_grad_(False), bf16=bench.cuda)
    settings = PPOSettings(
        total_episodes=case.rows * (case.timed + 2), per_device_train_batch_size=case.micro_batch_rows,
        gradient_accumulation_steps=case.rows // case.micro_batch_rows, num_ppo_epochs=1,
        response_length=case.response, temperature=1.0, bf16=bench.cuda,
    )  # fmt: skip
    engine = HFEngine(policy, None, PAD, bf16=bench.cuda)
    trainer = PPOTrainer(policy, ref, value, {"reward": reward}, engine, settings)
    for each in (policy, ref, value, reward.model) if bench.compiles else ():
        compiled.enable(each)
    stats: list[dict[str, float]] = []
    experience, scores = None, torch.zeros(case.rows)

    def score() -> None:
        nonlocal scores
        scores = reward(rollout)

    def judge() -> None:
        nonlocal experience
        experience = trainer.make_experience(rollout, scores)

    phases = {"reward": score, "judge": judge, "update": lambda: stats.append(trainer.update(experience))}
    shape, lengths = Shape.of(policy.config), rollout.lengths.tolist()
    body, with_head = forward_flops(shape, lengths), forward_flops(shape, lengths, case.rows * case.response)
    flops = {"reward": body, "judge": body + 2 * with_head, "update": 3 * (body + with_head)}
    seconds: dict[str, float] = {}
    peaks: dict[str, float | None] = {}
    first: dict[str, float] = {}  # seconds with all compilation
    for number in range(case.timed + 1):
        for phase, work in phases.items():
            bench.clean()
            took = bench.seconds(work)
            peaks[phase] = bench.gib(torch.cuda.max_memory_allocated)
            first.setdefault(phase, took)
            if number:
                seconds[phase] = min(took, seconds.get(phase, took))
    for phase, took in seconds.items():
        bench.row(
            "update", f"{name} {phase}", seconds=round(took, 3), mfu=bench.mfu(flops[phase], took),
            tokens_per_s=round(sum(lengths) / took), peak_gib=peaks[phase], first_s=round(first[phase], 1),
        )  # fmt: skip
    total = sum(seconds.values())
    error = stats[0]["policy/first_ratio_error"]
    bench.row(
        "update", f"{name} without rollout", seconds=round(total, 3), mfu=bench.mfu(sum(flops.values()), total),
        first_ratio_error=error,
    )  # fmt: skip
    for phase, work in phases.items():
        kernels(bench, f"{name} {phase}", work)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the cases, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="default: all")
    parser.add_argument("--plain", action="store_true", help="nothing compiled; default on a GPU with Triton: compiled")
    parser.add_argument("--device", type=torch.device, help="default: the GPU if there is one, else the CPU")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and tiny sizes, for a smoke test")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    args = parser.parse_args(arguments)
    cases = TINY if args.tiny else {name: CASES[name] for name in args.cases}
    device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(device, args.json, compiles=compiled.is_supported(device) and not args.plain, engines=args.engines)
    bench.about["compiled"] = bench.compiles
    bench.about["cases"] = {name: asdict(case) for name, case in cases.items()}
    print(json.dumps(bench.about), flush=True)
    card(bench)
    for name, case in cases.items():
        with bench.attempt("update", name):
            updates(bench, name, case)
    return int(any("failed" in row for row in bench.rows))


if __name__ == "__main__":
    transformers_logging.set_verbosity_error()
    sys.exit(main())
