"""`rlhf init`: ready folders of configs, written with the data that they need. Torch-free."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from filecmp import cmp
from pathlib import Path

from rlhf_cli import runs, system, terminal
from rlhf_cli.config import json_schema
from rlhf_cli.config.paths import resolve_data
from rlhf_cli.demo import world
from rlhf_cli.distributed import RLHF_COMMAND
from rlhf_cli.errors import RLHFError, closest_match, shell_path, shell_word, shown
from rlhf_cli.files import sync_files
from rlhf_cli.runs.discover import configs_folder
from rlhf_cli.runs.locks import lock_folder, lock_path, release

UNTOUCHED = "nothing was written; name another folder"
# In a folder that was there before: what is being written; what is whole and being placed; what is placed.
WRITING, WHOLE, PLACED = ".tmp-init", ".tmp-init-whole", ".tmp-init-placed"
MOST = 5  # names in a message


@contextmanager
def all_or_nothing(folder: Path) -> Iterator[Path]:
    """Within, a hidden folder to write into; at the end `folder` holds all that it holds.

    A folder that is not there comes in one step. In one that is there, files with the same bytes are taken as they are.
    Whatever is raised within leaves nothing. Raises RLHFError C15, before anything is written, where `folder` is a file
    or holds other files of those names, or another process is at it; E03 where it cannot be written.
    """
    if not os.path.lexists(folder):
        with runs.new_folder(folder) as scratch:
            yield scratch
        return
    if not folder.is_dir():
        raise RLHFError("C15", f"{shown(folder)} is no folder", hint=UNTOUCHED)
    system.require_writable(folder, hint="name another folder")
    with _alone_in(folder):
        _take_back(folder)
        scratch = folder / WRITING
        scratch.mkdir()
        try:
            yield scratch
            names = _files(scratch)
            _refuse_others(folder, scratch, names)
            sync_files(scratch, names)
            scratch.rename(folder / WHOLE)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        _place(folder, names)


def take_back(folder: Path) -> None:
    """Remove what a killed `rlhf init` left: of files that it placed, those that it did not find there."""
    if (folder / WHOLE).is_dir():
        with _alone_in(folder):
            _take_back(folder)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    place = folder / "init"
    lock_folder(place, hint="wait for it to end, or name another folder")
    try:
        yield
    finally:
        lock_path(place).unlink(missing_ok=True)
        release(place)


def _take_back(folder: Path) -> None:
    whole = folder / WHOLE
    for name in _files(whole):
        target = folder / name
        with suppress(OSError):
            if target.samefile(whole / name):
                target.unlink()
        for above in target.relative_to(folder).parents:
            with suppress(OSError):  # it holds something else
                (folder / above).rmdir()
    for name in (WRITING, WHOLE, PLACED):
        shutil.rmtree(folder / name, ignore_errors=True)


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _refuse_others(folder: Path, scratch: Path, names: list[str]) -> None:
    taken = [name for name in names if os.path.lexists(folder / name) and not _same(folder / name, scratch / name)]
    # A file in the place of a folder.
    taken += [str(above) for name in names for above in Path(name).parents if (folder / above).is_file()]
    if taken := list(dict.fromkeys(taken)):
        more = f" and {len(taken) - MOST} more" if len(taken) > MOST else ""
        text = f"{shown(folder)} already holds {', '.join(taken[:MOST])}{more}, with another content"
        raise RLHFError("C15", text, hint=UNTOUCHED)


def _same(one: Path, other: Path) -> bool:
    return one.is_file() and cmp(one, other, shallow=False)


def _place(folder: Path, names: list[str]) -> None:
    """Each file gets its name by a link, so that `take_back` knows it; where the file system has none, it is moved."""
    whole = folder / WHOLE
    for name in names:
        target = folder / name
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(whole / name, target)
        except OSError:
            (whole / name).rename(target)
    sync_files(folder, names)
    whole.rename(folder / PLACED)
    shutil.rmtree(folder / PLACED)


COPIED = (".yaml", ".py", ".jinja")
BASE = "base"  # the folder whose own run makes the base model


@dataclass(frozen=True)
class Preset:
    """A folder of configs/, how much of the demo's world goes with it, and what comes before the first run."""

    text: str
    sizes: world.Sizes | None = None
    first: str = ""


PRESETS = {
    "demo": Preset("a small world with a judge that knows the truth: minutes on a CPU", world.Sizes()),
    "ci": Preset("the same world, tiny: the whole chain in about a minute, for a CI", world.Sizes(0, 600, 600, 60)),
    "functions": Preset(
        "PPO from a Python function alone, no reward model: the same world, minutes on a CPU",
        world.Sizes(0, 3000, 0, 60),
    ),
    "preferences": Preset("your own pairs and a base model: --data pairs.jsonl --base MODEL"),
    "reviews": Preset(
        "film reviews turned friendly: real sentences, two text files of your own, an independent judge",
        first="python scripts/prepare_reviews.py pos.txt neg.txt {folder}",
    ),
    "tldr": Preset(
        "summaries of Reddit posts, Pythia-1B: the recipe of the N+ details paper, one large GPU",
        first="hf download EleutherAI/pythia-1b-deduped",
    ),
    "hh": Preset(
        "helpful dialogues, Pythia-1.4B on Anthropic's hh-rlhf: one large GPU",
        first="hf download EleutherAI/pythia-1.4b-deduped",
    ),
    "sentiment": Preset(
        "friendly film reviews, GPT-2 and a sentiment classifier: TRL's first example, a small GPU",
        first="hf download openai-community/gpt2; then hf download lvwerra/distilbert-imdb",
    ),
    "instruct": Preset(
        "a chat model on UltraFeedback, Qwen2.5-0.5B-Instruct: one GPU",
        first="hf download Qwen/Qwen2.5-0.5B-Instruct",
    ),
}


def available() -> dict[str, str]:
    """Name -> one line, of each preset."""
    return {name: preset.text for name, preset in PRESETS.items()}


def init(name: str, folder: Path, *, seed: int = 0) -> None:
    """Write preset `name` into `folder`: configs with `seed`, data made from it, and the base model where it has one.

    All of it is written or nothing, and files that are there with the same bytes are taken: it can be given again.
    Raises RLHFError C07 for an unknown preset, C15 for a folder that holds other files of the same names. Exits with
    the code of the base model's run where that fails.
    """
    if name not in PRESETS:
        near = closest_match(name, PRESETS)
        hint = f"did you mean {near}?" if near else "rlhf init --list"
        raise RLHFError("C07", f"no preset {name!r}; there are {', '.join(PRESETS)}", hint=hint)
    source = configs_folder() / name
    files = sorted(path.relative_to(source) for path in source.rglob("*") if path.suffix in COPIED)
    preset = PRESETS[name]
    with all_or_nothing(folder) as scratch:
        for path in files:
            (scratch / path).parent.mkdir(parents=True, exist_ok=True)
            text = (source / path).read_text(encoding="utf-8")
            text = re.sub(r"^seed: 0\b", f"seed: {seed}", text, flags=re.MULTILINE)
            if path.suffix == ".yaml":
                text = json_schema.with_modeline(text, path, Path(json_schema.FOLDER, f"{path.stem}.json"))
            (scratch / path).write_text(text, encoding="utf-8")
        json_schema.write_schemas(scratch, sorted({path.stem for path in files if path.suffix == ".yaml"}))
        if preset.sizes:
            world.write(scratch, seed, preset.sizes)
    if preset.sizes and preset.sizes.texts:
        terminal.say(f"init     {shown(folder)}: training its base model, once")
        done = subprocess.run([*RLHF_COMMAND, "run", str(folder / BASE)], check=False)
        if done.returncode:
            terminal.say(f"init     not finished; go on with: rlhf run {shell_path(folder / BASE)}")
            raise SystemExit(done.returncode)
    steps = [preset.first.format(folder=shell_path(folder))] if preset.first else []
    terminal.out(f"{shown(folder)} is ready; next: {'; then '.join([*steps, f'rlhf run {shell_path(folder)}'])}")


def init_preferences(
    folder: Path,
    *,
    data: str | None,
    base: str | None,
    columns: Sequence[str] = (),
    plain: bool = False,
    minutes: float | None = None,
    seed: int = 0,
) -> None:
    """Write configs and data made from the user's own pairs (see `preferences.write`); `columns` are "ours=theirs"."""
    if data is None or base is None:
        asked = {"--data, your file of pairs,": data, "--base, the model to start from,": base}
        missing = [what for what, given in asked.items() if given is None]
        text = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        words = ["--data", shell_word(data or "pairs.jsonl"), "--base", shell_word(base or "MODEL"), shell_path(folder)]
        raise RLHFError("C11", text, hint=" ".join(["rlhf", "init", "preferences", *words]))
    named = dict(text.partition("=")[::2] for text in columns)
    if wrong := next((text for text in columns if not all(text.partition("="))), None):
        raise RLHFError("C11", f"--column {wrong}: expected OURS=THEIRS", hint="for example --column prompt=question")
    if several := next((text for text in columns if re.search(r",\s*\w+=", text)), None):
        each = " ".join(f"--column {part.strip()}" for part in several.split(","))
        raise RLHFError("C11", f"--column {several}: one OURS=THEIRS is needed", hint=f"give it again: {each}")
    from rlhf_cli.commands.init import preferences  # brings in torch

    here = os.getcwd()
    model = os.path.abspath(os.path.expanduser(base))
    wish = preferences.Wish(
        data=resolve_data(data, here),
        base=model if os.path.exists(model) else base,
        columns=named,
        plain=plain,
        minutes=minutes,
        seed=seed,
    )
    preferences.write(folder, configs_folder() / "preferences", wish)
