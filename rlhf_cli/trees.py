"""Look into nested tables, such as a YAML config, whose keys the user names as a dotted path."""

from collections.abc import Mapping
from typing import Any

Tree = dict[str, Any]


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return {dotted path: value} of nested tables; an empty table is a value."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            values |= {f"{key}.{path}": inner for path, inner in flatten(value).items()}
        else:
            values[str(key)] = value
    return values


def at(tree: Any, path: str) -> Any:
    """Return the value at a dotted path of nested tables, or None."""
    for part in path.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree
