"""What a model is for, and what is not known of it, or is known and speaks against it."""

import re
from collections.abc import Iterator

from rlhf_cli.codes import CODES
from rlhf_cli.export.card.markdown import bullets, text
from rlhf_cli.export.card.results import OWN, judges
from rlhf_cli.export.card.subject import Subject
from rlhf_cli.report import glance
from rlhf_cli.report.health import ILL

# What the run warned of; the reward model's flags stand with its report card, and are told with their numbers.
WARNED = re.compile(r"warning\[([A-Z]\d\d)\]")
FLAGS = ("R10", "R11", "R12")
OVER = "[Gao et al. 2022](https://arxiv.org/abs/2210.10760)"


def blocks(about: Subject) -> Iterator[str]:
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
        for finding in glance.findings(about.run, name):
            if finding.grade in ILL:
                yield f"Noted by the run, {name}: {text(finding.text)}."
    warned = {code for line in about.report.get("warnings", []) for code in WARNED.findall(str(line))}
    for code in sorted(warned - {*FLAGS}):
        if code in CODES:
            yield f"Warned of by the evaluation, {code}: {CODES[code].title}. {CODES[code].meaning}"


def _always(about: Subject) -> Iterator[str]:
    if about.stage.name == "ppo":
        yield (
            "PPO raises what its reward likes, which is not the same as what is good: a learned reward can be "
            f"over-optimised, and then its score rises while quality falls ({OVER})."
        )
    if about.stage.name == "reward":
        yield f"Optimised against for long enough, its faults are what is found ({OVER})."
    yield "The licences of its base model and of its data hold for it too; this card does not know them."
