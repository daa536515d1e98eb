"""What PPO costs on one GPU: rollout tokens a second, update MFU, peak memory. Random weights, no files, no network.

    python -m benchmarks.gpu --json gpu.json                      # all of it, some five minutes on an H200
    python -m benchmarks.gpu --only rollout --models 0.5b         # one part, one model
    python -m benchmarks.gpu --tiny                               # the same on the CPU in seconds: does it run?

Needs torch, transformers and pydantic; LoRA also peft. Each row is printed, and the JSON file written, as soon as it is
known; what fails or runs out of memory becomes a row that says so, the others still run, and the exit code is 1.

card      bf16 matmul rate and copy bandwidth, beside the vendor's figure
rollout   tokens/s of each engine beside transformers' `generate` and its continuous batching, `generate_batch`: all
          rows to the limit ("full"), or with a stop token whose logit is raised so that lengths are geometric
          ("ragged"). Temperature 1, no top-k, no top-p
update    PPO's judge and update on given responses: seconds, MFU, torch's max_memory_allocated; with two models or a
          value head, gradient checkpointing, LoRA

MFU: multiply-adds x 2 that the real tokens need (the head on response tokens only; backward twice the forward, once
where weights are frozen; nothing for padding or recomputation), over seconds, over the card's bf16 peak.
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.generation import ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging as transformers_logging

from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.models import forward
from rlhf_cli.models.batch import Prompts, Rollout
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer

STOP, PAD = 1, 0
Row = dict[str, Any]

# Qwen2.5's config.json of each size
MODELS = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
}

# Dense bf16 tensor rates from the vendors' data sheets, TFLOP/s; the first name that the card's name holds
VENDOR = {"B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "L4": 121}


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    models: tuple[str, ...] = ("0.5b", "1.5b")
    vocabulary: int = 151936
    rollout_rows: tuple[int, ...] = (64, 512)
    update_rows: int = 64
    micro_batch_rows: int = 8
    prompt: int = 128  # longest prompt; lengths are even from a quarter of it
    response: int = 192  # limit of a rollout
    update_response: int = 512  # limit of a response in an update
    matmul: int = 8192
    timed: int = 2  # updates, after one that is not


TINY = Sizes(("tiny",), 256, (8,), 8, 4, 8, 12, 12, 64, 1)


class Bench:
    """The device, the sizes, and the rows found so far."""

    def __init__(self, sizes: Sizes, device: torch.device, path: Path | None):
        self.sizes, self.device, self.path = sizes, device, path
        self.cuda = device.type == "cuda"
        self.rows: list[Row] = []
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
        """Print a row, keep it, and write the file."""
        self.rows.append({"part": part, "what": what, **numbers})
        shown = "  ".join(f"{name} {value}" for name, value in numbers.items())
        print(f"{part:8} {what:46} {shown}", flush=True)
        if self.path:
            self.path.write_text(json.dumps({**self.about, "rows": self.rows}, indent=1) + "\n", encoding="utf-8")

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], Any]) -> float:
        """Wall time of `work`, the device's part of it included."""
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start

    @contextmanager
    def attempt(self, part: str, what: str) -> Iterator[None]:
        """Within, an error makes a row; before and after, what nothing holds any more is given back."""
        self.clean()
        try:
            yield
        except Exception as error:  # a machine that is lent for minutes: the other parts must still be measured
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

    def peak_gib(self) -> float | None:
        """max_memory_allocated since `clean`; none on the CPU, where torch does not count."""
        return round(torch.cuda.max_memory_allocated(self.device) / 2**30, 2) if self.cuda else None

    def allocated_gib(self) -> float | None:
        """Memory in use now; none on the CPU."""
        return round(torch.cuda.memory_allocated(self.device) / 2**30, 2) if self.cuda else None


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# Models


def config(name: str, vocabulary: int, **more: Any) -> Any:
    shape = {"num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 32768}
    return AutoConfig.for_model(
        "qwen2", vocab_size=vocabulary, pad_token_id=PAD, eos_token_id=STOP, **shape, **MODELS[name], **more
    )


def model(bench: Bench, name: str, *, scorer: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """A model of random weights, made on the device."""
    torch.manual_seed(0)
    kind, more = (AutoModelForSequenceClassification, {"num_labels": 1}) if scorer else (AutoModelForCausalLM, {})
    with torch.device(bench.device):
        made = kind.from_config(config(name, bench.sizes.vocabulary, **more))
    return made.to(dtype).eval()


def forward_flops(shape: Any, lengths: Sequence[int], head_tokens: int = 0) -> float:
    """FLOPs of one causal forward pass over rows of these lengths, the head on `head_tokens` of their tokens."""
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    width = hidden // heads
    projections = 2 * hidden * heads * width + 2 * hidden * shape.num_key_value_heads * width
    layer = projections + 3 * hidden * shape.intermediate_size
    tokens, pairs = sum(lengths), sum(n * (n + 1) // 2 for n in lengths)
    body = shape.num_hidden_layers * (2.0 * layer * tokens + 4.0 * heads * width * pairs)
    return body + 2.0 * hidden * shape.vocab_size * head_tokens


# Parts


def card(bench: Bench) -> None:
    """The rates that the others are held against."""
    size = bench.sizes.matmul
    dtype = torch.bfloat16 if bench.cuda else torch.float32
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
    bench.row(
        "card",
        bench.card,
        matmul_tflops=round(bench.peaks["measured"] / 1e12, 3),
        vendor_tflops=VENDOR[name] if name else None,
        copy_gb_s=round(2 * source.numel() / copied / 1e9),
    )


def queries(sizes: Sizes, rows: int) -> list[list[int]]:
    """Random prompts, lengths even between a quarter of the longest and it."""
    draw = random.Random(0)
    lengths = [draw.randint(max(1, sizes.prompt // 4), sizes.prompt) for _ in range(rows)]
    return [[draw.randrange(2, sizes.vocabulary) for _ in range(length)] for length in lengths]


def prompts(bench: Bench, rows: int) -> Prompts:
    made = Prompts.from_lists(queries(bench.sizes, rows))
    made = replace(made, ids=made.ids.to(bench.device), mask=made.mask.to(bench.device))
    return replace(made, seeds=tuple(range(rows)), response_length=bench.sizes.response)


@contextmanager
def stopping(policy: Any, mean_length: float | None) -> Iterator[int | None]:
    """Within, each token is the stop token with chance 1 / mean_length, whatever the engine; none: never.

    The random weights' logits have a spread of about initializer_range * sqrt(hidden), which the raise allows for.
    """
    if mean_length is None:
        yield None
        return
    shape = policy.config
    variance = shape.initializer_range**2 * shape.hidden_size
    chance = 1 / mean_length
    raised = math.log(shape.vocab_size * chance / (1 - chance)) + variance / 2

    def raise_stop(_: nn.Module, __: Any, logits: Tensor) -> None:
        logits[..., STOP] = raised

    handle = policy.get_output_embeddings().register_forward_hook(raise_stop)
    try:
        yield STOP
    finally:
        handle.remove()


def sampling(asked: Prompts, stop: int | None) -> GenerationConfig:
    """The engines' own way of drawing."""
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=asked.response_length,
        eos_token_id=-1 if stop is None else stop,
        pad_token_id=PAD,
    )


def generate(policy: Any, stop: int | None, bf16: bool, asked: Prompts) -> list[int]:
    """Lengths, through the first stop token, of the responses that transformers' own `generate` draws."""
    with torch.no_grad(), torch.autocast(policy.device.type, dtype=torch.bfloat16, enabled=bf16):
        found = policy.generate(asked.ids, attention_mask=asked.mask.long(), generation_config=sampling(asked, stop))
    return through_stop(found[:, asked.ids.shape[1] :], stop)


def through_stop(responses: Tensor, stop: int | None) -> list[int]:
    """Tokens of each row through its first stop token, or all of them."""
    stopped = (responses == stop).int() if stop is not None else torch.zeros_like(responses)
    return (stopped.cumsum(1) - stopped == 0).sum(1).tolist()


def generate_batch(policy: Any, stop: int | None, bf16: bool, asked: Prompts) -> list[int]:
    """The same of transformers' continuous batching. Autocast does not reach its thread: `bf16` changes nothing."""
    lists = [ids[mask].tolist() for ids, mask in zip(asked.ids, asked.mask, strict=True)]
    rows, longest = len(lists), asked.ids.shape[1] + asked.response_length
    page = 256 if longest > 64 else 16  # flash attention wants 256
    known = {field.name for field in fields(ContinuousBatchingConfig)}
    how = ContinuousBatchingConfig(  # room for all rows at once; else it would take half of the memory or more
        **{"page_size" if "page_size" in known else "block_size": page},  # its name in transformers 5.17
        num_blocks=rows * (math.ceil(longest / page) + 1),
        max_batch_tokens=max(rows, min(4096, sum(map(len, lists)))),
        seed=0,
    )
    found = policy.generate_batch(lists, generation_config=sampling(asked, stop), continuous_batching_config=how)
    lengths = [len(output.generated_tokens) for output in found.values()]
    if len(lengths) < len(asked):  # it logs its errors and gives what it has
        raise RuntimeError(f"generate_batch gave {len(lengths)} of {len(asked)} responses")
    return lengths


def hf(policy: Any, stop: int | None, bf16: bool, asked: Prompts) -> list[int]:
    return HFEngine(policy, stop, PAD, bf16=bf16).generate(asked).response_lengths.tolist()


OTHERS = {"generate": generate, "generate_batch": generate_batch}
ENGINES = {"hf": hf}


def rollouts(bench: Bench, name: str) -> None:
    """Each engine on float32 weights under autocast, as a run has them; transformers' own also on bfloat16 weights."""
    plans = [(engine, torch.bfloat16 if bench.cuda else torch.float32) for engine in OTHERS]
    plans += [(engine, torch.float32) for engine in (("generate", *ENGINES) if bench.cuda else ENGINES)]
    policies: dict[torch.dtype, Any] = {}
    best: dict[tuple[int, str], float] = {}  # the quicker `generate`
    for rows in bench.sizes.rollout_rows:
        for shape, mean_length in (("full", None), ("ragged", bench.sizes.response / 4)):
            for engine, dtype in plans:
                what = f"{name} {engine}, {rows} rows, {shape}, {str(dtype).removeprefix('torch.')} weights"
                with bench.attempt("rollout", what):
                    if dtype not in policies:
                        policies[dtype] = model(bench, name, dtype=dtype)
                    lengths, seconds, memory = _timed_rollout(bench, engine, policies[dtype], rows, mean_length)
                    rate = sum(lengths) / seconds
                    if engine == "generate":
                        best[rows, shape] = max(best.get((rows, shape), 0.0), rate)
                    bench.row(
                        "rollout",
                        what,
                        tokens_per_s=round(rate),
                        over_generate=round(rate / best[rows, shape], 2) if (rows, shape) in best else None,
                        mean_length=round(sum(lengths) / rows, 1),
                        ms_per_step=round(1e3 * seconds / max(lengths), 2),
                        gib_above_weights=memory,
                    )


def _timed_rollout(
    bench: Bench, engine: str, policy: Any, rows: int, mean_length: float | None
) -> tuple[list[int], float, float | None]:
    """Response lengths, seconds and memory of one rollout, after a short one for what is set up only once."""
    write, asked, before = (OTHERS | ENGINES)[engine], prompts(bench, rows), bench.allocated_gib()
    found: list[list[int]] = []
    with stopping(policy, mean_length) as stop:
        write(policy, stop, bench.cuda, replace(asked, response_length=min(4, asked.response_length)))
        seconds = bench.seconds(lambda: found.append(write(policy, stop, bench.cuda, asked)))
    peak = bench.peak_gib()
    return found[0], seconds, round(peak - before, 2) if peak is not None and before is not None else None


VARIANTS: dict[str, dict[str, bool]] = {
    "policy and value model": {},
    "policy and value model, gradient checkpointing": {"checkpointing": True},
    "value head": {"head": True},
    "value head, LoRA": {"head": True, "lora": True},
}


def updates(bench: Bench, name: str) -> None:
    """Judge and update of every variant: seconds, MFU and memory."""
    for variant, how in VARIANTS.items():
        what = f"{name} {variant}"
        if how.get("lora") and version("peft") is None:
            bench.row("update", what, skipped="peft is not installed")
            continue
        with bench.attempt("update", what):
            _timed_update(bench, name, what, **how)


def _timed_update(
    bench: Bench, name: str, what: str, *, checkpointing: bool = False, head: bool = False, lora: bool = False
) -> None:
    sizes = bench.sizes
    policy = model(bench, name)
    ref = copy.deepcopy(policy)
    if lora:
        policy = with_lora(policy)
    value = forward.ValueHead(policy) if head else model(bench, name, scorer=True)
    settings = PPOSettings(
        total_episodes=sizes.update_rows * (sizes.timed + 1),
        per_device_train_batch_size=sizes.micro_batch_rows,
        gradient_accumulation_steps=sizes.update_rows // sizes.micro_batch_rows,
        num_ppo_epochs=1,
        response_length=sizes.update_response,
        temperature=1.0,
        bf16=bench.cuda,
        gradient_checkpointing=checkpointing,
    )
    trainer = PPOTrainer(policy, ref, value, {}, HFEngine(policy, STOP, PAD, bf16=bench.cuda), settings)
    weights = bench.allocated_gib()
    judging, learning, judged = [], [], []
    rollout = responses(bench)
    scores = torch.linspace(-1, 1, sizes.update_rows, device=bench.device)
    for _ in range(sizes.timed + 1):
        judging.append(bench.seconds(lambda: judged.append(trainer.make_experience(rollout, scores))))
        learning.append(bench.seconds(lambda: trainer.update(judged.pop())))
    judge_s, update_s = min(judging[1:]), min(learning[1:])
    shape, lengths = config(name, sizes.vocabulary), rollout.lengths.tolist()
    with_head = forward_flops(shape, lengths, int(rollout.response_mask.sum()))
    of_value = 0.0 if head else forward_flops(shape, lengths)
    flops = (2 if lora else 3) * with_head + 3 * of_value
    mfu = {f"mfu_of_{peak}": f"{flops / update_s / rate:.1%}" for peak, rate in bench.peaks.items()}
    bench.row(
        "update",
        what,
        update_s=round(update_s, 3),
        judge_s=round(judge_s, 3),
        tokens_per_s=round(sum(lengths) / update_s),
        tflops=round(flops / update_s / 1e12, 3),
        **mfu,
        weights_gib=weights,
        peak_gib=bench.peak_gib(),
    )


def responses(bench: Bench) -> Rollout:
    """Random responses, lengths even between a token and the limit."""
    sizes, draw = bench.sizes, random.Random(1)
    lengths = [draw.randint(1, sizes.update_response) for _ in range(sizes.update_rows)]
    written = [[draw.randrange(2, sizes.vocabulary) for _ in range(length)] for length in lengths]
    return Rollout.from_lists(queries(sizes, sizes.update_rows), written, stop_token_id=STOP).to(bench.device)


def with_lora(policy: Any) -> Any:
    """The policy with adapters of rank 16 on every linear layer; nothing else learns."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(policy, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))


PARTS: dict[str, Callable[[Bench, str], None]] = {"rollout": rollouts, "update": updates}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts (the card always)")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="these models (default: both)")
    parser.add_argument("--device", type=torch.device, help="default: the GPU, or the CPU where there is none")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and sizes, to see that it runs")
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
