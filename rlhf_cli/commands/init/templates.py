"""Write configs from the templates of configs/."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_cli import config
from rlhf_cli.config import json_schema
from rlhf_cli.config.machinery.yaml_io import align_comments, to_yaml
from rlhf_cli.runs.layout import configs_folder


def write_config(stage: str, file: Path, template: str, values: Mapping[str, Any], run: Path | None = None) -> None:
    """Write a config from a template of configs/; loading it checks it.

    Its schema is below the folder `run`, by default its own. Templates write a value as YAML with the filter `yaml`.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(configs_folder()), undefined=StrictUndefined, trim_blocks=True)
    environment.filters["yaml"] = to_yaml
    text = align_comments(environment.get_template(template).render(values))
    schema = (run or file.parent) / json_schema.FOLDER / f"{stage}.json"
    file.write_text(json_schema.with_modeline(text, file, schema), encoding="utf-8")
    config.load(stage, file)


def format_rate(rate: float) -> str:
    """Format a learning rate to one digit, as it is written in YAML."""
    return f"{rate:.0e}".replace("e-0", "e-")
