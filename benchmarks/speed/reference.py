"""The two reference models, trained from two files of sentences, for where the developers' shared folder is not.

    python -m benchmarks.speed.reference good.txt bad.txt runs/bench/reference

A Llama of 5.3 M parameters (hidden size 256, 4 layers, 8192 byte-level BPE tokens, the head tied, 256 tokens of
context) learns `<bos> sentence <eos>` in four epochs, and a reward model is made of it in three epochs on pairs
(good, bad). All but the fresh weights is the product's own: this writes `sft.yaml` and `reward.yaml`, and `rlhf run`
trains them. What is finished is not trained again. rt-polarity (Pang and Lee, ACL 2005) has such files.
"""

import argparse
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.speed.children import surroundings
from benchmarks.speed.workload import Reference, sentences
from rlhf_cli.distributed import RLHF_COMMAND
from rlhf_cli.jsonl import write_jsonl

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"  # ids 0, 1, 2
VOCABULARY, HELD_OUT = 8192, 500  # tokens; sentences and pairs that only measure
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.04,  # the usual 0.02 is for wider models
}
# As configs/reviews has them: a small model from fresh weights.
TRAINING = {"per_device_train_batch_size": 32, "per_device_eval_batch_size": 64, "max_length": 128, "logging_steps": 50}
SFT = {"num_train_epochs": 4, "learning_rate": 1e-3, "adam_beta2": 0.95, "weight_decay": 0.1, "warmup_ratio": 0.05}
REWARD = {"num_train_epochs": 3, "learning_rate": 2e-4, "normalize": "none"}


def fresh_model(texts: list[str], folder: Path, *, vocabulary: int = VOCABULARY, **sizes: Any) -> None:
    """A folder with a tokenizer of these texts and a model of fresh weights."""
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
    """The run's folder: data, fresh weights, sft.yaml and reward.yaml; what is there stays."""
    positive, negative = sentences(good), sentences(bad)
    held_out = min(HELD_OUT, len(negative) // 10)
    rows = [{"prompt": BOS, "completion": text} for text in positive + negative]
    pairs = [{"prompt": BOS, "chosen": a, "rejected": b} for a, b in zip(positive, negative, strict=False) if a != b]
    (folder / "data").mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "data/texts.jsonl", rows)
    write_jsonl(folder / "data/pairs.jsonl", pairs[:-held_out])
    write_jsonl(folder / "data/pairs_eval.jsonl", pairs[-held_out:])
    if not (folder / "base/tokenizer.json").exists():
        fresh_model(positive + negative, folder / "base", **sizes)
    # Both tokens around a sentence are learned, and the sentences are not told apart: SFT reads them all.
    sft = {"model": {"path": "./base"}, "data": {"train": "data/texts.jsonl"}, "sft": SFT | TRAINING}
    data = {"train": "data/pairs.jsonl", "eval": "data/pairs_eval.jsonl"}
    for name, config in (("sft", sft), ("reward", {"data": data, "reward": REWARD | TRAINING})):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"seed": 0, **config}, sort_keys=False), encoding="utf-8")


def cpu_seconds() -> float:
    """Of this process and the children that it has waited for."""
    return sum(os.times()[:4])


def train(good: Path, bad: Path, folder: Path, threads: int = 1) -> Reference:
    """Prepare and train, or take what is finished; prints how long it took.

    Raises subprocess.CalledProcessError where `rlhf run` fails.
    """
    reference = Reference(folder / "sft/model", folder / "reward/model", good, bad)
    if not (folder / "reward/manifest.json").exists():
        began, used = time.monotonic(), cpu_seconds()
        prepare(good, bad, folder)
        subprocess.run([*RLHF_COMMAND, "run", str(folder)], check=True, env=surroundings(threads))
        took, used = time.monotonic() - began, cpu_seconds() - used
        print(f"reference models: trained in {took / 60:.1f} minutes, {used / 60:.1f} CPU minutes", flush=True)
    return reference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("good", type=Path, help="good reviews, one a line")
    parser.add_argument("bad", type=Path, help="bad reviews, one a line")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    train(asked.good, asked.bad, asked.folder, asked.threads)


if __name__ == "__main__":
    main()
