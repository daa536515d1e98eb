"""The YAML at a card's head, which the hub reads: what the model is for, what it came from, what was measured."""

from collections.abc import Iterator
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from rlhf_cli.config.sources import hub_dataset
from rlhf_cli.evaluation import render
from rlhf_cli.export.card.subject import Subject, data_name, is_of_the_hub, report_card
from rlhf_cli.report.runs import Stage
from rlhf_cli.report.texts import visible

TASKS = {"ppo": "text-generation", "sft": "text-generation", "reward": "text-classification"}
TAGS = {"ppo": "ppo", "sft": "sft", "reward": "reward-model"}
DIGITS = 4
HELD_OUT = ("data.eval", "data.eval_prompts")
LOCAL = "local-file"  # the hub wants a kind of every dataset: that of one that it does not have


def matter(about: Subject) -> str:
    """The block between the two rulers. What is not known, such as a licence, is not in it."""
    kind = about.stage.name
    base = about.base["path"] if is_of_the_hub(about.base) else None
    results = list(_reward_model(about) if kind == "reward" else _policy(about))
    told = ModelCardData(
        library_name="transformers",
        pipeline_tag=TASKS[kind],
        base_model=base,
        base_model_relation="finetune" if base else None,
        datasets=sorted(_learnt(about)) or None,
        tags=["rlhf", TAGS[kind], "rlhf-cli"],
        model_name=visible(about.name) if results else None,
        eval_results=results or None,
    )
    return f"---\n{told.to_yaml()}\n---"


def _learnt(about: Subject) -> set[str]:
    """The hub's datasets that it was trained on."""
    named = [(stage, key) for stage in about.stages for key in stage.told("data") if key not in HELD_OUT]
    paths = [stage.setting(key) for stage, key in named]
    return {dataset for path in paths if isinstance(path, str) and (dataset := hub_dataset(path))}


def _policy(about: Subject) -> Iterator[EvalResult]:
    """Win rates of its sampled answers, each with its interval in its name."""
    for pair, rates in about.report.get("win_rate", {}).items():
        for judge, rate in rates.items() if pair.startswith(f"{about.stage.name}_vs_") else ():
            name = f"Win rate, {render.pair_label(pair)} by {judge}, {_interval(rate)}"
            yield _result(about, about.run.stages["eval"], "data.prompts", "win_rate", rate["value"], name)


def _reward_model(about: Subject) -> Iterator[EvalResult]:
    told = report_card(about.stage)
    if "accuracy" in told:
        interval = _interval({"ci95": told["accuracy_ci95"], "n": told["n"]})
        name = f"Share of held-out pairs that it tells right, {interval}"
        yield _result(about, about.stage, "data.eval", "accuracy", told["accuracy"], name)


def _interval(told: dict[str, Any]) -> str:
    low, high = told["ci95"]
    return f"95 % interval {low:.3f} to {high:.3f}, n {told['n']}"


def _result(about: Subject, stage: Stage, key: str, metric: str, value: float, name: str) -> EvalResult:
    """`key` names the data of the stage that it was measured on."""
    data = data_name(stage, key)
    return EvalResult(
        task_type=TASKS[about.stage.name],
        dataset_type=hub_dataset(data) or LOCAL,
        dataset_name=visible(data),
        metric_type=metric,
        metric_value=round(value, DIGITS),
        metric_name=visible(name),
    )
