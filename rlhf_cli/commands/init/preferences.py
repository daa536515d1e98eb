"""`rlhf init preferences`: write a run folder from one file of preference pairs and a base model."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_cli import runs, terminal
from rlhf_cli.commands.init.baselines import write_best_of, write_dpo
from rlhf_cli.commands.init.folder import all_or_nothing, remove_leftovers
from rlhf_cli.commands.init.pairs import (
    MAX_ANSWERS,
    PART_USES,
    PairFormat,
    Parts,
    balance_parts,
    distinct_prompts,
    fit_lengths,
    longer_share,
    measure_rendered,
    percent,
    read_pairs,
    rows_of_files,
    split_pairs,
)
from rlhf_cli.commands.init.sizes import Sizes, SizingInputs, choose_sizes, measure_inputs
from rlhf_cli.commands.init.templates import write_config
from rlhf_cli.config import json_schema
from rlhf_cli.config.machinery.paths import resolve_data
from rlhf_cli.config.machinery.yaml_io import to_yaml
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.rendering import WITHOUT_MARKUP, check_rendering, rendered_rows
from rlhf_cli.errors import RLHFError, at_location, shell_path, shell_word, shown
from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.models import build, chat_templates, load, tokenizers
from rlhf_cli.planning.placement import memory_line, require_known
from rlhf_cli.planning.target import Target
from rlhf_cli.runs import layout
from rlhf_cli.statistics import wilson

STAGES = tuple(stage for stage in layout.STAGES if stage not in layout.OPTIONAL_STAGES)
BASE_STAGES = ("sft", "ppo", "dpo")  # that --base may name
MAX_LONGER_SHARE = 0.6  # of pairs whose longer answer was chosen; beyond it the summary names --balance-length
NO_ADAPTERS = (
    "the base model has no chat template, and adapters do not train the embeddings of the tokens that chatml adds: "
    "take one with a chat template, add --plain, or take a smaller one"
)


def init(
    folder: Path,
    *,
    data: str | None,
    base: str | None,
    columns: Sequence[str] = (),
    plain: bool = False,
    balance_length: bool = False,
    minutes: float | None = None,
    adapters: str = "auto",
    gpu: str | None = None,
    baselines: bool = False,
    seed: int = 0,
) -> None:
    """Write data/ and four YAMLs sized for the data and this machine into `folder`, and print a summary.

    `data` is a file, a folder or a hub id; `base` a model's folder or hub id; `columns` are "NAME=COLUMN"; `plain` uses
    the texts without the model's chat template; `balance_length` drops pairs of the reward model until the longer
    answer is chosen as often as the shorter one; `minutes` is the time budget of the run (None: 30 on a CPU, 480 on a
    GPU); `adapters` is one of placement.ADAPTERS; `gpu` is a GPU by name or in GiB; `baselines` as in `init`.
    Raises RLHFError C07 for unknown adapters or GPUs, C11 for missing or malformed options, D01-D12 for the data, D10
    if too few pairs fit the base model's context, D11 for too few different prompts or balanced pairs, D16 for too many
    unusable rows, T08 and T09 for what the chat template does not render, M01, M07, M08, M10 for the base model, E03 if
    the run fits in no way, C15 if the folder holds any of the files already.
    """
    if data is None or base is None:
        raise _missing_options_error(data, base, folder)
    require_known(adapters)
    target = Target.of(gpu, 1)
    named = resolve_data(data, os.getcwd())
    source = DataSource(named, "--data", columns=_column_names(columns), on_bad="drop")
    remove_leftovers(folder)
    check_not_taken(folder)
    model = os.path.abspath(os.path.expanduser(base))
    parent = runs.open_parent(model if os.path.exists(model) else base, expect=BASE_STAGES, key="--base", where="")
    tokenizer = tokenizers.load_tokenizer(parent.model)
    formatted = read_pairs(source, tokenizer, plain=plain)
    variables = _set_chat_template(tokenizer, formatted)
    check_conversations(formatted, tokenizer)
    context = _context_length(parent.model)
    pairs, lengths = measure_rendered(tokenizer, formatted.pairs)
    used, limits = fit_lengths(pairs, lengths, context)
    parts = split_pairs(used, seed)
    contents = rows_of_files(parts, balance=balance_length)
    hint = "take a smaller base model" + (", or leave --adapters out" if adapters != "auto" else "")
    if formatted.chat_template and adapters == "auto":
        adapters, hint = "none", NO_ADAPTERS
    inputs = measure_inputs(parent, limits, contents, target, adapters, hint, baselines=baselines)
    sizes = choose_sizes(inputs, minutes)
    values = {
        "base": to_yaml(parent.hub or str(parent.path.resolve())),
        "data": DataSource.of(named).shown(),
        "seed": seed,
        "style": formatted,
        "template_variables": to_yaml(variables) if variables else None,
        "max_answers": MAX_ANSWERS if len(contents["sft"]) < len(parts["sft"]) else None,  # if it left out any
        "known": inputs,
        "s": sizes,
    }
    with all_or_nothing(folder) as scratch:
        write_data(scratch / "data", contents, sizes)
        write_configs(scratch, values, (inputs.placement.rows or {}).get("dpo"))
    print_summary(folder, formatted, parts, inputs, sizes, length_note(parts, contents, balanced=balance_length))


def _context_length(base: Path) -> int | None:
    """Return the base model's context, None without a limit. Raises RLHFError M10 if it cannot be a reward model."""
    model_config = load.read_config(base)
    with at_location("--base"):
        build.require_classifier(model_config)
    return load.context_length(model_config)


def _set_chat_template(tokenizer: Any, formatted: PairFormat) -> dict[str, Any]:
    """Set the chat template as the SFT stage will, and return the values of its variables."""
    if formatted.chat_template:
        tokenizers.set_chat_template(tokenizer, formatted.chat_template)
    with_thoughts = sum("</think>" in pair.chosen for pair in formatted.pairs)
    thoughts = with_thoughts > len(formatted.pairs) / 2
    variables = chat_templates.variables_for_answers(tokenizer, thoughts=thoughts)
    chat_templates.set_template_variables(tokenizer, variables, where="--base")
    return variables


def check_conversations(formatted: PairFormat, tokenizer: Any) -> None:
    """Warn (D18) about chat markup in the texts. Raises RLHFError T08 if the template leaves out a message."""
    rows = rendered_rows((pair.location, pair.prompt, [pair.chosen, pair.rejected]) for pair in formatted.pairs)
    hint = "add --plain, which uses the texts as they are" if formatted.from_texts else WITHOUT_MARKUP
    check_rendering(rows, tokenizer, where="--data", hint=hint)


def _missing_options_error(data: str | None, base: str | None, folder: Path) -> RLHFError:
    required = {"--data, your file of pairs,": data, "--base, the model to start from,": base}
    missing = [option for option, value in required.items() if value is None]
    verb = "is" if len(missing) == 1 else "are"
    pairs, model = shell_word(data or "pairs.jsonl"), shell_word(base or "MODEL")
    hint = f"rlhf init preferences --data {pairs} --base {model} {shell_path(folder)}"
    return RLHFError("C11", f"{' and '.join(missing)} {verb} missing", hint=hint)


def _column_names(columns: Sequence[str]) -> dict[str, str]:
    """Return the column of each name. Raises RLHFError C11."""
    for text in columns:
        if re.search(r",\s*\w+=", text):
            options = " ".join(f"--column {part.strip()}" for part in text.split(","))
            raise RLHFError("C11", f"--column {text}: expected one NAME=COLUMN", hint=f"repeat the option: {options}")
        if not all(text.partition("=")):
            hint = "for example --column prompt=question"
            raise RLHFError("C11", f"--column {text}: expected NAME=COLUMN", hint=hint)
    return dict(text.partition("=")[::2] for text in columns)


def check_not_taken(folder: Path) -> None:
    """Raise RLHFError C15 if `folder` contains a file that would be written."""
    names = [*(f"{stage}.yaml" for stage in STAGES), "data", json_schema.FOLDER]
    if taken := [name for name in names if (folder / name).exists()]:
        text = f"{shown(folder)} already holds {', '.join(taken)}"
        raise RLHFError("C15", text, hint="nothing was written; name another folder")


def write_data(folder: Path, contents: Mapping[str, list[dict[str, Any]]], sizes: Sizes) -> None:
    """Write the files; evaluation files are shuffled and truncated."""
    folder.mkdir(parents=True)
    max_rows = {"sft_eval": sizes.sft.eval_rows, "pairs_eval": sizes.reward.eval_rows}
    for name, rows in contents.items():
        write_jsonl(folder / f"{name}.jsonl", rows[: max_rows.get(name)])


def write_configs(folder: Path, values: Mapping[str, Any], rows: int | None = None) -> None:
    """Write the YAMLs from the templates of configs/preferences, and load each; baselines if DPO has `rows`."""
    for stage in STAGES:
        write_config(stage, folder / f"{stage}.yaml", f"preferences/{stage}.yaml.jinja", values)
    if rows:
        write_dpo(folder, rows)
        write_best_of(folder)
    json_schema.write_schemas(folder, [*STAGES, "dpo"] if rows else STAGES)


def print_summary(
    folder: Path, formatted: PairFormat, parts: Parts, inputs: SizingInputs, sizes: Sizes, note: str | None
) -> None:
    """Print the data read, the sizes chosen, and a note on the data."""
    used = sum(map(len, parts.values()))
    terminal.out(f"{formatted.read} rows read, {used} pairs used, as {formatted.text}")
    terminal.out(f"columns: {formatted.columns}")
    rows = [
        [name, uses, str(len(distinct_prompts(pairs))), str(len(pairs))]
        for (name, uses), pairs in zip(PART_USES.items(), parts.values(), strict=True)
    ]
    terminal.table(["part", "for", "prompts", "pairs"], rows)
    low, high = wilson(sizes.eval_n / 2, sizes.eval_n)
    terminal.out(
        f"a win rate of 0.50 on {sizes.eval_n} held-out prompts is measured to +-{(high - low) / 2:.2f} (95 %); "
        "four times as many prompts halve that"
    )
    speed, lengths = "", inputs.lengths
    if inputs.speed:
        speed = f", trains {inputs.speed.training:.0f} and writes {inputs.speed.generation:.0f} tokens a second"
        speed += " in bfloat16" if inputs.speed.bf16_gain else ""
    terminal.out(
        f"prompts of {lengths.prompt_mean:.0f} tokens, answers of {lengths.answer_mean:.0f}; the base "
        f"model has {inputs.parameters:,} parameters{speed}"
    )
    terminal.out(memory_line(inputs.placement, inputs.placement, inputs.target, "whole weights need", inputs.whole))
    if sizes.minutes:
        terminal.out(
            f"about {sizes.minutes} minute{'s' * (sizes.minutes > 1)} in all, by a short measurement on this machine"
        )
    for each in (sizes.note, note):
        if each:
            terminal.out(f"noted: {each}")
    terminal.out(f"{shown(folder)} is ready; next: rlhf run {shell_path(folder)}")


def length_note(parts: Parts, contents: Mapping[str, Sequence[Any]], *, balanced: bool) -> str | None:
    """Return what --balance-length did, or that it would help."""
    share = longer_share(parts["pairs"])
    if balanced:
        before, after = (f"{len(pairs)} and {len(held_out)}" for pairs, held_out in (
            (parts["pairs"], parts["held-out"]), (contents["pairs"], contents["pairs_eval"])
        ))  # fmt: skip
        return f"of {before} pairs of the reward model {after} are kept, in which no answer is chosen for its length"
    if share <= MAX_LONGER_SHARE:
        return None
    try:
        balance_parts(parts)
        remedy = "--balance-length drops such pairs"
    except RLHFError:
        remedy = "bring more pairs in which the shorter answer is the chosen one"
    text = f"the longer answer is the chosen one in {percent(share)} of the pairs: a reward model may learn that"
    return f"{text}; {remedy}"
