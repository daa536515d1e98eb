"""Baselines of a run: dpo.yaml beside reward.yaml, and best_of/sft.yaml below ppo.yaml, with its prompts."""

import os
from pathlib import Path
from typing import Any

from rlhf_cli import config, jsonl
from rlhf_cli.commands.init.templates import write_config
from rlhf_cli.config.machinery import yaml_io
from rlhf_cli.config.machinery.yaml_io import to_yaml
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.config.sections import TrainerSettings
from rlhf_cli.config.sft import SFTConfig
from rlhf_cli.errors import RLHFError

RATE_SHARE = 0.1  # of the reward model's learning rate, as the defaults of the two stages are: 1e-5 and 1e-6
BEST_OF_FOLDER = "best_of"  # a run's folder in that of the run whose models it reads
NUM_ANSWERS, MAX_ANSWERS, EPOCHS = 16, 64, 4  # of best-of-n SFT; more than 16 answers where prompts are few
NOT_SHARED = {"num_train_epochs", "max_steps", "logging_steps", "eval_steps"}  # with the stage whose sizes it has
SHARED_MODEL_KEYS = ("adapters", "revision", "dtype", "attn_implementation")  # that the model has in PPO, too
PPO_DATA = ("prompts", "eval_prompts", "ptx_data")


def write_dpo(folder: Path, rows: int | None = None) -> None:
    """Write dpo.yaml, with `rows` pairs at a time (None: those of reward.yaml) in batches of the same size.

    Raises RLHFError C11 if there is no reward.yaml.
    """
    source = folder / "reward.yaml"
    if not source.exists():
        raise RLHFError("C11", "--baselines needs the pairs of a reward.yaml, and there is none", hint="remove it")
    tree = yaml_io.read(source).tree
    reward = config.load("reward", source)
    assert isinstance(reward, RewardConfig)
    settings = {name: value for name, value in tree["reward"].items() if name in TrainerSettings.model_fields}
    if rows:
        batch = reward.reward.per_device_train_batch_size * reward.reward.gradient_accumulation_steps
        rows = min(rows, batch)
        settings |= {"per_device_train_batch_size": rows, "gradient_accumulation_steps": batch // rows}
        settings["per_device_eval_batch_size"] = rows
    model = {"path": "RUN/sft", **tree.get("model", {})}
    values = {
        "seed": tree["seed"],
        "path": model.pop("path"),
        "learning_rate": f"{RATE_SHARE * reward.reward.learning_rate:.0e}".replace("e-0", "e-"),
        "model": model,
        "data": tree["data"],
        "settings": settings,
        "sections": {name: tree[name] for name in ("trainer", "output") if name in tree},
    }
    write_config("dpo", folder / "dpo.yaml", "dpo.yaml.jinja", values)


def write_best_of(folder: Path) -> None:
    """Write best_of/sft.yaml: prompts and sampling of ppo.yaml, sizes of sft.yaml, or without it of reward.yaml.

    It samples about as many answers as PPO, if MAX_ANSWERS to each prompt are enough for that.
    """
    stage = "sft" if (folder / "sft.yaml").exists() else "reward"
    ppo_tree = yaml_io.read(folder / "ppo.yaml").tree
    tree = yaml_io.read(folder / f"{stage}.yaml").tree
    ppo, sizes = config.load("ppo", folder / "ppo.yaml"), config.load(stage, folder / f"{stage}.yaml")
    assert isinstance(ppo, PPOConfig) and isinstance(sizes, SFTConfig | RewardConfig)

    trained = sizes.sft if isinstance(sizes, SFTConfig) else sizes.reward
    batch = trained.per_device_train_batch_size * trained.gradient_accumulation_steps
    episodes = ppo.ppo.total_episodes or 0
    file = Path(ppo.data.prompts)
    prompts = sum(1 for _ in jsonl.read_jsonl(file)) if file.is_file() else max(episodes, batch)
    n = min(MAX_ANSWERS, max(NUM_ANSWERS, round(episodes / prompts)))

    data = {"train": _inside(folder, ppo.data.prompts), **ppo_tree["data"]}
    has_limit = not episodes or "max_rows" in data
    sampling = _sampling(ppo)
    if "truncate_prompt_words" in data:
        sampling["truncate_prompt_words"] = data.pop("truncate_prompt_words")
    scorers = [path for source in ppo.rewards.values() for path in (source.model, *source.models.values()) if path]
    models = ppo_tree.get("models", {})

    values = {
        "seed": tree["seed"],
        "path": _inside(folder, ppo.models.sft),
        "model": {key: models[key] for key in SHARED_MODEL_KEYS if key in models},
        "data": {key: value for key, value in data.items() if key not in PPO_DATA},
        "max_rows": None if has_limit else min(prompts, max(batch, episodes // n)),
        "episodes": episodes,
        "n": n,
        "reward": _inside(folder, scorers[0] if scorers else ppo.models.reward),
        "sampling": sampling,
        "source": f"{stage}.yaml",
        "epochs": EPOCHS,
        "settings": _training(tree[stage], sizes, ppo),
        "trainer": to_yaml(tree["trainer"]) if "trainer" in tree else None,
    }
    (folder / BEST_OF_FOLDER).mkdir(exist_ok=True)
    write_config("sft", folder / BEST_OF_FOLDER / "sft.yaml", "best_of.yaml.jinja", values, folder)


def _sampling(ppo: PPOConfig) -> dict[str, Any]:
    """Return the keys of best_of that sample as PPO does."""
    settings = ppo.ppo
    sampling = {
        "response_length": settings.max_response_length,
        "temperature": settings.temperature,
        "missing_eos_penalty": settings.missing_eos_penalty,
    }
    rows = settings.local_rollout_forward_batch_size
    return sampling | ({"per_device_batch_size": rows} if rows else {})


def _training(written: dict[str, Any], sizes: SFTConfig | RewardConfig, ppo: PPOConfig) -> dict[str, Any]:
    """Return the training settings of the stage whose sizes best-of-n SFT has."""
    shared = TrainerSettings.model_fields.keys() - NOT_SHARED
    settings = {name: value for name, value in written.items() if name in shared}
    if isinstance(sizes, SFTConfig) and bool(sizes.model.adapters) == bool(ppo.models.adapters):
        settings["learning_rate"] = sizes.sft.learning_rate
    return settings


def _inside(folder: Path, value: str) -> str:
    """Return a resolved path inside `folder` relative to best_of/; others and hub ids are unchanged."""
    top = Path(os.path.abspath(folder))
    return f"../{Path(value).relative_to(top).as_posix()}" if Path(value).is_relative_to(top) else value
