"""What TAB offers beyond commands and options: runs, configs, keys and their values, presets, steps, codes.

Each is asked in a process of its own, between two keys: it imports what it needs, never torch, and is silent where
anything is wrong. An empty answer leaves the word to the shell, which offers files.
"""

import functools
import os
from collections.abc import Callable, Iterable
from itertools import permutations
from pathlib import Path

import typer

from rlhf_cli.runs import discover

DEPTH, MOST = 3, 500  # folders below the one that is typed, and how many are looked at in all
Offer = list[str]


def quietly(offer: Callable[..., Offer]) -> Callable[..., Offer]:
    """A half-typed line, a half-written file: what cannot be completed is not."""

    @functools.wraps(offer)
    def silent(**given: object) -> Offer:
        try:
            return offer(**given)
        except Exception:
            return []

    return silent


# Places


@quietly
def runs(incomplete: str) -> Offer:
    """Folders of runs, near what is typed, but those of the presets: nobody has run them."""
    _, base = _place(incomplete)
    return _offered(incomplete, [name for name in _runs(base) if not discover.is_preset(base / name)])


@quietly
def runs_and_configs(incomplete: str) -> Offer:
    """Folders of runs and presets, and the configs in the one that is typed."""
    typed, base = _place(incomplete)
    return [*_offered(incomplete, _runs(base)), *(typed + path.name for path in discover.configs_in(base))]


@quietly
def config(ctx: typer.Context, incomplete: str) -> Offer:
    """The command's own YAML in each run."""
    typed, base = _place(incomplete)
    names = [os.path.normpath(f"{name}/{ctx.info_name}.yaml") for name in _runs(base)]
    return [typed + name for name in names if (base / name).is_file()]


def _place(incomplete: str) -> tuple[str, Path]:
    """The folders that are typed already, as they are, and where they lead."""
    typed = incomplete[: incomplete.rfind("/") + 1]
    return typed, Path(typed or ".")


def _offered(incomplete: str, names: list[str]) -> Offer:
    typed, _ = _place(incomplete)
    return [typed + name if name != "." else typed.rstrip("/") or name for name in names]


def _runs(base: Path) -> list[str]:
    return [os.path.relpath(path, base) for path in discover.find_run_folders(base, DEPTH, MOST)]


# Names


def stages(incomplete: str) -> Offer:
    """The four stages."""
    return list(discover.STAGES)


def talking(incomplete: str) -> Offer:
    """The stages whose models write text."""
    return list(discover.POLICY_STAGES)


def compared(incomplete: str) -> Offer:
    """What `rlhf chat` compares, in both orders."""
    return [",".join(order) for order in permutations(reversed(discover.POLICY_STAGES))]


@quietly
def presets(incomplete: str) -> Offer:
    """The presets of `rlhf init`."""
    from rlhf_cli.commands import init

    return list(init.available())


@quietly
def steps(ctx: typer.Context, incomplete: str) -> Offer:
    """PPO's policies of the run that is named before: its end, the selected one, its snapshots."""
    from rlhf_cli import runs as checkpoints

    ppo = next((path for run in _named(ctx) for path in (run / "ppo", run) if discover.has_output(path)), None)
    found = checkpoints.state_steps(ppo / checkpoints.SNAPSHOTS) if ppo else []
    return [checkpoints.LAST, checkpoints.SELECTED, *map(str, found)]


@quietly
def keys_and_codes(incomplete: str) -> Offer:
    """What `rlhf explain` takes: codes, sections and keys by their paths, and keys by their own names."""
    from rlhf_cli.error_codes import CODES

    codes = [code for code in CODES if code.startswith(incomplete)] if incomplete else []
    if codes:
        return codes
    paths = _keys(discover.STAGES)
    names = {path.rpartition(".")[2] for path in paths} if incomplete and "." not in incomplete else set()
    return [*_next(paths, incomplete), *sorted(names)]


# Keys and values


@quietly
def assignments(ctx: typer.Context, incomplete: str) -> Offer:
    """KEY= of the configs that the command reads, a section at a time; behind it the values that can be listed."""
    keys = _keys(_stages_of(ctx))
    if cut := _before_the_sign():
        return keys.get(cut, [])
    key, sign, _ = incomplete.partition("=")
    found = [key] if sign else _next(keys, key)
    if len(found) > 1:
        return [name if name.endswith(".") else f"{name}=" for name in found]
    # With its values, however few: behind a word that is the only one a shell puts a space.
    return [f"{name}={value}" for name in found for value in ("", *keys.get(name, []))]


def _before_the_sign() -> str | None:
    """The key where the word to complete is its value: bash cuts words at `=`."""
    words, place = os.environ.get("COMP_WORDS", "").split("\n"), int(os.environ.get("COMP_CWORD", "0"))
    now = words[: place + 1]
    if now[-1:] == ["="]:
        return now[-2]
    return now[-3] if now[-2:-1] == ["="] else None


def _stages_of(ctx: typer.Context) -> list[str]:
    """The stages whose configs the command reads: its own, that of the file that it is given, or those in a folder."""
    if ctx.info_name in discover.STAGES:
        return [ctx.info_name]
    from rlhf_cli.config.loading import stage_of

    given = _named(ctx)
    if given and given[0].is_file():
        return [stage_of(given[0])]
    return [path.stem for folder in given for path in discover.configs_in(folder)] or list(discover.STAGES)


def _named(ctx: typer.Context) -> list[Path]:
    """The files and folders that the command was given: in `args` as long as an option lacks its value."""
    values = [ctx.params.get(key) for key in ("folder", "folders", "path")]
    flat = [each for value in values for each in (value if isinstance(value, list | tuple) else [value]) if each]
    return [Path(str(each)) for each in (*flat, *ctx.args)]


def _keys(stages: Iterable[str]) -> dict[str, list[str]]:
    """The keys of stages, with the words that each takes."""
    from rlhf_cli import config

    found: dict[str, list[str]] = {}
    for stage in stages:
        for key, words in config.completion_values(stage).items():
            found[key] = list(dict.fromkeys([*found.get(key, []), *words]))
    return found


def _next(paths: Iterable[str], incomplete: str) -> list[str]:
    """The sections (`ppo.`) and keys that come next; where that is one section alone, what is in it."""
    known, found = list(paths), [incomplete]
    while len(found) == 1 and found[0] not in known:
        before = found[0]
        found = list(dict.fromkeys(_cut(path, before.count(".")) for path in known if path.startswith(before)))
    return found


def _cut(path: str, depth: int) -> str:
    """A path down to so many sections."""
    parts = path.split(".")
    return ".".join(parts[: depth + 1]) + "." * (len(parts) > depth + 1)
