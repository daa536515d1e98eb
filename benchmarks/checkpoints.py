"""What the choice of a checkpoint and label smoothing are worth to the demo's reward model.

    python -m benchmarks.checkpoints RUN --cases small medium [--smoothing 0 0.1] [--out FILE]

RUN is a folder of `rlhf init demo` after `rlhf sft RUN`. Each seed of a case trains on other pairs of its
data/pairs.jsonl, as long as there are enough, and keeps the weights of each evaluation. All of them score the 500 pairs
of data/pairs_eval.jsonl, by which one is chosen, and 1,000 further pairs of held-out requests, which take no part in
the choice and have no errors of raters. Prints a line of JSON for each training.
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
from rlhf_cli.jsonl import append_jsonl, read_jsonl, write_jsonl
from rlhf_cli.models import load, tokenizers
from rlhf_cli.stages import reward
from rlhf_cli.stages.common import training_rows
from rlhf_cli.statistics import selection_weights, within_noise

FURTHER_PAIRS = 1000
BATCH = 32


@dataclass(frozen=True)
class Case:
    """A training: its pairs and epochs, the evaluations in each epoch, and the share of labels that are exchanged.

    The demo's raters err in .05 of the pairs; people disagree in a quarter to a third (Ouyang et al. 2022, 3.4).
    """

    pairs: int
    epochs: int
    evaluations: int = 1
    exchanged: float = 0.0


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
        name = f"{case.pairs}x{case.epochs}-{case.exchanged:g}-{self.smoothing:g}-{self.seed}"
        return self.run / "checkpoints" / name


CASES = {
    "small": Case(pairs=500, epochs=5),
    "noisy": Case(pairs=500, epochs=8, exchanged=0.25),
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
        for smoothing in options.smoothing:
            for seed in options.seeds:
                training = Training(options.run.resolve(), CASES[name], seed, smoothing)
                result = {"case": name, "seed": seed, "smoothing": smoothing, **measure(training)}
                print(result, flush=True)
                if options.out:
                    append_jsonl(options.out, result)


def measure(training: Training) -> dict[str, Any]:
    """Train a case, and return the accuracies of its checkpoints."""
    run = training.run
    folder = training.folder
    config: Any = loading.load("reward", write_inputs(training))
    with label_smoothing(training.smoothing):
        reward.run(config, Options())

    chosen_on = Held.read(config, "data/pairs_eval.jsonl", run)
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
    rows = [row for _, row in read_jsonl(training.run / "data/pairs.jsonl")]
    first = training.seed * case.pairs % len(rows)
    pairs = rows[first : first + case.pairs]
    draw = random.Random(training.seed)
    for number in draw.sample(range(len(pairs)), round(case.exchanged * len(pairs))):
        row = pairs[number]
        pairs[number] = {**row, "chosen": row["rejected"], "rejected": row["chosen"]}
    write_jsonl(folder / "pairs.jsonl", pairs)
    write_jsonl(folder / "further.jsonl", further_pairs(training.run))

    steps_per_epoch = -(-case.pairs // BATCH)
    interval = steps_per_epoch // case.evaluations
    keys = {
        "seed": training.seed,
        "model": {"path": "../../sft"},
        "data": {"train": "pairs.jsonl"},
        "reward": {
            "num_train_epochs": case.epochs,
            "per_device_train_batch_size": BATCH,
            "per_device_eval_batch_size": 64,
            "max_length": 128,
            "learning_rate": 1e-3,
            "normalize": "none",
        },
        "output": {"save_steps": interval, "keep": 100},
    }
    path = folder / "reward.yaml"
    path.write_text(yaml.safe_dump(keys), encoding="utf-8")
    return path


def further_pairs(run: Path) -> Iterator[dict[str, str]]:
    """Return pairs of held-out requests in the order that a rater without errors prefers."""
    seed = yaml.safe_load((run / "reward.yaml").read_text(encoding="utf-8"))["seed"]
    _, held_out = world.split(seed)
    for row in world.pairs(held_out, FURTHER_PAIRS, random.Random(f"{seed} further pairs")):
        answers = [row["chosen"], row["rejected"]]
        chosen, rejected = sorted(answers, key=lambda answer: -world.impression(row["prompt"], answer.strip()))
        yield {"prompt": row["prompt"], "chosen": chosen, "rejected": rejected}


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
