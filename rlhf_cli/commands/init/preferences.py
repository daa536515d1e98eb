"""`rlhf init preferences`: one file of preference pairs and a base model in, a folder ready for `rlhf run` out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rlhf_cli import config, runs, terminal
from rlhf_cli.commands.init import all_or_nothing, lengths, split, take_back
from rlhf_cli.commands.init import sizes as facts
from rlhf_cli.commands.init.sizes import Sizes, choose
from rlhf_cli.config import json_schema
from rlhf_cli.config.sources import DataSource
from rlhf_cli.config.yaml_io import align_comments, to_yaml
from rlhf_cli.errors import RLHFError, shell_path, shown
from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.models import devices, load, tokenizers
from rlhf_cli.runs.parents import Parent
from rlhf_cli.statistics import wilson

STAGES = ("sft", "reward", "ppo", "eval")


@dataclass(frozen=True)
class Wish:
    """What the command line asks for."""

    data: str  # a file, a folder or a hub id, as DataSource names it
    base: str  # a model's folder or hub id
    columns: Mapping[str, str]
    plain: bool  # leave texts as they are, also where the model has a chat template
    minutes: float | None  # that the whole run may take; None: 30 on a CPU, 480 on a GPU
    seed: int


def write(folder: Path, templates: Path, wish: Wish) -> None:
    """Write data/ and the four YAMLs into `folder`, whose sizes fit the data and this machine, and say what was chosen.

    Raises RLHFError: D01-D12 for the data, D10 where too few pairs fit the base model's context, D11 for too few
    different prompts, M01, M07, M08 for the base model, C15 for a folder that holds any of the files already.
    """
    take_back(folder)
    refuse_taken(folder)
    base = runs.open_parent(wish.base, expect=("sft", "ppo"), key="--base", where="")
    source = DataSource(wish.data, "--data", columns=wish.columns, on_bad="drop")
    tokenizer = tokenizers.load_tokenizer(base.model)
    style = split.read(source, tokenizer, plain=wish.plain)
    if style.chat_template:
        tokenizers.set_chat_template(tokenizer, style.chat_template)
    context = load.context_length(load.read_config(base.model))
    used, limits = lengths.fit(style.pairs, lengths.measure(tokenizer, style.pairs), context)
    parts = split.cut(used, wish.seed)
    contents = files(parts)
    known = facts.gather(base.model, limits, parts, {name: len(rows) for name, rows in contents.items()})
    sizes = choose(known, wish.minutes)
    with all_or_nothing(folder) as scratch:
        write_data(scratch / "data", contents, sizes)
        write_configs(scratch, templates, wish, base, style, known, sizes)
    report(folder, style, parts, known, sizes)


def refuse_taken(folder: Path) -> None:
    """Raise C15 where `folder` holds a file that would be written."""
    names = [*(f"{stage}.yaml" for stage in STAGES), "data", json_schema.FOLDER]
    if taken := [name for name in names if (folder / name).exists()]:
        text = f"{shown(folder)} already holds {', '.join(taken)}"
        raise RLHFError("C15", text, hint="nothing was written; name another folder")


def files(parts: split.Parts) -> dict[str, list[dict[str, Any]]]:
    """The rows of each file that the configs name."""
    held_out = parts["held-out"]
    return {
        "sft": [split.example(pair) for pair in split.chosen_most(parts["sft"])],
        "sft_eval": [split.example(pair) for pair in split.chosen_most(held_out)],
        "pairs": [split.preference(pair) for pair in parts["pairs"]],
        "pairs_eval": [split.preference(pair) for pair in held_out],
        "prompts": list(split.prompts(parts["prompts"])),
        "heldout": list(split.prompts(held_out)),
    }


def write_data(folder: Path, contents: Mapping[str, list[dict[str, Any]]], sizes: Sizes) -> None:
    """The files, those of evaluations cut to what the time allows: their rows stand in no order."""
    folder.mkdir(parents=True)
    most = {"sft_eval": sizes.sft.held_out, "pairs_eval": sizes.reward.held_out}
    for name, rows in contents.items():
        write_jsonl(folder / f"{name}.jsonl", rows[: most.get(name)])


def write_configs(
    folder: Path, templates: Path, wish: Wish, base: Parent, style: split.Style, known: facts.Facts, sizes: Sizes
) -> None:
    """The YAMLs, out of the templates of configs/preferences; each must load."""
    pages = Environment(loader=FileSystemLoader(templates), undefined=StrictUndefined, trim_blocks=True)
    values: dict[str, Any] = {
        "base": to_yaml(base.hub or str(base.path.resolve())),
        "data": DataSource.of(wish.data).shown(),
        "seed": wish.seed,
        "style": style,
        "answers": split.ANSWERS,
        "known": known,
        "s": sizes,
    }
    for stage in STAGES:
        file, text = folder / f"{stage}.yaml", align_comments(pages.get_template(f"{stage}.yaml.jinja").render(values))
        file.write_text(
            json_schema.with_modeline(text, file, folder / json_schema.FOLDER / f"{stage}.json"), encoding="utf-8"
        )
        config.load(stage, file)
    json_schema.write_schemas(folder, STAGES)


def report(folder: Path, style: split.Style, parts: split.Parts, known: facts.Facts, sizes: Sizes) -> None:
    """What was found and chosen, on stdout."""
    used = sum(map(len, parts.values()))
    terminal.out(f"{style.read} rows read, {used} pairs used, as {style.text}")
    rows = [
        [name, uses, str(len(split.distinct(pairs))), str(len(pairs))]
        for (name, uses), pairs in zip(split.USES.items(), parts.values(), strict=True)
    ]
    terminal.table(["part", "for", "prompts", "pairs"], rows)
    low, high = wilson(sizes.eval_n / 2, sizes.eval_n)
    terminal.out(
        f"a win rate of 0.50 on {sizes.eval_n} held-out prompts will be told as 0.50 +-{(high - low) / 2:.2f} (95 %); "
        "four times as many prompts halve that"
    )
    terminal.out(str(known))
    if sizes.minutes:
        terminal.out(
            f"about {sizes.minutes} minute{'s' * (sizes.minutes > 1)} in all, by a short measurement on this machine"
        )
    if known.speed and known.speed.share < devices.MIN_CPU_SHARE:
        terminal.out(
            f"other work left {known.speed.share:.0%} of the processor to that measurement: the run may take longer or "
            "shorter; on a quiet machine the sizes fit better"
        )
    for note in sizes.notes:
        terminal.out(f"noted: {note}")
    terminal.out(f"{shown(folder)} is ready; next: rlhf run {shell_path(folder)}")
