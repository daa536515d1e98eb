"""`rlhf init preferences`: one file of preference pairs and a base model in, a folder ready for `rlhf run` out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rlhf_cli import checkpoints, config, terminal
from rlhf_cli.checkpoints import Parent
from rlhf_cli.config import json_schema
from rlhf_cli.config.written import aligned, written
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.models import tokenizers
from rlhf_cli.preferences import facts, split
from rlhf_cli.preferences.sizes import Sizes, choose
from rlhf_cli.rows import write_jsonl
from rlhf_cli.sources import Source
from rlhf_cli.statistics import wilson

STAGES = ("sft", "reward", "ppo", "eval")
FILES = ("sft", "sft_eval", "pairs", "pairs_eval", "prompts", "heldout")


@dataclass(frozen=True)
class Wish:
    """What the command line asks for."""

    data: str  # a file, a folder or a hub id, as Source names it
    base: str  # a model's folder or hub id
    columns: Mapping[str, str]
    plain: bool  # leave texts as they are, also where the model has a chat template
    minutes: float | None  # that the whole run may take; None: 30 on a CPU, 480 on a GPU
    seed: int


def write(folder: Path, templates: Path, wish: Wish) -> None:
    """Write data/ and the four YAMLs into `folder`, whose sizes fit the data and this machine, and say what was chosen.

    Raises RLHFError: D01-D12 for the data, D11 for too few different prompts, M01, M07, M08 for the base model, C15 for
    a folder that holds any of the files already.
    """
    refuse_taken(folder)
    base = checkpoints.open_parent(wish.base, expect=("sft", "ppo"), key="--base", where="")
    source = Source(wish.data, "--data", columns=wish.columns, on_bad="drop")
    tokenizer = tokenizers.load_tokenizer(base.model)
    style = split.read(source, tokenizer, plain=wish.plain)
    parts = split.cut(style.pairs, wish.seed)
    if style.chat_template:
        tokenizers.set_chat_template(tokenizer, style.chat_template)
    known = facts.gather(base.model, tokenizer, parts)
    sizes = choose(known, wish.minutes)
    write_data(folder / "data", parts)
    write_configs(folder, templates, wish, base, style, sizes)
    report(folder, style, parts, known, sizes)


def refuse_taken(folder: Path) -> None:
    """Raise C15 where `folder` holds a file that would be written."""
    names = [*(f"{stage}.yaml" for stage in STAGES), "data", json_schema.FOLDER]
    if taken := [name for name in names if (folder / name).exists()]:
        text = f"{shown(folder)} already holds {', '.join(taken)}"
        raise RLHFError("C15", text, hint="nothing was written; name another folder")


def write_data(folder: Path, parts: split.Parts) -> None:
    """The files that the configs name."""
    folder.mkdir(parents=True)
    held_out = parts["held-out"]
    contents = (
        map(split.example, parts["sft"]),
        map(split.example, held_out),
        map(split.preference, parts["pairs"]),
        map(split.preference, held_out),
        split.prompts(parts["prompts"]),
        split.prompts(held_out),
    )
    for name, rows in zip(FILES, contents, strict=True):
        write_jsonl(folder / f"{name}.jsonl", rows)


def write_configs(folder: Path, templates: Path, wish: Wish, base: Parent, style: split.Style, sizes: Sizes) -> None:
    """The YAMLs, out of the templates of configs/preferences; each must load."""
    pages = Environment(loader=FileSystemLoader(templates), undefined=StrictUndefined, trim_blocks=True)
    values: dict[str, Any] = {
        "base": written(base.hub or str(base.path.resolve())),
        "data": Source.of(wish.data).shown(),
        "seed": wish.seed,
        "style": style,
        "s": sizes,
    }
    for stage in STAGES:
        file, text = folder / f"{stage}.yaml", aligned(pages.get_template(f"{stage}.yaml.jinja").render(values))
        file.write_text(
            json_schema.pointed(text, file, folder / json_schema.FOLDER / f"{stage}.json"), encoding="utf-8"
        )
        config.load(stage, file)
    json_schema.write_beside(folder, STAGES)


def report(folder: Path, style: split.Style, parts: split.Parts, known: facts.Facts, sizes: Sizes) -> None:
    """What was found and chosen, on stdout."""
    terminal.out(f"{style.read} rows read, {len(style.pairs)} pairs used, as {style.text}")
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
    for note in sizes.notes:
        terminal.out(f"noted: {note}")
    terminal.out(f"{shown(folder)} is ready; next: rlhf run {shown(folder)}")
