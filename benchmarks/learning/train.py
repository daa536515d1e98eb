"""Train one run per seed; an interrupted run resumes.

SEED/curve.jsonl has the metrics of each update, SEED/state the checkpoint (deleted at the end), SEED/trained/policy the
last policy and, with ppo.average, SEED/trained/average that of averaged weights.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from benchmarks.learning import curves
from benchmarks.speed.workload import Reference, prompts
from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.models.batch import Prompts
from rlhf_cli.models.save import load_tree, save_tree
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.scores import apply_penalties
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.model import ModelReward

EPISODES, HELD_OUT, EVERY = 3840, 64, 320  # a checkpoint is saved every 320 episodes
STOP, PAD, ROWS = 2, 0, 16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The settings of trl_ppo.py; all others are our defaults.
WORKLOAD = {
    "total_episodes": EPISODES,
    "per_device_train_batch_size": ROWS,
    "gradient_accumulation_steps": 4,
    "num_ppo_epochs": 4,
    "temperature": 1.0,
    "response_length": 64,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "bf16": False,
}


# Recipe -> keys of `ppo:` beyond WORKLOAD. TRL's recorded runs have its default, kl_coef 0.05, which is ours, too.
RECIPES: dict[str, dict[str, Any]] = {
    "default": {},
    "trl": {"kl_coef": 0.05},
    "frontier": {  # exact gradient of a high KL penalty, a fast value model, averaged weights
        "total_episodes": 2 * EPISODES,
        "kl_in": "both",
        "kl_estimator": "full",
        "kl_coef": 0.33,
        "lam": 0.8,
        "value_learning_rate": 5e-4,
        "cliprange_value": 1.0,
        "average": 0.98,
    },
}


def replace_folder(folder: Path, write: Callable[[Path], Any]) -> None:
    """Write a folder atomically: after an interruption it is missing or still the previous one."""
    temporary, old = folder.with_name(folder.name + ".tmp"), folder.with_name(folder.name + ".old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write(temporary)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def load_scorer(shared: Path) -> torch.nn.Module:
    return AutoModelForSequenceClassification.from_pretrained(shared / "models/reviews-rm", num_labels=1).to(DEVICE)


def load_policy(shared: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(shared / "models/reviews-sft").to(DEVICE)


def trainer(shared: Path, settings: PPOSettings, seed: int) -> PPOTrainer:
    policy, reward = load_policy(shared), ModelReward(load_scorer(shared).eval(), ROWS)
    engine, value = HFEngine(policy, STOP, PAD, bf16=False), load_scorer(shared) if settings.needs_value_model else None
    return PPOTrainer(policy, load_policy(shared), value, {"reward": reward}, engine, settings, seed=seed)


def run(shared: Path, folder: Path, settings: PPOSettings, seed: int, progress: Callable[[str], None]) -> None:
    """Train one seed in `folder`, or resume it."""
    updates, count = settings.num_updates(), settings.prompts_per_update
    every = max(1, EVERY // settings.episodes_per_update)
    if (folder / "trained").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    ppo = trainer(shared, settings, seed)
    if not (folder / "state").exists() and (folder / "state.old").exists():
        (folder / "state.old").rename(folder / "state")
    if (folder / "state").exists():
        ppo.load_state_dict(load_tree(folder / "state"))
    curves.truncate(folder / "curve.jsonl", ppo.updates)
    rows = prompts(Reference.shared(shared))[HELD_OUT:]
    random.Random(seed).shuffle(rows)
    while ppo.updates < updates:
        start = ppo.updates * count
        stats = ppo.step(Prompts.from_lists([rows[(start + i) % len(rows)] for i in range(count)]))
        with (folder / "curve.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"update": ppo.updates} | {key: round(v, 5) for key, v in stats.items()}) + "\n")
        score, kl = stats["objective/scores"], stats["objective/kl_k1"]
        progress(f"seed {seed}: update {ppo.updates} of {updates}, score {score:.2f}, KL {kl:.1f}")
        if ppo.updates % every == 0:
            replace_folder(folder / "state", lambda place: save_tree(place, ppo.state_dict()))

    def save(place: Path) -> None:
        ppo.policy.save_pretrained(place / "policy")
        if settings.average:
            with ppo.averaged_policy():
                ppo.policy.save_pretrained(place / "average")

    replace_folder(folder / "trained", save)
    shutil.rmtree(folder / "state", ignore_errors=True)


def best_of_n(shared: Path, path: Path, ns: list[int], samples: int, progress: Callable[[str], None]) -> list[dict]:
    """Return the mean score of the SFT policy's best of n on 128 training prompts; cached in `path`."""
    if path.exists() and (cached := json.loads(path.read_text(encoding="utf-8")))["samples"] == samples:
        return cached["best_of"]
    policy, rows = load_policy(shared), prompts(Reference.shared(shared))[HELD_OUT : HELD_OUT + 128]
    settings, reward = PPOSettings(**WORKLOAD), ModelReward(load_scorer(shared).eval(), 64)
    value, engine = load_scorer(shared), HFEngine(policy, STOP, PAD, bf16=False)
    ppo = PPOTrainer(policy, load_policy(shared), value, {"reward": reward}, engine, settings)
    scores_by_sample = []
    for sample in range(samples):
        progress(f"best of n: sample {sample + 1} of {samples}")
        rollout = ppo.generate(Prompts.from_lists(rows), purpose=f"best of n {sample}")
        scores = apply_penalties(ppo.rewards["reward"](rollout), rollout, ppo.response_limit, settings)
        scores_by_sample.append(scores.tolist())
    by_prompt = list(zip(*scores_by_sample, strict=True))
    best_of = [{"n": n, "score": sum(curves.best_of(row, n) for row in by_prompt) / len(by_prompt)} for n in ns]
    path.write_text(json.dumps({"samples": samples, "best_of": best_of}), encoding="utf-8")
    return best_of
