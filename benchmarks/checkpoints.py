"""What the choice of a checkpoint and label smoothing are worth to the demo's reward model.

    python -m benchmarks.checkpoints RUN --cases small medium [--smoothing 0 0.1] [--out FILE]

RUN is a folder of `rlhf init demo` after `rlhf sft RUN`. Each seed of a case draws pairs of the demo's world, trains on
them and keeps the weights of each evaluation. All of them score 1,000 pairs of held-out requests without errors of
raters, which are dealt into halves 200 times: one half, whose raters err again, chooses a checkpoint, the other
measures it. Prints a line of JSON for each training.
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

import numpy as np
import torch
import yaml
from torch.nn import functional

from rlhf_cli.config import loading
from rlhf_cli.config.base import Options
from rlhf_cli.demo import world
from rlhf_cli.evaluation.kept_step import best_step, keep_step
from rlhf_cli.jsonl import append_jsonl, write_jsonl
from rlhf_cli.models import load, tokenizers
from rlhf_cli.stages.common import training_rows
from rlhf_cli.stages.reward import run as reward_stage
from rlhf_cli.stages.reward.scores import raw_scores

HELD_OUT_PAIRS = 1000
DEALS = 200
BATCH = 32


@dataclass(frozen=True)
class Case:
    """A training: its pairs and epochs, the evaluations in each epoch, and the share of labels that are wrong.

    The demo's raters err in .05 of the pairs; people disagree in a quarter to a third (Ouyang et al. 2022, 3.4).
    """

    pairs: int
    epochs: int
    evaluations: int = 1
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
    "overfit": Case(pairs=500, epochs=8, errors=0.25),
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
    config: Any = loading.load("reward", write_inputs(training))
    with label_smoothing(training.smoothing):
        reward_stage.run(config, Options())

    return score_checkpoints(config, training.folder / "held_out.jsonl", training.case.errors)


def score_checkpoints(config: Any, pairs: Path, errors: float) -> dict[str, Any]:
    """Return the accuracies of the checkpoints of a finished training, and what each rule of choice gains."""
    held_out = Held.read(config, pairs)
    right = {}
    states = (config.folder / "state").glob("checkpoint-*")
    for step, state in sorted((int(state.name.split("-")[1]), state) for state in states):
        model = load.load_reward_model(state).eval().requires_grad_(False)
        right[step] = np.array(held_out.right(model))
    accuracies = {step: round(float(values.mean()), 4) for step, values in right.items()}
    return {"accuracies": accuracies, **gains(right, held_out.prompts, errors)}


def gains(right: dict[int, Any], prompts: Sequence[Any], errors: float) -> dict[str, Any]:
    """Return the mean accuracy of the step that each rule keeps over the last, and how often it is another step."""
    rng = np.random.default_rng(0)
    count = len(prompts)
    last = max(right)
    kept: dict[str, list[int]] = {"highest": [], "best": []}
    gained: dict[str, list[float]] = {"highest": [], "best": []}
    for _ in range(DEALS):
        order = rng.permutation(count)
        chooses = order[: count // 2]
        measures = order[count // 2 :]
        wrong_labels = rng.random(len(chooses)) < errors
        seen = {step: np.where(wrong_labels, 1 - values[chooses], values[chooses]) for step, values in right.items()}

        steps = {"highest": best_step(seen), "best": keep_step(seen, [prompts[i] for i in chooses]).step}
        for rule, step in steps.items():
            kept[rule].append(step)
            gained[rule].append(float(right[step][measures].mean() - right[last][measures].mean()))
    result: dict[str, Any] = {}
    for rule in kept:
        result[f"gain of {rule}"] = round(fmean(gained[rule]), 4)
        result[f"worst of {rule}"] = round(min(gained[rule]), 4)
        result[f"others of {rule}"] = fmean(step != last for step in kept[rule])
    return result


def write_inputs(training: Training) -> Path:
    """Write the pairs and the config of a training, and return the config's path."""
    case = training.case
    folder = training.folder
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = world.split(0)
    with mock.patch.object(world, "FLIPS", case.errors):
        write_jsonl(folder / "pairs.jsonl", world.pairs(train, case.pairs, draw(training, "training")))
    with mock.patch.object(world, "FLIPS", 0):
        write_jsonl(folder / "held_out.jsonl", world.pairs(held_out, HELD_OUT_PAIRS, draw(training, "held out")))

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
    def read(cls, config: Any, path: Path) -> "Held":
        """Read the pairs of a file."""
        pairs = config.model_copy(update={"data": config.data.model_copy(update={"eval": str(path)})})
        tokenizer = tokenizers.load_tokenizer(Path(config.model.path) / "model")
        return cls(list(training_rows.read_split(pairs, "eval", tokenizer)))

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [tuple(row["prompt_ids"]) for row in self.rows]

    def right(self, model: Any) -> list[float]:
        """Return 1 for each pair whose chosen answer scores higher, 0.5 for a tie, else 0."""
        chosen = raw_scores(model, [row["chosen_ids"] for row in self.rows], 64)
        rejected = raw_scores(model, [row["rejected_ids"] for row in self.rows], 64)
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
