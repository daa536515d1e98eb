"""One YAML file and its overrides into one frozen config, or every problem at once."""

import os
import re
from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, Literal, overload

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rlhf_cli.config import overrides as override_lines
from rlhf_cli.config import secrets, trl, yaml_source
from rlhf_cli.config.base import Config, Origin
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.keys import field_at, field_shape, keys_of, shape
from rlhf_cli.config.paths import fill_and_resolve
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.problems import translate, wrong_keys
from rlhf_cli.config.stages import CONFIGS, RewardConfig, SFTConfig
from rlhf_cli.config.which import refuse_other_stage
from rlhf_cli.errors import Problem, RLHFError


@overload
def load(stage: Literal["sft"], path: str | Path, overrides: Sequence[str] = ()) -> SFTConfig: ...
@overload
def load(stage: Literal["reward"], path: str | Path, overrides: Sequence[str] = ()) -> RewardConfig: ...
@overload
def load(stage: Literal["ppo"], path: str | Path, overrides: Sequence[str] = ()) -> PPOConfig: ...
@overload
def load(stage: Literal["eval"], path: str | Path, overrides: Sequence[str] = ()) -> EvalConfig: ...
@overload
def load(stage: str, path: str | Path, overrides: Sequence[str] = ()) -> Config: ...


def load(stage: str, path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of `stage` in the YAML file `path`, with `overrides` ("key.path=value") laid over it.

    Raises RLHFError with all problems at once: C01-C03, C05-C11, C16, C17, S02, S03, and those of the ppo settings.
    """
    config, problems = load_what_is_sound(stage, path, overrides)
    if problems or config is None:
        raise RLHFError.of(problems)
    return config


def load_what_is_sound(
    stage: str, path: str | Path, overrides: Sequence[str] = ()
) -> tuple[Config | None, list[Problem]]:
    """The config, and what is wrong with it. Wrong values of sections that name no files stand at their defaults, so
    that the files can be looked at; None where a file's name may be among what is wrong.

    Raises RLHFError for what cannot be read as a config of `stage` at all.
    """
    model = CONFIGS[stage]
    source = yaml_source.read(path)
    written, problems = override_lines.apply(overrides, source, model)
    file = Path(os.path.abspath(path))
    origin = Origin(file, source.name, source.lines, written)
    refuse_other_stage(stage, source.tree, origin)
    problems += source.problems + secrets.take_out(source.tree, origin.where)
    in_doubt = bool(problems)  # the YAML or an override could not be read whole
    folder, here = str(file.parent), os.getcwd()
    fill_and_resolve(model, source.tree, lambda key: here if origin.overridden(key) else folder)
    config, more = _validated(model, source.tree, origin)
    if config is not None:
        config._origin = origin
    return None if in_doubt else config, sorted([*problems, *more], key=_line)


def keys(stage: str) -> dict[str, FieldInfo]:
    """Every key path of a stage's config and its field: description, type and default."""
    return keys_of(CONFIGS[stage])


def takes(stage: str, key: str) -> bool:
    """Whether an override's key belongs to this stage: a key of its config, or an entry of one of its tables.

    `*.KEY` belongs to every stage that has KEY.
    """
    parts = tuple(key.removeprefix("*.").split("."))
    if parts[0] == "trainer" and len(parts) > 1:
        return stage in trl.TRAINERS and parts[1] in trl.fields_of(stage)
    model = CONFIGS[stage]
    if field_at(model, parts):
        return True
    above = [field_at(model, parts[:depth]) for depth in range(1, len(parts))]
    return any(field is not None and _is_open(field) for field in above)


def _is_open(field: FieldInfo) -> bool:
    """Whether below a key any name may stand: in a table, or in a section that hands its keys on (model.new)."""
    below = field_shape(field)
    return below.entries is not None or (below.model is not None and below.model.model_config.get("extra") == "allow")


def _validated(model: type[Config], tree: dict[str, Any], origin: Origin) -> tuple[Config | None, list[Problem]]:
    trainer = tree.get("trainer")
    problems = (
        trl.check(trainer, model, origin.where) if "trainer" in model.model_fields and isinstance(trainer, dict) else []
    )
    try:
        return model.model_validate(tree), problems
    except ValidationError as error:
        sound = _set_aside(wrong_keys(error, tree), model, tree)
        return sound, problems + translate(error, tree, model, origin.where)


def _set_aside(wrong: Iterable[tuple[str, ...]], model: type[Config], tree: dict[str, Any]) -> Config | None:
    """The config without the keys that are wrong; None where a section that names files has one, or more is wrong."""
    names_files = _that_name_files(model)
    tree = deepcopy(tree)
    for path in sorted(set(wrong), key=len, reverse=True):
        if not path or path[0] not in model.model_fields or path[0] in names_files:
            return None
        section: Any = tree
        for part in path[:-1]:
            section = section.get(part) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            return None
        section.pop(path[-1], None)
    try:
        return model.model_validate(tree)
    except ValidationError:
        return None


@cache
def _that_name_files(model: type[Config]) -> set[str]:
    """The sections of a config class with a key for a file in them."""
    return {key.partition(".")[0] for key, field in keys_of(model).items() if _names_files(field)}


def _names_files(field: FieldInfo) -> bool:
    below = field_shape(field)
    return below.path is not None or (below.entries is not None and shape(below.entries).path is not None)


def _line(problem: Problem) -> int:
    """Sorts problems as they stand in the file; overrides come last."""
    found = re.search(r":([0-9]+)(:[0-9]+)?$", problem.where or "")
    return int(found[1]) if found else 10**9 * (problem.where or "").startswith("--set")
