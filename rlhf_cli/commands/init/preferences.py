"""`rlhf init preferences`: write a run folder from one file of preference pairs and a base model."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli import runs, terminal
from rlhf_cli.commands.init.baselines import BEST_OF_FOLDER, write_best_of, write_dpo
from rlhf_cli.commands.init.folder import all_or_nothing, print_ready, remove_leftovers
from rlhf_cli.commands.init.limits import TokenLimits, drop_unrendered, fit_pairs, whole_percent
from rlhf_cli.commands.init.pairs import FormattedPairs, read_pairs
from rlhf_cli.commands.init.parts import (
    MAX_SFT_ANSWERS,
    PART_USES,
    Parts,
    Rows,
    balance_parts,
    distinct_prompts,
    longer_share,
    rows_of_files,
    split_pairs,
)
from rlhf_cli.commands.init.sizes import (
    BASE_LEARNING_RATES,
    EVAL_BEST_OF,
    PPO_EPOCHS,
    RunSizes,
    SizingInputs,
    choose_sizes,
    learning_rate,
    measure_inputs,
)
from rlhf_cli.commands.init.templates import write_config
from rlhf_cli.config import json_schema
from rlhf_cli.config.machinery.paths import resolve_data
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.rendering import WITHOUT_MARKUP, check_rendering, rendered_rows
from rlhf_cli.errors import RLHFError, at_location, did_you_mean, shell_path, shell_word, shown
from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.models import build, chat_templates, load, tokenizers
from rlhf_cli.planning.placement import (
    ADAMW_8BIT,
    CHECKPOINTING,
    EPISODES_PER_UPDATE,
    KINDS,
    OFFLOAD,
    POLICY_HEAD,
    memory_line,
    require_known,
)
from rlhf_cli.planning.target import Target
from rlhf_cli.runs import layout
from rlhf_cli.runs.parents import Parent
from rlhf_cli.statistics import wilson

REQUIRED_STAGES = tuple(stage for stage in layout.STAGES if stage not in layout.OPTIONAL_STAGES)
RATING_OPTIONS = ("pairs_per_prompt", "min_rating_gap", "margin_per_point")  # names of keys under data, too
BASE_STAGES = ("sft", "ppo", "dpo")  # that --base may name
MAX_LONGER_SHARE = 0.6  # of pairs whose longer answer was chosen; beyond it the summary names --balance-length
ADDED_TOKENS = (
    "the base model has no chat template, and adapters do not train the embeddings of the tokens that chatml adds"
)


@dataclass(frozen=True)
class PreferencesOptions:
    """Options of `rlhf init preferences`."""

    data: str | None  # a file, a folder or a hub id
    base: str | None  # a model's folder or hub id
    columns: Sequence[str] = ()  # each "NAME=COLUMN"
    plain: bool = False  # use the texts without the model's chat template
    pairs_per_prompt: str | None = None  # this and the next two of rated answers; None: the default of a reward.yaml
    min_rating_gap: float | None = None
    margin_per_point: float | None = None
    balance_length: bool = False  # drop pairs of the reward model until both lengths are chosen equally often
    minutes: float | None = None  # time budget of the run; None: 30 on a CPU, 480 on a GPU
    adapters: str = "auto"  # one of placement.ADAPTERS
    gpu: str | None = None  # a GPU by name or in GiB; None: the one that is here
    baselines: bool = False  # write dpo.yaml and best_of/sft.yaml, too
    seed: int = 0


@dataclass(frozen=True)
class PreparedData:
    """The pairs as they are written, in parts and in files, with the limits that they fit."""

    source: DataSource
    formatted: FormattedPairs
    template_variables: dict[str, Any]
    limits: TokenLimits
    parts: Parts
    files: dict[str, Rows]  # by name in data/, without .jsonl


def init(folder: Path, options: PreferencesOptions) -> None:
    """Write data/ and four YAMLs sized for the data and this machine into `folder`, and print a summary.

    Raises RLHFError C07 for unknown adapters or GPUs, C11 for missing or malformed options, D01-D12 for the data, D10
    if too few pairs fit the base model's context, D11 for too few different prompts or balanced pairs, D16 for too many
    unusable rows, C17 for adapters where chatml adds tokens, T08 and T09 for what the chat template does not render,
    M01, M07, M08, M10 for the base model, E03 if the run fits in no way, C15 if the folder holds any of the files.
    """
    if options.data is None or options.base is None:
        raise _missing_options_error(options, folder)
    require_known(options.adapters)
    target = Target.of(options.gpu, 1)
    named = resolve_data(options.data, os.getcwd())
    ratings = _rating_options(options)
    source = DataSource(named, "--data", columns=_column_names(options.columns), on_bad="drop", **ratings)
    remove_leftovers(folder)  # which are not taken
    _check_not_taken(folder, baselines=options.baselines)

    base = _open_base(options.base)
    data = _prepare_data(source, base, options)
    inputs = _measure(base, data, target, options)
    sizes = choose_sizes(inputs, options.minutes)

    with all_or_nothing(folder) as scratch:
        write_data(scratch / "data", data.files, sizes)
        values = _template_values(base, data, inputs, sizes=sizes, seed=options.seed)
        write_configs(scratch, values, inputs.dpo_rows)
    _print_summary(data, inputs, sizes)
    for note in (sizes.note, _ratings_note(data, options), _length_note(data, balanced=options.balance_length)):
        if note:
            terminal.out(f"noted: {note}")
    print_ready(folder, f"rlhf run {shell_path(folder)}")


# Options


def _missing_options_error(options: PreferencesOptions, folder: Path) -> RLHFError:
    needed = {"--data, your file of pairs,": options.data, "--base, the model to start from,": options.base}
    missing = [text for text, value in needed.items() if value is None]
    verb = "is" if len(missing) == 1 else "are"
    pairs = shell_word(options.data or "pairs.jsonl")
    model = shell_word(options.base or "MODEL")
    hint = f"rlhf init preferences --data {pairs} --base {model} {shell_path(folder)}"
    return RLHFError("C11", f"{' and '.join(missing)} {verb} missing", hint=hint)


def _column_names(columns: Sequence[str]) -> dict[str, str]:
    """Return the column of each name. Raises RLHFError C11."""
    names: dict[str, str] = {}
    for text in columns:
        if re.search(r",\s*\w+=", text):
            options = " ".join(f"--column {part.strip()}" for part in text.split(","))
            raise RLHFError("C11", f"--column {text}: expected one NAME=COLUMN", hint=f"repeat the option: {options}")
        name, _, column = text.partition("=")
        if not name or not column:
            hint = "for example --column prompt=question"
            raise RLHFError("C11", f"--column {text}: expected NAME=COLUMN", hint=hint)
        names[name] = column
    return names


def _rating_options(options: PreferencesOptions) -> dict[str, Any]:
    """Return how pairs of rated answers are made, where an option says so. Raises RLHFError C07."""
    if options.pairs_per_prompt not in (None, "one", "all"):
        text = f"--pairs-per-prompt {options.pairs_per_prompt}: expected one or all"
        raise RLHFError("C07", text, hint=did_you_mean(str(options.pairs_per_prompt), ("one", "all")))
    values = {name: getattr(options, name) for name in RATING_OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def _check_not_taken(folder: Path, *, baselines: bool) -> None:
    """Raise RLHFError C15 if `folder` contains a file that would be written."""
    names = [f"{stage}.yaml" for stage in REQUIRED_STAGES]
    names += ["data", json_schema.FOLDER]
    if baselines:
        names += ["dpo.yaml", f"{BEST_OF_FOLDER}/sft.yaml"]
    taken = [name for name in names if (folder / name).exists()]
    if taken:
        text = f"{shown(folder)} already holds {', '.join(taken)}"
        raise RLHFError("C15", text, hint="nothing was written; name another folder")


# Data


def _open_base(text: str) -> Parent:
    """Open the base model: a folder, or else a hub id. Raises RLHFError M01, M08."""
    path = os.path.abspath(os.path.expanduser(text))
    return runs.open_parent(path if os.path.exists(path) else text, expect=BASE_STAGES, key="--base", where="")


def _prepare_data(source: DataSource, base: Parent, options: PreferencesOptions) -> PreparedData:
    """Read the pairs, choose the token limits, and split the pairs that fit into parts and files."""
    tokenizer = tokenizers.load_tokenizer(base.model)
    formatted = read_pairs(source, tokenizer, plain=options.plain)
    variables = _set_chat_template(tokenizer, formatted, options.adapters)
    _check_conversations(formatted, tokenizer)
    context = _context_length(base.model)

    rendered, counts = drop_unrendered(tokenizer, formatted.pairs)
    fitting, limits = fit_pairs(rendered, counts, context)
    parts = split_pairs(fitting, options.seed)
    files = rows_of_files(parts, balance=options.balance_length)
    return PreparedData(source, formatted, variables, limits=limits, parts=parts, files=files)


def _set_chat_template(tokenizer: Any, formatted: FormattedPairs, adapters: str) -> dict[str, Any]:
    """Set the chat template as the SFT stage will, and return the values of its variables. Raises RLHFError C17."""
    if formatted.chat_template:
        size_before = len(tokenizer)
        tokenizers.set_chat_template(tokenizer, formatted.chat_template)
        if adapters in KINDS and len(tokenizer) > size_before:
            hint = "take a base model with a chat template, or add --plain"
            raise RLHFError("C17", f"--adapters {adapters}: {ADDED_TOKENS}", hint=hint)

    with_thoughts = sum("</think>" in pair.chosen for pair in formatted.pairs)
    mostly = with_thoughts > len(formatted.pairs) / 2
    variables = chat_templates.variables_for_answers(tokenizer, thoughts=mostly)
    chat_templates.set_template_variables(tokenizer, variables, where="--base")
    return variables


def _check_conversations(formatted: FormattedPairs, tokenizer: Any) -> None:
    """Warn (D18) about chat markup in the texts. Raises RLHFError T08 if the template leaves out a message."""
    rows = rendered_rows((pair.location, pair.prompt, [pair.chosen, pair.rejected]) for pair in formatted.pairs)
    hint = "add --plain, which uses the texts as they are" if formatted.from_texts else WITHOUT_MARKUP
    check_rendering(rows, tokenizer, where="--data", hint=hint)


def _context_length(base: Path) -> int | None:
    """Return the base model's context, None without a limit. Raises RLHFError M10 if it cannot be a reward model."""
    model_config = load.read_config(base)
    with at_location("--base"):
        build.require_classifier(model_config)
    return load.context_length(model_config)


# Sizes


def _measure(base: Parent, data: PreparedData, target: Target, options: PreferencesOptions) -> SizingInputs:
    """Measure what the sizes depend on. With chatml, adapters are considered only if the user chose them."""
    adapters = options.adapters
    hint = "take a smaller base model"
    if adapters != "auto":
        hint += ", or leave --adapters out"
    elif data.formatted.chat_template:
        adapters = "none"
        hint = f"{ADDED_TOKENS}: take one with a chat template, add --plain, or take a smaller one"
    return measure_inputs(
        base, data.limits, data.files, target, adapters=adapters, hint=hint, baselines=options.baselines
    )


# Files


def _template_values(
    base: Parent, data: PreparedData, inputs: SizingInputs, sizes: RunSizes, seed: int
) -> dict[str, Any]:
    """Return what the templates of configs/preferences read."""
    leaves_answers_out = len(data.files["sft"]) < len(data.parts["sft"])
    savings = inputs.placement.savings
    return {
        "base": base.hub or str(base.path.resolve()),
        "data": data.source.shown(),
        "seed": seed,
        "pairs": data.formatted,
        "ratings": {name: getattr(data.source, name) for name in RATING_OPTIONS},
        "template_variables": data.template_variables,
        "max_answers": MAX_SFT_ANSWERS if leaves_answers_out else None,
        "inputs": inputs,
        "sizes": sizes,
        "rate_at_1g": {stage: learning_rate(stage, 10**9, inputs.placement.adapters) for stage in BASE_LEARNING_RATES},
        "saves": {
            "checkpointing": CHECKPOINTING in savings,
            "adamw_8bit": ADAMW_8BIT in savings,
            "offload": OFFLOAD in savings,
            "policy_head": POLICY_HEAD in savings,
        },
        "episodes_per_update": EPISODES_PER_UPDATE,
        "ppo_epochs": PPO_EPOCHS[0],
        "best_of": EVAL_BEST_OF,
    }


def write_data(folder: Path, files: Mapping[str, Rows], sizes: RunSizes) -> None:
    """Write the files; evaluation files are shuffled and truncated."""
    folder.mkdir(parents=True)
    max_rows = {"sft_eval": sizes.sft.eval_rows, "pairs_eval": sizes.reward.eval_rows}
    for name, rows in files.items():
        write_jsonl(folder / f"{name}.jsonl", rows[: max_rows.get(name)])


def write_configs(folder: Path, values: Mapping[str, Any], dpo_rows: int | None) -> None:
    """Write the YAMLs from the templates of configs/preferences, and with `dpo_rows` those of the baselines."""
    for stage in REQUIRED_STAGES:
        write_config(stage, folder / f"{stage}.yaml", f"preferences/{stage}.yaml.jinja", values)
    stages = list(REQUIRED_STAGES)
    if dpo_rows:
        write_dpo(folder, dpo_rows)
        write_best_of(folder)
        stages.append("dpo")
    json_schema.write_schemas(folder, stages)


# Summary


def _print_summary(data: PreparedData, inputs: SizingInputs, sizes: RunSizes) -> None:
    """Print the data read, and the sizes chosen."""
    used = sum(len(pairs) for pairs in data.parts.values())
    terminal.out(f"{data.formatted.file.num_read} rows read, {used} pairs used, as {data.formatted.description}")
    terminal.out(f"columns: {data.formatted.file.columns}")
    rows = [
        [name, PART_USES[name], str(len(distinct_prompts(pairs))), str(len(pairs))]
        for name, pairs in data.parts.items()
    ]
    terminal.table(["part", "for", "prompts", "pairs"], rows)

    low, high = wilson(sizes.eval_n / 2, sizes.eval_n)
    terminal.out(
        f"a win rate of 0.50 on {sizes.eval_n} held-out prompts is measured to +-{(high - low) / 2:.2f} (95 %); "
        "four times as many prompts halve that"
    )
    limits = inputs.limits
    terminal.out(
        f"prompts of {limits.prompt_mean:.0f} tokens, answers of {limits.answer_mean:.0f}; "
        f"the base model has {inputs.parameters:,} parameters{_speed_text(inputs)}"
    )
    terminal.out(memory_line(inputs.placement, inputs.placement, inputs.target, "whole weights need", inputs.whole))
    if sizes.minutes:
        unit = "minute" if sizes.minutes == 1 else "minutes"
        terminal.out(f"about {sizes.minutes} {unit} in all, by a short measurement on this machine")


def _speed_text(inputs: SizingInputs) -> str:
    speed = inputs.speed
    if speed is None:
        return ""
    text = f", trains {speed.training:.0f} and writes {speed.generation:.0f} tokens a second"
    return f"{text} in bfloat16" if speed.bf16_gain else text


def _ratings_note(data: PreparedData, options: PreferencesOptions) -> str | None:
    """Return that options for ratings have no effect, if the pairs have none."""
    given = [f"--{name.replace('_', '-')}" for name in _rating_options(options)]
    if data.formatted.file.ratings or not given:
        return None
    return f"{' and '.join(given)} had no effect: the pairs have no ratings"


def _length_note(data: PreparedData, *, balanced: bool) -> str | None:
    """Return what --balance-length did, or that it would help."""
    parts = data.parts
    if balanced:
        before = f"{len(parts['pairs'])} and {len(parts['held-out'])}"
        after = f"{len(data.files['pairs'])} and {len(data.files['pairs_eval'])}"
        return f"of {before} pairs of the reward model {after} are kept, in which no answer is chosen for its length"

    share = longer_share(parts["pairs"])
    if share <= MAX_LONGER_SHARE:
        return None
    try:
        balance_parts(parts)
        remedy = "--balance-length drops such pairs"
    except RLHFError:
        remedy = "bring more pairs in which the shorter answer is the chosen one"
    text = f"the longer answer is the chosen one in {whole_percent(share)} of the pairs: a reward model may learn that"
    return f"{text}; {remedy}"
