"""CPU seconds of an update by share of padding, response length, batch size and vocabulary.

    python -m benchmarks.speed.synthetic MODEL padding|growth      (MODEL: a Llama folder; only its sizes are used)

Weights and tokens are random, because only shapes matter. Prints CPU seconds of all threads as one line of JSON.
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
from benchmarks.speed.ours import silence_libraries
from benchmarks.speed.workload import model_config
from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.models.batch import Prompts, Rollout
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.model import ModelReward

PROMPT, ROWS = 8, 16  # tokens of a prompt, rows of a micro-batch
PAD, FIRST = 0, 3  # the pad id, the first id that is not special
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8)  # of padding in a padded batch
BATCH, MEAN, SHORTEST = 64, 32, 12  # rows; mean and minimum of their tokens
LENGTHS, BATCHES, VOCABULARIES = (16, 32, 64, 128), (16, 32, 64, 128), (2048, 4096, 8192, 16384)
DEFAULT_BATCH, DEFAULT_LENGTH = 32, 32  # while another size varies


def config(model: str, **changes: Any) -> LlamaConfig:
    """Return the config of a model with changes. The ids below 3 are special."""
    return LlamaConfig(**(model_config(model) | {"max_position_embeddings": 256} | changes))


def trainer(body: LlamaConfig, *, batch: int, length: int, epochs: int = 4) -> PPOTrainer:
    """Return a trainer of models with random weights; every response has `length` tokens."""
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
    """Return row lengths with this mean whose padded batch has this share of padding.

    The longest row has mean / (1 - share) tokens. The others follow a power law, so that few rows are long, as in real
    responses. Raises ValueError if no such lengths exist.
    """
    longest = round(mean / (1 - share))
    if not shortest <= mean <= longest or (rows - 1) * shortest + longest > rows * mean:
        raise ValueError(f"{rows} rows of {shortest} to {longest} tokens cannot have {mean} on average")
    if longest == mean:
        return [mean] * rows
    power = (longest - shortest) / (mean - shortest) - 1
    steps = [(row + 0.5) / rows for row in range(rows - 1)]
    lengths = [round(shortest + (longest - shortest) * step**power) for step in steps] + [longest]
    return _adjust_sum(lengths, rows * mean, shortest, longest)


def _adjust_sum(lengths: list[int], total: int, least: int, most: int) -> list[int]:
    """Change the lengths, except the last, by single tokens in turn until they have this sum."""
    lengths, row = list(lengths), 0
    while sum(lengths) != total:
        step = 1 if sum(lengths) < total else -1
        if least <= lengths[row] + step <= most:
            lengths[row] += step
        row = (row + 1) % (len(lengths) - 1)
    return lengths


def rollout(lengths: Sequence[int], vocabulary: int) -> Rollout:
    """Return random tokens: prompts of PROMPT tokens, responses of the remaining length; rows in random order."""
    rng = random.Random(0)
    shuffled = rng.sample(list(lengths), len(lengths))

    def tokens(count: int) -> list[int]:
        return [rng.randrange(FIRST, vocabulary) for _ in range(count)]

    return Rollout.from_lists([tokens(PROMPT) for _ in shuffled], [tokens(n - PROMPT) for n in shuffled])


def padding(body: LlamaConfig, *, batch: int = BATCH, mean: int = MEAN, repeats: int = 5) -> list[dict[str, Any]]:
    """Return the CPU seconds of scoring and update for each share of padding.

    They are the minimum of `repeats`, because other processes only add time. The shares run in turn, so that other
    processes affect all of them.
    """
    ppo = trainer(body, batch=batch, length=round(mean / (1 - max(SHARES))))
    rollouts = {share: rollout(ragged_lengths(batch, mean, share), body.vocab_size) for share in SHARES}
    seconds: dict[float, list[float]] = {share: [] for share in SHARES}
    positions: dict[float, int] = {}
    ppo.update(ppo.make_experience(rollouts[SHARES[0]]))  # warm-up
    for _ in range(repeats):
        for share, rows in rollouts.items():
            start = time.process_time()
            positions[share] = int(ppo.update(ppo.make_experience(rows))["tokens/padded"])
            seconds[share].append(time.process_time() - start)
    return [
        {
            "share": round(1 - int(rows.mask.sum()) / rows.mask.numel(), 4),
            "real_tokens": int(rows.mask.sum()),
            "padded_tokens": positions[share],
            "cpu_s": round(min(seconds[share]), 4),
        }
        for share, rows in rollouts.items()
    ]


def step_seconds(body: LlamaConfig, *, batch: int, length: int, repeats: int = 3) -> dict[str, Any]:
    """Return the CPU seconds of a full update on rows of one length, without padding, after a warm-up."""
    ppo = trainer(body, batch=batch, length=length)
    rng, seconds = random.Random(0), []
    for _ in range(repeats + 1):
        rows = [[rng.randrange(FIRST, body.vocab_size) for _ in range(PROMPT)] for _ in range(batch)]
        start = time.process_time()
        ppo.step(Prompts.from_lists(rows))
        seconds.append(time.process_time() - start)
    return {"tokens": batch * (PROMPT + length), "vocabulary": body.vocab_size, "cpu_s": round(min(seconds[1:]), 4)}


def growth(model: str) -> dict[str, Any]:
    """Return the cost by response length, batch and vocabulary, and the share of attention pairs at the longest."""
    body = config(model)
    longest = attention_share(Shape.of(body), PROMPT, LENGTHS[-1])
    return {
        "length": [step_seconds(body, batch=DEFAULT_BATCH, length=length) for length in LENGTHS],
        "batch": [step_seconds(body, batch=batch, length=DEFAULT_LENGTH) for batch in BATCHES],
        "vocabulary": [
            step_seconds(config(model, vocab_size=size), batch=DEFAULT_BATCH, length=DEFAULT_LENGTH)
            for size in VOCABULARIES
        ],
        "attention_share_at_longest": round(longest, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("what", choices=["padding", "growth"])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    silence_libraries()
    torch.set_num_threads(args.threads)
    print(json.dumps(padding(config(args.model)) if args.what == "padding" else growth(args.model)))


if __name__ == "__main__":
    main()
