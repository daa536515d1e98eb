"""The reference workload: two models, and prompts that are the first words of film reviews."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORDS = (3, 12)  # of a prompt


@dataclass(frozen=True)
class Reference:
    """The two models, and the two files of sentences that they come from."""

    sft: Path
    reward: Path
    positive: Path
    negative: Path

    @classmethod
    def shared(cls, folder: Path) -> "Reference":
        """As the developers' shared folder has them."""
        models, texts = folder / "models", folder / "data/rt-polarity"
        return cls(models / "reviews-sft", models / "reviews-rm", texts / "pos.txt", texts / "neg.txt")

    def missing(self) -> Path | None:
        """The first part that is not there."""
        parts = (self.sft / "config.json", self.reward / "config.json", self.positive, self.negative)
        return next((path for path in parts if not path.exists()), None)


def sentences(path: Path) -> list[str]:
    """The lines of a file that are not empty."""
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def prompts(reference: Reference) -> list[list[int]]:
    """The first words of each sentence, in an order that is always the same, as token ids: BOS and the words'."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(reference.sft)
    texts = sentences(reference.positive) + sentences(reference.negative)
    draw = random.Random(0)
    draw.shuffle(texts)
    heads = [" ".join(text.split()[: draw.randint(*WORDS)]) for text in texts]
    return [[tokenizer.bos_token_id, *ids] for ids in tokenizer(heads, add_special_tokens=False)["input_ids"]]


def write_prompts(reference: Reference, path: Path) -> None:
    """The prompts as a JSON file, for processes in other environments."""
    path.write_text(json.dumps(prompts(reference)), encoding="utf-8")


def model_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a model's folder."""
    return json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
