"""Judges of an evaluation that are labels of people: read and checked against the evaluated models, and reported.

People labelled other answers than those that the evaluation samples, of the same models to the same held-out prompts.
So how far another judge agrees with them is measured on the labelled answers, which that judge scores.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_cli import data
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.data.labels import LABELS, SETTINGS, Label, is_labels_folder, read_labels
from rlhf_cli.data.texts import prompt_key
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.evaluation.people import comparing_labels, labelled_responses, people_win_rate
from rlhf_cli.evaluation.responses import EvalResponses
from rlhf_cli.files import read_json_object
from rlhf_cli.runs.layout import COMPARED_STAGES
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.report import PPO_OVER_SFT, Report

HINT = "rlhf label RUN --compare sft,ppo asks people about the models of a run"


@dataclass(frozen=True)
class PeopleJudge:
    """Labels of pairs of PPO's and SFT's answers."""

    name: str
    labels: Sequence[Label]
    prompts: Sequence[data.Prompt]  # of each label

    def responses(self, model: str) -> EvalResponses:
        """Return the labelled answers of a model."""
        return labelled_responses(self.labels, model, self.name)


def read_people(
    config: EvalConfig, parents: Mapping[str, Parent], held_out: Sequence[data.Prompt]
) -> dict[str, PeopleJudge]:
    """Return the judges that are labels, by name. `held_out`: all prompts that may be asked.

    Raises RLHFError C17 for a folder without labels, or with those of other models or prompts; D03, D04, D20.
    """
    judges = {}
    for name, folder in config.people_judges.items():
        key = f"judges.{name}.labels"
        where = config.where(key)
        labels = _read(Path(folder), parents, key, where)
        judges[name] = PeopleJudge(name, labels, _prompts_of(labels, held_out, where))
    return judges


def describe(judge: PeopleJudge) -> str:
    """Return how many labels a judge consists of as text."""
    return f"{len(judge.labels)} labels of {len({label.prompt_name for label in judge.labels})} held-out prompts"


def _read(folder: Path, parents: Mapping[str, Parent], key: str, where: str) -> list[Label]:
    if not is_labels_folder(folder):
        text = f"{key}: {shown(folder)} is no folder that `rlhf label` wrote"
        raise RLHFError("C17", text, where=where, hint=HINT)
    settings = read_json_object(folder / SETTINGS) or {}
    labelled = settings.get("policies")
    for name in COMPARED_STAGES:
        if not isinstance(labelled, dict) or labelled.get(name) != parents[f"models.{name}"].sha256:
            text = f"the labels in {shown(folder)} are of answers of another {name.upper()} model than models.{name}"
            raise RLHFError("C17", text, where=where, hint=f"{HINT}; --name NAME for new labels")

    found = comparing_labels([label for _, label in read_labels(folder / LABELS).values()], COMPARED_STAGES)
    if not found:
        raise RLHFError("C17", f"{shown(folder)} has no label that compares both models", where=where, hint=HINT)
    return found


def _prompts_of(labels: Iterable[Label], held_out: Iterable[data.Prompt], where: str) -> list[data.Prompt]:
    known = {prompt_key(prompt.text): prompt for prompt in held_out}
    prompts = []
    for label in labels:
        prompt = known.get(prompt_key(label.prompt))
        if prompt is None:
            text = f"the labelled pair {label.pair} is of a prompt that is not in data.prompts"
            raise RLHFError("C17", text, where=where, hint=HINT)
        prompts.append(prompt)
    return prompts


def add_people(
    report: Report,
    judges: Mapping[str, PeopleJudge],
    scored: Mapping[str, tuple[EvalResponses, EvalResponses]],
) -> Report:
    """Return the report with the win rates by people. `scored`: the labelled answers of PPO and SFT, by judge."""
    rates = {name: people_win_rate(name, judges[name].labels, ppo, sft) for name, (ppo, sft) in scored.items()}
    if not rates:
        return report
    return report.with_changes(win_rate={**report.win_rate, PPO_OVER_SFT: {**report.win_rate[PPO_OVER_SFT], **rates}})
