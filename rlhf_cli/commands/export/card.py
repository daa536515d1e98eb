"""The model card of an exported folder: card.md.jinja, filled with facts from the run's files.

Every number is read from these files; unknown facts are omitted. Texts from files are escaped, by `text` or `code`.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from rlhf_cli import __version__, data
from rlhf_cli.config.sources import hub_dataset, split_name
from rlhf_cli.data.texts import is_transcript, render_transcript
from rlhf_cli.data.tokens import Conversation, header_of_answers
from rlhf_cli.errors import CODES, RLHFError
from rlhf_cli.evaluation import report_text, reward_card
from rlhf_cli.report import diagnosis, tables
from rlhf_cli.report.formats import visible
from rlhf_cli.report.rules import ILL
from rlhf_cli.runs.layout import POLICY_STAGES, STAGES
from rlhf_cli.runs.model_files import read_adapter
from rlhf_cli.runs.parents import FOREIGN, is_hub_id
from rlhf_cli.runs.read import Run, Stage, at_step, read_stage_with_logs
from rlhf_cli.runs.resolve import ResolvedModel
from rlhf_cli.runs.settings import from_defaults
from rlhf_cli.stages.common import prompt_forms
from rlhf_cli.statistics import with_interval
from rlhf_cli.tracking.logs import read_log

TEMPLATE = Path(__file__).with_name("card.md.jinja")
TASKS = dict.fromkeys(POLICY_STAGES, "text-generation") | {"reward": "text-classification"}
WARNING = re.compile(r"warning\[(?!R1[0-2])([A-Z]\d\d)\]")  # R10 to R12 are shown with the reward model
EXAMPLE = "Write a prompt here, of the kind that it was trained on."

Prompt = str | Conversation


def render_card(
    chosen: ResolvedModel,
    model: Any,
    tokenizer: Any,
    *,
    dtype: str,
    name: str,
    address: str,
    example: Prompt | None = None,
) -> str:
    """Return the text of a model card.

    `name` is the model's name at its destination, `address` the argument of from_pretrained(), `example` a prompt that
    may be shown.
    """
    stages = list(_lineage(read_stage_with_logs(chosen.model.stage, chosen.model.path)))
    share = chosen.share
    run = _run_at(chosen, stages)
    points = []
    if run.report and not chosen.merged:
        points = [run.report.without_choice(each) for each in run.report.interpolated or []]
    is_changed = share is not None or chosen.merged
    if is_changed or run.report is None or stages[0].name not in run.report.models:
        run = replace(run, report=None)  # of other policies

    base = _hub_base(stages)
    warnings = WARNING.findall("\n".join(run.report.warnings or [])) if run.report else []
    prompts = prompt_forms.prompt_format(prompt_forms.training_prompt_form(chosen.model), tokenizer)
    stop = data.stop_token_id(tokenizer)
    card = ModelCard.from_template(
        _metadata(name, stages, base, run),
        template_path=str(TEMPLATE),
        **FUNCTIONS,
        name=name,
        address=address,
        dtype=dtype,
        share=share,
        chosen=chosen,
        model=model,
        adapter=read_adapter(chosen.model.model),
        base=base,
        stages=stages,
        run=run,
        findings=diagnosis.diagnose(run).findings,
        points=points,
        recommendation=chosen.report.recommendation if chosen.report and chosen.is_recommended else "",
        warnings={code: CODES[code] for code in sorted({*warnings} & CODES.keys())},
        prompts=prompts,
        prompt=repr(_prompt(example or EXAMPLE, prompts)),
        answer_header=json.dumps(header_of_answers(tokenizer) if prompts == "template" else ""),
        stop_token="" if stop == tokenizer.eos_token_id else json.dumps(tokenizer.convert_ids_to_tokens(stop)),
    )
    return f"{card}\n"


# Texts


def text(value: Any) -> str:
    """Return a value on one line, with Markdown and HTML characters escaped."""
    return re.sub(r"([\\`*_{}\[\]<>~$&#])", r"\\\1", _one_line(value))


def code(value: Any) -> str:
    """Return a value on one line as a code span, with ' in place of `; empty if the value is."""
    plain = _one_line(value).replace("`", "'")
    return f"`{plain}`" if plain else ""


def _one_line(value: Any) -> str:
    return visible(" ".join(str(value).split()))


def data_name(stage: Stage, key: str) -> str:
    """Return the name of a stage's data: a hub dataset or a file name, never a path."""
    keys = (key, "data.train", "data.prompts")  # the evaluation data may be a part of the training data
    path = next((path for path in map(stage.setting, keys) if path), None)
    if isinstance(path, list):
        return ", ".join(_name_of_data(source["path"]) for source in path)
    return _name_of_data(path) if isinstance(path, str) else ""


def _name_of_data(path: str) -> str:
    name, split = split_name(path)
    if not hub_dataset(name):
        name = PurePosixPath(name).name
    return f"{name}[{split}]" if split else name


# What the template uses
FUNCTIONS: dict[str, Any] = {
    "version": __version__,
    "text": text,
    "code": code,
    "data_name": data_name,
    "is_hub_id": is_hub_id,
    "with_interval": with_interval,
    "from_defaults": from_defaults,
    "tables": tables,
    "report_text": report_text,
    "ill": ILL,
    "card_rows": reward_card.card_rows,
}


# Facts


def _lineage(stage: Stage) -> Iterator[Stage]:
    """Yield a stage and its ancestors, as far as they have not changed since."""
    hashes: set[str] = set()
    waiting = [stage]
    while waiting:
        stage = waiting.pop(0)
        sha256 = str(stage.manifest.model_sha256)
        if sha256 in hashes:
            continue
        hashes.add(sha256)
        yield stage
        for entry in stage.manifest.parents.values():
            if entry.stage == FOREIGN:
                continue
            above = read_stage_with_logs(entry.stage, stage.folder / entry.path)
            if above.manifest.model_sha256 == entry.sha256 and above.state == "finished":
                waiting.append(above)


def _run_at(chosen: ResolvedModel, lineage: Sequence[Stage]) -> Run:
    """Return the run with the evaluation of the chosen step; without one if it was not evaluated."""
    root = chosen.model.path.resolve().parent
    stages = {name: Stage(name, root / name) for name in STAGES}
    stages |= {stage.name: stage for stage in reversed(lineage)}  # whatever their folders are called
    if chosen.report:
        stages["eval"] = read_stage_with_logs("eval", root / "eval")
    firings = tuple(read_log(chosen.model.path / "watchdog.jsonl"))
    run = Run(name=root.name, folder=root, stages=stages, report=chosen.report, firings=firings)
    try:
        return run if chosen.last else at_step(run, str(chosen.step))
    except RLHFError:
        return replace(run, report=None)


def _hub_base(stages: Sequence[Stage]) -> str | None:
    """Return the base of the first stage's model if it is on the hub; PPO's reward model may have another."""
    for stage in stages:
        entry = stage.manifest.start
        is_reward_of_ppo = stage.name == "reward" and stage is not stages[0]
        if entry and entry.stage == FOREIGN and not is_reward_of_ppo:
            return entry.path if is_hub_id(entry.path) else None
    return None


def _prompt(example: Prompt, prompts: prompt_forms.PromptFormat) -> Prompt:
    """Return the prompt of the example in the format of training: messages for a chat template, else text."""
    messages = [{"role": "user", "content": example}] if isinstance(example, str) else example
    if prompts == "template":
        return [{key: visible(turn[key]) for key in ("role", "content")} for turn in messages]
    is_question = isinstance(example, str) and not is_transcript(example)
    return visible(render_transcript(messages if prompts == "transcript" and is_question else example))


# Metadata


def _metadata(name: str, stages: Sequence[Stage], base: str | None, run: Run) -> ModelCardData:
    """Return the metadata for the hub. Unknown fields, such as the license, are omitted."""
    kind = stages[0].name
    results = list(_results(stages[0], run))
    datasets = set()
    for stage in stages:
        for key in stage.manifest.data.keys() - {"data.eval", "data.eval_prompts"}:
            datasets.add(hub_dataset(str(stage.setting(key))))
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=TASKS[kind],
        base_model=base,
        base_model_relation="finetune" if base else None,
        datasets=sorted(filter(None, datasets)) or None,
        tags=["rlhf", "reward-model" if kind == "reward" else kind, "rlhf-cli"],
        model_name=visible(name) if results else None,
        eval_results=results or None,
    )


def _results(stage: Stage, run: Run) -> Iterator[EvalResult]:
    """Yield the win rates of sampled responses, or a reward model's accuracy."""
    if accuracy := stage.manifest.reward_model:
        value = with_interval(accuracy.accuracy, accuracy.accuracy_ci95)
        name = f"Accuracy on held-out pairs: {value}, n {accuracy.n}"
        yield _result(stage, data_name(stage, "data.eval"), "accuracy", accuracy.accuracy, name=name)

    pairs = run.report.win_rate if run.report else {}
    for pair in (pair for pair in pairs if pair.startswith(f"{stage.name}_vs_")):
        for judge, rate in pairs[pair].items():
            value = with_interval(rate.value, rate.ci95)
            name = f"Win rate, {report_text.pair_label(pair)} by {judge}: {value}, n {rate.n}"
            yield _result(stage, data_name(run.stages["eval"], "data.prompts"), "win_rate", rate.value, name=name)


def _result(stage: Stage, dataset: str, metric: str, value: float, *, name: str) -> EvalResult:
    return EvalResult(
        task_type=TASKS[stage.name],
        dataset_type=hub_dataset(dataset) or "local-file",
        dataset_name=visible(dataset),
        metric_type=metric,
        metric_value=round(value, 4),
        metric_name=visible(name),
    )
