"""Option names of other systems and the keys that replace them: aliases.toml.

Used by the hints of errors (messages.py), `rlhf explain` and `rlhf convert`.
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
ALIASES: dict[str, Alias] = {
    **{name: Alias(key) for key, names in _TABLES["renamed"].items() for name in names},
    **{name: Alias(**fields) for name, fields in _TABLES["changed"].items()},
    **{name: Alias(None, reason) for reason, names in _TABLES["unsupported"].items() for name in names},
}


def find_alias(name: str) -> Alias | None:
    """Return the alias for an option name, or None. All vLLM options share one alias."""
    return ALIASES.get(name) or (ALIASES["vllm"] if "vllm" in name else None)
