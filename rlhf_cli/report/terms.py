"""The words of the page's first screen: each judge, and what a win, KL and the end of an answer are."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rlhf_cli.evaluation.report_text import is_own_reward
from rlhf_cli.evaluation.sample_pairs import Sample, deciding_judge
from rlhf_cli.jsonl import is_number
from rlhf_cli.report.formats import number
from rlhf_cli.runs.read import Run
from rlhf_cli.runs.report import Report

KINDS = {
    "model": "a reward model",
    "function": "a function",
    "verifier": "a function that knows the right answers",
    "openai": "a language model",
    "people": "labels of people",
}
LARGE = 20.0  # nats: e to their power is no longer a number that one can picture


class Term(NamedTuple):
    """A word of the page as a question, and its answer."""

    question: str
    answer: str


class Judge(NamedTuple):
    """A judge, and what it is."""

    name: str
    about: str


def judges(run: Run, rows: Sequence[Sample]) -> Iterator[Judge]:
    """Yield what each judge of PPO against SFT is, the deciding one first; `rows` are those of samples.jsonl."""
    if run.outcome is None or not run.rates:
        return
    deciding = deciding_judge(run.rates)
    for name in sorted(run.rates, key=lambda name: name != deciding):
        decides = "it decides; " if name == deciding and len(run.rates) > 1 else ""
        yield Judge(name, f"{decides}{_kind(run, run.outcome, name)}{_scores(name, rows)}")


def _kind(run: Run, report: Report, judge: str) -> str:
    """Return what a judge is, with the name of its function or model."""
    kind = (report.judge_kinds or {}).get(judge, "model")
    text = KINDS[kind]
    if is_own_reward(report, judge):
        return f"{text}, on which PPO was trained"
    setting = run.stages["eval"].setting
    named = setting(f"judges.{judge}.openai.model") or setting(f"judges.{judge}")
    return f"{text}, {named}" if isinstance(named, str) else text


def _scores(judge: str, rows: Sequence[Sample]) -> str:
    """Return the range of a judge's scores as text; empty for a judge that compares answers."""
    found = [row["scores"][judge] for row in rows if is_number(row["scores"].get(judge))]
    return f"; scores here: {number(min(found))} to {number(max(found))}" if found else ""


def win(judge: str) -> Term:
    return Term(
        "What is a win?",
        f"On a prompt PPO wins if {judge} prefers its answer to SFT's; a tie counts half, so 50 % is no difference. "
        "At equal length: what the rate would be if both answers had the same length. Near-greedy: the likeliest "
        "answer of each policy.",
    )


def kl(judge: str, nats: float) -> Term:
    times = f"e^{number(nats)}"
    if nats < LARGE:
        times += f" = {number(math.exp(nats))}"
    return Term(
        "What is KL, and when is it too much?",
        f"How far the answers are from SFT's: {number(nats)} nats say that PPO makes its answers {times} times "
        "likelier than SFT does, on (geometric) average. No number is too much by itself: too much is where "
        f"{judge} falls while the reward rises.",
    )


ENDS = Term("When does an answer end?", "If the policy stops by itself; the others are cut off at the longest length.")
