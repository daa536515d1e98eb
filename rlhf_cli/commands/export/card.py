"""The README of an exported folder, a model card as the hub reads it: what the model is, how it is used and was made,
what is known of it, and what is not. Every number is read from the run's files; what they do not tell is not in it.
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
from rlhf_cli.commands.export.card_context import Subject, data_name, is_of_the_hub, report_card, subject
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
from rlhf_cli.runs.references import ResolvedModel

ASKED = "Write a prompt here, of the kind that it was trained on."
ROWS, LONGEST = 1000, 400  # that are looked at for a short one, and its characters

Prompt = str | Conversation


def held_out(chosen: ResolvedModel) -> Prompt:
    """A prompt of the evaluation's data, as it is written there: the first short one, else the shortest of the first.

    Raises RLHFError M01 where the run has no evaluation, and as the reading of its data does.
    """
    file = chosen.model.path.resolve().parent / "eval" / "config.yaml"
    if not file.is_file():
        text = f"--show-prompt: no evaluation in {shown(file.parents[1])}, of which a prompt could be shown"
        raise RLHFError("M01", text, hint="run `rlhf eval` first, or leave --show-prompt out")
    source = configs.load("eval", file).sources()["data.prompts"]
    found = data.prompt_rows(replace(source, max_rows=ROWS), None, max_length=None)
    texts = [row.text for row in found]
    return next((text for text in texts if len(str(text)) <= LONGEST), min(texts, key=lambda text: len(str(text))))


def of(about: Subject) -> Prompt:
    """The prompt for the card's code, written as those of the training go to the model: messages where a chat template
    writes them, else a text.
    """
    prompt = ASKED if about.example is None else about.example
    if about.prompts == "template":
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return [{key: visible(turn[key]) for key in ("role", "content")} for turn in turns]
    if about.prompts == "transcript" and isinstance(prompt, str) and not other_formats.is_transcript(prompt):
        prompt = [{"role": "user", "content": prompt}]
    return visible(other_formats.render_transcript(prompt))


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


# What the run warned of; the reward model's flags stand with its report card, and are told with their numbers.
WARNED = re.compile(r"warning\[([A-Z]\d\d)\]")
FLAGS = ("R10", "R11", "R12")
OVER = "[Gao et al. 2022](https://arxiv.org/abs/2210.10760)"


def limits_section(about: Subject) -> Iterator[str]:
    """The two sections."""
    yield "## Intended use"
    yield _use(about)
    yield "## Limits"
    yield bullets([*_unknown(about), *_noted(about), *_always(about)])


def _use(about: Subject) -> str:
    if about.stage.name == "reward":
        return "To compare answers to one prompt of the kind that it was trained on: in PPO, or to pick the best of n."
    return (
        "To answer prompts of the kind that it was trained on (see Data), and to study what the training did. Before "
        "any other use read answers of it, and evaluate it for that use."
    )


def _unknown(about: Subject) -> Iterator[str]:
    if about.stage.name == "reward":
        yield "Between prompts, or far from its data, its scores mean little."
        return
    if not about.is_evaluated:
        yield "Nothing is known of the quality of its answers: it was not evaluated."
    else:
        yield "The numbers above are of those prompts and those judges; on others it may fare otherwise."
        if set(judges(about).values()) == {OWN}:
            yield "No other judge than its own reward model has seen its answers: whether they are better is not known."
    yield "Nobody has measured whether what it says is true, harmless or fair, and no work was done to make it so."


def _noted(about: Subject) -> Iterator[str]:
    """What the run itself has found, the gravest of each stage first."""
    of_the_reward = [stage.name for stage in about.reward_models]
    told = [stage.name for stage in about.stages if stage.name != "reward"] + of_the_reward
    for name in dict.fromkeys([*told, *(["eval"] if about.stage.name == "ppo" else [])]):
        for finding in summary.findings(about.run, name):
            if finding.grade in ILL:
                yield f"Noted by the run, {name}: {text(finding.text)}."
    warned = {code for line in about.report.get("warnings", []) for code in WARNED.findall(str(line))}
    for warning in sorted(warned - {*FLAGS}):
        if warning in CODES:
            yield f"Warned of by the evaluation, {warning}: {CODES[warning].title}. {CODES[warning].meaning}"


def _always(about: Subject) -> Iterator[str]:
    if about.stage.name == "ppo":
        yield (
            "PPO raises what its reward likes, which is not the same as what is good: a learned reward can be "
            f"over-optimised, and then its score rises while quality falls ({OVER})."
        )
    if about.stage.name == "reward":
        yield f"Optimised against for long enough, its faults are what is found ({OVER})."
    yield "The licences of its base model and of its data hold for it too; this card does not know them."


ANSWER = "Write an answer to it here."
PROMPTS = {  # what goes to the model
    "template": "Prompts are conversations, lists of messages that the chat template of its tokenizer writes.",
    "text": "A prompt is plain text, which the answer goes on with: no chat template, no roles.",
    "transcript": r"A prompt is a transcript as a text, `\n\nHuman: ...\n\nAssistant:`, also that of one question.",
}
TOKENS = 128  # of an answer, where the run tells no length


def snippet(about: Subject) -> str:
    """Python: an answer to a prompt, or the score of one."""
    of_a_policy = about.model.can_generate()
    lines = [] if of_a_policy else ["import torch"]
    kind = "AutoModelForCausalLM" if of_a_policy else "AutoModelForSequenceClassification"
    trust = ", trust_remote_code=True" if getattr(about.model.config, "auto_map", None) else ""
    lines += [
        f"from transformers import {kind}, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{about.address}"{trust})',
        f'model = {kind}.from_pretrained("{about.address}"{trust})',
        "",
    ]
    lines += _answering(about) if of_a_policy else _scoring(about)
    return "```python\n" + "\n".join(lines) + "\n```"


def sampling(about: Subject) -> tuple[float, int] | None:
    """(temperature, most tokens of an answer) with which it was evaluated, or else trained; None for neither."""
    found = [about.report.get(key, about.stage.setting(f"ppo.{key}")) for key in ("temperature", "response_length")]
    temperature, length = found
    length = length.get("max") if isinstance(length, Mapping) else length
    return (temperature, length) if is_number(temperature) and isinstance(length, int) else None


def _answering(about: Subject) -> list[str]:
    found = sampling(about)
    how = f"do_sample=True, temperature={found[0]:g}, top_k=0, max_new_tokens={found[1]}" if found else ""
    how = how or f"max_new_tokens={TOKENS}"
    if about.prompts == "template":
        how_asked = "add_generation_prompt=True, return_dict=True, return_tensors"
        asked = [
            f"messages = {of(about)!r}",
            f'inputs = tokenizer.apply_chat_template(messages, {how_asked}="pt")',
        ]
    else:
        asked = [f"prompt = {of(about)!r}", 'inputs = tokenizer(prompt, return_tensors="pt")']
    return [
        *asked,
        f"output = model.generate(**inputs, {how})",
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]


def _scoring(about: Subject) -> list[str]:
    """Prompt and answer are tokenised each by itself, as in the training: joined they may give other tokens."""
    tokenizer, config = about.tokenizer, about.model.config
    chat, stop = about.prompts == "template", data.stop_token_id(tokenizer)
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
        f"prompt = {of(about)!r}",
        f'print(score(prompt, "{"" if chat else " "}{ANSWER}"))',
    ]


__all__ = ["held_out", "subject", "write"]

PPO = "[Schulman et al. 2017](https://arxiv.org/abs/1707.06347)"
KINDS = {
    "ppo": f"A language model trained by PPO ({PPO}) to earn more of a reward while it stays near the model that it "
    "started from.",
    "sft": "A language model, fine-tuned on examples of good answers.",
    "reward": "A reward model: it scores an answer to a prompt. It was trained on pairs of a better and a worse one.",
}


def write(about: Subject) -> str:
    """The card of a model that is about to be written."""
    blocks = [matter(about), f"# {text(about.name)}", *_description(about), "## How to use it"]
    blocks += [
        snippet(about),
        *_as_in_training(about),
        *card_training.training_section(about),
        *card_training.results_section(about),
    ]
    return "\n\n".join([*blocks, *limits_section(about)]) + "\n"


def _description(about: Subject) -> Iterator[str]:
    yield KINDS[about.stage.name] + "".join(f" {each}" for each in (_which(about), _picked(about)) if each)
    model, told = about.model, read_adapter(about.chosen.model.model)
    base = f", from {code(about.base['path'])}" if is_of_the_hub(about.base) else ""
    size = f"{model.num_parameters():,} parameters ({text(model.config.model_type)}{base}), {about.dtype}, safetensors."
    merged = ""
    if told:
        kind = "adapters (DoRA)" if told.get("use_dora") else "adapters"
        merged = f" It was trained as {kind} of rank {told['r']}, which are added into the weights of their base here."
    yield f"{size}{merged} Made and exported with rlhf-cli {__version__}."


def _which(about: Subject) -> str:
    """Of PPO's policies: which one it is, and why that one."""
    step, manifest = about.chosen.step, about.stage.manifest or {}
    if step is None:
        return ""
    which = f"This is the policy after update {step} of {about.updates}"
    if not about.chosen.last or not manifest.get("stopped"):
        return f"{which}, the last one." if step == about.updates else f"{which}."
    best = f"the highest by {code(manifest['best']['metric'])}" if "best" in manifest else "the best one"
    return f"{which}, {best}: the training was stopped ({text(manifest['stopped'])})."


def _picked(about: Subject) -> str:
    """That the evaluation selected it, and what its numbers are worth then."""
    report: Mapping[str, Any] = about.report
    if about.chosen.step is None or about.chosen.step != report.get("selected_step"):
        return ""
    told = report["selected"]
    said = f"The evaluation picked it by {text(told['rule'])}: on these prompts its mean flatters it by some "
    noise = ", ".join(map(str, told["within_noise"]))
    more = f" Within the noise of it: update {noise}." if noise else ""
    return f"{said}{told['optimism']:.3f}.{more}"


def _as_in_training(about: Subject) -> Iterator[str]:
    yield PROMPTS[about.prompts]
    found = sampling(about)
    if about.model.can_generate() and found:
        when = "evaluation" if about.is_evaluated else "training"
        how = f"from the whole distribution at temperature {found[0]:g}, with at most {found[1]} tokens"
        yield f"This is how its answers were sampled in its {when}: {how}."
    if hasattr(about.model.config, "reward_mean"):
        yield (
            "`reward_mean` and `reward_std` in config.json are those of the SFT model's own answers: 0 is an answer as "
            "good as they are on the mean."
        )
