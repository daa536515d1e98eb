"""Keys that a config does not have: a misspelling, a key of another place, or an older name."""

from typing import Any

from rlhf_cli.config.base import Config
from rlhf_cli.config.foreign import foreign
from rlhf_cli.config.keys import field_at, field_shape, keys_of, shape
from rlhf_cli.config.stages import CONFIGS
from rlhf_cli.config.trl import TRAINERS, fields_of
from rlhf_cli.errors import Problem, nearest


def unknown_key(path: tuple[str, ...], value: Any, model: type[Config], place: str) -> Problem:
    """C01 with the key that was meant, or C02 with the place where the key belongs."""
    key, name, section = ".".join(path), path[-1], path[:-1]
    siblings = _keys_under(model, section)
    renamed = _renamed(name, value, siblings, model) if section else None
    if renamed:
        return Problem("C01", f"unknown key {key}", place, renamed)
    theirs = foreign(name)
    if section == ("ppo",) and theirs and theirs.key is None:
        return Problem("C01", f"unknown key {key}", place, f"{theirs.why}; remove the line")
    home = _home(name, path, model)
    if home:
        return Problem("C02", f"{key} belongs {home[0]}", place, home[1])
    near = nearest(name, siblings)
    if near:
        hint = f"did you mean {near}?"
    elif len(siblings) <= 8:
        hint = f"keys here: {', '.join(siblings)}"
    else:
        hint = f"`rlhf explain {'.'.join(section) or '--all'}` lists the keys"
    return Problem("C01", f"unknown key {key}", place, hint)


def _keys_under(model: type[Config], section: tuple[str, ...]) -> list[str]:
    if not section:
        return list(model.model_fields)
    field = field_at(model, section)
    if field is None:  # an entry such as rewards.style
        table = field_at(model, section[:-1])
        entry = shape(field_shape(table).entries).model if table else None
    else:
        entry = field_shape(field).model
    return list(entry.model_fields) if entry else []


def _renamed(name: str, value: Any, siblings: list[str], model: type[Config]) -> str | None:
    theirs = foreign(name)
    new = theirs.key if theirs else None
    if theirs is None or new is None or not (new in siblings or ("." in new and new in keys_of(model))):
        return None
    if theirs.why:
        return f"use {new}; {theirs.why}"
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return f"write {new}: {theirs.words.get(str(value), value)}"
    return f"use {new}"


def _home(name: str, path: tuple[str, ...], model: type[Config]) -> tuple[str, str | None] | None:
    """(where a key of this name belongs, how to write it): in this config, under trainer:, or in another file."""
    stage = model.model_fields["stage"].default
    here = _places(name, model)
    if here:
        section = here[0].rpartition(".")[0]
        return f"under {section}:" if section else "at the top of the file", f"write it as {here[0]}"
    if stage in TRAINERS and name in fields_of(stage) and path[0] != "trainer":
        return "under trainer:", f"write it as trainer.{name}"
    there: dict[str, list[str]] = {}
    for other, config in CONFIGS.items():
        for key in _places(name, config)[:1]:
            there.setdefault(key.rpartition(".")[0], []).append(f"{other}.yaml")
    if not there:
        return None
    # A section of another file, such as ppo:, rather than a key of that name.
    section = min(there, key=len)
    return f"in {' or '.join(there[section])}" + (f", under {section}:" if section else ""), None


def _places(name: str, model: type[Config]) -> list[str]:
    return [key for key in keys_of(model) if key.rpartition(".")[2] == name and key.count(".") <= 1]
