"""Our runs: one folder a seed, an interrupted one goes on where it stopped.

SEED/curve.jsonl has a line of metrics an update, SEED/points/NNN/policy the policy after NNN updates, SEED/state what
the next update depends on (gone when the run is over).
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.learning import curves
from benchmarks.speed.workload import Reference, prompts
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.models.batch import Prompts
from rlhf_cli.models.save import load_tree, save_tree
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.model import ModelReward

EPISODES, HELD_OUT, EVERY = 3840, 64, 320  # a policy and the state are kept every 320 episodes
STOP, PAD, ROWS = 2, 0, 16
# The workload, as trl_ppo.py has it; all else is our default.
WORKLOAD = {
    "total_episodes": EPISODES,
    "per_device_train_batch_size": ROWS,
    "gradient_accumulation_steps": 4,
    "num_ppo_epochs": 4,
    "temperature": 1.0,
    "response_length": 64,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
}


def replace_folder(folder: Path, write: Callable[[Path], Any]) -> None:
    """`folder` as `write` makes it: all of it or, after an interruption, none or the one before."""
    temporary, old = folder.with_name(folder.name + ".tmp"), folder.with_name(folder.name + ".old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write(temporary)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def scorer(shared: Path) -> torch.nn.Module:
    return AutoModelForSequenceClassification.from_pretrained(shared / "models/reviews-rm", num_labels=1)


def writer(shared: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(shared / "models/reviews-sft")


def trainer(shared: Path, settings: PPOSettings, seed: int) -> PPOTrainer:
    policy, reward = writer(shared), ModelReward(scorer(shared).eval(), ROWS)
    engine = HFEngine(policy, STOP, PAD)
    return PPOTrainer(policy, writer(shared), scorer(shared), {"reward": reward}, engine, settings, seed=seed)


def finished(folder: Path, updates: int) -> bool:
    return len(curves.read_lines(folder / "curve.jsonl")) == updates and not (folder / "state").exists()


def run(shared: Path, folder: Path, settings: PPOSettings, seed: int, tell: Callable[[str], None]) -> None:
    """Train one seed into `folder`, from where it stopped."""
    updates, count = settings.num_updates(), settings.prompts_per_update
    every = max(1, EVERY // settings.episodes_per_update)
    if finished(folder, updates):
        return
    folder.mkdir(parents=True, exist_ok=True)
    ppo = trainer(shared, settings, seed)
    if not (folder / "state").exists() and (folder / "state.old").exists():
        (folder / "state.old").rename(folder / "state")
    if (folder / "state").exists():
        ppo.load_state_dict(load_tree(folder / "state"))
    curves.cut_back(folder / "curve.jsonl", ppo.updates)
    tokenizer = AutoTokenizer.from_pretrained(shared / "models/reviews-sft")
    rows = prompts(Reference.shared(shared))[HELD_OUT:]
    random.Random(seed).shuffle(rows)
    while ppo.updates < updates:
        start = ppo.updates * count
        stats = ppo.step(Prompts.from_lists([rows[(start + i) % len(rows)] for i in range(count)]))
        with (folder / "curve.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"update": ppo.updates} | {key: round(v, 5) for key, v in stats.items()}) + "\n")
        score, kl = stats["objective/scores"], stats["objective/kl_k1"]
        tell(f"seed {seed}: update {ppo.updates} of {updates}, score {score:.2f}, KL {kl:.1f}")
        if ppo.updates % every == 0 or ppo.updates == updates:

            def keep(place: Path) -> None:
                for part in (ppo.policy, tokenizer):
                    part.save_pretrained(place / "policy")

            replace_folder(folder / "points" / f"{ppo.updates:03d}", keep)
            replace_folder(folder / "state", lambda place: save_tree(place, ppo.state_dict()))
    shutil.rmtree(folder / "state")


def best_of_n(shared: Path, path: Path, ns: list[int], samples: int, tell: Callable[[str], None]) -> list[dict]:
    """The SFT policy's best of n by the reward model, on 128 of the prompts that the runs train on; kept in `path`."""
    if path.exists() and (kept := json.loads(path.read_text(encoding="utf-8")))["samples"] == samples:
        return kept["best_of"]
    policy, rows = writer(shared), prompts(Reference.shared(shared))[HELD_OUT : HELD_OUT + 128]
    settings = PPOSettings(**WORKLOAD)
    ppo = PPOTrainer(
        policy,
        writer(shared),
        scorer(shared),
        {"reward": ModelReward(scorer(shared).eval(), 64)},
        HFEngine(policy, STOP, PAD),
        settings,
    )
    drawn = []
    for sample in range(samples):
        tell(f"best of n: sample {sample + 1} of {samples}")
        rollout = ppo.generate(Prompts.from_lists(rows), purpose=f"best of n {sample}")
        scores = ppo.rewards["reward"](rollout) - (settings.missing_eos_penalty or 0.0) * ~rollout.ended
        drawn.append(scores.tolist())
    by_prompt = list(zip(*drawn, strict=True))
    found = [{"n": n, "score": sum(curves.best_of(one, n) for one in by_prompt) / len(by_prompt)} for n in ns]
    path.write_text(json.dumps({"samples": samples, "best_of": found}), encoding="utf-8")
    return found
