"""What the choice of a checkpoint and label smoothing are worth to the demo's reward model.

    python -m benchmarks.checkpoints RUN --cases small medium [--smoothing 0 0.1] [--out FILE]

RUN is a folder of `rlhf init demo` or `rlhf init ci` after `rlhf sft RUN`. Each seed of a case draws pairs of the
demo's world for training and 500 pairs of held-out requests, with the same share of rater errors, and keeps the weights
of each evaluation. All of them score the 500 pairs, by which one is chosen, and 1,000 further ones, which take no part
in the choice and have no errors. Prints a line of JSON for each training.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import torch
import yaml
from torch.nn import functional

from rlhf_cli.config import loading
from rlhf_cli.config.base import Options
from rlhf_cli.demo import world
from rlhf_cli.jsonl import append_jsonl, write_jsonl
from rlhf_cli.models import load, tokenizers
from rlhf_cli.stages import reward
from rlhf_cli.stages.common import training_rows
from rlhf_cli.statistics import selection_weights, within_noise

CHOOSING_PAIRS = 500
FURTHER_PAIRS = 1000
BATCH = 32


@dataclass(frozen=True)
class Case:
    """A training: its pairs and epochs, the evaluations in each epoch, and the share of labels that are wrong.

    The demo's raters err in .05 of the pairs; people disagree in a quarter to a third (Ouyang et al. 2022, 3.4).
    """

    pairs: int
    epochs: int
    evaluations: float = 1
    errors: float = world.FLIPS


@dataclass(frozen=True)
class Training:
    """A case with a seed and a share of label smoothing."""

    run: Path
    case: Case
    seed: int
    smoothing: float

    @property
    def folder(self) -> Path:
        case = self.case
        name = f"{case.pairs}x{case.epochs}-{case.errors:g}-{self.smoothing:g}-{self.seed}"
        return self.run / "checkpoints" / name


CASES = {
    "small": Case(pairs=500, epochs=5),
    "overfit": Case(pairs=250, epochs=12, evaluations=0.5, errors=0.25),
    "medium": Case(pairs=2000, epochs=5),
    "three-epochs": Case(pairs=12_000, epochs=3),
    "one-epoch": Case(pairs=12_000, epochs=1, evaluations=5),
}


def main() -> None:
    """Train and measure each case on each run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["small"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--smoothing", type=float, nargs="+", default=[0.0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)

    for name in options.cases:
        for seed in options.seeds:
            for smoothing in options.smoothing:
                training = Training(options.run.resolve(), CASES[name], seed, smoothing)
                result = {"case": name, "seed": seed, "smoothing": smoothing, **measure(training)}
                print(result, flush=True)
                if options.out:
                    append_jsonl(options.out, result)


def measure(training: Training) -> dict[str, Any]:
    """Train a case, and return the accuracies of its checkpoints."""
    folder = training.folder
    config: Any = loading.load("reward", write_inputs(training))
    with label_smoothing(training.smoothing):
        reward.run(config, Options())

    chosen_on = Held.read(config, "chosen_on.jsonl", folder)
    further = Held.read(config, "further.jsonl", folder)
    right = {}
    accuracy = {}
    states = sorted((folder / "reward/state").glob("checkpoint-*"), key=lambda state: int(state.name.split("-")[1]))
    for state in states:
        model = load.load_reward_model(state).eval().requires_grad_(False)
        step = int(state.name.split("-")[1])
        right[step] = chosen_on.right(model)
        accuracy[step] = fmean(further.right(model))
    return summary(right, accuracy, chosen_on.prompts)


def summary(right: dict[int, list[float]], accuracy: dict[int, float], prompts: Sequence[Any]) -> dict[str, Any]:
    """Return which checkpoint each rule keeps, and what it is worth on pairs that took no part in the choice."""
    last = max(right)
    best = max(right, key=lambda step: fmean(right[step]))
    tied = within_noise(right, prompts)
    kept = last if last in tied else best
    weights = selection_weights(right, prompts)
    elsewhere = fmean((weights * torch.tensor(list(right.values())).T.numpy()).sum(axis=1))
    return {
        "steps": list(right),
        "chosen_on": [round(fmean(values), 4) for values in right.values()],
        "further": [round(value, 4) for value in accuracy.values()],
        "last": last,
        "best": best,
        "kept": kept,
        "optimism": round(fmean(right[best]) - elsewhere, 4),
        "gain_of_best": round(accuracy[best] - accuracy[last], 4),
        "gain_of_kept": round(accuracy[kept] - accuracy[last], 4),
    }


def write_inputs(training: Training) -> Path:
    """Write the pairs and the config of a training, and return the config's path."""
    case = training.case
    folder = training.folder
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = world.split(0)
    with mock.patch.object(world, "FLIPS", case.errors):
        write_jsonl(folder / "pairs.jsonl", world.pairs(train, case.pairs, draw(training, "training")))
        write_jsonl(folder / "chosen_on.jsonl", world.pairs(held_out, CHOOSING_PAIRS, draw(training, "choice")))
    with mock.patch.object(world, "FLIPS", 0):
        write_jsonl(folder / "further.jsonl", world.pairs(held_out, FURTHER_PAIRS, draw(training, "further")))

    steps_per_epoch = -(-case.pairs // BATCH)
    interval = round(steps_per_epoch / case.evaluations)
    keys = {
        "seed": training.seed,
        "model": {"path": "../../sft"},
        "data": {"train": "pairs.jsonl"},
        "reward": {
            "num_train_epochs": case.epochs,
            "per_device_train_batch_size": BATCH,
            "per_device_eval_batch_size": 64,
            "max_length": 160,
            "learning_rate": 1e-3,
            "normalize": "none",
        },
        "output": {"save_steps": interval, "keep": 100},
    }
    path = folder / "reward.yaml"
    path.write_text(yaml.safe_dump(keys), encoding="utf-8")
    return path


def draw(training: Training, name: str) -> random.Random:
    """Return the random numbers of a file of pairs."""
    return random.Random(f"{training.seed} {name}")


@dataclass(frozen=True)
class Held:
    """Held-out pairs as token ids."""

    rows: list[dict[str, Any]]

    @classmethod
    def read(cls, config: Any, name: str, folder: Path) -> "Held":
        """Read the pairs of a file."""
        pairs = config.model_copy(update={"data": config.data.model_copy(update={"eval": str(folder / name)})})
        tokenizer = tokenizers.load_tokenizer(Path(config.model.path) / "model")
        return cls(list(training_rows.read_split(pairs, "eval", tokenizer)))

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [tuple(row["prompt_ids"]) for row in self.rows]

    def right(self, model: Any) -> list[float]:
        """Return 1 for each pair whose chosen answer scores higher, 0.5 for a tie, else 0."""
        chosen = reward.raw_scores(model, [row["chosen_ids"] for row in self.rows], 64)
        rejected = reward.raw_scores(model, [row["rejected_ids"] for row in self.rows], 64)
        return [0.5 * ((a > b) + (a >= b)) for a, b in zip(chosen, rejected, strict=True)]


@contextmanager
def label_smoothing(share: float) -> Iterator[None]:
    """Replace log sigmoid(x) in TRL's loss by (1 - share) log sigmoid(x) + share log sigmoid(-x)."""
    plain = functional.logsigmoid

    def smoothed(margin: torch.Tensor) -> torch.Tensor:
        return (1 - share) * plain(margin) + share * plain(-margin)

    with mock.patch.object(functional, "logsigmoid", smoothed):
        yield


if __name__ == "__main__":
    main()
