"""`rlhf init --baselines`: write dpo.yaml beside reward.yaml, and best_of/sft.yaml below ppo.yaml, with its prompts."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rlhf_cli import config
from rlhf_cli.config import json_schema, yaml_io
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.training import RewardConfig, SFTConfig, TrainerSettings
from rlhf_cli.config.yaml_io import align_comments, to_yaml
from rlhf_cli.errors import RLHFError
from rlhf_cli.runs.discover import configs_folder

RATE_SHARE = 0.1  # of the reward model's learning rate, as the defaults of the two stages are: 1e-5 and 1e-6
BEST_OF = "best_of"  # a run's folder in that of the run whose models it reads
NUM_ANSWERS, EPOCHS = 16, 4  # of best-of-n SFT
NOT_SHARED = {"num_train_epochs", "max_steps", "logging_steps", "eval_steps"}  # with the stage whose sizes it has


def write_dpo(folder: Path, rows: int | None = None) -> None:
    """Write dpo.yaml, with `rows` pairs at a time (None: those of reward.yaml) in batches of the same size.

    Raises RLHFError C11 if there is no reward.yaml.
    """
    source = folder / "reward.yaml"
    if not source.exists():
        raise RLHFError("C11", "--baselines needs the pairs of a reward.yaml, and there is none", hint="remove it")
    tree, reward = yaml_io.read(source).tree, config.load("reward", source)
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
    _write("dpo", folder / "dpo.yaml", "dpo.yaml.jinja", values)


def write_best_of(folder: Path) -> None:
    """Write best_of/sft.yaml: prompts and sampling of ppo.yaml, sizes of sft.yaml, or without it of reward.yaml.

    It samples about as many answers as PPO.
    """
    stage = "sft" if (folder / "sft.yaml").exists() else "reward"
    ppo_tree, tree = (yaml_io.read(folder / f"{name}.yaml").tree for name in ("ppo", stage))
    ppo, sizes = (config.load(name, folder / f"{name}.yaml") for name in ("ppo", stage))
    assert isinstance(ppo, PPOConfig) and isinstance(sizes, SFTConfig | RewardConfig)
    settings = {name: value for name, value in tree[stage].items() if name in TrainerSettings.model_fields}
    settings = {name: value for name, value in settings.items() if name not in NOT_SHARED}
    if isinstance(sizes, SFTConfig) and bool(sizes.model.adapters) == bool(ppo.models.adapters):
        settings["learning_rate"] = sizes.sft.learning_rate
    keys = ("adapters", "revision", "dtype", "attn_implementation")
    scorers = [path for source in ppo.rewards.values() for path in (source.model, *source.models.values()) if path]
    data = {"train": _inside(folder, ppo.data.prompts), **ppo_tree["data"]}
    trained = sizes.sft if isinstance(sizes, SFTConfig) else sizes.reward
    batch, episodes = trained.per_device_train_batch_size * trained.gradient_accumulation_steps, ppo.ppo.total_episodes
    sampling = {name: getattr(ppo.ppo, name) for name in ("temperature", "missing_eos_penalty")}
    sampling |= {key: data.pop(key) for key in ("truncate_prompt_words",) if key in data}
    if ppo.ppo.local_rollout_forward_batch_size:
        sampling["per_device_batch_size"] = ppo.ppo.local_rollout_forward_batch_size
    values = {
        "seed": tree["seed"],
        "path": _inside(folder, ppo.models.sft),
        "model": {key: ppo_tree["models"][key] for key in keys if key in ppo_tree.get("models", {})},
        "data": {key: value for key, value in data.items() if key not in ("prompts", "eval_prompts", "ptx_data")},
        "max_rows": max(batch, episodes // NUM_ANSWERS) if episodes and "max_rows" not in data else None,
        "episodes": episodes,
        "n": NUM_ANSWERS,
        "reward": _inside(folder, scorers[0] if scorers else ppo.models.reward),
        "sampling": {"response_length": ppo.ppo.max_response_length, **sampling},
        "source": f"{stage}.yaml",
        "epochs": EPOCHS,
        "settings": settings,
        "trainer": to_yaml(tree["trainer"]) if "trainer" in tree else None,
    }
    (folder / BEST_OF).mkdir(exist_ok=True)
    _write("sft", folder / BEST_OF / "sft.yaml", "best_of.yaml.jinja", values, folder)


def _inside(folder: Path, value: str) -> str:
    """Return a resolved path inside `folder` relative to best_of/; others and hub ids are unchanged."""
    top = Path(os.path.abspath(folder))
    return f"../{Path(value).relative_to(top).as_posix()}" if Path(value).is_relative_to(top) else value


def _write(stage: str, file: Path, template: str, values: Mapping[str, Any], run: Path | None = None) -> None:
    """Write a config from a template of configs/ and load it; its schema is in the folder `run` (None: its own)."""
    written = {
        key: {name: to_yaml(each) for name, each in value.items()} if isinstance(value, dict) else value
        for key, value in values.items()
    }
    environment = Environment(loader=FileSystemLoader(configs_folder()), undefined=StrictUndefined, trim_blocks=True)
    text = align_comments(environment.get_template(template).render(written))
    schema = (run or file.parent) / json_schema.FOLDER / f"{stage}.json"
    file.write_text(json_schema.with_modeline(text, file, schema), encoding="utf-8")
    config.load(stage, file)
