"""Baselines of a run: dpo.yaml beside reward.yaml, and best_of/sft.yaml below ppo.yaml, with its prompts."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rlhf_cli import config, jsonl
from rlhf_cli.commands.init.templates import format_rate, write_config
from rlhf_cli.config.machinery import yaml_io
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.config.sections import TrainerSettings
from rlhf_cli.config.sft import SFTConfig
from rlhf_cli.errors import RLHFError

RATE_SHARE = 0.1  # of the reward model's learning rate, as the defaults of the two stages are: 1e-5 and 1e-6
BEST_OF_FOLDER = "best_of"  # a run's folder in that of the run whose models it reads
EPOCHS = 4  # of best-of-n SFT
NUM_ANSWERS = 16  # to a prompt, of best-of-n SFT
MAX_BEST_OF = 64  # where prompts are few
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

    settings = _with_keys(tree["reward"], TrainerSettings.model_fields)
    if rows:
        batch = _batch_rows(reward.reward)
        rows = min(rows, batch)
        settings["per_device_train_batch_size"] = rows
        settings["gradient_accumulation_steps"] = batch // rows
        settings["per_device_eval_batch_size"] = rows

    model = {"path": "RUN/sft", **tree.get("model", {})}
    values = {
        "seed": tree["seed"],
        "path": model.pop("path"),
        "learning_rate": format_rate(RATE_SHARE * reward.reward.learning_rate),
        "model": model,
        "data": tree["data"],
        "settings": settings,
        "sections": _with_keys(tree, ("trainer", "output")),
    }
    write_config("dpo", folder / "dpo.yaml", "dpo.yaml.jinja", values)


def write_best_of(folder: Path) -> None:
    """Write best_of/sft.yaml: prompts and sampling of ppo.yaml, sizes of sft.yaml, or without it of reward.yaml.

    It samples about as many answers as PPO, if MAX_BEST_OF to each prompt are enough for that.
    """
    stage = "sft" if (folder / "sft.yaml").exists() else "reward"
    tree = yaml_io.read(folder / f"{stage}.yaml").tree
    sized = config.load(stage, folder / f"{stage}.yaml")
    ppo_tree = yaml_io.read(folder / "ppo.yaml").tree
    ppo = config.load("ppo", folder / "ppo.yaml")
    assert isinstance(ppo, PPOConfig) and isinstance(sized, SFTConfig | RewardConfig)

    data = {"train": _inside(folder, ppo.data.prompts), **ppo_tree["data"]}
    sampling = _sampling(ppo)
    if "truncate_prompt_words" in data:
        sampling["truncate_prompt_words"] = data.pop("truncate_prompt_words")

    batch = _batch_rows(getattr(sized, stage))
    episodes = ppo.ppo.total_episodes or 0
    file = Path(ppo.data.prompts)
    prompts = sum(1 for _ in jsonl.read_jsonl(file)) if file.is_file() else max(episodes, batch)
    n = min(MAX_BEST_OF, max(NUM_ANSWERS, round(episodes / prompts)))
    max_rows = None
    if episodes and "max_rows" not in data:
        max_rows = min(prompts, max(batch, episodes // n))

    values = {
        "seed": tree["seed"],
        "path": _inside(folder, ppo.models.sft),
        "model": _with_keys(ppo_tree.get("models", {}), SHARED_MODEL_KEYS),
        "data": {key: value for key, value in data.items() if key not in PPO_DATA},
        "max_rows": max_rows,
        "episodes": episodes,
        "n": n,
        "reward": _inside(folder, _first_scorer(ppo)),
        "sampling": sampling,
        "source": f"{stage}.yaml",
        "epochs": EPOCHS,
        "settings": _shared_settings(tree[stage], sized, ppo),
        "trainer": tree.get("trainer"),
    }
    (folder / BEST_OF_FOLDER).mkdir(exist_ok=True)
    write_config("sft", folder / BEST_OF_FOLDER / "sft.yaml", "best_of.yaml.jinja", values, folder)


def _batch_rows(settings: TrainerSettings) -> int:
    """Return the rows of an optimizer step."""
    return settings.per_device_train_batch_size * settings.gradient_accumulation_steps


def _with_keys(tree: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Return those of the keys that a tree has, with their values, in its order."""
    return {key: value for key, value in tree.items() if key in keys}


def _first_scorer(ppo: PPOConfig) -> str:
    """Return the path of the first reward model that PPO is trained with."""
    for source in ppo.rewards.values():
        for path in (source.model, *source.models.values()):
            if path:
                return path
    return ppo.models.reward


def _sampling(ppo: PPOConfig) -> dict[str, Any]:
    """Return the keys of best_of that sample as PPO does."""
    settings = ppo.ppo
    sampling: dict[str, Any] = {
        "response_length": settings.max_response_length,
        "temperature": settings.temperature,
        "missing_eos_penalty": settings.missing_eos_penalty,
    }
    if settings.local_rollout_forward_batch_size:
        sampling["per_device_batch_size"] = settings.local_rollout_forward_batch_size
    return sampling


def _shared_settings(written: dict[str, Any], sized: SFTConfig | RewardConfig, ppo: PPOConfig) -> dict[str, Any]:
    """Return the training settings of the stage whose sizes best-of-n SFT has."""
    settings = _with_keys(written, TrainerSettings.model_fields.keys() - NOT_SHARED)
    if isinstance(sized, SFTConfig):
        trains_the_same = bool(sized.model.adapters) == bool(ppo.models.adapters)
        if trains_the_same:
            settings["learning_rate"] = sized.sft.learning_rate
    return settings


def _inside(folder: Path, value: str) -> str:
    """Return a resolved path inside `folder` relative to best_of/; others and hub ids are unchanged."""
    top = Path(os.path.abspath(folder))
    path = Path(value)
    if not path.is_relative_to(top):
        return value
    return f"../{path.relative_to(top).as_posix()}"
