"""The reference workload: two models, prompts from film reviews, and the settings that both systems read.

It imports nothing of rlhf_cli at module level: the environment of TRL 1.12 imports it, too.
"""

import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WORDS = (3, 12)  # bounds of the number of words in a prompt


@dataclass(frozen=True)
class Reference:
    """Paths of the SFT and the reward model, and of the sentences that the prompts come from."""

    sft: Path
    reward: Path
    positive: Path
    negative: Path

    @classmethod
    def shared(cls, folder: Path) -> "Reference":
        """Return the paths in the developers' shared folder."""
        models, texts = folder / "models", folder / "data/rt-polarity"
        return cls(models / "reviews-sft", models / "reviews-rm", texts / "pos.txt", texts / "neg.txt")

    def missing(self) -> Path | None:
        """Return the first file that does not exist."""
        files = (self.sft / "config.json", self.reward / "config.json", self.positive, self.negative)
        return next((path for path in files if not path.exists()), None)


def sentences(path: Path) -> list[str]:
    """Return the lines of a file that are not empty."""
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def prompts(reference: Reference) -> list[list[int]]:
    """Return token ids, BOS and the first words of each sentence, in a fixed random order."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(reference.sft)
    texts = sentences(reference.positive) + sentences(reference.negative)
    rng = random.Random(0)
    rng.shuffle(texts)
    heads = [" ".join(text.split()[: rng.randint(*WORDS)]) for text in texts]
    return [[tokenizer.bos_token_id, *ids] for ids in tokenizer(heads, add_special_tokens=False)["input_ids"]]


def write_prompts(reference: Reference, path: Path) -> None:
    """Write the prompts as JSON, for processes in other environments."""
    path.write_text(json.dumps(prompts(reference)), encoding="utf-8")


def model_config(folder: str | Path) -> dict[str, Any]:
    """Return config.json of a model."""
    return json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Job:
    """Settings of PPO for one process of either system. The first update is a warm-up."""

    sft: str  # policy and reference
    reward: str  # reward and value model
    prompts: str  # a JSON file: one list of token ids per prompt
    dense: bool = False  # no stop token: every response has `response_length` tokens, so there is no padding
    first: int = 0  # index of the first prompt
    seed: int = 0
    updates: int = 5
    batch: int = 64
    rows: int = 16  # of a micro-batch
    epochs: int = 4
    response_length: int = 64
    learning_rate: float = 3e-5
    kl_coef: float = 0.05
    threads: int = 1
    settings: dict[str, Any] = field(default_factory=dict)  # other keys of `ppo:`, for rlhf only

    @property
    def missing_eos_penalty(self) -> float | None:
        return None if self.dense else 1.0

    @classmethod
    def read(cls, path: str | Path) -> "Job":
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    def batches(self) -> list[list[list[int]]]:
        """Return the prompts of each update, as token ids."""
        rows = json.loads(Path(self.prompts).read_text(encoding="utf-8"))
        selected = [rows[(self.first + row) % len(rows)] for row in range(self.updates * self.batch)]
        return [selected[start : start + self.batch] for start in range(0, len(selected), self.batch)]
