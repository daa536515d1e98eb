"""Which keys of a config name models, and the parents that they name."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_cli.checkpoints.parents import Parent, finished, open_parent
from rlhf_cli.config.ppo import VALUE_WORDS
from rlhf_cli.errors import Problem, RLHFError


@dataclass(frozen=True)
class Reference:
    """A key of a config that names a model: where it points, and what stages may have made it."""

    key: str
    path: str
    expect: tuple[str, ...]
    revision: str | None = None  # of a hub id


def references(config: Any) -> list[Reference]:
    """The models that a stage's config names, in the order of the config."""
    if config.stage in ("sft", "reward"):
        expect = ("sft",) if config.stage == "reward" else ("sft", "ppo")
        return [Reference("model.path", config.model.path, expect, config.model.revision)] if config.model.path else []
    if config.stage == "eval":
        found = [Reference("models.sft", config.models.sft, ("sft",))]
        found.append(Reference("models.ppo", config.models.ppo, ("ppo",)))
        if config.models.reward:
            found.append(Reference("models.reward", config.models.reward, ("reward",)))
        if config.models.base:
            found.append(Reference("models.base", config.models.base, ("sft", "ppo")))
        judges = {name: value for name, value in config.judges.items() if not _is_function(value)}
        return found + [Reference(f"judges.{name}", path, ("reward",)) for name, path in judges.items()]
    found = [Reference("models.sft", config.models.sft, ("sft",), config.models.revision)]
    if _needs_reward(config):
        found.append(Reference("models.reward", config.models.reward, ("reward",)))
    if config.models.value not in VALUE_WORDS:
        found.append(Reference("models.value", config.models.value, ("reward",)))
    models: dict[str, str] = {}
    for name, source in config.rewards.items():
        models |= {f"rewards.{name}.model": source.model} if source.model else {}
        models |= {f"rewards.{name}.models.{member}": path for member, path in source.models.items()}
        models |= {f"rewards.{name}.pipeline": source.pipeline} if source.pipeline else {}
    return found + [Reference(key, path, ("reward",)) for key, path in models.items()]


def _needs_reward(config: Any) -> bool:
    """Whether PPO reads models.reward by that key: to start the value model. As a source it has a key of its own."""
    return config.models.value == "reward" or not config.rewards


def _is_function(value: str) -> bool:
    """Whether a judge is `package.module:function` rather than a path or a hub id."""
    module, colon, name = value.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def open_parents(config: Any, left_out: Collection[Path] = (), *, hashed: bool = True) -> dict[str, Parent]:
    """All parents of a stage, by config key (model.path; models.sft, models.reward, rewards.NAME.model, judges.NAME).

    Those in a folder of `left_out` are passed over: their stages are still to run. Unless `hashed`, foreign models are
    not read, see `open_parent`.
    Raises RLHFError with the problems of all of them at once.
    """
    parents: dict[str, Parent] = {}
    problems: dict[str, list[Problem]] = {}  # by path: several keys may name one folder
    for reference in references(config):
        if Path(reference.path) in left_out:
            continue
        try:
            parents[reference.key] = open_reference(config, reference, hashed=hashed)
        except RLHFError as error:
            problems.setdefault(reference.path, list(error.problems))
    if problems:
        raise RLHFError.of([problem for found in problems.values() for problem in found])
    return parents


def open_reference(config: Any, reference: Reference, *, hashed: bool = True) -> Parent:
    """`open_parent` of one key of a config; raises M10 too where it names the stage's own output."""
    key, where, expect = reference.key, config.where(reference.key), reference.expect
    if Path(reference.path) == config.folder:
        text = f"{key} names the folder that this stage writes"
        raise RLHFError("M10", text, where=where, hint=f"name {finished(expect)}")
    revision = reference.revision
    try:
        return open_parent(reference.path, expect=expect, key=key, where=where, revision=revision, hashed=hashed)
    except RLHFError as error:
        also = _named_too(config, reference)
        raise RLHFError.of([replace(problem, text=problem.text + also) for problem in error.problems]) from error


def _named_too(config: Any, reference: Reference) -> str:
    """The other keys that are written and name the same: what is wrong is told once, of the first."""
    keys = [each.key for each in references(config) if each.path == reference.path]
    if config.stage == "ppo" and config.models.reward == reference.path:  # the reward, where no other is named
        keys.append("models.reward")
    others = [key for key in dict.fromkeys(keys) if key != reference.key and config.is_written(key)]
    return f" ({' and '.join(others)} too)" if others else ""
