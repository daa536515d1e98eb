"""Config keys that differ: from their defaults, and from run to run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_cli.config import CONFIGS
from rlhf_cli.config.keys import default_of, field_at, field_shape
from rlhf_cli.report.runs import STAGES, Run, Stage

OF_THE_CHAIN = {f"../{name}" for name in STAGES} | {".."}  # the run's own folders, where a run has them by default


@dataclass(frozen=True)
class Difference:
    """A key with its value, and what it is without being set: None where it must be set, `-` where it would not be."""

    stage: str
    key: str
    value: str
    default: str | None


def from_defaults(stage: Stage) -> list[Difference]:
    """The keys of a stage's config.yaml that are not at their default; keys that have none are among them."""
    found = []
    for key, value in flat(stage.config or {}).items():
        if key == "stage" or _is_own_folder(stage.name, key, value):
            continue
        default = _default(stage.name, key)
        if default in (MUST_BE_SET, FREE):
            found.append(Difference(stage.name, key, said(value), None if default is MUST_BE_SET else "-"))
        elif default != value:
            found.append(Difference(stage.name, key, said(value), said(default)))
    return found


def between(runs: list[Run]) -> list[tuple[str, str, list[str]]]:
    """(stage, key, value in each run) of the keys that are not the same in all runs; `-` where a run lacks the key.

    A stage that a run lacks says nothing of its keys.
    """
    found = []
    for stage in STAGES:
        trees = [flat(run.stages[stage].config or {}) for run in runs]
        for key in dict.fromkeys(key for tree in trees for key in tree):
            values = [said(tree[key]) if key in tree else "-" for tree in trees]
            told = {value for tree, value in zip(trees, values, strict=True) if tree}
            if len(told) > 1 and not all(_is_own_folder(stage, key, tree.get(key)) for tree in trees):
                found.append((stage, key, values))
    return found


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{dotted path: value}; an empty table is a value."""
    if not isinstance(tree, Mapping) or not (tree or not prefix):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def said(value: Any) -> str:
    """A value as YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(said, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


MUST_BE_SET, FREE = "must be set", "a key of the user's own"


def _default(stage: str, key: str) -> Any:
    field = field_at(CONFIGS[stage], tuple(key.split(".")))
    return FREE if field is None else default_of(field, MUST_BE_SET)


def _is_own_folder(stage: str, key: str, value: Any) -> bool:
    field = field_at(CONFIGS[stage], tuple(key.split(".")))
    return field is not None and field_shape(field).path is not None and value in OF_THE_CHAIN
