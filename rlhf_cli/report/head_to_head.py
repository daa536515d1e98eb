"""PPO policies of several runs against one another, on the prompts that all of them answered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

from rlhf_cli import statistics
from rlhf_cli.evaluation.report_text import Table, significance
from rlhf_cli.evaluation.sample_pairs import ResponsePair, Sample
from rlhf_cli.jsonl import is_number
from rlhf_cli.report.answers import Answers
from rlhf_cli.report.formats import interval_text, percent, rated
from rlhf_cli.runs.read import Run
from rlhf_cli.runs.report import WinRate

COLUMNS = ["policies", "judge", "prompts", "win rate", "at equal length", "result"]
MODE = "sampled"
Prompt = tuple[int, str]  # its place and text


@dataclass(frozen=True)
class Match:
    """The win rate of the PPO policy of one run over that of another, by one judge."""

    first: str
    second: str
    judge: str
    rate: WinRate

    @property
    def row(self) -> list[str]:
        """Return the cells of COLUMNS."""
        results = {
            "better": f"{self.first} is better",
            "undecided": "not distinguishable",
            "worse": f"{self.second} is better",
        }
        equal = self.rate.length_controlled
        return [
            f"{self.first} over {self.second}",
            self.judge,
            str(self.rate.n),
            rated(self.rate),
            "-" if equal is None else percent(equal) + interval_text(self.rate.length_controlled_ci95),
            results[significance(self.rate)],
        ]


@dataclass(frozen=True)
class HeadToHead:
    """The sampled answers of each run's PPO policy to the prompts that all runs answered."""

    answers: Mapping[str, Sequence[Sample]]  # by run, in the same order of prompts
    judges: Sequence[str]  # that are the same in all runs, and scored every answer; the one that decides is first

    @cached_property
    def matches(self) -> list[Match]:
        """The result of each two runs by each judge."""
        matches = []
        for first, second in combinations(self.answers, 2):
            for judge in self.judges:
                rate = _win_rate(judge, self.answers[first], self.answers[second])
                matches.append(Match(first, second, judge, rate))
        return matches

    @property
    def table(self) -> Table:
        return COLUMNS, [match.row for match in self.matches]

    @property
    def side_by_side(self) -> Answers:
        """Return the answers for the page: those of the first run beside those of the last."""
        names = list(self.answers)
        rows: list[dict[str, Any]] = []
        for name in names:
            rows += [{**row, "model": name} for row in self.answers[name]]
        return Answers(
            rows=rows,
            pairs=self._pairs(),
            judge=self.judges[0],
            judges=self.judges,
            policies=[(name, MODE) for name in names],
            names=names,
            right=len(names) - 1,
        )

    def _pairs(self) -> list[ResponsePair]:
        """Return the answers of the first and of the last run, the largest gain first."""
        first, *_, last = self.answers.values()
        judge = self.judges[0]
        pairs = []
        for before, after in zip(first, last, strict=True):
            gain = after["scores"][judge] - before["scores"][judge]
            pairs.append(ResponsePair(before["index"], before["prompt"], before, ppo=after, gain=gain))
        return sorted(pairs, key=lambda pair: (-pair.gain, pair.index))


def head_to_head(names: Sequence[str], runs: Sequence[Run], judges: Sequence[str]) -> HeadToHead | None:
    """Return the answers of the runs that can be compared by `judges`; None without two of them, or a shared prompt."""
    known: dict[str, Mapping[Prompt, Sample]] = {}
    for name, run in zip(names, runs, strict=True):
        rows = _by_prompt(run)
        if rows:
            known[name] = rows
    if len(known) < 2:
        return None

    first, *others = known.values()
    shared = [prompt for prompt in first if all(prompt in rows for rows in others)]
    answers = {name: [rows[prompt] for prompt in shared] for name, rows in known.items()}
    scoring = [judge for judge in judges if all(_scored(rows, judge) for rows in answers.values())]
    return HeadToHead(answers, scoring) if shared and scoring else None


def _by_prompt(run: Run) -> dict[Prompt, Sample]:
    """Return PPO's sampled answers of an evaluation that is not out of date."""
    rows = run.answers if run.outcome else ()
    answers = [row for row in rows if (row["model"], row["mode"]) == ("ppo", MODE)]
    return {(row["index"], row["prompt"]): row for row in answers}


def _scored(rows: Sequence[Sample], judge: str) -> bool:
    return all(is_number(row["scores"].get(judge)) for row in rows)


def _win_rate(judge: str, first: Sequence[Sample], second: Sequence[Sample]) -> WinRate:
    """Return how often the first answers score above the second, plain and at equal length."""
    prompts = [row["prompt"] for row in first]
    scores = [row["scores"][judge] for row in first]
    others = [row["scores"][judge] for row in second]
    extra_lengths = [ours["length"] - theirs["length"] for ours, theirs in zip(first, second, strict=True)]
    controlled = statistics.length_controlled(scores, others, extra_lengths, prompts)
    return WinRate(
        **statistics.win_rate(scores, others, prompts),
        length_controlled=controlled[0] if controlled else None,
        length_controlled_ci95=list(controlled[1]) if controlled else None,
    )
