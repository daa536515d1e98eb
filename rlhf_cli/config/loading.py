"""One YAML file and its overrides into one frozen config, or every problem at once."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, Literal, overload

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rlhf_cli.config import trl_fields, yaml_io
from rlhf_cli.config.base import Config, Origin
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.messages import translate, wrong_keys
from rlhf_cli.config.paths import field_at, field_shape, fill_and_resolve, keys_of, shape
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.training import CONFIGS, RewardConfig, SFTConfig
from rlhf_cli.config.values import shown_value
from rlhf_cli.config.yaml_io import Source, parse_value
from rlhf_cli.errors import TOKEN, Problem, RLHFError, redact, shell_path

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


def stage_of(path: Path) -> str:
    """The stage of a file. Raises RLHFError C08, C09, S02 where it cannot be read, C07 where nothing tells."""
    tree = yaml_io.read(path).tree
    said = tree.get("stage")
    if isinstance(said, str) and said in CONFIGS:
        return said
    if path.stem in CONFIGS:
        return path.stem
    best = max(CONFIGS, key=lambda stage: (stage in tree, _known(stage, tree)))
    if best not in tree and sum(_known(stage, tree) == _known(best, tree) for stage in CONFIGS) > 1:
        hint = f"add stage: {' or '.join(CONFIGS)}"
        raise RLHFError("C07", "cannot tell which stage this config is for", where=str(path), hint=hint)
    return best


def refuse_other_stage(stage: str, tree: dict[str, Any], origin: Origin) -> None:
    """A file of another stage is told as that one thing, not as a list of its unknown keys."""
    said = tree.get("stage")
    if said is None:
        said, place = _meant(stage, tree), origin.name
    else:
        place = origin.where("stage")
    if said == stage:
        return
    if isinstance(said, str) and said in CONFIGS:
        text = f"this config is for {said}, not for {stage}"
        raise RLHFError("C07", text, where=place, hint=f"run it with: rlhf {said} --config {shell_path(origin.file)}")
    raise RLHFError("C07", f"stage: {shown_value(said)} is not one of {', '.join(CONFIGS)}", where=place)


def _meant(stage: str, tree: dict[str, Any]) -> str:
    """Another stage where the file has no section of `stage`, and more of its sections are the other one's."""
    best = max(CONFIGS, key=lambda other: (_known(other, tree), other == stage))
    return stage if stage in tree else best


def _known(stage: str, tree: dict[str, Any]) -> int:
    return len(CONFIGS[stage].model_fields.keys() & tree.keys())


PASSWORD = re.compile(r"://[^/\s@:]*:[^/\s@]+@")  # https://name:PASSWORD@host
QUERY = re.compile(r"://[^\s#]*[?&][\w-]*(token|key|secret|password|signature)=[^&\s]", re.IGNORECASE)
SECRET_KEY = re.compile(
    r"(.*_)?(hub_token|hf_token|auth_token|access_token|api_token|api_?key|secret|password)", re.IGNORECASE
)


def take_out(tree: dict[str, Any], where: Callable[[str], str]) -> list[Problem]:
    """C16 for each secret, which is removed from `tree`, so that no other message can repeat it."""
    found = list(_secrets(tree, ""))
    for container, name, _ in reversed(found):  # from the end of a list: the indices before it stay what they are
        container.pop(name)
    hint = "remove it, and set it in the environment, e.g. HF_TOKEN"
    return [Problem("C16", f"{redact(key)} contains a secret", where(key), hint) for _, _, key in found]


def _secrets(node: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
    for name, value in list(node.items()) if isinstance(node, dict) else list(enumerate(node)):
        key = f"{path}.{name}" if path else str(name)
        if TOKEN.search(str(name)) or (isinstance(value, str) and _is_secret(str(name), value)):
            yield node, name, key
        elif isinstance(value, dict | list):
            yield from _secrets(value, key)


def _is_secret(name: str, value: str) -> bool:
    named_so = value != "" and SECRET_KEY.fullmatch(name) is not None
    return named_so or TOKEN.search(value) is not None or any(form.search(value) for form in (PASSWORD, QUERY))


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
        raise RLHFError.from_problems(problems)
    return config


def load_what_is_sound(
    stage: str, path: str | Path, overrides: Sequence[str] = ()
) -> tuple[Config | None, list[Problem]]:
    """The config, and what is wrong with it. Wrong values of sections that name no files stand at their defaults, so
    that the files can be looked at; None where a file's name may be among what is wrong.

    Raises RLHFError for what cannot be read as a config of `stage` at all.
    """
    model = CONFIGS[stage]
    source = yaml_io.read(path)
    written, problems = apply(overrides, source, model)
    file = Path(os.path.abspath(path))
    origin = Origin(file, source.name, source.lines, written)
    refuse_other_stage(stage, source.tree, origin)
    problems += source.problems + take_out(source.tree, origin.where)
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
        return stage in trl_fields.TRAINERS and parts[1] in trl_fields.fields_of(stage)
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
        trl_fields.check(trainer, model, origin.where)
        if "trainer" in model.model_fields and isinstance(trainer, dict)
        else []
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
