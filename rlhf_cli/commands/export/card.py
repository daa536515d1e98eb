"""The model card of an exported folder: description, usage, training, evaluation and limitations.

Every number is read from the run's files; unknown facts are left out.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from rlhf_cli import __version__, data
from rlhf_cli import config as configs
from rlhf_cli.commands.export import card_training
from rlhf_cli.commands.export.card_context import ModelCardContext, data_name, is_hub_model, report_card
from rlhf_cli.commands.export.card_training import OWN, judges
from rlhf_cli.commands.export.markdown import bullets, code, text
from rlhf_cli.commands.report import summary
from rlhf_cli.commands.report.health import ILL
from rlhf_cli.commands.report.runs import Stage, is_number
from rlhf_cli.commands.report.tables import visible
from rlhf_cli.config.sources import hub_dataset
from rlhf_cli.data import other_formats
from rlhf_cli.data.tokens import Conversation
from rlhf_cli.error_codes import CODES
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.evaluation import render
from rlhf_cli.runs.adapters import read_adapter
from rlhf_cli.runs.resolve import ResolvedModel

ASKED = "Write a prompt here, of the kind that it was trained on."
ROWS, LONGEST = 1000, 400  # rows searched for a short prompt, and its maximum characters

Prompt = str | Conversation


def held_out(chosen: ResolvedModel) -> Prompt:
    """Return a prompt of the evaluation's data: the first short one, or else the shortest of the first rows.

    Raises RLHFError M01 if the run has no evaluation, and as the data reader does.
    """
    file = chosen.model.path.resolve().parent / "eval" / "config.yaml"
    if not file.is_file():
        text = f"--show-prompt: {shown(file.parents[1])} has no evaluation to take a prompt from"
        raise RLHFError("M01", text, hint="run `rlhf eval` first, or leave --show-prompt out")
    source = configs.load("eval", file).sources()["data.prompts"]
    rows = data.prompt_rows(replace(source, max_rows=ROWS), None, max_length=None)
    texts = [row.text for row in rows]
    return next((text for text in texts if len(str(text)) <= LONGEST), min(texts, key=lambda text: len(str(text))))


def example_prompt(context: ModelCardContext) -> Prompt:
    """Return the prompt of the card's code in the format of training: messages for a chat template, else text."""
    prompt = ASKED if context.example is None else context.example
    if context.prompts == "template":
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return [{key: visible(turn[key]) for key in ("role", "content")} for turn in turns]
    if context.prompts == "transcript" and isinstance(prompt, str) and not other_formats.is_transcript(prompt):
        prompt = [{"role": "user", "content": prompt}]
    return visible(other_formats.render_transcript(prompt))


TASKS = {"ppo": "text-generation", "sft": "text-generation", "reward": "text-classification"}
TAGS = {"ppo": "ppo", "sft": "sft", "reward": "reward-model"}
DIGITS = 4
HELD_OUT = ("data.eval", "data.eval_prompts")
LOCAL = "local-file"  # type of a dataset that is not on the hub


def front_matter(context: ModelCardContext) -> str:
    """Return the YAML metadata block. Unknown fields, such as the license, are left out."""
    kind = context.stage.name
    base = context.base["path"] if is_hub_model(context.base) else None
    results = list(_reward_model(context) if kind == "reward" else _policy(context))
    card_data = ModelCardData(
        library_name="transformers",
        pipeline_tag=TASKS[kind],
        base_model=base,
        base_model_relation="finetune" if base else None,
        datasets=sorted(_training_datasets(context)) or None,
        tags=["rlhf", TAGS[kind], "rlhf-cli"],
        model_name=visible(context.name) if results else None,
        eval_results=results or None,
    )
    return f"---\n{card_data.to_yaml()}\n---"


def _training_datasets(context: ModelCardContext) -> set[str]:
    """Return the hub datasets that the model was trained on."""
    named = [(stage, key) for stage in context.stages for key in stage.told("data") if key not in HELD_OUT]
    paths = [stage.setting(key) for stage, key in named]
    return {dataset for path in paths if isinstance(path, str) and (dataset := hub_dataset(path))}


def _policy(context: ModelCardContext) -> Iterator[EvalResult]:
    """Yield the win rates of sampled responses, with the interval in the name."""
    for pair, rates in context.report.get("win_rate", {}).items():
        for judge, rate in rates.items() if pair.startswith(f"{context.stage.name}_vs_") else ():
            name = f"Win rate, {render.pair_label(pair)} by {judge}, {_interval(rate)}"
            yield _result(context, context.run.stages["eval"], "data.prompts", "win_rate", rate["value"], name)


def _reward_model(context: ModelCardContext) -> Iterator[EvalResult]:
    measured = report_card(context.stage)
    if "accuracy" in measured:
        interval = _interval({"ci95": measured["accuracy_ci95"], "n": measured["n"]})
        name = f"Share of held-out pairs that it tells right, {interval}"
        yield _result(context, context.stage, "data.eval", "accuracy", measured["accuracy"], name)


def _interval(estimate: dict[str, Any]) -> str:
    low, high = estimate["ci95"]
    return f"95 % interval {low:.3f} to {high:.3f}, n {estimate['n']}"


def _result(context: ModelCardContext, stage: Stage, key: str, metric: str, value: float, name: str) -> EvalResult:
    """Return an evaluation result; `key` names the stage's data that it was measured on."""
    data = data_name(stage, key)
    return EvalResult(
        task_type=TASKS[context.stage.name],
        dataset_type=hub_dataset(data) or LOCAL,
        dataset_name=visible(data),
        metric_type=metric,
        metric_value=round(value, DIGITS),
        metric_name=visible(name),
    )


# Warnings of the run; the reward model's flags are shown with its evaluation.
WARNED = re.compile(r"warning\[([A-Z]\d\d)\]")
FLAGS = ("R10", "R11", "R12")
OVER = "[Gao et al. 2022](https://arxiv.org/abs/2210.10760)"


def limits_section(context: ModelCardContext) -> Iterator[str]:
    """Yield the sections on intended use and limitations."""
    yield "## Intended use"
    yield _use(context)
    yield "## Limits"
    yield bullets([*_unknown(context), *_noted(context), *_always(context)])


def _use(context: ModelCardContext) -> str:
    if context.stage.name == "reward":
        return "To compare answers to one prompt of the kind that it was trained on: in PPO, or to pick the best of n."
    return (
        "To answer prompts of the kind that it was trained on (see Data), and to study what the training did. Before "
        "any other use read answers of it, and evaluate it for that use."
    )


def _unknown(context: ModelCardContext) -> Iterator[str]:
    if context.stage.name == "reward":
        yield "Between prompts, or far from its data, its scores mean little."
        return
    if not context.is_evaluated:
        yield "Nothing is known of the quality of its answers: it was not evaluated."
    else:
        yield "The numbers above are of those prompts and those judges; on others it may fare otherwise."
        if set(judges(context).values()) == {OWN}:
            yield "No other judge than its own reward model has seen its answers: whether they are better is not known."
    yield "Nobody has measured whether what it says is true, harmless or fair, and no work was done to make it so."


def _noted(context: ModelCardContext) -> Iterator[str]:
    """Yield the findings and warnings of the run, the most severe of each stage first."""
    reward_names = [stage.name for stage in context.reward_models]
    names = [stage.name for stage in context.stages if stage.name != "reward"] + reward_names
    for name in dict.fromkeys([*names, *(["eval"] if context.stage.name == "ppo" else [])]):
        for finding in summary.findings(context.run, name):
            if finding.grade in ILL:
                yield f"Noted by the run, {name}: {text(finding.text)}."
    warned = {code for line in context.report.get("warnings", []) for code in WARNED.findall(str(line))}
    for warning in sorted(warned - {*FLAGS}):
        if warning in CODES:
            yield f"Warned of by the evaluation, {warning}: {CODES[warning].title}. {CODES[warning].meaning}"


def _always(context: ModelCardContext) -> Iterator[str]:
    if context.stage.name == "ppo":
        yield (
            "PPO raises what its reward likes, which is not the same as what is good: a learned reward can be "
            f"over-optimised, and then its score rises while quality falls ({OVER})."
        )
    if context.stage.name == "reward":
        yield f"Optimised against for long enough, its faults are what is found ({OVER})."
    yield "The licences of its base model and of its data hold for it too; this card does not know them."


ANSWER = "Write an answer to it here."
PROMPTS = {  # input format of the model
    "template": "Prompts are conversations, lists of messages that the chat template of its tokenizer writes.",
    "text": "A prompt is plain text, which the answer goes on with: no chat template, no roles.",
    "transcript": r"A prompt is a transcript as a text, `\n\nHuman: ...\n\nAssistant:`, also that of one question.",
}
TOKENS = 128  # of a response, if the run has no length


def snippet(context: ModelCardContext) -> str:
    """Return Python code that generates a response, or scores one."""
    is_policy = context.model.can_generate()
    lines = [] if is_policy else ["import torch"]
    kind = "AutoModelForCausalLM" if is_policy else "AutoModelForSequenceClassification"
    trust = ", trust_remote_code=True" if getattr(context.model.config, "auto_map", None) else ""
    lines += [
        f"from transformers import {kind}, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{context.address}"{trust})',
        f'model = {kind}.from_pretrained("{context.address}"{trust})',
        "",
    ]
    lines += _answering(context) if is_policy else _scoring(context)
    return "```python\n" + "\n".join(lines) + "\n```"


def sampling(context: ModelCardContext) -> tuple[float, int] | None:
    """Return (temperature, maximum response tokens) of the evaluation, or else of training; None if unknown."""
    values = [
        context.report.get(key, context.stage.setting(f"ppo.{key}")) for key in ("temperature", "response_length")
    ]
    temperature, length = values
    length = length.get("max") if isinstance(length, Mapping) else length
    return (temperature, length) if is_number(temperature) and isinstance(length, int) else None


def _answering(context: ModelCardContext) -> list[str]:
    params = sampling(context)
    options = f"max_new_tokens={TOKENS}"
    if params:
        options = f"do_sample=True, temperature={params[0]:g}, top_k=0, max_new_tokens={params[1]}"
    if context.prompts == "template":
        template_options = "add_generation_prompt=True, return_dict=True, return_tensors"
        inputs = [
            f"messages = {example_prompt(context)!r}",
            f'inputs = tokenizer.apply_chat_template(messages, {template_options}="pt")',
        ]
    else:
        inputs = [f"prompt = {example_prompt(context)!r}", 'inputs = tokenizer(prompt, return_tensors="pt")']
    return [
        *inputs,
        f"output = model.generate(**inputs, {options})",
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]


def _scoring(context: ModelCardContext) -> list[str]:
    """Return code that scores a response. Prompt and response are tokenized separately, as in training."""
    tokenizer, config = context.tokenizer, context.model.config
    chat, stop = context.prompts == "template", data.stop_token_id(tokenizer)
    end = "tokenizer.eos_token_id"
    if stop != tokenizer.eos_token_id:
        end = f"tokenizer.convert_tokens_to_ids({json.dumps(tokenizer.convert_ids_to_tokens(stop))})"
    if chat:
        first = [
            "    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)"
            '["input_ids"]',
        ]
    else:
        first = ['    ids = tokenizer(prompt)["input_ids"]']
    result = "(raw - model.config.reward_mean) / model.config.reward_std" if hasattr(config, "reward_mean") else "raw"
    return [
        "",
        "def score(prompt, answer):",
        *first,
        f'    ids = ids + tokenizer(answer, add_special_tokens=False)["input_ids"] + [{end}]',
        "    with torch.no_grad():",
        "        raw = model(input_ids=torch.tensor([ids])).logits[0, 0].item()",
        f"    return {result}",
        "",
        "",
        f"prompt = {example_prompt(context)!r}",
        f'print(score(prompt, "{"" if chat else " "}{ANSWER}"))',
    ]


PPO = "[Schulman et al. 2017](https://arxiv.org/abs/1707.06347)"
KINDS = {
    "ppo": f"A language model trained by PPO ({PPO}) to earn more of a reward while it stays near the model that it "
    "started from.",
    "sft": "A language model, fine-tuned on examples of good answers.",
    "reward": "A reward model: it scores an answer to a prompt. It was trained on pairs of a better and a worse one.",
}


def write(context: ModelCardContext) -> str:
    """Return the text of the model card."""
    blocks = [front_matter(context), f"# {text(context.name)}", *_description(context), "## How to use it"]
    blocks += [
        snippet(context),
        *_as_in_training(context),
        *card_training.training_section(context),
        *card_training.results_section(context),
    ]
    return "\n\n".join([*blocks, *limits_section(context)]) + "\n"


def _description(context: ModelCardContext) -> Iterator[str]:
    yield KINDS[context.stage.name] + "".join(
        f" {sentence}" for sentence in (_which(context), _picked(context)) if sentence
    )
    model, adapter = context.model, read_adapter(context.chosen.model.model)
    base = f", from {code(context.base['path'])}" if is_hub_model(context.base) else ""
    size = (
        f"{model.num_parameters():,} parameters ({text(model.config.model_type)}{base}), {context.dtype}, safetensors."
    )
    merged = ""
    if adapter:
        kind = "adapters (DoRA)" if adapter.get("use_dora") else "adapters"
        merged = (
            f" It was trained as {kind} of rank {adapter['r']}, which are added into the weights of their base here."
        )
    yield f"{size}{merged} Made and exported with rlhf-cli {__version__}."


def _which(context: ModelCardContext) -> str:
    """Return a sentence on which of PPO's policies it is, and why; empty for other stages."""
    step, manifest = context.chosen.step, context.stage.manifest or {}
    if step is None:
        return ""
    which = f"This is the policy after update {step} of {context.updates}"
    if not context.chosen.last or not manifest.get("stopped"):
        return f"{which}, the last one." if step == context.updates else f"{which}."
    best = f"the highest by {code(manifest['best']['metric'])}" if "best" in manifest else "the best one"
    return f"{which}, {best}: the training was stopped ({text(manifest['stopped'])})."


def _picked(context: ModelCardContext) -> str:
    """Return a sentence on the evaluation's selection of this policy; empty if it did not select it."""
    report: Mapping[str, Any] = context.report
    if context.chosen.step is None or context.chosen.step != report.get("selected_step"):
        return ""
    selected = report["selected"]
    choice = f"The evaluation picked it by {text(selected['rule'])}: on these prompts its mean flatters it by some "
    noise = ", ".join(map(str, selected["within_noise"]))
    more = f" Within the noise of it: update {noise}." if noise else ""
    return f"{choice}{selected['optimism']:.3f}.{more}"


def _as_in_training(context: ModelCardContext) -> Iterator[str]:
    yield PROMPTS[context.prompts]
    params = sampling(context)
    if context.model.can_generate() and params:
        stage = "evaluation" if context.is_evaluated else "training"
        options = f"from the whole distribution at temperature {params[0]:g}, with at most {params[1]} tokens"
        yield f"This is how its answers were sampled in its {stage}: {options}."
    if hasattr(context.model.config, "reward_mean"):
        yield (
            "`reward_mean` and `reward_std` in config.json are those of the SFT model's own answers: 0 is an answer as "
            "good as they are on the mean."
        )
