"""Reads what TRL was told out of a file: YAML, JSON, a Python script, or a command line in a script or a text."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf_cli.config import yaml_source
from rlhf_cli.errors import RLHFError
from rlhf_cli.from_trl import command, python
from rlhf_cli.from_trl.settings import Read, value_of

# Options whose values are keys and values themselves; any other such key is a section.
HOLDS_KEYS = re.compile(r"(?!.*gen).*_kwargs|accelerator_config|fsdp_config|deepspeed|quantization_config")
PEFT = ("peft_config", "lora_config", "peft", "lora")  # sections of peft's own names


def read(path: Path) -> Read:
    """The settings in a file. Raises RLHFError C08, C09 or S02 where it cannot be read."""
    name, suffix = str(path), path.suffix.lower()
    if suffix == ".ipynb":
        hint = f"save it as a script: jupyter nbconvert --to script {name}"
        raise RLHFError("C09", "a notebook is not read", where=name, hint=hint)
    if suffix in yaml_source.SUFFIXES:
        source = yaml_source.read(path)
        if source.problems:
            raise RLHFError.of(source.problems)
        return _tree(source.tree, lambda key: f"{name}:{source.lines[key]}")
    text = yaml_source.text_of(path)
    if suffix == ".json":
        return _json(text, name)
    return python.read(text, name) if suffix == ".py" else command.read(text, name)


def _json(text: str, name: str) -> Read:
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise RLHFError("C08", f"not valid JSON: {error.msg}", where=f"{name}:{error.lineno}") from error
    except (ValueError, RecursionError) as error:
        raise RLHFError("C08", "no JSON that a person would write", where=name) from error
    if not isinstance(tree, dict):
        raise RLHFError("C09", "this holds no keys and values", where=name)

    def where(key: str) -> str:
        at = text.find(json.dumps(key.rpartition(".")[2]))
        return f"{name}:{text.count(chr(10), 0, at) + 1}" if at >= 0 else name

    return _tree(tree, where)


def _tree(tree: Mapping[str, Any], where: Callable[[str], str]) -> Read:
    """Keys and values, those of sections one level below too."""
    found = Read()
    for key, value in tree.items():
        if not isinstance(value, dict) or HOLDS_KEYS.fullmatch(key):
            found.add(key, _typed(value), where(key))
            continue
        if key in PEFT:
            found.signs.add("LoraConfig")
            found.add("use_peft", True, where(key))
        for inner, below in value.items():
            name = python.OF_LORA.get(str(inner), str(inner)) if key in PEFT else str(inner)
            found.add(name, _typed(below), where(f"{key}.{inner}"))
    return found


def _typed(value: Any) -> Any:
    """A text of YAML 1.1 or of a form such as "3e-6", which TRL's parser would have turned into a value."""
    return value_of(value) if isinstance(value, str) else value
