"""Names of other systems' options and commands, and what replaces them here; aliases.toml has the tables.

Used by the hints of errors, `rlhf explain` and `rlhf convert`.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Alias:
    """Replacement of another system's option.

    `key` is a full key path or its last part. `note` describes how values differ or, if `key` is None, the reason
    or the alternative. `values` maps values of the option to YAML values of the key.
    """

    key: str | None
    note: str = ""
    values: Mapping[str, str] = field(default_factory=dict)


_TABLES = tomllib.loads(Path(__file__).with_name("aliases.toml").read_text(encoding="utf-8"))


def _by_name(table: str) -> dict[str, str]:
    return {name: text for names, text in _TABLES[table].items() for name in names.split()}


ALIASES = {
    **{name: Alias(key) for name, key in _by_name("renamed").items()},
    **{name: Alias(**fields) for name, fields in _TABLES["changed"].items()},
    **{name: Alias(None, reason) for name, reason in _by_name("unsupported").items()},
}
# Fields of TRL's configs that rlhf sets itself -> the key or option to use instead, or "".
SET_BY_RLHF = _by_name("set_by_rlhf")
# Commands of other tools -> what to use here.
COMMANDS = _by_name("commands")


def find_alias(name: str) -> Alias | None:
    """Return the alias for an option name, or None. All vLLM options share one alias."""
    return ALIASES.get(name) or (ALIASES["use_vllm"] if "vllm" in name else None)
