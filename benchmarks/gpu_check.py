"""Is everything right on a GPU? Random weights and tiny chains; torch, transformers, peft, bitsandbytes, no network.

    make gpu                                                   # this, benchmarks.gpu and benchmarks.chain
    python -m benchmarks.gpu_check --json gpu_check.json       # this alone
    python -m benchmarks.gpu_check --tiny                      # tiny sizes, on a CPU too: does it run?

Each check is a row with its numbers; a failed one becomes a row, the others still run, and the exit code is 1.

update   two updates of each kind: first ratios, no KL before the first step, the state dict read back
number   tokens and log-probs beside those of the CPU; padding; the head's product and the cache in bfloat16; 4-bit base
memory   gradients freed after an update, an evaluation's KL at its default rows, expandable segments
time     noise plain and compiled, heads of aligned and odd widths, reward model in float32 and bfloat16
chain    `rlhf init` and `rlhf run` of the ci and demo presets, stopped by SIGTERM in PPO and resumed
"""

import argparse
import copy
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from benchmarks.gpu import PAD, STOP, Bench
from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.config.sections import LoRA
from rlhf_cli.jsonl import read_jsonl
from rlhf_cli.models import compiled, forward, lora, packing
from rlhf_cli.models.batch import Prompts, Rollout
from rlhf_cli.ppo import losses
from rlhf_cli.ppo.graph_engine import GraphEngine
from rlhf_cli.ppo.rollout import HFEngine, _CachedDecoder, gumbel_sample, row_keys, token_counters
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.model import ModelReward
from rlhf_cli.stages.eval.policy_evaluator import sequence_kl

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 301, "initializer_range": 0.2,
}  # fmt: skip
# Llama-3.2-1B's config.json.
BIG = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"bf16": False},
    "bfloat16": {"bf16": True},
    "bfloat16, compiled": {"bf16": True, "compiled": True},
    "bfloat16, compiled, gradient checkpointing": {"bf16": True, "compiled": True, "gradient_checkpointing": True},
    "bfloat16, padded": {"bf16": True, "packing": False},
    "bfloat16, gradient checkpointing": {"bf16": True, "gradient_checkpointing": True},
    "bfloat16, head on the policy": {"bf16": True, "head": True},
    "bfloat16, LoRA": {"bf16": True, "adapters": "lora"},
    "bfloat16, LoRA on a 4-bit base": {"bf16": True, "adapters": "qlora"},
    "bfloat16, offload": {"bf16": True, "offload": True},
    "bfloat16, exact KL in the loss": {"bf16": True, "kl_in": "loss", "kl_estimator": "full"},
    "bfloat16, all logits at once": {"bf16": True, "logits_at_a_time": "all"},
    "bfloat16, 8-bit AdamW": {"bf16": True, "optim": "adamw_8bit"},
}
# The first ratio is that of the same model in another batch: rounding of the dtype.
RATIO_LIMITS = {False: 1e-4, True: 0.1}
QUERIES = [[5, 6, 7], [8, 9], [3] * 7, [4, 4], [11, 12], [13], [14, 15, 16, 17], [18, 2]]


class CheckFailed(Exception):
    """A number is out of its bounds."""


def require(holds: bool, text: str) -> None:
    if not holds:
        raise CheckFailed(text)


def model(bench: Bench, shape: dict[str, Any], *, scorer: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """Return a Llama of a shape with random weights on the device."""
    torch.manual_seed(0)
    kind, more = (AutoModelForSequenceClassification, {"num_labels": 1}) if scorer else (AutoModelForCausalLM, {})
    with torch.device(bench.device):
        return kind.from_config(AutoConfig.for_model("llama", **shape, **more, **IDS), dtype=dtype).eval()


IDS = {"pad_token_id": PAD, "eos_token_id": STOP, "bos_token_id": None, "max_position_embeddings": 4096}


def prompts(length: int) -> Prompts:
    seeds = tuple(range(len(QUERIES)))
    return replace(Prompts.from_lists(QUERIES), seeds=seeds, response_length=length)


def random_rollout(bench: Bench, rows: int, response: int, vocabulary: int) -> Rollout:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, vocabulary, (rows, response), generator=draw).tolist()
    return Rollout.from_lists([[5] * 16] * rows, tokens).to(bench.device)


# update


def update(bench: Bench, kind: str) -> dict[str, Any]:
    """Make two updates of a kind; the state dict must be read back."""
    options = dict(KINDS[kind])
    adapters, head, compiles = (options.pop(name, None) for name in ("adapters", "head", "compiled"))
    policy = model(bench, SMALL)
    ref = copy.deepcopy(policy)
    if adapters == "qlora":
        for each in (policy, ref):
            lora.quantize(each, bench.device, bf16=True)
    if adapters:
        base = {"vocab_size": SMALL["vocab_size"], "base": "", "revision": None}
        peft_model = lora.add_adapters(policy, LoRA(kind=adapters, r=4), **base, device=bench.device, bf16=True)
        policy = lora.unwrap(peft_model)
    settings = PPOSettings(
        total_episodes=64, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_ppo_epochs=2,
        response_length=12, temperature=0.7, **options,
    )  # fmt: skip
    scorer = model(bench, SMALL, scorer=True).requires_grad_(False)
    trainer = PPOTrainer(
        policy, ref, forward.ValueHead(policy) if head else model(bench, SMALL, scorer=True),
        {"reward": ModelReward(scorer, 4, offloaded=settings.offload)},
        HFEngine(policy, STOP, PAD, settings.temperature, bf16=settings.bf16), settings,
    )  # fmt: skip
    for each in (policy, ref, trainer.value, scorer) if compiles and bench.cuda else ():  # a minute on a CPU
        compiled.enable(each)
    stats = [trainer.step(Prompts.from_lists(QUERIES)) for _ in range(2)]
    trainer.load_state_dict(copy.deepcopy(trainer.state_dict()))
    error, kl = max(each["policy/first_ratio_error"] for each in stats), abs(stats[0]["objective/kl"])
    limit = RATIO_LIMITS[bool(settings.bf16)]
    require(error <= limit, f"the first ratio differs from 1 by {error:.2g}, limit {limit}")
    require(kl <= limit * 12, f"the KL before the first step is {kl:.2g}")
    return {
        "first_ratio_error": f"{error:.1e}",
        "kl_before": f"{kl:.1e}",
        "reward": round(stats[1]["objective/scores"], 3),
    }


# number


def same_tokens_as_on_the_cpu(bench: Bench) -> dict[str, Any]:
    """Sampling in float32 gives the CPU's tokens, but for near-ties."""
    policy = model(bench, SMALL)
    here = HFEngine(policy, None, PAD, bf16=False).generate(prompts(12)).ids.cpu()
    there = HFEngine(copy.deepcopy(policy).cpu(), None, PAD, bf16=False).generate(prompts(12)).ids
    same = int((here == there).all(1).sum())
    require(same >= len(QUERIES) - 1, f"{same} of {len(QUERIES)} rows are the CPU's")
    return {"same_rows": same, "of": len(QUERIES)}


def left_padding(bench: Bench) -> dict[str, Any]:
    """Rows behind left padding have finite logits, in both dtypes."""
    batch = prompts(4)
    for dtype in (torch.float32, torch.bfloat16):
        engine = HFEngine(model(bench, SMALL, dtype=dtype), None, PAD, bf16=False)
        decoder = engine._prefill(batch)
        require(bool(decoder.logits.isfinite().all()), f"logits in {dtype} are not finite")
    return {}


def graph_engine(bench: Bench) -> dict[str, Any]:
    """Captured steps give hf's tokens in float32, and in bfloat16 log-probs near those of a pass over whole rows."""
    policy, batch = model(bench, SMALL), prompts(40)
    plain, captured = (kind(policy, None, PAD, bf16=False).generate(batch) for kind in (HFEngine, GraphEngine))
    same = int((plain.ids == captured.ids).all(1).sum())
    require(same >= len(QUERIES) - 1, f"{same} of {len(QUERIES)} rows are hf's")
    gap = float((plain.logprobs - captured.logprobs)[(plain.ids == captured.ids).all(1)].abs().max())
    require(gap < RATIO_LIMITS[False], f"log-probs differ by {gap}")
    for weight in policy.parameters():
        weight.requires_grad_(True)
    engine = GraphEngine(policy, None, PAD, bf16=True)
    engine.update_weights(0, policy)
    rollout = engine.generate(batch)
    micro = rollout.micro_batch(torch.arange(len(rollout), device=rollout.ids.device))
    with torch.no_grad(), torch.autocast(bench.device.type, dtype=torch.bfloat16):
        logits = forward.response_logits(policy, micro)
    exact = losses.token_logprobs(logits, micro.response_ids, 1.0)
    gap_bf16 = float((rollout.logprobs[micro.response_index] - exact).abs().mean())
    require(gap_bf16 < RATIO_LIMITS[True], f"log-probs in bfloat16 differ by {gap_bf16} on average")
    return {"same_rows": same, "of": len(QUERIES), "largest_gap": gap, "mean_gap_bf16": gap_bf16}


def engine_speed(bench: Bench, tiny: bool) -> dict[str, Any]:
    """Milliseconds of a token step of 64 and 256 rows, by hf and by captured steps."""
    shape, length = (SMALL, 8) if tiny else (BIG, 64)
    policy, times = model(bench, shape), {}
    for rows in (8,) if tiny else (64, 256):
        batch = replace(Prompts.from_lists([[5] * 128] * rows), seeds=tuple(range(rows)), response_length=length)
        for kind in (HFEngine, GraphEngine):
            engine = kind(policy, None, PAD, bf16=True)
            engine.update_weights(0, policy)
            took = milliseconds(bench, partial(engine.generate, batch))
            times[f"{kind.name}_{rows}_rows_ms_a_token"] = round(took / length, 2)
            engine.release_memory()
    return times


def variable_length_kernel(bench: Bench, tiny: bool) -> dict[str, Any]:
    """States and gradients of packed rows by torch's kernel are about as near to float32's as those of padded rows."""
    shape, rows, response = (SMALL, 4, 8) if tiny else ({**BIG, "num_hidden_layers": 2}, 16, 200)
    policy = model(bench, shape).requires_grad_(True)
    require(packing.enable([policy]), "the model is not packed")
    rollout = random_rollout(bench, rows, response, shape["vocab_size"])
    micro = rollout.micro_batch(torch.arange(rows, device=bench.device))
    exact = states_and_gradient(bench, policy, micro, bf16=False)
    kernel = states_and_gradient(bench, policy, micro, bf16=True)
    taken, packing._takes_varlen_kernel = packing._takes_varlen_kernel, lambda *_: False
    padded = states_and_gradient(bench, policy, micro, bf16=True)
    packing._takes_varlen_kernel = taken
    errors = {}
    for part, *each in zip(("states", "gradient"), exact, kernel, padded, strict=True):
        norm = each[0].norm()
        of_kernel, of_padded = (float((part - each[0]).norm() / norm) for part in each[1:])
        require(
            of_kernel < 1.5 * of_padded + 1e-6, f"{part}: {of_kernel:.2g} from float32, padded rows {of_padded:.2g}"
        )
        errors |= {f"{part}_kernel": f"{of_kernel:.1e}", f"{part}_padded": f"{of_padded:.1e}"}
    return errors


def states_and_gradient(bench: Bench, policy: Any, micro: Any, *, bf16: bool) -> tuple[torch.Tensor, torch.Tensor]:
    policy.zero_grad()
    with torch.autocast(bench.device.type, dtype=torch.bfloat16, enabled=bf16):
        states = forward.response_hidden_states(policy, micro)
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(2)).to(bench.device)
    (states.float() * weights).sum().backward()
    first = policy.model.layers[0].self_attn.k_proj.weight
    return states.detach().float(), first.grad.clone()


def cache_dtype(bench: Bench) -> dict[str, Any]:
    """The key-value cache is bfloat16 under autocast."""
    policy, batch = model(bench, SMALL), prompts(4)
    engine = HFEngine(policy, None, PAD, bf16=True)
    with torch.no_grad():
        decoder = _CachedDecoder(policy, batch.ids.to(bench.device), batch.mask.to(bench.device), engine._autocast)
    dtypes = {layer.keys.dtype for layer in decoder.cache.layers} | {
        layer.values.dtype for layer in decoder.cache.layers
    }
    require(dtypes == {torch.bfloat16}, f"the cache holds {dtypes}")
    return {}


def head_product(bench: Bench, tiny: bool) -> dict[str, Any]:
    """Log-probs of a bfloat16 head have float32's precision of the sum, not bfloat16's of the logits."""
    shape = {**(SMALL if tiny else BIG), "num_hidden_layers": 1}
    policy, rollout = model(bench, shape, dtype=torch.bfloat16), random_rollout(bench, 4, 8, shape["vocab_size"])
    with torch.no_grad():
        hidden = policy.base_model(input_ids=rollout.ids).last_hidden_state
        weight = policy.get_output_embeddings().weight
        exact = losses.token_logprobs((hidden.double() @ weight.double().T), rollout.ids, 1.0)
        with forward.float32_logits(policy):
            logits = policy(input_ids=rollout.ids).logits
    require(logits.dtype == torch.float32, f"the logits are {logits.dtype}")
    error = float((losses.token_logprobs(logits, rollout.ids, 1.0) - exact).abs().max())
    require(error < 2e-3, f"log-probs are wrong by {error:.2g}")
    return {"max_error": f"{error:.1e}"}


def four_bit_base(bench: Bench) -> dict[str, Any]:
    """A 4-bit base computes what its dequantised weights compute."""
    import bitsandbytes

    plain = model(bench, SMALL)
    packed = copy.deepcopy(plain)
    lora.quantize(packed, bench.device, bf16=False)
    for name, module in packed.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            weight = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            plain.get_submodule(name).weight.data = weight.to(torch.float32)
    ids = prompts(1).ids[:, -2:].to(bench.device)
    with torch.no_grad():
        error = float((packed(input_ids=ids).logits - plain(input_ids=ids).logits).abs().max())
    require(error < 1e-2, f"logits differ by {error:.2g}")
    return {"max_error": f"{error:.1e}"}


# memory


def gradients_freed(bench: Bench) -> dict[str, Any]:
    """After an update the trainer holds no gradients."""
    policy = model(bench, SMALL)
    settings = PPOSettings(
        total_episodes=8, per_device_train_batch_size=4, gradient_accumulation_steps=2, response_length=4
    )
    reward = {"reward": ModelReward(model(bench, SMALL, scorer=True).requires_grad_(False), 4)}
    engine = HFEngine(policy, STOP, PAD, settings.temperature)
    trainer = PPOTrainer(policy, copy.deepcopy(policy), forward.ValueHead(policy), reward, engine, settings)
    trainer.step(Prompts.from_lists(QUERIES))
    require(all(weight.grad is None for weight in policy.parameters()), "a weight has a gradient")
    return {}


def evaluation_kl(bench: Bench, tiny: bool) -> dict[str, Any]:
    """The KL of an evaluation fits at its default of 64 rows of 512 tokens."""
    shape, rows, response = (SMALL, 4, 8) if tiny else (BIG, 64, 512)
    policy = model(bench, shape, dtype=torch.bfloat16)
    rollout = random_rollout(bench, rows, response, shape["vocab_size"])
    kl = sequence_kl(policy, policy, rollout, 0.7, max_rows=rows)
    require(max(map(abs, kl)) < 1e-3, "the KL of a model to itself is not 0")
    return {"peak_gib": bench.gib(torch.cuda.max_memory_allocated)}


def expandable_segments(bench: Bench) -> dict[str, Any]:
    """The allocator's expandable segments are on, unless the user set another configuration."""
    configured = os.environ.get("PYTORCH_ALLOC_CONF", "")
    require("expandable_segments" in configured or not bench.cuda, f"PYTORCH_ALLOC_CONF is {configured!r}")
    return {"PYTORCH_ALLOC_CONF": configured}


# time


def noise(bench: Bench, tiny: bool) -> dict[str, Any]:
    """Sampling one token of each row, plain and compiled."""
    rows, words = (4, 301) if tiny else (512, 128256)
    logits = torch.randn(rows, words, device=bench.device)
    keys, counters = row_keys(range(rows), bench.device), token_counters(words, bench.device)
    plain = partial(gumbel_sample, logits, keys, 3, counters)
    result = {"ms": milliseconds(bench, plain)}
    if bench.cuda:
        compiled = partial(torch.compile(gumbel_sample), logits, keys, 3, counters)
        require(bool((compiled() == plain()).float().mean() > 0.99), "compiled noise draws other tokens")
        result["compiled_ms"] = milliseconds(bench, compiled)
    return result


def head_widths(bench: Bench, tiny: bool) -> dict[str, Any]:
    """Forward and backward of heads whose number of rows is a multiple of 64, or not."""
    hidden, times = SMALL["hidden_size"] if tiny else BIG["hidden_size"], {}
    for words in (300, 301) if tiny else (128256, 128257, 128320):
        head = nn.Linear(hidden, words, bias=False, device=bench.device, dtype=torch.bfloat16)
        states = torch.randn(1024, hidden, device=bench.device, dtype=torch.bfloat16, requires_grad=True)
        times[f"{words}_ms"] = milliseconds(bench, lambda head=head, states=states: head(states).sum().backward())
    return times


def reward_model(bench: Bench, tiny: bool) -> dict[str, Any]:
    """Scoring 64 responses in float32, and in bfloat16 as a stage does on a GPU."""
    shape, rows, response = (SMALL, 4, 8) if tiny else (BIG, 64, 128)
    rollout = random_rollout(bench, rows, response, shape["vocab_size"])
    times: dict[str, Any] = {}
    for name, bf16 in (("float32", False), ("bfloat16", True)):
        scorer = ModelReward(model(bench, shape, scorer=True).requires_grad_(False), 16, bf16=bf16)
        times[f"{name}_ms"] = milliseconds(bench, partial(scorer, rollout))
    return times


def milliseconds(bench: Bench, work: Callable[[], Any]) -> float:
    """Return the least time of three calls after a warm-up."""
    work()
    return round(1e3 * min(bench.seconds(work) for _ in range(3)), 2)


# chain


def chain(bench: Bench, preset: str) -> dict[str, Any]:
    """Run a preset, send SIGTERM in its PPO stage, resume, and compare the updates with those of an unstopped run."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: Path(folder) / name for name in ("straight", "stopped")}
        for run in runs.values():
            rlhf("init", preset, run)
        start = time.perf_counter()
        rlhf("run", runs["straight"])
        seconds = time.perf_counter() - start
        stop_in_ppo(runs["stopped"])
        rlhf("run", runs["stopped"])
        rewards = [
            [row["objective/scores"] for _, row in read_jsonl(run / "ppo/metrics.jsonl")] for run in runs.values()
        ]
    require(len(rewards[0]) == len(rewards[1]), f"{len(rewards[1])} of {len(rewards[0])} updates after the resume")
    same = sum(one == other for one, other in zip(*rewards, strict=True))
    return {"seconds": round(seconds), "updates": len(rewards[0]), "same_updates": same}


def rlhf(*arguments: Any) -> None:
    result = subprocess.run(_command(*arguments), capture_output=True, text=True)
    require(result.returncode == 0, f"rlhf {arguments[0]}: {result.stderr.strip()[-300:]}")


def stop_in_ppo(run: Path) -> None:
    """Start a run, and send SIGTERM when PPO has written a checkpoint. It must exit with 143."""
    process = subprocess.Popen(_command("run", run), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(run.glob("ppo/state/step_*/state.json")):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    code = process.wait()
    require(code in (0, 143), f"rlhf run exited with {code} after SIGTERM")


def _command(*arguments: Any) -> list[str]:
    return [sys.executable, "-m", "rlhf_cli", *map(str, arguments)]


def checks(bench: Bench, tiny: bool) -> dict[str, dict[str, Callable[[], dict[str, Any]]]]:
    """Return the checks by part and name."""
    return {
        "update": {kind: partial(update, bench, kind) for kind in KINDS},
        "number": {
            "tokens as on the CPU": partial(same_tokens_as_on_the_cpu, bench),
            "left padding": partial(left_padding, bench),
            "graph engine": partial(graph_engine, bench),
            "variable-length kernel": partial(variable_length_kernel, bench, tiny),
            "cache in bfloat16": partial(cache_dtype, bench),
            "product of a bfloat16 head": partial(head_product, bench, tiny),
            "4-bit base": partial(four_bit_base, bench),
        },
        "memory": {
            "gradients freed": partial(gradients_freed, bench),
            "evaluation's KL": partial(evaluation_kl, bench, tiny),
            "expandable segments": partial(expandable_segments, bench),
        },
        "time": {
            "noise of a token": partial(noise, bench, tiny),
            "token step of the engines": partial(engine_speed, bench, tiny),
            "widths of the head": partial(head_widths, bench, tiny),
            "reward model": partial(reward_model, bench, tiny),
        },
        "chain": {preset: partial(chain, bench, preset) for preset in (("ci",) if tiny else ("ci", "demo"))},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="PART", help="update, number, memory, time, chain; default: all")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a smoke test on a CPU")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    args = parser.parse_args(arguments)
    bench = Bench(torch.device("cuda" if torch.cuda.is_available() else "cpu"), args.json)
    for part, of_part in checks(bench, args.tiny).items():
        for name, check in of_part.items() if not args.only or part in args.only else ():
            with bench.attempt(part, name):
                bench.row(part, name, **check())
    failed = [row["what"] for row in bench.rows if "failed" in row]
    print(f"{len(bench.rows)} checks, {len(failed)} failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
