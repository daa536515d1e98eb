"""`--set key.path=value` laid over the values of a file."""

from collections.abc import Sequence
from typing import Any

from rlhf_cli.config.base import Config
from rlhf_cli.config.keys import field_at, field_shape, shape
from rlhf_cli.config.yaml_source import Source, parse_value
from rlhf_cli.errors import Problem, RLHFError

EXAMPLE = "e.g. --set ppo.kl_coef=0.1"


def malformed(text: str) -> Problem | None:
    """What is wrong with the form of an override (C11)."""
    key, equals, _ = text.partition("=")
    if equals and all(key.strip().removeprefix("*.").split(".")):
        return None
    return Problem("C11", "expected KEY=VALUE", f"--set {key or text}", EXAMPLE)


def apply(overrides: Sequence[str], source: Source, model: type[Config]) -> tuple[frozenset[str], list[Problem]]:
    """Writes each override into `source`; returns the keys written and what was wrong (C11)."""
    written: set[str] = set()
    problems: list[Problem] = []
    for text in overrides:
        if problem := malformed(text):
            problems.append(problem)
            continue
        key, _, value = text.partition("=")
        # `*.seed=3` is meant for every stage, so for this one too.
        key = key.strip().removeprefix("*.")
        try:
            _write(source.tree, _segments(model, key), _value(value))
        except RLHFError as error:
            problems += [Problem("C11", problem.text, f"--set {key}", problem.hint) for problem in error.problems]
            continue
        written.add(key)
        # What stood there in the file is gone, and so are its lines.
        for old in [line for line in source.lines if line == key or line.startswith(f"{key}.")]:
            del source.lines[old]
    return frozenset(written), problems


def _value(text: str) -> Any:
    # `>= 0.6` is a requirement here; in a file it would start a folded text and needs quotes.
    return text.strip() if text.lstrip().startswith((">", "<", "==")) else parse_value(text)


def _segments(model: type[Config], key: str) -> list[str]:
    """The parts of a key path; below a table of texts (data.columns, eval.require) the rest is one name."""
    parts = key.split(".")
    for depth in range(1, len(parts)):
        field = field_at(model, tuple(parts[:depth]))
        entries = field_shape(field).entries if field else None
        if entries is not None and shape(entries).model is None and entries is not Any:
            return [*parts[:depth], ".".join(parts[depth:])]
    return parts


def _write(tree: dict[str, Any], segments: list[str], value: Any) -> None:
    *sections, last = segments
    for depth, name in enumerate(sections, start=1):
        if tree.get(name) is None:
            tree[name] = {}
        tree = tree[name]
        if not isinstance(tree, dict):
            raise RLHFError("C11", f"{'.'.join(segments[:depth])} is a single value without keys")
    tree[last] = value
