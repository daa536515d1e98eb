"""Stages with random models, and the memory that each takes in a separate process."""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from rlhf_cli import jsonl
from rlhf_cli.models import load, save

# Prints the peak of a process minus its memory after the same stage ran on almost nothing, with all libraries loaded.
CHILD = """
import os, sys
from rlhf_cli.cli import app

def run(config):
    try:
        app(["{stage}", "--config", config])
    except SystemExit as end:
        assert not end.code, end.code

run("{small}")
before = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
run("{config}")
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))  # without the parent's
print(int(peak) * 1024 - before)
"""


@dataclass(frozen=True)
class Case:
    """A Llama with random weights, and one stage that uses it."""

    stage: str
    sizes: dict[str, Any]
    settings: dict[str, Any]
    prompt: int  # words, each one token
    answer: int = 0


def write(case: Case, folder: Path) -> Path:
    """Write the folder of a case; return its config."""
    folder.mkdir(exist_ok=True, parents=True)
    words = [f"w{n}" for n in range(case.sizes["vocab_size"] - 3)]
    vocabulary = {word: n for n, word in enumerate(["<pad>", "<unk>", "</s>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")
    torch.manual_seed(0)
    ids = {"max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **case.sizes, **ids))
    save.save_model(model, tokenizer, folder / "base", "A model.")
    save.save_model(load.init_reward_model(folder / "base"), tokenizer, folder / "scorer", "A scorer.")

    def text(row: int, step: int, count: int) -> str:
        return " ".join(words[(row * step + k) % len(words)] for k in range(count))

    rows = [{"prompt": text(n, 31, case.prompt), "completion": f" {text(n, 17, case.answer)}"} for n in range(64)]
    jsonl.write_jsonl(folder / "sft.jsonl", rows)
    jsonl.write_jsonl(folder / "prompts.jsonl", [{"prompt": row["prompt"]} for row in rows])
    sections = {
        "sft": {"model": {"path": "base"}, "data": {"train": "sft.jsonl"}},
        "ppo": {"models": {"sft": "base", "reward": "scorer"}, "data": {"prompts": "prompts.jsonl"}},
    }[case.stage]
    (folder / f"{case.stage}.yaml").write_text(yaml.safe_dump({**sections, case.stage: case.settings}))
    return folder / f"{case.stage}.yaml"


def measured(case: Case, folder: Path, **environment: str) -> int:
    """Run the stage in `folder`; return its peak memory above the libraries, in bytes."""
    config = write(case, folder)
    tiny = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    small = write(replace(case, sizes={**case.sizes, **tiny}, prompt=4, answer=4), folder / "small")
    command = [sys.executable, "-c", CHILD.format(stage=case.stage, small=small, config=config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])
