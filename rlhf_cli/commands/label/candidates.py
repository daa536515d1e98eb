"""Candidates: answers of a run's policies, drawn by key, from which the pairs to label are made.

candidates.jsonl grows by whole batches. After a kill the same command writes the bytes that were missing.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import pstdev
from typing import Any

from rlhf_cli import data, terminal
from rlhf_cli.commands.common.models import ChatModel, ReplyScorer
from rlhf_cli.commands.label.answer_engines import AnswerEngines
from rlhf_cli.commands.label.session import Pair
from rlhf_cli.data.labels import CANDIDATES
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.data.tokens import Conversation
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import append_rows, appended_rows, repair_end, sync
from rlhf_cli.models.batch import EnsembleScores, Prompts, Rollout
from rlhf_cli.progress import Progress
from rlhf_cli.rewards.function import RolloutReward
from rlhf_cli.rewards.model import EnsembleReward, RetokenizingReward

EDITED_HINT = "restore the file, or give another --name to draw new candidates"
BATCH_PROMPTS = 16  # drawn, scored and written together


@dataclass(frozen=True)
class Candidate:
    """A prompt and the answers drawn to it: a line of candidates.jsonl."""

    row: int  # of the prompt among the prompts
    prompt: str | Conversation
    answers: list[str]
    sources: list[str]  # the policy of each answer
    ended: list[bool]  # False: cut off at the longest length
    scores: dict[str, list[float]]  # by reward model, of each answer; empty without --order uncertain

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield the numbers of the answers of each pair."""
        yield from combinations(range(len(self.answers)), 2)

    def pair(self, first: int, second: int) -> Pair:
        """Return two of the answers as a pair to label."""
        name = f"{self.row}:{first}-{second}"
        return Pair(
            name=name,
            prompt=self.prompt,
            answers=(self.answers[first], self.answers[second]),
            sources=(self.sources[first], self.sources[second]),
            ended=(self.ended[first], self.ended[second]),
        )

    def unusable(self, first: int, second: int) -> str | None:
        """Return why a pair is not shown, or None."""
        texts = self.answers[first].strip(), self.answers[second].strip()
        if not all(texts):
            return "empty"
        return "equal" if texts[0] == texts[1] else None

    def margins(self, first: int, second: int) -> list[float]:
        """Return by how much each reward model prefers the first of two answers."""
        return [scores[first] - scores[second] for scores in self.scores.values()]


@dataclass
class CandidateSampler:
    """Draws the answers, `per_prompt` to a prompt, from the policies in turn; the scorer's sources score them."""

    policies: Sequence[ChatModel]
    engines: AnswerEngines
    scorer: ReplyScorer
    prompts: Sequence[data.Prompt]
    response_length: int
    per_prompt: int
    seed: int

    def draw(self, rows: Sequence[int]) -> list[Candidate]:
        """Return the candidates of some prompts. The tokens of an answer depend on seed, draw and row alone."""
        numbers = range(self.per_prompt)
        by_policy = sorted(numbers, key=lambda number: number % len(self.policies))  # servers get one after the other
        rollouts = {number: self._draw_one(rows, number) for number in by_policy}
        drawn = [rollouts[number] for number in numbers]
        scores = [self._scores(rollout) for rollout in drawn]
        texts = [rollout.texts(self.scorer.tokenizer)[1] for rollout in drawn]

        candidates = []
        for place, row in enumerate(rows):
            candidate = Candidate(
                row=row,
                prompt=self.prompts[row].text,
                answers=[answers[place] for answers in texts],
                sources=[self._policy(number).name for number in numbers],
                ended=[bool(rollout.ended[place]) for rollout in drawn],
                scores={name: [each[name][place] for each in scores] for name in scores[0]},
            )
            candidates.append(candidate)
        return candidates

    def _draw_one(self, rows: Sequence[int], number: int) -> Rollout:
        """Return answer `number` to each prompt."""
        draw = number // len(self.policies)  # of this policy
        seeds = tuple(derive_seed(self.seed, "label", draw, row) for row in rows)
        prompts = Prompts.of([self.prompts[row] for row in rows])
        keyed = replace(prompts, seeds=seeds, response_length=self.response_length)
        rollout = self.engines.draw(self._policy(number), keyed)
        return replace(rollout, records=prompts.records)

    def _policy(self, number: int) -> ChatModel:
        return self.policies[number % len(self.policies)]

    def _scores(self, rollout: Rollout) -> dict[str, list[float]]:
        """Return the scores of the run's reward models, of an ensemble those of each member."""
        models: dict[str, RolloutReward] = {}
        for name, source in self.scorer.sources.items():
            if isinstance(source, EnsembleReward):
                models |= {f"{name}.{member}": model for member, model in source.members.items()}
            else:
                models[name] = source
        return {name: scores_of(model, rollout) for name, model in models.items()}


def scores_of(source: RolloutReward, rollout: Rollout) -> list[float]:
    """Return the raw score of each row by a source; NaN for none. The rows have the records of their prompts."""
    if isinstance(source, RetokenizingReward):
        for row in range(len(rollout)):
            source.add_prompt(rollout.prompt_tokens(row), rollout.records[row]["prompt"])
    scores = source(rollout)
    values = scores.score if isinstance(scores, EnsembleScores) else scores
    return [float(value) for value in values]


class CandidateFile:
    """candidates.jsonl of a folder. `order` holds the rows of the prompts in the order in which they are drawn."""

    def __init__(self, folder: Path, order: Sequence[int]) -> None:
        """Read the candidates so far. Raises RLHFError D03, D04, D12, D20, S03."""
        self.path = folder / CANDIDATES
        self.order = order
        repair_end(self.path)
        rows = appended_rows(self.path, hint=EDITED_HINT)
        self.candidates = [_parse(row, f"{shown(self.path)}:{number}") for number, row in rows]

    def lacks(self, num_pairs: int) -> bool:
        """Return True if there are fewer usable pairs, and prompts left to draw more from."""
        return len(usable_pairs(self.candidates)) < num_pairs and bool(self._pending())

    def extend(self, sampler: CandidateSampler, num_pairs: int) -> None:
        """Draw batches until there are `num_pairs` usable pairs, or no prompt is left."""
        self._drop_part_of_a_batch()
        usable = len(usable_pairs(self.candidates))
        with Progress("label", num_pairs, "pair", done=usable, brief=True) as bar:
            while self.lacks(num_pairs):
                self._append(sampler.draw(self._pending()[:BATCH_PROMPTS]))
                now = len(usable_pairs(self.candidates))
                bar.advance(now - usable, note=f"{len(self.candidates)} prompts answered")
                usable = now

    def _pending(self) -> list[int]:
        """Return the rows of the prompts that have no answers."""
        drawn = {each.row for each in self.candidates}
        return [row for row in self.order if row not in drawn]

    def _drop_part_of_a_batch(self) -> None:
        """Remove what a killed process wrote of a batch: the batch is drawn again as a whole."""
        if not self.path.exists() or not self._pending():
            return
        count = len(self.candidates)
        self.candidates = self.candidates[: count - count % BATCH_PROMPTS]
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = b"".join(lines[: len(self.candidates)])
        with self.path.open("r+b") as file:
            file.truncate(len(kept))
        sync(self.path)

    def _append(self, candidates: Sequence[Candidate]) -> None:
        append_rows(self.path, [asdict(each) for each in candidates])
        self.candidates += candidates


def _parse(row: dict[str, Any], where: str) -> Candidate:
    """Return the candidate of a line. Raises RLHFError D20 if it is not one."""
    missing = [name for name in Candidate.__dataclass_fields__ if name not in row]
    problem = f'"{missing[0]}" is missing' if missing else None
    if not missing and not _are_of_their_sources(row["answers"], row["sources"]):
        problem = '"answers" and "sources" are not two or more texts each'
    if problem:
        raise RLHFError("D20", problem, where=where, hint=EDITED_HINT)
    return Candidate(**{name: row[name] for name in Candidate.__dataclass_fields__})


def _are_of_their_sources(answers: Any, sources: Any) -> bool:
    """Return True for two or more answers, with the name of the policy of each."""
    if not isinstance(answers, list) or not isinstance(sources, list):
        return False
    return len(answers) == len(sources) >= 2 and all(isinstance(text, str) for text in [*answers, *sources])


# Pairs


def usable_pairs(candidates: Sequence[Candidate]) -> list[tuple[Candidate, int, int]]:
    """Return the pairs whose answers are neither equal nor empty, in the order of the candidates."""
    pairs = []
    for each in candidates:
        pairs += [(each, first, second) for first, second in each.pairs() if not each.unusable(first, second)]
    return pairs


def ordered_pairs(candidates: Sequence[Candidate], order: str, count: int) -> list[Pair]:
    """Return the `count` pairs that come first: as drawn, or `uncertain` ones."""
    pairs = usable_pairs(candidates)

    def rank(pair: tuple[Candidate, int, int]) -> float:
        candidate, first, second = pair
        return uncertainty(candidate.margins(first, second))

    if order == "uncertain":
        pairs.sort(key=rank)
    return [candidate.pair(first, second) for candidate, first, second in pairs[:count]]


def uncertainty(margins: Sequence[float]) -> float:
    """Return a number that is lower for a pair on which reward models are less certain.

    Of one model it is the distance of its margin from 0, of several it is minus the deviation of their margins.
    """
    if len(margins) == 1:
        return abs(margins[0])
    return -pstdev(margins)


def report_unusable(candidates: Sequence[Candidate]) -> None:
    """Say how many pairs are not shown, and why."""
    counts: Counter[str] = Counter()
    total = 0
    for each in candidates:
        reasons = [each.unusable(first, second) for first, second in each.pairs()]
        counts.update(reason for reason in reasons if reason)
        total += len(reasons)
    if counts:
        reasons_text = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
        terminal.say(f"label    {counts.total()} of {total} pairs omitted: {reasons_text} answers")
