"""The keys of a config and what may be written for them, as far as it can be listed: for who completes a word."""

from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from rlhf_cli.config import trl
from rlhf_cli.config.keys import PathKey, default_of, keys_of, parts_of
from rlhf_cli.config.stages import CONFIGS


def listed(stage: str) -> dict[str, list[str]]:
    """Path of each key of a stage that holds a value -> words that it takes: a number's default, choices, true, null.

    Fields of TRL's that `trainer:` hands on are among them; what lies in tables, under names of the user's, is not.
    """
    model = CONFIGS[stage]
    found = {path: _words(field) for path, field in keys_of(model).items() if ".NAME" not in path}
    found |= {f"trainer.{name}": _words_of_trl(field) for name, field in trl.handed_on(model).items()}
    sections = {path.rpartition(".")[0] for path in found}
    return {path: words for path, words in found.items() if path not in sections}


def _words(field: FieldInfo) -> list[str]:
    found = _number(default_of(field, None))
    for part in (*field.metadata, *parts_of(field.annotation)):
        if get_origin(part) is Literal:
            found += map(str, get_args(part))
        elif isinstance(part, PathKey):
            found += part.words
        elif part is bool:
            found += ["true", "false"]
        elif part is NoneType:
            found.append("null")
    return list(dict.fromkeys(found))


def _words_of_trl(field: dict[str, Any]) -> list[str]:
    words = {"boolean": ["true", "false"], "null": ["null"]}
    typed = [word for kind in field["types"] for word in words.get(kind, [])]
    return _number(field["default"]) + field.get("choices", []) + typed


def _number(default: Any) -> list[str]:
    return [str(default)] if isinstance(default, int | float) and not isinstance(default, bool) else []
