"""Shell completion of arguments: runs, configs, keys and their values, presets, steps, error codes.

Each completion is a separate process and must be fast: it imports what it needs, never torch, and hides all errors.
An empty result lets the shell offer files.
"""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import permutations
from pathlib import Path

import typer

from rlhf_cli.runs import layout

# Search limits below the typed folder.
MAX_DEPTH = 3
MAX_FOLDERS = 500
BREAKS = ("=", ":")  # where bash splits words


def ignore_errors(complete: Callable[..., list[str]] | None) -> Callable[..., list[str]] | None:
    """Return a completion function that offers nothing on errors, e.g. for a half-typed line or half-written file."""
    if complete is None:
        return None

    @functools.wraps(complete)
    def wrapper(**arguments: object) -> list[str]:
        try:
            return complete(**arguments)
        except Exception:
            return []

    return wrapper


# Paths


def runs(incomplete: str) -> list[str]:
    """Return the run folders near the typed path, except presets."""
    typed, base, names = _runs_near(incomplete)
    return [_joined(typed, name) for name in names if not layout.is_preset(base / name)]


def runs_and_configs(incomplete: str) -> list[str]:
    """Return the folders of runs and presets, and the configs in the typed folder."""
    typed, base, names = _runs_near(incomplete)
    folders = [_joined(typed, name) for name in names]
    files = [typed + path.name for path in layout.configs_in(base)]
    return folders + files


def config(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the command's own YAML in each run."""
    typed, base, names = _runs_near(incomplete)
    files = [os.path.normpath(f"{name}/{ctx.info_name}.yaml") for name in names]
    return [typed + file for file in files if (base / file).is_file()]


def _runs_near(incomplete: str) -> tuple[str, Path, list[str]]:
    """Return the folder part of the typed text, as text and as a path, and the runs and presets below it."""
    typed = incomplete[: incomplete.rfind("/") + 1]
    base = Path(typed or ".")
    folders = layout.find_run_folders(base, MAX_DEPTH, MAX_FOLDERS)
    return typed, base, [os.path.relpath(path, base) for path in folders]


def _joined(typed: str, name: str) -> str:
    return typed + name if name != "." else typed.rstrip("/") or name


# Names


def one_of(values: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a completion function that offers fixed values."""
    choices = list(values)
    return lambda incomplete: choices


stages = one_of(layout.STAGES)
chat_stages = one_of(layout.POLICY_STAGES)
chat_pairs = one_of(",".join(order) for order in permutations(reversed(layout.COMPARED_STAGES)))


def presets(incomplete: str) -> list[str]:
    """Return the presets of `rlhf init`."""
    from rlhf_cli.commands.init import presets

    return list(presets.PRESETS)


def steps(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the values of --step for the run on the command line: last, recommended and its snapshots."""
    from rlhf_cli import runs

    offered = [runs.LAST, runs.RECOMMENDED]
    for run in _paths(ctx):
        for folder in (run / "ppo", run):
            if layout.has_output(folder):
                snapshots = runs.state_steps(folder / runs.SNAPSHOTS)
                return offered + [str(step) for step in snapshots]
    return offered


def keys_and_codes(incomplete: str) -> list[str]:
    """Return the arguments of `rlhf explain`: codes, paths of sections and keys, and last parts of keys."""
    from rlhf_cli.errors import CODES

    codes = [code for code in CODES if code.startswith(incomplete)] if incomplete else []
    if codes:
        return codes
    paths = values_by_key(layout.STAGES)
    offered = _next_parts(paths, incomplete)
    if incomplete and "." not in incomplete:
        offered += sorted({path.rpartition(".")[2] for path in paths})
    return offered


# Keys and values


def assignments(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return KEY= of the configs that the command reads, a section at a time, then values that can be listed.

    `STAGE:KEY=` is a key of that stage, where the command reads several.
    """
    word = _whole_word(incomplete)
    typed_before = word.removesuffix(incomplete.removeprefix(":"))  # the shell does not replace it
    return [each.removeprefix(typed_before) for each in _assignments(_stages_of(ctx), word) if each != typed_before]


def _assignments(stages: Sequence[str], word: str) -> list[str]:
    """Return what a word can become, as whole words."""
    stage, colon, rest = word.partition(":")
    if colon and stage in stages:
        return [f"{stage}:{each}" for each in _assignments([stage], rest)]

    keys = values_by_key(stages)
    key, sign, _ = word.partition("=")
    names = [key] if sign else _next_parts(keys, key)
    if len(names) > 1:
        return [name if name.endswith(".") else f"{name}=" for name in names]
    # Include the values even if there are few: a shell adds a space after a single candidate.
    offered = []
    for name in names:
        offered += [f"{name}={value}" for value in ("", *keys.get(name, []))]
    return offered


def words(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the stage's own YAML in each run, unless one is given already, and what `assignments` returns."""
    is_given = ctx.params.get("config") or ctx.params.get("words")
    files = [] if is_given else config(ctx, incomplete)
    return files + assignments(ctx, incomplete)


def _whole_word(incomplete: str) -> str:
    """Return the word to complete with what stands before it: bash splits words at `=` and `:`."""
    if "COMP_WORDS" not in os.environ:
        return incomplete
    last = int(os.environ["COMP_CWORD"])
    parts = os.environ["COMP_WORDS"].split("\n")[: last + 1]
    word = parts.pop()
    while parts and (parts[-1] in BREAKS or word.startswith(BREAKS)):
        word = parts.pop() + word
    return word


def _stages_of(ctx: typer.Context) -> list[str]:
    """Return the stages whose configs the command reads: its own, that of the given file, or those of a folder."""
    if ctx.info_name in layout.STAGES:
        return [ctx.info_name]
    from rlhf_cli.config.loading import stage_of

    paths = _paths(ctx)
    if paths and paths[0].is_file():
        return [stage_of(paths[0])]
    files: list[Path] = []
    for folder in paths:
        files += layout.configs_in(folder)
    return [file.stem for file in files] or list(layout.STAGES)


def _paths(ctx: typer.Context) -> list[Path]:
    """Return the files and folders on the command line; typer has them in `args` while an option lacks its value."""
    given: list[object] = []
    for key in ("folder", "folders", "path"):
        value = ctx.params.get(key)
        given += value if isinstance(value, list | tuple) else [value]
    paths = [path for path in given if path]
    return [Path(str(path)) for path in (*paths, *ctx.args)]


def values_by_key(stages: Iterable[str]) -> dict[str, list[str]]:
    """Return the keys of stages and TRL's fields, with the values of each that can be listed.

    Without sections and without entries of tables, whose names the user chooses.
    """
    from rlhf_cli import config
    from rlhf_cli.config.machinery.trl_fields import trainer_keys

    values: dict[str, list[str]] = {}
    for stage in stages:
        keys = [*config.keys(stage).values(), *trainer_keys(config.CONFIGS[stage]).values()]
        named = [key for key in keys if not {"NAME", "NUMBER"} & set(key.path.split("."))]
        sections = {key.path.rpartition(".")[0] for key in named}
        for key in named:
            if key.path not in sections:
                values[key.path] = list(dict.fromkeys([*values.get(key.path, []), *key.suggestions()]))
    return values


def _next_parts(paths: Iterable[str], incomplete: str) -> list[str]:
    """Return the sections (`ppo.`) and keys that come next; of a single section, its contents."""
    all_paths = list(paths)
    names = [incomplete]
    while len(names) == 1 and names[0] not in all_paths:
        (start,) = names
        depth = start.count(".") + 1
        matches = [path for path in all_paths if path.startswith(start)]
        names = list(dict.fromkeys(_shortened(path, depth) for path in matches))
    return names


def _shortened(path: str, depth: int) -> str:
    """Return the first parts of a path, with a dot at its end if there are more."""
    parts = path.split(".")
    start = ".".join(parts[:depth])
    return f"{start}." if len(parts) > depth else start
