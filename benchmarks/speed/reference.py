"""Train the two reference models from two files of sentences, if the developers' shared folder is missing.

The SFT model is a Llama of 5.3 M parameters (hidden size 256, 4 layers, 8192 byte-level BPE tokens, tied head, 256
tokens of context), trained for four epochs on `<bos> sentence <eos>`. The reward model is trained from it for three
epochs on pairs (good, bad). This module writes fresh weights, `sft.yaml` and `reward.yaml`, and `rlhf run` trains them;
finished stages are not repeated. rt-polarity (Pang and Lee, ACL 2005) has such files.
"""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.speed.processes import child_environment
from benchmarks.speed.workload import Reference, sentences
from rlhf_cli.distributed import RLHF_COMMAND
from rlhf_cli.jsonl import write_jsonl

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"  # ids 0, 1, 2
VOCABULARY, HELD_OUT = 8192, 500  # tokens; pairs for evaluation
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.04,  # 0.02 is too small for this width
}
# The settings of configs/reviews, for a small model with fresh weights.
TRAINING = {"per_device_train_batch_size": 32, "per_device_eval_batch_size": 64, "max_length": 128, "logging_steps": 50}
SFT = {"num_train_epochs": 4, "learning_rate": 1e-3, "adam_beta2": 0.95, "weight_decay": 0.1, "warmup_ratio": 0.05}
REWARD = {"num_train_epochs": 3, "learning_rate": 2e-4, "normalize": "none"}


def fresh_model(texts: list[str], folder: Path, *, vocabulary: int = VOCABULARY, **sizes: Any) -> None:
    """Write a tokenizer trained on these texts, and a model with fresh weights."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    backend = ByteLevelBPETokenizer(add_prefix_space=True)
    special = [PAD, BOS, EOS]
    backend.train_from_iterator(texts, vocab_size=vocabulary, special_tokens=special, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend._tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, padding_side="left"
    )
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **ids, **(SIZES | sizes)))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prepare(good: Path, bad: Path, folder: Path, **sizes: Any) -> None:
    """Write the run folder: data, fresh weights unless they exist, sft.yaml and reward.yaml."""
    positive, negative = sentences(good), sentences(bad)
    held_out = min(HELD_OUT, len(negative) // 10)
    rows = [{"prompt": BOS, "completion": text} for text in positive + negative]
    sides = zip(positive, negative, strict=False)
    pairs = [{"prompt": BOS, "chosen": one, "rejected": other} for one, other in sides if one != other]
    (folder / "data").mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "data/texts.jsonl", rows)
    write_jsonl(folder / "data/pairs.jsonl", pairs[:-held_out])
    write_jsonl(folder / "data/pairs_eval.jsonl", pairs[-held_out:])
    if not (folder / "base/tokenizer.json").exists():
        fresh_model(positive + negative, folder / "base", **sizes)
    # SFT reads good and bad sentences without their label, with BOS as the prompt and EOS at the end.
    sft = {"model": {"path": "./base"}, "data": {"train": "data/texts.jsonl"}, "sft": SFT | TRAINING}
    data = {"train": "data/pairs.jsonl", "eval": "data/pairs_eval.jsonl"}
    for name, config in (("sft", sft), ("reward", {"data": data, "reward": REWARD | TRAINING})):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"seed": 0, **config}, sort_keys=False), encoding="utf-8")


def train(good: Path, bad: Path, folder: Path, threads: int = 1) -> Reference:
    """Train both models unless they exist, and print the time it took.

    Raises subprocess.CalledProcessError if `rlhf run` fails.
    """
    reference = Reference(folder / "sft/model", folder / "reward/model", good, bad)
    if not (folder / "reward/manifest.json").exists():
        start, cpu_start = time.monotonic(), sum(os.times()[:4])
        prepare(good, bad, folder)
        subprocess.run([*RLHF_COMMAND, "run", str(folder)], check=True, env=child_environment(threads))
        minutes, cpu_minutes = (time.monotonic() - start) / 60, (sum(os.times()[:4]) - cpu_start) / 60
        print(f"reference models: trained in {minutes:.1f} minutes, {cpu_minutes:.1f} CPU minutes", flush=True)
    return reference
