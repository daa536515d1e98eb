"""`rlhf init --baselines`: write dpo.yaml beside reward.yaml, with its pairs, batches and lengths."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rlhf_cli import config
from rlhf_cli.config import json_schema, yaml_io
from rlhf_cli.config.training import RewardConfig, TrainerSettings
from rlhf_cli.config.yaml_io import align_comments, to_yaml
from rlhf_cli.errors import RLHFError
from rlhf_cli.runs.discover import configs_folder

RATE_SHARE = 0.1  # of the reward model's learning rate, as the defaults of the two stages are: 1e-5 and 1e-6


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
    written = {
        key: {name: to_yaml(each) for name, each in value.items()} if isinstance(value, dict) else value
        for key, value in values.items()
    }
    environment = Environment(loader=FileSystemLoader(configs_folder()), undefined=StrictUndefined, trim_blocks=True)
    file, schema = folder / "dpo.yaml", folder / json_schema.FOLDER / "dpo.json"
    text = align_comments(environment.get_template("dpo.yaml.jinja").render(written))
    file.write_text(json_schema.with_modeline(text, file, schema), encoding="utf-8")
    config.load("dpo", file)
