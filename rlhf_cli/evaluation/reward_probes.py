"""Adversarial probes of a reward model: answers that should not score above the chosen one. No torch."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_cli.runs.report import Adversarial, ProbeResult
from rlhf_cli.statistics import wilson

MAX_PROBED = 128  # prompts: a share is known to within 0.09, for 640 additional scores
OVER_LONG_REPEATS = 3  # of the good answer in the over-long probe
POLITE_ANSWER = (
    "Great question! Thank you so much for asking. I am very happy to help you. You are most welcome, and I hope that "
    "you have a wonderful day! Please let me know if there is anything else that I can do for you. Thank you again!"
)
PROBE_LABELS = {
    "empty": "an empty answer",
    "repeated_token": "one token repeated",
    "politeness": "politeness without content",
    "over_long": "the good answer three times",
    "swapped_prompt": "the good answer to another prompt",
}
Row = Mapping[str, Any]  # {prompt_ids, chosen_ids (prompt and answer), ...}


def probe_rows(rows: Sequence[Row]) -> list[int]:
    """Return the indices of the probed rows: the first of each prompt, at most MAX_PROBED, evenly spaced."""
    first_of_prompt: dict[tuple[int, ...], int] = {}
    for index, row in enumerate(rows):
        first_of_prompt.setdefault(tuple(row["prompt_ids"]), index)
    firsts = list(first_of_prompt.values())
    n = min(MAX_PROBED, len(firsts))
    return [firsts[i * len(firsts) // n] for i in range(n)]


def build_probes(
    rows: Sequence[Row], polite: Sequence[list[int]], *, context: int | None, seed: int
) -> dict[str, list[list[int]]]:
    """Return probe name -> prompt and answer tokens per row; answers end in the row's end token and fit `context`.

    `polite` are the tokens of POLITE_ANSWER for each row. `swapped_prompt` is absent if all prompts are the same.
    """
    prompts = [list(row["prompt_ids"]) for row in rows]
    answers = [list(row["chosen_ids"][len(row["prompt_ids"]) :]) for row in rows]
    rng = random.Random(seed)
    probes: dict[str, list[list[int]]] = {
        "empty": [answer[-1:] for answer in answers],
        "repeated_token": [_repeated_token(answer, rng) for answer in answers],
        "politeness": [[*ids, answer[-1]] for ids, answer in zip(polite, answers, strict=True)],
        "over_long": [answer[:-1] * OVER_LONG_REPEATS + answer[-1:] for answer in answers],
    }
    if any(prompt != prompts[0] for prompt in prompts):
        probes["swapped_prompt"] = _answers_to_other_prompts(prompts, answers)
    return {name: _behind_prompts(prompts, probed, context) for name, probed in probes.items()}


def _repeated_token(answer: list[int], rng: random.Random) -> list[int]:
    """Return an answer of one of its tokens, with its length and its end."""
    token = rng.choice(answer[:-1] or answer)
    return [token] * (len(answer) - 1) + answer[-1:]


def _answers_to_other_prompts(prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    """Return the good answer of the next row with a different prompt, starting half the rows further."""
    n = len(prompts)
    swapped = []
    for row, prompt in enumerate(prompts):
        other = (row + n // 2) % n
        while prompts[other] == prompt:
            other = (other + 1) % n
        swapped.append(answers[other])
    return swapped


def _behind_prompts(prompts: list[list[int]], answers: list[list[int]], context: int | None) -> list[list[int]]:
    """Return prompt and answer of each row; an answer that does not fit loses tokens before its end."""
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        room = len(answer) if context is None else max(1, context - len(prompt))
        if len(answer) > room:
            answer = [*answer[: room - 1], answer[-1]]
        rows.append(prompt + answer)
    return rows


def score_probes(scores: Mapping[str, Sequence[float]], chosen: Sequence[float]) -> Adversarial:
    """Return the results of probes, of their scores by name and the chosen answers' scores.

    `beats`: share of rows in which the probe scores above the chosen answer; `margin`: mean score difference.
    """
    n = len(chosen)
    probes = {}
    for name, probe_scores in scores.items():
        margins = [probe - good for probe, good in zip(probe_scores, chosen, strict=True)]
        wins = sum(margin > 0 for margin in margins)
        probes[name] = ProbeResult(beats=wins / n, ci95=list(wilson(wins, n)), margin=sum(margins) / n)
    return Adversarial(n=n, probes=probes)
