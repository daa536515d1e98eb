"""Responses of both policies to one prompt, from the rows of samples.jsonl. Torch-free: `rlhf run` prints them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from rlhf_cli.jsonl import is_number

QUANTILES = (0.25, 0.5, 0.75)
Sample = Mapping[str, Any]  # a row of samples.jsonl


@dataclass(frozen=True)
class ResponsePair:
    """Samples of both policies for one prompt. `gain`: PPO's score minus SFT's by the deciding judge."""

    index: int
    prompt: str
    sft: Sample
    ppo: Sample
    gain: float

    def gain_by(self, judge: str) -> float | None:
        """Return the gain by any judge; None if it did not score both."""
        return _gain(self.sft, self.ppo, judge)

    @property
    def change(self) -> tuple[float, float]:
        """KL of PPO's response in nats, and the difference of the lengths in tokens."""
        kl = self.ppo.get("kl")
        return (kl if is_number(kl) else 0.0, abs(self.ppo["length"] - self.sft["length"]))


def deciding_judge(judges: Iterable[str]) -> str:
    """Return `gold` if present, else a judge that PPO was not trained on, else the reward model."""
    return min(judges, key=lambda name: (name != "gold", name == "reward"))


def deciding_judge_of(samples: Sequence[Sample]) -> str | None:
    """Return the deciding judge of samples.jsonl, None if no judge scored it."""
    names = dict.fromkeys(chain.from_iterable(row["scores"] for row in samples))
    return deciding_judge(names) if names else None


def response_pairs(samples: Sequence[Sample]) -> list[ResponsePair]:
    """Pair the SFT and PPO responses that the deciding judge scored, by prompt index.

    They are the sampled ones if there are any, else the near-greedy ones.
    """
    judge = deciding_judge_of(samples)
    mode = "sampled" if any(row.get("mode") == "sampled" for row in samples) else "greedy"
    sft_rows = _by_index(samples, "sft", mode)
    ppo_rows = _by_index(samples, "ppo", mode)

    pairs = []
    for index in sorted(sft_rows.keys() & ppo_rows.keys()):
        sft = sft_rows[index]
        ppo = ppo_rows[index]
        gain = _gain(sft, ppo, judge)
        if gain is not None:
            pairs.append(ResponsePair(index, sft["prompt"], sft, ppo=ppo, gain=gain))
    return pairs


def _gain(sft: Sample, ppo: Sample, judge: str | None) -> float | None:
    """Return by how much a judge scores PPO's response higher; None if it did not score both."""
    before = sft["scores"].get(judge)
    after = ppo["scores"].get(judge)
    return after - before if is_number(before) and is_number(after) else None


def _by_index(samples: Sequence[Sample], model: str, mode: str) -> dict[int, Sample]:
    return {row["index"]: row for row in samples if (row["model"], row["mode"]) == (model, mode)}


def quartile_examples(pairs: Sequence[ResponsePair]) -> list[ResponsePair]:
    """Return the distinct pairs whose gain is nearest to each quartile; the lower index wins a tie."""
    gains = sorted(pair.gain for pair in pairs)
    remaining = list(pairs)
    selected = []
    for quantile in QUANTILES[: len(pairs)]:
        target = gains[round(quantile * (len(gains) - 1))]
        nearest = min(remaining, key=lambda pair: (abs(pair.gain - target), pair.index))
        selected.append(nearest)
        remaining.remove(nearest)
    return selected


def columns_text(sample: Sample) -> str:
    """Return the columns that judges read of a sample's row, such as the right answer, as text."""
    return ", ".join(f"{name}: {value}" for name, value in sample.get("columns", {}).items())
