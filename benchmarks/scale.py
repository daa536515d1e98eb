"""GPU memory and time of PPO by model size and mode, as estimated by `rlhf plan`: `python -m benchmarks.scale`.

`--chain` estimates all four stages with adapters. docs/results/memory.md has both tables. Nothing is loaded or trained:
the models are configs with the published sizes of known families, in a temporary folder. Prompts and responses have 512
tokens; 8 rows per GPU at a time, 64 per GPU and update, one epoch, bfloat16, gradient checkpointing. Time is that of
matrix products at 40 % of an H100's 989e12 operations per second: an assumption and a lower bound, in particular for
generation, which is bound by memory.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

# In the order of NAMES, from config.json of Qwen2.5 0.5B and 14B, Llama 3.2 1B and 3B, Llama 3.1 8B and 70B.
MODELS = {
    "0.5 B": (896, 4864, 24, 14, 2, 151936, True),
    "1 B": (2048, 8192, 16, 32, 8, 128256, True),
    "3 B": (3072, 8192, 28, 24, 8, 128256, True),
    "8 B": (4096, 14336, 32, 32, 8, 128256, False),
    "14 B": (5120, 13824, 48, 40, 8, 152064, False),
    "70 B": (8192, 28672, 80, 64, 8, 128256, False),
}
NAMES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "tie_word_embeddings",
)  # fmt: skip
EPISODES, UPDATE_ROWS = 100_000, 64
PPO = {
    "total_episodes": EPISODES, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, "num_ppo_epochs": 1,
    "response_length": 512, "bf16": True, "gradient_checkpointing": True,
}  # fmt: skip
# Mode -> keys and `--mode`. Trained weights are float32, the base weights under adapters bfloat16.
MODES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "full": ({}, ["--mode", "full"]),
    "full, 8-bit AdamW, policy_head, offload": (
        {"ppo.optim": "adamw_8bit", "models.value": "policy_head", "ppo.offload": True}, ["--mode", "full"],
    ),
    "one base (LoRA)": ({}, ["--mode", "lora"]),
    "fsdp, offload": ({"ppo.fsdp": True, "ppo.offload": True}, ["--mode", "full"]),
}  # fmt: skip
GPUS, GIB, FLOPS = (1, 8, 64), 80, 4e14
# --chain: LoRA, bfloat16, 8 rows at a time of 1024 tokens. Evaluation: the default of 64 rows, and 8 rows.
TRAINING = {"per_device_train_batch_size": 8, "max_length": 1024, "bf16": True, "gradient_checkpointing": True}
MODEL = {"dtype": "bfloat16", "adapters": {"kind": "lora"}}
CHAIN: dict[str, dict[str, Any]] = {
    "sft": {
        "model": {"path": "./base", **MODEL}, "data": {"train": "rows.jsonl"}, "sft": {"max_steps": 100, **TRAINING}
    },
    "reward": {"model": MODEL, "data": {"train": "pairs.jsonl"}, "reward": {"max_steps": 100, **TRAINING}},
    "ppo": {"models": MODEL, "data": {"prompts": "prompts.jsonl"}, "ppo": PPO},
    "eval": {
        "models": {"dtype": "bfloat16"}, "data": {"prompts": "prompts.jsonl"}, "eval": {"response_length": 512}
    },
}  # fmt: skip
EVAL_ROWS = (64, 8)
CHAIN_COLUMNS = ["sft", "reward", "ppo", *(f"eval, {rows} rows" for rows in EVAL_ROWS)]


def main() -> None:
    """Print a table, and write it to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench-scale"))
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--chain", action="store_true", help="plan all four stages with adapters")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    name, columns, cells = ("chain", CHAIN_COLUMNS, chain_cells) if args.chain else ("scale", list(MODES), mode_cells)
    lines = [f"| model | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    estimates: dict[str, Any] = {}
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            estimates[model], texts = cells(Path(folder), MODELS[model])
        lines.append(f"| {model} | " + " | ".join(texts) + " |")
        print(lines[-1], file=sys.stderr, flush=True)
    if not args.chain:
        (args.out / "scale.json").write_text(json.dumps(estimates, indent=2))
    (args.out / f"{name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def mode_cells(folder: Path, sizes: tuple[Any, ...]) -> tuple[Any, list[str]]:
    """Return the estimates of PPO in each mode by number of GPUs, and their cells of the table."""
    write_models(folder, sizes)
    config = {"models": {"sft": "sft", "reward": "reward"}, "data": {"prompts": "prompts.jsonl"}, "ppo": PPO}
    (folder / "ppo.yaml").write_text(yaml.safe_dump(config))
    estimates = {mode: estimate_mode(folder / "ppo.yaml", mode) for mode in MODES}
    return estimates, [cell(estimate) for estimate in estimates.values()]


def chain_cells(folder: Path, sizes: tuple[Any, ...]) -> tuple[Any, list[str]]:
    """Return the bytes of a GPU that each stage needs with adapters, and their cells of the table."""
    write_models(folder, sizes)
    (folder / "sft").rename(folder / "base")
    for stage, config in CHAIN.items():
        (folder / f"{stage}.yaml").write_text(yaml.safe_dump(config))
    plans = [plan(folder / f"{stage}.yaml") for stage in ("sft", "reward", "ppo")]
    plans += [plan(folder / "eval.yaml", f"eval.per_device_batch_size={rows}") for rows in EVAL_ROWS]
    needed = [stage["memory_bytes"] for stage in plans]
    return needed, [f"{need / 1e9:.0f} GB" for need in needed]


def estimate_mode(config: Path, mode: str) -> dict[int, dict[str, Any]]:
    """Return the plan for each number of GPUs. Without sharding, memory and time per update do not depend on it."""
    keys, options = MODES[mode]
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={json.dumps(value)}")]

    def estimate(count: int) -> dict[str, Any]:
        stage = plan(config, "--nproc", str(count), *options, *sets)
        return {key: stage[key] for key in ("memory_bytes", "fullest", "fits", "step_seconds", "steps", "seconds")}

    if "fsdp" in mode:
        return {count: estimate(count) for count in GPUS[1:]}
    single = estimate(1)
    update = sum(single["step_seconds"].values())
    steps = {count: math.ceil(EPISODES / (UPDATE_ROWS * count)) for count in GPUS}
    return {count: single | {"steps": steps[count], "seconds": update * steps[count]} for count in GPUS}


def plan(config: Path, *arguments: str) -> dict[str, Any]:
    """Return the plan of a stage by `rlhf plan --json`. Raises SystemExit if it fails."""
    command = [sys.executable, "-m", "rlhf_cli", "plan", str(config), "--json", "--prompt-length", "512"]
    command += ["--gpu", str(GIB), "--flops", str(FLOPS), *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(result.stderr)
    (stage,) = json.loads(result.stdout)["stages"].values()
    return stage


def write_models(folder: Path, sizes: tuple[Any, ...]) -> None:
    """Write the config of an SFT and a reward model, a minimal tokenizer, and data."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    for name, head in (("sft", {}), ("reward", {"num_labels": 1})):
        config = LlamaConfig(**dict(zip(NAMES, sizes, strict=True)), max_position_embeddings=8192, **head)
        config.architectures = ["LlamaForSequenceClassification" if head else "LlamaForCausalLM"]
        config.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    row = '{"prompt": "a", "completion": "a a", "chosen": "a a", "rejected": "a"}\n'
    for name in ("prompts", "rows", "pairs"):
        (folder / f"{name}.jsonl").write_text(row * UPDATE_ROWS)


def cell(plans: dict[int, dict[str, Any]]) -> str:
    """Format GB per GPU and hours by number of GPUs; GB only once if they are equal."""
    gigabytes = {count: round(plan["memory_bytes"] / 1e9) for count, plan in plans.items()}
    if len(set(gigabytes.values())) == 1:
        first = next(iter(plans.values()))
        hours = ", ".join(f"{plan['seconds'] / 3600:.3g} h on {count}" for count, plan in plans.items())
        return f"{gigabytes.popitem()[1]} GB: {hours if first['fits'] else 'does not fit'}"
    return "; ".join(
        f"{gigabytes[count]} GB on {count}: " + (f"{plan['seconds'] / 3600:.3g} h" if plan["fits"] else "does not fit")
        for count, plan in plans.items()
    )


if __name__ == "__main__":
    main()
