"""What `rlhf init preferences` writes for known models on GPUs, and what `rlhf plan` says of it.

    python -m benchmarks.placement [--models NAME ...] [--gpus GIB ...]

It prints the table of docs/results/placement.md. Nothing is loaded or trained: the base models are a config.json with
published sizes and a small tokenizer. The pairs have prompts of up to 160 words and answers of up to 300, a token each.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoConfig
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.models import tokenizers

QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
QWEN3 |= {"max_position_embeddings": 40960}
# From the config.json of each model.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "tie_word_embeddings": True},
    "Qwen3-1.7B": {**QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "tie_word_embeddings": True},
    "Qwen3-4B": {**QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                 "num_attention_heads": 32, "tie_word_embeddings": True},
    "Qwen3-8B": {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                 "num_attention_heads": 32, "tie_word_embeddings": False},
    "Llama-3.1-8B": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
                     "max_position_embeddings": 131072, "tie_word_embeddings": False},
    "Gemma-3-4B": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
                   "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                   "vocab_size": 262208, "max_position_embeddings": 131072, "tie_word_embeddings": True},
}  # fmt: skip
GPUS = (24, 48, 80, 141)
FLOPS = "4e14"  # for the time, which the table leaves out
STAGES = ("sft", "reward", "ppo", "eval")
HEAD = "| model | GiB | written by `rlhf init preferences` | rows: sft, reward, ppo, eval | GB by `rlhf plan`: same |"


def table(models: Sequence[str], gpus: Sequence[float]) -> list[str]:
    """Return the lines of the table."""
    lines = [HEAD, "|---|---|---|---|---|"]
    for model in models:
        for gib in gpus:
            with tempfile.TemporaryDirectory() as folder:
                lines.append(f"| {model} | {gib:g} | {' | '.join(cells(Path(folder), model, gib))} |")
    return lines


def cells(folder: Path, model: str, gib: float) -> list[str]:
    """Write a folder for a model and a GPU, plan it, and return the cells of its row."""
    write_inputs(folder, MODELS[model])
    command = ["init", "preferences", str(folder / "run"), "--data", str(folder / "pairs.jsonl")]
    written = CliRunner().invoke(app, [*command, "--base", str(folder / "base"), "--gpu", str(gib)])
    if written.exit_code:
        return [written.stderr.strip().splitlines()[-2], "", ""]
    planned = CliRunner().invoke(app, ["plan", str(folder / "run"), "--gpu", str(gib), "--flops", FLOPS, "--json"])
    stages = json.loads(planned.stdout)["stages"]
    assert all(stages[stage]["fits"] for stage in STAGES), stages
    (memory,) = [line for line in written.stdout.splitlines() if line.startswith("memory: ")]
    configs = {stage: yaml.safe_load((folder / f"run/{stage}.yaml").read_text()) for stage in STAGES}
    rows = [configs[stage][stage]["per_device_train_batch_size"] for stage in STAGES[:3]]
    rows.append(configs["eval"]["eval"]["per_device_batch_size"])
    sizes = ", ".join(f"{stages[stage]['memory_bytes'] / 1e9:.0f}" for stage in STAGES)
    return [memory.removeprefix("memory: ").partition(": ")[0], ", ".join(map(str, rows)), sizes]


def write_inputs(folder: Path, sizes: dict[str, Any], prompt: int = 160, answer: int = 300) -> None:
    """Write pairs.jsonl with prompts and answers of at most as many words, and base/ without weights."""
    draw, words = random.Random(0), [f"w{number}" for number in range(100)]

    def text(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(most // 4, most)))

    def answered() -> str:
        return f" {text(answer)}"

    rows = [{"prompt": text(prompt), "chosen": answered(), "rejected": answered()} for _ in range(200)]
    write_jsonl(folder / "pairs.jsonl", rows)
    write_jsonl(folder / "texts.jsonl", [{"text": " ".join(words)}] * 20)
    tokenizers.train_tokenizer(folder / "texts.jsonl", 600).save_pretrained(folder / "base")
    config = AutoConfig.for_model(**sizes)
    config.architectures = ["AnyForCausalLM"]
    config.save_pretrained(folder / "base")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--gpus", nargs="+", type=float, default=GPUS)
    arguments = parser.parse_args()
    print("\n".join(table(arguments.models, arguments.gpus)))


if __name__ == "__main__":
    main()
