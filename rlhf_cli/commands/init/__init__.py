"""`rlhf init`: write a run folder of configs from a preset, with generated data if it needs any. Imports no torch."""

import os
import re
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from filecmp import cmp
from pathlib import Path
from typing import Any

from rlhf_cli import config, jsonl, runs, system, terminal
from rlhf_cli.config import json_schema
from rlhf_cli.config.machinery import yaml_io
from rlhf_cli.config.machinery.yaml_io import align_comments, to_yaml
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.config.sections import TrainerSettings
from rlhf_cli.config.sft import SFTConfig
from rlhf_cli.demo import arithmetic, world
from rlhf_cli.distributed import RLHF_COMMAND
from rlhf_cli.errors import RLHFError, did_you_mean, shell_path, shown
from rlhf_cli.files import remove, sync_files
from rlhf_cli.runs.layout import configs_folder
from rlhf_cli.runs.locks import locked

UNTOUCHED = "nothing was written; name another folder"
LOCKED = "wait for it to end, or name another folder"
# Scratch folder inside a folder that existed before, and its name after all files are linked.
SCRATCH, PLACED = ".tmp-init", ".tmp-init-placed"
MAX_LISTED_NAMES = 5
RATE_SHARE = 0.1  # of the reward model's learning rate, as the defaults of the two stages are: 1e-5 and 1e-6
BEST_OF = "best_of"  # a run's folder in that of the run whose models it reads
NUM_ANSWERS, MAX_ANSWERS, EPOCHS = 16, 64, 4  # of best-of-n SFT; more than 16 answers where prompts are few
NOT_SHARED = {"num_train_epochs", "max_steps", "logging_steps", "eval_steps"}  # with the stage whose sizes it has


@contextmanager
def all_or_nothing(folder: Path) -> Iterator[Path]:
    """Yield a scratch folder whose files appear in `folder` at the end, all of them or none.

    A new folder is created atomically. In an existing one, identical files are kept. An exception in the block leaves
    nothing behind. Raises RLHFError C15 before anything is written if `folder` is a file, holds different files of the
    same names or is locked by another process; E03 if it cannot be written.
    """
    if not os.path.lexists(folder):
        with runs.new_folder(folder) as scratch:
            yield scratch
        return
    if not folder.is_dir():
        raise RLHFError("C15", f"{shown(folder)} is not a folder", hint=UNTOUCHED)
    system.require_writable(folder, hint="name another folder")
    remove_leftovers(folder)
    with locked(folder / "init", hint=LOCKED):
        scratch = folder / SCRATCH
        for path in (scratch, folder / PLACED):
            if os.path.lexists(path):
                text = f"{shown(path)} was not made by rlhf, which needs that name"
                raise RLHFError("C15", text, hint="move it away, then run the same command again")
        scratch.mkdir()
        try:
            yield scratch
            names = _files(scratch)
            _check_conflicts(folder, scratch, names)
            sync_files(scratch, names)
        except BaseException:
            remove(scratch, ignore_errors=True)
            raise
        for name in [name for name in names if not (folder / name).exists()]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            try:  # a hard link, so that `remove_leftovers` can identify it; not all file systems have them
                os.link(scratch / name, folder / name)
            except OSError:
                (scratch / name).rename(folder / name)
        sync_files(folder, names)
        scratch.rename(folder / PLACED)
        remove(folder / PLACED)


def remove_leftovers(folder: Path) -> None:
    """Remove the files of a killed `rlhf init`, except those that existed before it."""
    scratch = folder / SCRATCH
    own = [path for path in (folder / PLACED, scratch) if path.is_dir() and not path.is_symlink()]
    if not own:
        return
    with locked(folder / "init", hint=LOCKED):
        for name in _files(scratch) if scratch in own else []:
            target = folder / name
            with suppress(OSError):
                if target.samefile(scratch / name):
                    target.unlink()
            for parent in Path(name).parents:
                with suppress(OSError):  # not empty
                    (folder / parent).rmdir()
        for path in own:
            remove(path, ignore_errors=True)


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _check_conflicts(folder: Path, scratch: Path, names: list[str]) -> None:
    existing = [name for name in names if os.path.lexists(folder / name)]
    conflicts = [n for n in existing if not ((folder / n).is_file() and cmp(folder / n, scratch / n, shallow=False))]
    # Files where folders are needed.
    conflicts += [str(parent) for name in names for parent in Path(name).parents if (folder / parent).is_file()]
    if conflicts := list(dict.fromkeys(conflicts)):
        more = f" and {len(conflicts) - MAX_LISTED_NAMES} more" if len(conflicts) > MAX_LISTED_NAMES else ""
        text = f"{shown(folder)} already holds {', '.join(conflicts[:MAX_LISTED_NAMES])}{more}, with another content"
        raise RLHFError("C15", text, hint=UNTOUCHED)


COPIED = (".yaml", ".py", ".jinja")
BASE = "base"  # subfolder: a run that trains the base model


@dataclass(frozen=True)
class Preset:
    """A folder of configs/, with the size of its synthetic data, commands to run before `rlhf run`, its base model."""

    description: str
    sizes: world.Sizes | None = None
    problems: arithmetic.Sizes | None = None
    preparation: str = ""
    base: Mapping[str, Any] | None = None  # fields of the config of a base model that needs a GPU
    prompt: int = 0  # tokens of the longest prompt that is planned for

    def write_data(self, folder: Path, seed: int) -> None:
        """Write the synthetic data into a folder, if there is any."""
        if self.sizes:
            world.write(folder, seed, self.sizes)
        if self.problems:
            arithmetic.write(folder, seed, self.problems)


GENERATED = {"sizes": world.Sizes, "problems": arithmetic.Sizes}
TABLES = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
PRESETS = {
    name: Preset(**{**table, **{key: make(**table[key]) for key, make in GENERATED.items() if key in table}})
    for name, table in TABLES.items()
}


def init(
    name: str,
    folder: Path,
    *,
    seed: int = 0,
    adapters: str | None = None,
    gpu: str | None = None,
    baselines: bool = False,
) -> None:
    """Write preset `name` into `folder`: configs with `seed`, synthetic data, and a trained base model if it has one.

    A preset with a large base model is changed if it does not fit `gpu` (None: the one that is here), with `adapters`.
    With `baselines` there are dpo.yaml and best_of/sft.yaml, too. Configs and data are written completely or not at
    all; identical files are kept, so the command can be repeated. Raises RLHFError C07 for an unknown preset or GPU,
    C11 for options without an effect, C15 if the folder holds different files of the same names, E03 if nothing fits.
    Exits with the code of the base model's run if that fails.
    """
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS) or "rlhf init --list"
        raise RLHFError("C07", f"no preset {name!r}; there are {', '.join(PRESETS)}", hint=hint)
    if (adapters or gpu) and not PRESETS[name].base:
        text = f"--{'adapters' if adapters else 'gpu'} belongs to presets of a large model, and {name} has none"
        raise RLHFError("C11", text, hint="remove it")
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
        if baselines:
            write_dpo(scratch)
        stages = {path.stem for path in files if path.suffix == ".yaml"} | ({"sft", "dpo"} if baselines else set())
        json_schema.write_schemas(scratch, sorted(stages))
        preset.write_data(scratch, seed)
        if preset.base:
            from rlhf_cli.planning.placement import fit_preset

            memory = fit_preset(scratch, preset.base, preset.prompt, adapters, gpu)
        if baselines:
            write_best_of(scratch)
    if preset.base:
        terminal.out(memory)
    if preset.sizes and preset.sizes.texts:
        terminal.say(f"init     {shown(folder)}: training its base model, once")
        result = subprocess.run([*RLHF_COMMAND, "run", str(folder / BASE)], check=False)
        if result.returncode:
            terminal.say(f"init     not finished; resume with: rlhf run {shell_path(folder / BASE)}")
            raise SystemExit(result.returncode)
    steps = [preset.preparation.format(folder=shell_path(folder))] if preset.preparation else []
    terminal.out(f"{shown(folder)} is ready; next: {'; then '.join([*steps, f'rlhf run {shell_path(folder)}'])}")


# Configs from templates


def write_config(stage: str, file: Path, template: str, values: Mapping[str, Any], run: Path | None = None) -> None:
    """Write a config from a template of configs/ and load it; its schema is in the folder `run` (None: its own).

    The inner values of a dict of `values` are written as YAML.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    written = {
        key: {name: to_yaml(each) for name, each in value.items()} if isinstance(value, dict) else value
        for key, value in values.items()
    }
    environment = Environment(loader=FileSystemLoader(configs_folder()), undefined=StrictUndefined, trim_blocks=True)
    text = align_comments(environment.get_template(template).render(written))
    schema = (run or file.parent) / json_schema.FOLDER / f"{stage}.json"
    file.write_text(json_schema.with_modeline(text, file, schema), encoding="utf-8")
    config.load(stage, file)


# Baselines: dpo.yaml beside reward.yaml, and best_of/sft.yaml below ppo.yaml, with its prompts


def write_dpo(folder: Path, rows: int | None = None) -> None:
    """Write dpo.yaml, with `rows` pairs at a time (None: those of reward.yaml) in batches of the same size.

    Raises RLHFError C11 if there is no reward.yaml.
    """
    source = folder / "reward.yaml"
    if not source.exists():
        raise RLHFError("C11", "--baselines needs the pairs of a reward.yaml, and there is none", hint="remove it")
    tree, reward = yaml_io.read(source).tree, config.load("reward", source)
    assert isinstance(reward, RewardConfig)
    settings = {name: value for name, value in tree["reward"].items() if name in TrainerSettings.model_fields}
    if rows:
        batch = reward.reward.per_device_train_batch_size * reward.reward.gradient_accumulation_steps
        rows = min(rows, batch)
        settings |= {"per_device_train_batch_size": rows, "gradient_accumulation_steps": batch // rows}
        settings["per_device_eval_batch_size"] = rows
    model = {"path": "RUN/sft", **tree.get("model", {})}
    values = {
        "seed": tree["seed"],
        "path": model.pop("path"),
        "learning_rate": f"{RATE_SHARE * reward.reward.learning_rate:.0e}".replace("e-0", "e-"),
        "model": model,
        "data": tree["data"],
        "settings": settings,
        "sections": {name: tree[name] for name in ("trainer", "output") if name in tree},
    }
    write_config("dpo", folder / "dpo.yaml", "dpo.yaml.jinja", values)


def write_best_of(folder: Path) -> None:
    """Write best_of/sft.yaml: prompts and sampling of ppo.yaml, sizes of sft.yaml, or without it of reward.yaml.

    It samples about as many answers as PPO, if MAX_ANSWERS to each prompt are enough for that.
    """
    stage = "sft" if (folder / "sft.yaml").exists() else "reward"
    ppo_tree, tree = (yaml_io.read(folder / f"{name}.yaml").tree for name in ("ppo", stage))
    ppo, sizes = (config.load(name, folder / f"{name}.yaml") for name in ("ppo", stage))
    assert isinstance(ppo, PPOConfig) and isinstance(sizes, SFTConfig | RewardConfig)
    settings = {name: value for name, value in tree[stage].items() if name in TrainerSettings.model_fields}
    settings = {name: value for name, value in settings.items() if name not in NOT_SHARED}
    if isinstance(sizes, SFTConfig) and bool(sizes.model.adapters) == bool(ppo.models.adapters):
        settings["learning_rate"] = sizes.sft.learning_rate
    keys = ("adapters", "revision", "dtype", "attn_implementation")
    scorers = [path for source in ppo.rewards.values() for path in (source.model, *source.models.values()) if path]
    data = {"train": _inside(folder, ppo.data.prompts), **ppo_tree["data"]}
    trained = sizes.sft if isinstance(sizes, SFTConfig) else sizes.reward
    batch = trained.per_device_train_batch_size * trained.gradient_accumulation_steps
    episodes, file = ppo.ppo.total_episodes or 0, Path(ppo.data.prompts)
    prompts = sum(1 for _ in jsonl.read_jsonl(file)) if file.is_file() else max(episodes, batch)
    n = min(MAX_ANSWERS, max(NUM_ANSWERS, round(episodes / prompts)))
    sampling = {name: getattr(ppo.ppo, name) for name in ("temperature", "missing_eos_penalty")}
    sampling |= {key: data.pop(key) for key in ("truncate_prompt_words",) if key in data}
    if ppo.ppo.local_rollout_forward_batch_size:
        sampling["per_device_batch_size"] = ppo.ppo.local_rollout_forward_batch_size
    values = {
        "seed": tree["seed"],
        "path": _inside(folder, ppo.models.sft),
        "model": {key: ppo_tree["models"][key] for key in keys if key in ppo_tree.get("models", {})},
        "data": {key: value for key, value in data.items() if key not in ("prompts", "eval_prompts", "ptx_data")},
        "max_rows": min(prompts, max(batch, episodes // n)) if episodes and "max_rows" not in data else None,
        "episodes": episodes,
        "n": n,
        "reward": _inside(folder, scorers[0] if scorers else ppo.models.reward),
        "sampling": {"response_length": ppo.ppo.max_response_length, **sampling},
        "source": f"{stage}.yaml",
        "epochs": EPOCHS,
        "settings": settings,
        "trainer": to_yaml(tree["trainer"]) if "trainer" in tree else None,
    }
    (folder / BEST_OF).mkdir(exist_ok=True)
    write_config("sft", folder / BEST_OF / "sft.yaml", "best_of.yaml.jinja", values, folder)


def _inside(folder: Path, value: str) -> str:
    """Return a resolved path inside `folder` relative to best_of/; others and hub ids are unchanged."""
    top = Path(os.path.abspath(folder))
    return f"../{Path(value).relative_to(top).as_posix()}" if Path(value).is_relative_to(top) else value
