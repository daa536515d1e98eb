"""What an update costs as its episodes change: the padding share, the length, the batch, the vocabulary.

    python -m benchmarks.speed.synthetic MODEL padding|growth      (the folder of a Llama: its sizes are taken)

Weights and tokens are random: only shapes count here. CPU seconds of all threads; prints one line of JSON.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks.speed.floor import Shape, attention_share
from benchmarks.speed.ours import quiet
from benchmarks.speed.workload import model_config
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.models.batch import Prompts, Rollout
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.model import ModelReward

PROMPT, ROWS, PAD, FIRST = 8, 16, 0, 3  # tokens of a prompt; rows of a micro-batch; the first id that is no special one
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8)  # of padding in the rectangle of a batch
BATCH, MEAN, SHORTEST = 64, 32, 12  # rows; their tokens on average, and at least
LENGTHS, BATCHES, VOCABULARIES = (16, 32, 64, 128), (16, 32, 64, 128), (2048, 4096, 8192, 16384)
GROWN_BATCH, GROWN_LENGTH = 32, 32  # where the other one grows


def config(model: str, **changes: Any) -> LlamaConfig:
    """The sizes of a model's folder, with changes; random weights of 0.02, ids below 3 are special."""
    return LlamaConfig(**(model_config(model) | {"max_position_embeddings": 256} | changes))


def trainer(body: LlamaConfig, *, batch: int, length: int, epochs: int = 4) -> PPOTrainer:
    """PPO on random models; responses never end before `length`."""
    torch.manual_seed(0)
    policy, ref = LlamaForCausalLM(body), LlamaForCausalLM(body)
    heads = type(body)(**(body.to_dict() | {"num_labels": 1}))
    value, scorer = LlamaForSequenceClassification(heads), LlamaForSequenceClassification(heads)
    settings = PPOSettings(
        total_episodes=batch,
        per_device_train_batch_size=min(ROWS, batch),
        gradient_accumulation_steps=max(1, batch // ROWS),
        num_ppo_epochs=epochs,
        temperature=1.0,
        response_length=length,
        learning_rate=3e-5,
        lr_scheduler_type="constant",
        stop_token="none",
        missing_eos_penalty=None,
    )
    reward = ModelReward(scorer.eval().requires_grad_(False), ROWS)
    return PPOTrainer(policy, ref, value, {"reward": reward}, HFEngine(policy, None, PAD), settings)


def ragged_lengths(rows: int, mean: int, share: float, shortest: int = SHORTEST) -> list[int]:
    """Row lengths with this mean, the longest mean / (1 - share): so much of their rectangle is padding.

    Between the shortest and the longest they follow a power of even steps, as real responses do: few are long. Raises
    ValueError where no such lengths are.
    """
    longest = round(mean / (1 - share))
    if not shortest <= mean <= longest or (rows - 1) * shortest + longest > rows * mean:
        raise ValueError(f"{rows} rows of {shortest} to {longest} tokens cannot have {mean} on average")
    if longest == mean:
        return [mean] * rows
    power = (longest - shortest) / (mean - shortest) - 1
    steps = [(row + 0.5) / rows for row in range(rows - 1)]
    lengths = [round(shortest + (longest - shortest) * step**power) for step in steps] + [longest]
    return _with_sum(lengths, rows * mean, shortest, longest)


def _with_sum(lengths: list[int], total: int, least: int, most: int) -> list[int]:
    """The lengths moved by single tokens, in turn and the last one left out, until they have this sum."""
    lengths, row = list(lengths), 0
    while sum(lengths) != total:
        step = 1 if sum(lengths) < total else -1
        if least <= lengths[row] + step <= most:
            lengths[row] += step
        row = (row + 1) % (len(lengths) - 1)
    return lengths


def rollout(lengths: Sequence[int], vocabulary: int) -> Rollout:
    """Random tokens: prompts of PROMPT, responses of what is left of each length; rows in random order."""
    draw = random.Random(0)
    shuffled = draw.sample(list(lengths), len(lengths))

    def tokens(count: int) -> list[int]:
        return [draw.randrange(FIRST, vocabulary) for _ in range(count)]

    return Rollout.from_lists([tokens(PROMPT) for _ in shuffled], [tokens(n - PROMPT) for n in shuffled])


def padding(body: LlamaConfig, *, batch: int = BATCH, mean: int = MEAN, repeats: int = 5) -> list[dict[str, Any]]:
    """CPU seconds of judge and update for each padding share, the least of `repeats`: on a shared machine neighbours
    only add to them. Shares in turn, so that all meet the same ones.
    """
    ppo = trainer(body, batch=batch, length=round(mean / (1 - max(SHARES))))
    made = {share: rollout(ragged_lengths(batch, mean, share), body.vocab_size) for share in SHARES}
    seconds: dict[float, list[float]] = {share: [] for share in SHARES}
    read: dict[float, int] = {}
    ppo.update(ppo.make_experience(made[SHARES[0]]))  # warms up
    for _ in range(repeats):
        for share, rows in made.items():
            began = time.process_time()
            read[share] = int(ppo.update(ppo.make_experience(rows))["tokens/padded"])
            seconds[share].append(time.process_time() - began)
    return [
        {
            "share": round(1 - int(rows.mask.sum()) / rows.mask.numel(), 4),
            "real_tokens": int(rows.mask.sum()),
            "padded_tokens": read[share],
            "cpu_s": round(min(seconds[share]), 4),
        }
        for share, rows in made.items()
    ]


def step_seconds(body: LlamaConfig, *, batch: int, length: int, repeats: int = 3) -> dict[str, Any]:
    """CPU seconds of whole updates on rows of one length, without padding; the first update is not counted."""
    ppo = trainer(body, batch=batch, length=length)
    draw, seconds = random.Random(0), []
    for _ in range(repeats + 1):
        rows = [[draw.randrange(FIRST, body.vocab_size) for _ in range(PROMPT)] for _ in range(batch)]
        began = time.process_time()
        ppo.step(Prompts.from_lists(rows))
        seconds.append(time.process_time() - began)
    return {"tokens": batch * (PROMPT + length), "vocabulary": body.vocab_size, "cpu_s": round(min(seconds[1:]), 4)}


def growth(model: str) -> dict[str, Any]:
    """Points of growth with response length, batch and vocabulary, and attention's share at the longest."""
    body = config(model)
    longest = attention_share(Shape.of(body), PROMPT, LENGTHS[-1])
    return {
        "length": [step_seconds(body, batch=GROWN_BATCH, length=length) for length in LENGTHS],
        "batch": [step_seconds(body, batch=batch, length=GROWN_LENGTH) for batch in BATCHES],
        "vocabulary": [
            step_seconds(config(model, vocab_size=size), batch=GROWN_BATCH, length=GROWN_LENGTH)
            for size in VOCABULARIES
        ],
        "attention_share_at_longest": round(longest, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("what", choices=["padding", "growth"])
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    quiet()
    torch.set_num_threads(asked.threads)
    print(json.dumps(padding(config(asked.model)) if asked.what == "padding" else growth(asked.model)))


if __name__ == "__main__":
    main()
