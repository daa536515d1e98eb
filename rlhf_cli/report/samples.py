"""Which answers are shown: SFT's and PPO's to the same prompt, the best, the worst, the middle, the most changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_cli.report.runs import is_number
from rlhf_cli.verdict.frontier import deciding_judge

EACH = 3  # pairs of a kind: enough to see a habit, few enough to be read
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Pair:
    """Both policies' answers to a prompt. `gain` is PPO's score less SFT's, by the deciding judge."""

    index: int
    prompt: str
    sft: Row
    ppo: Row
    gain: float

    @property
    def change(self) -> tuple[float, float]:
        """How far PPO went from what SFT says: nats of its answer, and the difference of the lengths."""
        kl = self.ppo.get("kl")
        return (float(kl) if is_number(kl) else 0.0, abs(self.ppo["length"] - self.sft["length"]))


@dataclass(frozen=True)
class Shown:
    """Pairs that are shown for one reason."""

    title: str
    pairs: list[Pair]


def judge_of(answers: Sequence[Row]) -> str | None:
    """The judge that decides among those who scored the answers; None where nobody did."""
    names = [name for row in answers[:1] for name in row.get("scores", {})]
    return deciding_judge(names) if names else None


def pairs(answers: Sequence[Row]) -> list[Pair]:
    """Sampled answers of both policies, near-greedy ones where there are no others, by the prompt's index."""
    judge = judge_of(answers)
    mode = "sampled" if any(row.get("mode") == "sampled" for row in answers) else "greedy"
    both = {
        name: {row["index"]: row for row in answers if (row["model"], row["mode"]) == (name, mode)} for name in MODELS
    }
    found = []
    for index in sorted(both["sft"].keys() & both["ppo"].keys()):
        sft, ppo = both["sft"][index], both["ppo"][index]
        found.append(Pair(index, sft["prompt"], sft, ppo, ppo["scores"][judge] - sft["scores"][judge]))
    return found


MODELS = ("sft", "ppo")


def chosen(found: Sequence[Pair]) -> list[Shown]:
    """What is shown of the pairs, a pair once: by gain from both ends and around the middle, then by change."""
    left = sorted(found, key=lambda pair: (-pair.gain, pair.index))
    best = _take(left, left[:EACH])
    worst = _take(left, sorted(left, key=lambda pair: (pair.gain, pair.index))[:EACH])
    middle = sorted(pair.gain for pair in found)[len(found) // 2] if found else 0.0
    median = _take(left, sorted(left, key=lambda pair: (abs(pair.gain - middle), pair.index))[:EACH])
    moved = _take(left, sorted(left, key=lambda pair: (*(-each for each in pair.change), pair.index))[:EACH])
    shown = [
        Shown("Where PPO gained most", best),
        Shown("Where PPO lost most", worst),
        Shown("In the middle", median),
        Shown("Where PPO changed most", moved),
    ]
    return [each for each in shown if each.pairs]


def _take(left: list[Pair], taken: list[Pair]) -> list[Pair]:
    for pair in taken:
        left.remove(pair)
    return taken


def lengths(answers: Sequence[Row]) -> dict[str, list[int]]:
    """Tokens of each of SFT's and PPO's answers, of the pairs' mode."""
    found = pairs(answers)
    return (
        {"SFT": [pair.sft["length"] for pair in found], "PPO": [pair.ppo["length"] for pair in found]} if found else {}
    )
