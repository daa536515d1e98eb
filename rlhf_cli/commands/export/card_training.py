"""Sections of the model card on training and evaluation."""

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from rlhf_cli.commands.export.card_context import ModelCardContext, data_name, report_card, sha256_of
from rlhf_cli.commands.export.markdown import bullets, code, table, text
from rlhf_cli.commands.report import run_tables, summary, tables
from rlhf_cli.commands.report.health import readings
from rlhf_cli.commands.report.runs import Stage, flat, from_defaults, is_number, said
from rlhf_cli.commands.report.tables import bounds, percent
from rlhf_cli.config.paths import FUNCTION, field_at, field_kind
from rlhf_cli.config.rewards import KINDS
from rlhf_cli.config.training import CONFIGS
from rlhf_cli.evaluation import render, reward_model_table
from rlhf_cli.evaluation.render import deciding_judge
from rlhf_cli.runs.adapters import is_hub_id
from rlhf_cli.runs.parents import FOREIGN
from rlhf_cli.statistics import with_interval

SHORT = 12  # hex digits of a hash
LIBRARIES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "tokenizers", "safetensors")
COURSE = ("objective/scores", "objective/kl_k1", "objective/response_length", "objective/eos_fraction")
_TRAINING = ("learning_rate", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps")
# Main settings, shown even at their default.
HEADLINE = {
    "sft": tuple(f"sft.{key}" for key in (*_TRAINING, "max_length")),
    "reward": tuple(f"reward.{key}" for key in (*_TRAINING, "max_length")),
    "ppo": tuple(
        f"ppo.{key}"
        for key in (
            "recipe", "total_episodes", "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps",
            "num_ppo_epochs", "num_mini_batches", "response_length", "temperature", "kl_coef", "kl_estimator", "gamma",
            "lam", "cliprange", "vf_coef", "missing_eos_penalty",
        )
    ),
}  # fmt: skip
# Settings that are hidden: logging, saving, network services.
HIDDEN = {"output", "run", "logging_steps", "num_sample_generations", "push_to_hub_if_best"}
HIDDEN |= {"url", "headers", "timeout", "retries", "batch_size"}
SOURCES = {
    "model": "a reward model",
    "models": "several reward models together",
    "function": "a Python function",
    "builtin": "a rule",
    "url": "a service that is asked over the network",
    "pipeline": "a text classifier",
}


def training_section(context: ModelCardContext) -> Iterator[str]:
    """Yield the parts of the training section."""
    yield "## How it was made"
    yield table(
        ("stage", "starts from", "trained for", "time", "device", "seed", "model, sha256"),
        (_stage(context, stage) for stage in context.stages),
    )
    if rewards := list(_rewards(context)):
        yield "What PPO was trained to raise:"
        yield bullets(rewards)
    yield "### Data"
    yield table(("stage", "key", "data", "rows", "sha256"), _data(context))
    yield "Rows are all that a file holds: fewer were used where some are too long, or `data.max_rows` is set."
    yield "### Settings"
    yield "Those that differ from the defaults, and the main ones."
    yield table(
        ("stage", "key", "value", "default"), (row for stage in context.stages for row in _settings(context, stage))
    )
    versions = run_tables.versions(context.stages)
    libraries = [("rlhf-cli", versions.get("rlhf")), *((name, versions.get(name)) for name in LIBRARIES)]
    made_with = ", ".join(f"{name} {text(version)}" for name, version in libraries if version)
    git = (context.stage.manifest or {}).get("git")
    where = f" The git repository around its folder stood at revision {code(str(git))} then." if git else ""
    yield f"Trained with {made_with}.{where}"
    if course := list(_course(context.stage)):
        yield "### Course of PPO"
        yield bullets(course)


def _stage(context: ModelCardContext, stage: Stage) -> list[str]:
    row, manifest = run_tables.stage_row(stage), stage.manifest or {}
    started = [parent(context, entry) for key, entry in stage.told("parents").items() if not key.startswith("rewards.")]
    started = started or ["fresh weights"]
    of_the_end = "" if stage is not context.stage or context.chosen.last else " at its end"
    made = _short(sha256_of(stage)) + of_the_end
    return [
        _label(context, stage),
        "; ".join(started),
        row.steps,
        row.time,
        text(row.device),
        str(manifest.get("seed", "")),
        made,
    ]


def _label(context: ModelCardContext, stage: Stage) -> str:
    return context.labels.get(sha256_of(stage), stage.name)


def parent(context: ModelCardContext, entry: Mapping[str, Any]) -> str:
    """Return the name and hash of an input model, without local paths."""
    if entry["stage"] != FOREIGN:
        return f"{context.labels.get(entry['sha256'], entry['stage'])} {_short(entry['sha256'])}"
    name = entry["path"] if is_hub_id(entry["path"]) else PurePosixPath(entry["path"]).name
    return code(name + (f" at {entry['revision']}" if "revision" in entry else "")) + f" {_short(entry['sha256'])}"


def _short(sha256: Any) -> str:
    return code(str(sha256)[:SHORT])


def _rewards(context: ModelCardContext) -> Iterator[str]:
    """Yield the terms of PPO's reward; nothing for other stages."""
    stage = context.stage
    for name, source in (stage.setting("rewards") or {}).items():
        kind = next(kind for kind in KINDS if source.get(kind))
        models = [entry for key, entry in stage.told("parents").items() if key.startswith(f"rewards.{name}.")]
        named = f" ({', '.join(parent(context, entry) for entry in models)})" if models else ""
        weight = f"weight {source['weight']:g}" if source["weight"] else "not optimised: a judge that was only watched"
        yield f"{code(name)}: {SOURCES[kind]}{named}, {weight}"
    kl_coef, start = stage.setting("ppo.kl_coef"), " at the start" if stage.setting("ppo.adap_kl_ctrl") else ""
    if is_number(kl_coef):
        yield f"less {kl_coef:g}{start} times the KL divergence from the SFT model, in nats"


def _data(context: ModelCardContext) -> Iterator[list[str]]:
    for stage in [*context.stages, *([context.run.stages["eval"]] if context.is_evaluated else [])]:
        for row in run_tables.data_rows([stage]):
            yield [_label(context, stage), code(row.key), code(data_name(stage, row.key)), row.rows, _short(row.sha256)]


def _settings(context: ModelCardContext, stage: Stage) -> Iterator[list[str]]:
    set_otherwise = {each.key: each for each in from_defaults(stage)}
    main = {key: value for key, value in flat(stage.config or {}).items() if key in HEADLINE.get(stage.name, ())}
    for key in [*main, *(key for key in set_otherwise if key not in main)]:
        each = set_otherwise.get(key)
        value = each.value if each else said(main[key])
        if HIDDEN.isdisjoint(key.split(".")) and not _is_place(stage.name, key) and "/" not in value:
            default = value if each is None else (each.default or "").removeprefix("-")
            yield [_label(context, stage), code(key), code(value), code(default)]


def _is_place(stage: str, key: str) -> bool:
    field = field_at(CONFIGS[stage], tuple(key.split(".")))
    return field is not None and field_kind(field).path is not None


def _course(stage: Stage) -> Iterator[str]:
    """Yield the course of PPO's main metrics, with an interpretation."""
    if stage.name == "ppo":
        for reading in readings(stage):
            if reading.key in COURSE:
                yield f"{reading.title} ({code(reading.key)}): {text(reading.sentence)}"


# Descriptions of judges that are not Python functions.
MODEL = "a reward model"
OWN = "the reward model that PPO was trained on: a win by it alone proves nothing"


def results_section(context: ModelCardContext) -> Iterator[str]:
    """Yield the parts of the evaluation sections."""
    if context.stage.name != "reward":
        yield "## Evaluation"
        yield from _evaluation(context)
    for stage in context.reward_models:
        yield "## Evaluation" if stage is context.stage else "## The reward model"
        yield from _report_card(stage)


def judges(context: ModelCardContext) -> dict[str, str]:
    """Return a description of each judge of the evaluation."""
    evaluation, descriptions = context.run.stages["eval"], {}
    for name in tables.judge_table(context.report):
        judge = str(evaluation.setting(f"judges.{name}"))
        if FUNCTION.fullmatch(judge):
            descriptions[name] = (
                f"the Python function {code(judge)}: a higher score is better, and its code says by what"
            )
            continue
        key = "models.reward" if name == "reward" else f"judges.{name}"
        own = evaluation.told("parents").get(key, {}).get("sha256") in context.rewarded_by
        descriptions[name] = OWN if own else MODEL
    return descriptions


def _evaluation(context: ModelCardContext) -> Iterator[str]:
    if not context.is_evaluated:
        yield "No evaluation of this very model was found beside it."
    else:
        yield from _evaluation_results(context)
    metrics = context.stage.told("metrics") if context.chosen.last else {}
    rows = [
        [code(name), str(value) if isinstance(value, int) else with_interval(value, metrics.get(f"{name}_ci95"))]
        for name, value in metrics.items()
        if isinstance(value, int | float)
    ]
    if rows:
        yield "Measured at the end of its training:"
        yield table(("", "value"), rows)


def _evaluation_results(context: ModelCardContext) -> Iterator[str]:
    report, who = context.report, render.model_label(context.stage.name)
    data = code(data_name(context.run.stages["eval"], "data.prompts"))
    yield (
        f"{report['n']:,} held-out prompts of {data}, an answer each, sampled as above; near-greedy where it says so. "
        "A tie counts half. In brackets: 95 % intervals."
    )
    if context.stage.name == "ppo":
        first, *others = summary.sentences(context.run)
        yield bullets(map(text, [first + _caveat(context), *others]))
    if rows := [row for row in tables.won(report) if row[0].startswith(f"{who} over ")]:
        yield table(tables.WON, rows)
    columns, policies = tables.policies(report)
    shown_policies = (
        policies if context.stage.name == "ppo" else [row for row in policies if not row[0].startswith("PPO")]
    )
    yield table(columns, shown_policies)
    yield "The policies:"
    yield bullets(_compared(context))
    yield "The judges:"
    yield bullets(f"{code(name)}: {description}" for name, description in judges(context).items())


def _caveat(context: ModelCardContext) -> str:
    """Return a caveat if only PPO's own reward model decides the main result."""
    rates = context.report.get("win_rate", {}).get("ppo_vs_sft")
    own = rates and judges(context).get(deciding_judge(rates)) == OWN
    return " That judge is what it was trained to please: alone this proves nothing." if own else ""


def _compared(context: ModelCardContext) -> Iterator[str]:
    """Yield a description of each evaluated policy."""
    parents = context.run.stages["eval"].told("parents")
    for name in context.report["models"]:
        entry = parents.get(f"models.{name}")
        if name == context.stage.name:
            yield f"{text(render.model_label(name))}: this model"
        elif entry and (name != "ppo" or context.stage.name == "ppo"):
            yield f"{text(render.model_label(name))}: {parent(context, entry)}"


def _report_card(stage: Stage) -> Iterator[str]:
    card = report_card(stage)
    if "accuracy" not in card:
        yield "It was measured on no held-out pairs: how often it is right is not known."
        return
    name = code(data_name(stage, "data.eval"))
    right = f"{percent(card['accuracy'])}{bounds(card.get('accuracy_ci95'))}"
    yield f"Right on {right} of {card['n']:,} held-out pairs of {name}; a coin is on 50 %."
    if "adversarial" in card:
        rows = [
            [row.name, row.value, row.limit, "flagged" if row.flagged else ""]
            for row in reward_model_table.card_rows(card)
        ]
        yield table(("report card", f"{card['n']} pairs, {card['adversarial']['n']} probed", "limit", ""), rows)
