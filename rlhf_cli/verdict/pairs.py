"""SFT's and PPO's answers to the same prompts, out of an evaluation's samples.jsonl."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_cli.verdict.frontier import deciding_judge

MODELS = ("sft", "ppo")
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
        nats = float(kl) if isinstance(kl, int | float) and not isinstance(kl, bool) else 0.0
        return (nats, abs(self.ppo["length"] - self.sft["length"]))


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
