"""CPU seconds and peak memory of a PPO update on the reference workload; prints one JSON line.

    python benchmarks/ppo_update.py --shared ../shared --updates 5

64 prompts an update (the first 3 to 12 words of a review), up to 64 new tokens, 4 epochs of one optimizer step,
temperature 1, on the 5.3 M-parameter models of the developers' shared folder. `--dense` has no stop token: every
response has 64 tokens.
CPU seconds count all threads and hold on a noisy machine, where wall time does not; one thread is steadiest.
"""

import argparse
import json
import random
import resource
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli.ppo import HFEngine, ModelReward, PPOSettings, PPOTrainer, Prompts

BATCH = 64


def prompts(shared: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(shared / "models/reviews-sft")
    texts = [
        line.strip()
        for kind in ("pos", "neg")
        for line in (shared / f"data/rt-polarity/{kind}.txt").read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]
    draw = random.Random(0)
    draw.shuffle(texts)
    return [[1, *tokenizer(" ".join(text.split()[: draw.randint(3, 12)]))["input_ids"]] for text in texts]


def trainer(shared: Path, *, dense: bool, rows: int) -> PPOTrainer:
    def scorer() -> torch.nn.Module:
        return AutoModelForSequenceClassification.from_pretrained(shared / "models/reviews-rm", num_labels=1)

    policy, ref = (AutoModelForCausalLM.from_pretrained(shared / "models/reviews-sft") for _ in range(2))
    settings = PPOSettings(
        total_episodes=BATCH * 60,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=BATCH // rows,
        temperature=1.0,
        response_length=64,
        learning_rate=3e-5,
        lr_scheduler_type="constant",
        stop_token="none" if dense else "eos",
    )
    engine = HFEngine(policy, None if dense else 2, 0)
    return PPOTrainer(policy, ref, scorer(), {"reward": ModelReward(scorer().eval(), rows)}, engine, settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--dense", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows, ours = prompts(args.shared), trainer(args.shared, dense=args.dense, rows=args.micro_batch)
    seconds, tokens = [], []
    for update in range(args.updates):
        before = time.process_time()
        stats = ours.step(Prompts.from_lists(rows[BATCH * (update + 1) : BATCH * (update + 2)]))
        seconds.append(time.process_time() - before)
        tokens.append(stats["tokens/real"])
    found = {
        "system": "rlhf",
        "cpu_s_per_update": round(statistics.median(seconds[1:] or seconds), 3),
        "real_tokens_per_update": round(statistics.mean(tokens[1:] or tokens)),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
