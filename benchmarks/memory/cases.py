"""The cases: a Llama with random weights, random words as data, and a config for each case."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.speed import reference
from benchmarks.speed.workload import Job
from rlhf_cli.jsonl import write_jsonl

LORA = {"kind": "lora", "r": 16, "lora_alpha": 32}  # also of TRL
QLORA = LORA | {"kind": "qlora"}


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of a batch."""

    model: dict[str, Any]
    words: int  # distinct words in the data; each has at least one token
    prompt: int = 12  # words
    response: int = 48  # tokens
    rows: int = 8
    updates: int = 2


def _llama(hidden: int, intermediate: int, layers: int, heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "vocabulary": vocabulary, "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "initializer_range": 0.02,
    }  # fmt: skip


# 91 M parameters, 365 MB in float32: much more than a process needs besides its tensors.
BIG = Size(_llama(768, 2048, 12, 12, 8192), words=6000)
# For the runs that only load the libraries.
SMALL = Size(_llama(64, 64, 1, 4, 300), words=60)


@dataclass(frozen=True)
class Case:
    """A stage and the keys of its config. `reward` is the case that trains the reward model of PPO."""

    name: str
    title: str
    stage: str
    models: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    reward: str = "reward-full"

    def config(self, folder: Path) -> Path:
        return folder / "runs" / self.name / f"{self.stage}.yaml"


# PPO reads the reward models, so their cases come first.
STAGES = [
    Case(f"{stage}-{kind}", f"{stage}, {kind}", stage, {"adapters": adapters} if adapters else {})
    for stage in ("sft", "reward")
    for kind, adapters in (("full", None), ("lora", LORA), ("qlora", QLORA))
]
ADAPTERS, CHECKPOINTING = {"adapters": LORA}, {"gradient_checkpointing": True}
PPO = [
    Case("ppo-full", "full: four copies", "ppo"),
    Case("ppo-checkpointing", "full, checkpointed", "ppo", settings=CHECKPOINTING),
    Case("ppo-8bit", "full, adamw_8bit", "ppo", settings={"optim": "adamw_8bit"}),
    Case("ppo-policy-head", "full, policy_head", "ppo", {"value": "policy_head"}),
    Case("ppo-lora", "lora, full reward", "ppo", ADAPTERS),
    Case("ppo-one-base", "shared base", "ppo", ADAPTERS, reward="reward-lora"),
    Case("ppo-one-base-checkpointing", "shared base, checkpointed", "ppo", ADAPTERS, CHECKPOINTING, "reward-lora"),
]

CASES = [*STAGES, *PPO]


def write(folder: Path, size: Size, cases: list[Case]) -> None:
    """Write the base model unless it exists, data, and a config for each case."""
    rng = random.Random(0)
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = sorted({"".join(rng.choices(syllables, k=rng.randint(2, 3))) for _ in range(2 * size.words)})
    rng.shuffle(words)
    del words[size.words :]

    def texts(count: int, length: int) -> list[str]:
        return [" ".join(rng.choices(words, k=length)) for _ in range(count)]

    if not (folder / "base/tokenizer.json").exists():
        vocabulary = size.model["vocabulary"]
        shape = {key: value for key, value in size.model.items() if key != "vocabulary"}
        reference.fresh_model([" ".join(words)] * 4, folder / "base", vocabulary=vocabulary, **shape)
    data, count = folder / "data", size.rows * size.updates
    data.mkdir(exist_ok=True)
    columns = [texts(count, size.prompt), *(texts(count, 3 * size.prompt) for _ in range(2))]
    rows = [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in zip(*columns, strict=True)]
    write_jsonl(data / "pairs.jsonl", rows)
    write_jsonl(data / "sft.jsonl", [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows])
    write_jsonl(data / "prompts.jsonl", [{"prompt": row["prompt"]} for row in rows])
    for case in cases:
        path = case.config(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(_config(case, size), sort_keys=False), encoding="utf-8")


def _config(case: Case, size: Size) -> dict[str, Any]:
    base, data = "../../base", "../../data"
    if case.stage == "ppo":
        settings = {
            "total_episodes": size.rows * size.updates, "per_device_train_batch_size": size.rows,
            "gradient_accumulation_steps": 1, "num_ppo_epochs": 1, "response_length": size.response,
            "temperature": 1.0, "stop_token": "none", "missing_eos_penalty": None, "num_sample_generations": 0,
        }  # fmt: skip
        return {
            "models": {"sft": base, "reward": f"../{case.reward}/reward", **case.models},
            "data": {"prompts": f"{data}/prompts.jsonl"},
            "ppo": settings | case.settings,
        }
    rows = f"{data}/{'sft' if case.stage == 'sft' else 'pairs'}.jsonl"
    settings = {
        "max_steps": size.updates, "max_length": 256, "logging_steps": 1, "bf16": False,
        # A pair is two rows of a forward pass.
        "per_device_train_batch_size": size.rows if case.stage == "sft" else size.rows // 2,
    }  # fmt: skip
    if case.stage == "reward":
        settings["normalize"] = "none"
    return {
        "model": {"path": base, **case.models},
        "data": {"train": rows, "eval": rows},
        case.stage: settings | case.settings,
        "output": {"save_steps": size.updates},
    }


def write_job(folder: Path, size: Size) -> Path:
    """Write the job of TRL with the same models, prompts and sizes, and return its path."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    lines = (folder / "data/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    ids = tokenizer([json.loads(line)["prompt"] for line in lines], add_special_tokens=False)["input_ids"]
    prompts, path = (folder / "prompts.json").resolve(), (folder / "job.json").resolve()
    prompts.write_text(json.dumps(ids), encoding="utf-8")
    models = str((folder / "base").resolve()), str((folder / "runs/reward-full/reward/model").resolve())
    sizes = {"updates": size.updates, "batch": size.rows, "rows": size.rows, "response_length": size.response}
    Job(*models, str(prompts), dense=True, epochs=1, **sizes).write(path)
    return path
