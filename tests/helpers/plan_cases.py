"""Runs whose memory is worth an estimate, and what they took: the real stage in a process of its own."""

import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from rlhf_cli import jsonl
from rlhf_cli.models import load, save

# The most memory that a process ever held, less what it held once the same stage had run on next to nothing: the
# libraries, all of which are loaded by then.
CHILD = """
import os, resource, sys
from rlhf_cli.cli import app

def run(config):
    try:
        app(["{stage}", "--config", config])
    except SystemExit as end:
        assert not end.code, end.code

run("{small}")
before = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
run("{config}")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)
"""


@dataclass(frozen=True)
class Case:
    """A model with random weights, and one stage on it."""

    stage: str
    sizes: dict[str, Any]
    settings: dict[str, Any]
    prompt: int  # words, each one token
    answer: int = 0
    family: str = "llama"
    sections: dict[str, Any] = field(default_factory=dict)


def write(case: Case, folder: Path) -> Path:
    """The folder of a case; returns its config."""
    folder.mkdir(exist_ok=True, parents=True)
    words = [f"w{n}" for n in range(case.sizes["vocab_size"] - 3)]
    vocabulary = {word: n for n, word in enumerate(["<pad>", "<unk>", "</s>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2}
    body = AutoConfig.for_model(case.family, **{"max_position_embeddings": 2048, **case.sizes, **ids})
    save.save_model(AutoModelForCausalLM.from_config(body), tokenizer, folder / "base", "A model.")
    scorer = load.init_reward_model(folder / "base")
    save.save_model(scorer, tokenizer, folder / "scorer", "A scorer.")
    texts = [" ".join(words[(n * 31 + k) % len(words)] for k in range(case.prompt)) for n in range(64)]
    answers = [" ".join(words[(n * 17 + k) % len(words)] for k in range(case.answer)) for n in range(64)]
    jsonl.write_jsonl(folder / "prompts.jsonl", [{"prompt": text} for text in texts])
    both = zip(texts, answers, strict=True)
    jsonl.write_jsonl(folder / "sft.jsonl", [{"prompt": prompt, "completion": f" {answer}"} for prompt, answer in both])
    config: dict[str, Any] = {
        "sft": {"model": {"path": "base"}, "data": {"train": "sft.jsonl"}},
        "ppo": {"models": {"sft": "base", "reward": "scorer"}, "data": {"prompts": "prompts.jsonl"}},
    }[case.stage]
    config = {**config, **case.sections, case.stage: case.settings}
    (folder / f"{case.stage}.yaml").write_text(yaml.safe_dump(config))
    return folder / f"{case.stage}.yaml"


def measured(case: Case, folder: Path, **environment: str) -> int:
    """Bytes at the fullest moment of the stage, run anew in `folder`, above what the libraries take."""
    config = write(case, folder)
    names = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    small = write(replace(case, sizes={**case.sizes, **names}, prompt=4, answer=4), folder / "small")
    code = CHILD.format(stage=case.stage, small=small, config=config)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])
