"""Load a YAML file with overrides into a frozen config, or report all its problems together."""

import os
import re
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

from pydantic import ValidationError

from rlhf_cli import terminal
from rlhf_cli.config.base import Config
from rlhf_cli.config.machinery import trl_fields, yaml_io
from rlhf_cli.config.machinery.fields import Key, current_name, key_at, key_or_table_at, keys_of, with_current_names
from rlhf_cli.config.machinery.paths import resolve_paths
from rlhf_cli.config.machinery.secret_values import remove_secrets
from rlhf_cli.config.machinery.section import Origin
from rlhf_cli.config.machinery.yaml_io import YamlFile, parse_value
from rlhf_cli.config.messages import check_trainer, format_value, invalid_keys, translate_validation_error
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.stages import CONFIGS
from rlhf_cli.errors import Problem, RLHFError, shell_path, shown
from rlhf_cli.trees import Tree


def check_override(text: str) -> Problem | None:
    """Return the problem (C11) of an override that is not KEY=VALUE, or None."""
    key, equals, _ = text.partition("=")
    if equals and all(key.strip().removeprefix("*.").split(".")):
        return None
    return Problem("C11", "expected KEY=VALUE", f"--set {key or text}", "e.g. --set ppo.kl_coef=0.1")


def apply_overrides(
    overrides: Sequence[str], source: YamlFile, model: type[Config]
) -> tuple[frozenset[str], list[Problem]]:
    """Write each override into `source`; return the keys written and the problems (C11)."""
    written_keys: set[str] = set()
    problems: list[Problem] = []
    for text in overrides:
        if problem := check_override(text):
            problems.append(problem)
            continue
        name, _, value = text.partition("=")
        old = name.strip().removeprefix("*.")  # `*.seed=3` applies to every stage
        key = current_name(old)
        if key != old:
            terminal.warn("C19", f"is now {key}", where=f"--set {old}")
        try:
            _write(source.tree, _split_key(model, key), _parse_override(value))
        except RLHFError as error:
            problems += [replace(problem, code="C11", where=f"--set {key}") for problem in error.problems]
            continue

        written_keys.add(key)
        # The override replaces the value in the file, so its line numbers no longer apply.
        for path in list(source.lines):
            if path == key or path.startswith(f"{key}."):
                del source.lines[path]
    return frozenset(written_keys), problems


def _parse_override(value: str) -> Any:
    """Return the value of an override; `>= 0.6` is a requirement, which in YAML would start a folded text."""
    value = value.strip()
    return value if value.startswith((">", "<", "==")) else parse_value(value)


def _split_key(model: type[Config], key: str) -> list[str]:
    """Split a key path; below a table of texts (data.columns, eval.require) the rest is one name."""
    parts = key.split(".")
    for depth in range(1, len(parts)):
        table = key_at(model, parts[:depth])
        if table is None or table.entry is None:
            continue
        if table.entry.section is None and table.entry.field.annotation is not Any:
            return [*parts[:depth], ".".join(parts[depth:])]
    return parts


def _write(tree: Tree, segments: list[str], value: Any) -> None:
    *sections, last = segments
    for depth, name in enumerate(sections, start=1):
        if tree.get(name) is None:
            tree[name] = {}
        tree = tree[name]
        if not isinstance(tree, dict):
            section = ".".join(segments[:depth])
            raise RLHFError("C11", f"{section} is a single value without keys")
    tree[last] = value


def stage_of(path: Path) -> str:
    """Return the stage of a file. Raises RLHFError C08, C09, S02 if it cannot be read, C07 if it is ambiguous."""
    tree = yaml_io.read(path).tree
    for stage in (tree.get("stage"), path.stem):
        if isinstance(stage, str) and stage in CONFIGS:
            return stage

    counts = _count_sections(tree)
    best = max(counts, key=lambda stage: (stage in tree, counts[stage]))
    is_tied = list(counts.values()).count(counts[best]) > 1
    if best not in tree and is_tied:
        hint = f"add stage: {' or '.join(CONFIGS)}"
        raise RLHFError("C07", "cannot tell which stage this config is for", where=str(path), hint=hint)
    return best


def _count_sections(tree: Tree) -> dict[str, int]:
    return {stage: len(model.model_fields.keys() & tree.keys()) for stage, model in CONFIGS.items()}


def require_stage(stage: str, tree: Tree, origin: Origin) -> None:
    """Raise C07 if the file is for another stage, instead of listing its keys as unknown."""
    file_stage = tree.get("stage")
    if file_stage is None and stage not in tree:
        counts = _count_sections(tree)
        file_stage = max(counts, key=lambda name: (counts[name], name == stage))
    if file_stage in (stage, None):
        return

    location = origin.where("stage")
    if file_stage not in list(CONFIGS):
        text = f"stage: {format_value(file_stage)} is not one of {', '.join(CONFIGS)}"
        raise RLHFError("C07", text, where=location)
    text = f"this config is for {file_stage}, not for {stage}"
    hint = f"run it with: rlhf {file_stage} --config {shell_path(origin.file)}"
    raise RLHFError("C07", text, where=location, hint=hint)


@overload
def load(stage: Literal["ppo"], path: str | Path, overrides: Sequence[str] = ()) -> PPOConfig: ...
@overload
def load(stage: str, path: str | Path, overrides: Sequence[str] = ()) -> Config: ...


def load(stage: str, path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load the config of `stage` from the YAML file `path` with `overrides` ("key.path=value").

    Raises RLHFError with all problems together: C01-C03, C05-C11, C16, C17, S02, S03, and those of the ppo settings.
    """
    config, problems = load_partial(stage, path, overrides)
    if problems or config is None:
        raise RLHFError.from_problems(problems)
    return config


def load_partial(stage: str, path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config | None, list[Problem]]:
    """Load a config together with its problems, so that its files can be checked even if other values are invalid.

    Invalid values in sections without paths have their defaults; the config is None if a path may be invalid. Raises
    RLHFError if the file cannot be read as a config of `stage`.
    """
    model = CONFIGS[stage]
    source = _rename_keys(yaml_io.read(path))
    overridden, problems = apply_overrides(overrides, source, model)
    file = Path(os.path.abspath(path))
    origin = Origin(file, source.name, source.lines, overridden)
    require_stage(stage, source.tree, origin)
    problems += source.problems
    problems += remove_secrets(source.tree, origin.where)
    is_incomplete = bool(problems)  # parts of the YAML or an override could not be read

    working_dir = os.getcwd()
    resolve_paths(model, source.tree, lambda key: working_dir if origin.overridden(key) else str(file.parent))

    trainer = source.tree.get("trainer")
    if "trainer" in model.model_fields and isinstance(trainer, dict):
        problems += check_trainer(trainer, model, origin.where)
    try:
        config: Config | None = model.model_validate(source.tree)
    except ValidationError as error:
        config = _without_invalid_keys(invalid_keys(error, source.tree), model, source.tree)
        problems += translate_validation_error(error, source.tree, model, origin.where)
    if config is not None:
        config._origin = origin
    return None if is_incomplete else config, sorted(problems, key=_line_number)


def _rename_keys(source: YamlFile) -> YamlFile:
    """Return the file with today's names of renamed keys, and warn about each, unless a stage wrote the file."""
    problems = [*source.problems]
    is_resolved = os.path.basename(source.name) == "config.yaml"
    for old, line in source.lines.items():
        new = current_name(old)
        if new == old:
            continue
        location = f"{shown(source.name)}:{line}"
        is_itself_renamed = new.rpartition(".")[0] == old.rpartition(".")[0]  # not only a section above it
        if new in source.lines:
            problems.append(Problem("C03", f"{old} is the old name of {new}", location, "remove this line"))
        elif is_itself_renamed and not is_resolved:
            terminal.warn("C19", f"{old} is now {new}", where=location)

    lines = {current_name(path): line for path, line in source.lines.items()}
    return YamlFile(source.name, with_current_names(source.tree), lines, problems)


def keys(stage: str) -> dict[str, Key]:
    """Return every key of a stage's config by its path."""
    return keys_of(CONFIGS[stage])


def accepts_key(stage: str, key: str) -> bool:
    """Return True if a stage accepts an override of this key: a key of its config, or an entry of one of its tables.

    `*.KEY` belongs to every stage that has KEY.
    """
    parts = current_name(key.removeprefix("*.")).split(".")
    if parts[0] == "trainer" and len(parts) > 1:
        return stage in trl_fields.TRAINERS and parts[1] in trl_fields.fields_of(stage)
    return key_or_table_at(CONFIGS[stage], parts) is not None


def _without_invalid_keys(paths: Iterable[tuple[str, ...]], model: type[Config], tree: Tree) -> Config | None:
    """Validate the config without its invalid keys; None if one is in a section with paths, or if that fails too."""
    path_keys = [path for path, key in keys_of(model).items() if (key.entry or key).path_field]
    with_paths = {path.partition(".")[0] for path in path_keys}
    tree = deepcopy(tree)
    for path in sorted(set(paths), key=len, reverse=True):
        if not path or path[0] not in model.model_fields or path[0] in with_paths:
            return None
        section: Any = tree
        for part in path[:-1]:
            section = section[part]
        if not isinstance(section, dict):  # an entry of a list
            return None
        section.pop(path[-1], None)
    try:
        return model.model_validate(tree)
    except ValidationError:
        return None


def _line_number(problem: Problem) -> int:
    """Return the sort key of a problem: its line in the file; overrides come last."""
    where = problem.where or ""
    if where.startswith("--set"):
        return 10**9
    match = re.search(r":([0-9]+)(:[0-9]+)?$", where)
    return int(match[1]) if match else 0
