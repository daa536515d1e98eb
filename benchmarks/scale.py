"""`python -m benchmarks.scale`: which mode of PPO fits which GPUs, by `rlhf plan`; `--chain` plans all four stages
with adapters. docs/results/memory.md has both tables.

Nothing is loaded or trained: models are configs with the published sizes of known families, laid out in a folder for
the time of the run. Rows of 512 + 512 tokens, 8 rows a GPU at a time, 64 a GPU an update, one epoch, bfloat16, gradient
checkpointing. Time is matrix products over 40 % of an H100's 989e12 operations a second: an assumption, and a floor,
above all of the writing of responses, which waits for memory and not for products.
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

# NAMES, by the config.json on the hub of Qwen2.5 0.5B, Llama 3.2 1B and 3B, Llama 3.1 8B, Qwen2.5 14B, Llama 3.1 70B.
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
EPISODES, AN_UPDATE = 100_000, 64
PPO = {
    "total_episodes": EPISODES, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, "num_ppo_epochs": 1,
    "response_length": 512, "bf16": True, "gradient_checkpointing": True,
}  # fmt: skip
# Mode -> what it sets, and `--mode`; weights are float32 where they learn, bfloat16 where adapters stand on them.
MODES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "full": ({}, ["--mode", "full"]),
    "full, 8-bit AdamW, policy_head, offload": (
        {"ppo.optim": "adamw_8bit", "models.value": "policy_head", "ppo.offload": True}, ["--mode", "full"],
    ),
    "one base (LoRA)": ({"models.dtype": "bfloat16"}, ["--mode", "one-base"]),
    "fsdp, offload": ({"ppo.fsdp": True, "ppo.offload": True}, ["--mode", "full"]),
}  # fmt: skip
GPUS, GIB, FLOPS = (1, 8, 64), 80, 4e14
# --chain: LoRA, weights and passes in bfloat16; rows of 1024 tokens, 8 at a time. Evaluation: its default, and 8 rows.
_TRAINED = {"per_device_train_batch_size": 8, "max_length": 1024, "bf16": True, "gradient_checkpointing": True}
_BODY = {"dtype": "bfloat16", "adapters": {"kind": "lora"}}
CHAIN: dict[str, dict[str, Any]] = {
    "sft": {
        "model": {"path": "./base", **_BODY}, "data": {"train": "rows.jsonl"}, "sft": {"max_steps": 100, **_TRAINED}
    },
    "reward": {"model": _BODY, "data": {"train": "pairs.jsonl"}, "reward": {"max_steps": 100, **_TRAINED}},
    "ppo": {"models": _BODY, "data": {"prompts": "prompts.jsonl"}, "ppo": PPO},
    "eval": {
        "models": {"dtype": "bfloat16"}, "data": {"prompts": "prompts.jsonl"}, "eval": {"response_length": 512}
    },
}  # fmt: skip
EVAL_ROWS = (64, 8)


def main() -> None:
    """Print the table, and write it with all numbers into --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench-scale"))
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--chain", action="store_true")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.chain:
        chain(asked.out, asked.models)
        return
    found: dict[str, Any] = {}
    lines = [f"| model | {' | '.join(MODES)} |", "| --- |" + " --- |" * len(MODES)]
    for name in asked.models:
        with tempfile.TemporaryDirectory() as folder:
            lay_out(Path(folder), MODELS[name])
            found[name] = {mode: planned(Path(folder), mode) for mode in MODES}
        lines.append(f"| {name} | " + " | ".join(cell(found[name][mode]) for mode in MODES) + " |")
        print(lines[-1], file=sys.stderr, flush=True)
    table = "\n".join(lines)
    (asked.out / "scale.json").write_text(json.dumps(found, indent=2))
    (asked.out / "scale.md").write_text(table + "\n")
    print(table)


def chain(out: Path, names: list[str]) -> None:
    """Print the table of all stages by adapters: GB of the GPU that each needs."""
    heads = ["sft", "reward", "ppo", *(f"eval, {rows} rows" for rows in EVAL_ROWS)]
    lines = [f"| model | {' | '.join(heads)} |", "| --- |" + " --- |" * len(heads)]
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            lay_out(Path(folder), MODELS[name])
            (Path(folder) / "sft").rename(Path(folder) / "base")
            for stage, config in CHAIN.items():
                (Path(folder) / f"{stage}.yaml").write_text(yaml.safe_dump(config))
            needs = [needed(Path(folder) / f"{stage}.yaml") for stage in ("sft", "reward", "ppo")]
            needs += [needed(Path(folder) / "eval.yaml", f"eval.per_device_batch_size={rows}") for rows in EVAL_ROWS]
        lines.append(f"| {name} | " + " | ".join(f"{need / 1e9:.0f} GB" for need in needs) + " |")
        print(lines[-1], file=sys.stderr, flush=True)
    (out / "chain.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def needed(config: Path, *sets: str) -> int:
    """Bytes of a GPU that a stage needs, as `rlhf plan` says."""
    command = [sys.executable, "-m", "rlhf_cli", "plan", str(config), *sets, "--json", "--prompt-length", "512"]
    result = subprocess.run([*command, "--gpu", str(GIB), "--flops", str(FLOPS)], capture_output=True, text=True)
    if result.returncode not in (0, 1) or not result.stdout:
        raise SystemExit(result.stderr)
    return json.loads(result.stdout)["stages"][0]["needed"]


def planned(folder: Path, mode: str) -> dict[int, dict[str, Any]]:
    """The plan for each number of GPUs. Whole models are planned once: memory and time of an update stay the same."""
    if "fsdp" in mode:
        return {count: plan(folder, mode, count) for count in GPUS[1:]}
    alone = plan(folder, mode, 1)
    seconds = sum(alone["seconds"].values())
    steps = {count: math.ceil(EPISODES / (AN_UPDATE * count)) for count in GPUS}
    return {count: alone | {"steps": steps[count], "hours": seconds * steps[count] / 3600} for count in GPUS}


def lay_out(folder: Path, sizes: tuple[Any, ...]) -> None:
    """A model's config, a tokenizer that nobody reads, and a ppo.yaml."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    for name, head in (("sft", {}), ("reward", {"num_labels": 1})):
        body = LlamaConfig(**dict(zip(NAMES, sizes, strict=True)), max_position_embeddings=8192, **head)
        body.architectures = ["LlamaForSequenceClassification" if head else "LlamaForCausalLM"]
        body.save_pretrained(folder / name)
        words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a"))
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(
            folder / name
        )
    row = '{"prompt": "a", "completion": "a a", "chosen": "a a", "rejected": "a"}\n'
    for name in ("prompts", "rows", "pairs"):
        (folder / f"{name}.jsonl").write_text(row * AN_UPDATE)
    config = {"models": {"sft": "sft", "reward": "reward"}, "data": {"prompts": "prompts.jsonl"}, "ppo": PPO}
    (folder / "ppo.yaml").write_text(yaml.safe_dump(config))


def plan(folder: Path, mode: str, count: int) -> dict[str, Any]:
    """What `rlhf plan` says of a mode on so many GPUs."""
    changes, how = MODES[mode]
    sets = [word for key, value in changes.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    command = [sys.executable, "-m", "rlhf_cli", "plan", str(folder / "ppo.yaml"), "--json", "--prompt-length", "512"]
    command += ["--gpu", str(GIB), "--flops", str(FLOPS), "--nproc", str(count), *how, *sets]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(result.stderr)
    (stage,) = json.loads(result.stdout)["stages"]
    return {key: stage[key] for key in ("needed", "fullest", "fits", "seconds", "steps", "hours")}


def cell(found: dict[int, dict[str, Any]]) -> str:
    """Memory of a GPU, and hours for 100,000 episodes, by the number of GPUs; one figure of memory where all agree."""
    needs = {round(told["needed"] / 1e9) for told in found.values()}
    hours = ", ".join(f"{told['hours']:.3g} h on {count}" for count, told in found.items())
    if len(needs) == 1:
        told = next(iter(found.values()))
        return f"{needs.pop()} GB: {hours}" if told["fits"] else f"{needs.pop()} GB: does not fit"
    return "; ".join(
        f"{round(told['needed'] / 1e9)} GB on {count}"
        + (f": {told['hours']:.3g} h" if told["fits"] else ": does not fit")
        for count, told in found.items()
    )


if __name__ == "__main__":
    main()
