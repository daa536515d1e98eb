"""Parts of the pairs of `rlhf init preferences`, one for each stage; no two share a prompt."""

import math
import random
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import Any

from rlhf_cli import data
from rlhf_cli.data.texts import Pair
from rlhf_cli.errors import RLHFError

SHARES = {"sft": 0.3, "pairs": 0.45, "prompts": 0.15, "held-out": 0.1}  # of the prompts
PART_USES = {
    "sft": "SFT learns the chosen answers",
    "pairs": "the reward model learns to tell them apart",
    "prompts": "PPO answers them",
    "held-out": "evaluation alone",
}
MAX_HELD_OUT = 1000  # prompts; the interval of a win rate is then 0.06 wide
MIN_PROMPTS = 20  # distinct prompts, so that two are held out
MIN_BALANCED = {"pairs": 9, "held-out": 2}  # pairs that balance_parts must keep: as many as MIN_PROMPTS prompts give
MAX_SFT_ANSWERS = 4  # per prompt, for SFT, so that prompts have similar weights

Parts = dict[str, list[Pair]]
Rows = list[dict[str, Any]]


def split_pairs(pairs: Sequence[Pair], seed: int) -> Parts:
    """Split the pairs into parts; all pairs of a prompt, or of a conversation's first message, share a part.

    Raises RLHFError D11 for fewer than 20 distinct prompts.
    """
    keys = split_keys(pairs)
    if len(keys) < MIN_PROMPTS:
        text = f"{len(keys)} different prompts; at least {MIN_PROMPTS} are needed to hold some of them out"
        raise RLHFError("D11", text, where="--data", hint="bring pairs for more prompts")

    random.Random(f"{seed} preferences").shuffle(keys)
    rest = iter(keys)
    part_of: dict[str, str] = {}
    for name, count in _count_prompts(len(keys)).items():
        part_of |= dict.fromkeys(islice(rest, count), name)

    parts: Parts = {name: [] for name in SHARES}
    for pair in pairs:
        parts[part_of[data.split_key(pair.prompt)]].append(pair)
    for name, part in parts.items():
        random.Random(f"{seed} {name}").shuffle(part)  # eval takes the first ones, which must be a random sample
    return parts


def split_keys(pairs: Sequence[Pair]) -> list[str]:
    """Return the distinct keys that decide the part of a prompt, in order."""
    return list(dict.fromkeys(data.split_key(pair.prompt) for pair in pairs))


def _count_prompts(total: int) -> dict[str, int]:
    """Return the number of prompts of each part; the reward model has those that the others leave."""
    counts = {name: round(share * total) for name, share in SHARES.items()}
    counts["held-out"] = min(counts["held-out"], MAX_HELD_OUT)
    counts["pairs"] += total - sum(counts.values())
    return counts


def rows_of_files(parts: Parts, *, balance: bool = False) -> dict[str, Rows]:
    """Return the rows of each file in data/; `balance` the lengths of the reward model's pairs (D11)."""
    held_out = parts["held-out"]
    rewarded = balance_parts(parts) if balance else parts
    return {
        "sft": [_example(pair) for pair in most_chosen(parts["sft"])],
        "sft_eval": [_example(pair) for pair in most_chosen(held_out)],
        "pairs": [preference_row(pair) for pair in rewarded["pairs"]],
        "pairs_eval": [preference_row(pair) for pair in rewarded["held-out"]],
        "prompts": [{"prompt": prompt} for prompt in distinct_prompts(parts["prompts"])],
        "heldout": [{"prompt": prompt} for prompt in distinct_prompts(held_out)],
    }


def distinct_prompts(pairs: Sequence[Pair]) -> list[Any]:
    """Return each prompt once, in order."""
    return list({repr(pair.prompt): pair.prompt for pair in pairs}.values())


def most_chosen(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs for SFT: of each prompt the MAX_SFT_ANSWERS answers that were chosen most often, each once."""
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for pair in pairs:
        answers[repr(pair.prompt)][pair.chosen] += 1
    wanted = {prompt: dict(counts.most_common(MAX_SFT_ANSWERS)) for prompt, counts in answers.items()}

    selected = []
    for pair in pairs:
        if wanted[repr(pair.prompt)].pop(pair.chosen, 0):
            selected.append(pair)
    return selected


def _example(pair: Pair) -> dict[str, Any]:
    return {"prompt": pair.prompt, "completion": _written(pair, pair.chosen)}


def preference_row(pair: Pair) -> dict[str, Any]:
    """Return a pair as a row of a file."""
    row = {
        "prompt": pair.prompt,
        "chosen": _written(pair, pair.chosen),
        "rejected": _written(pair, pair.rejected),
    }
    if pair.margin is not None:
        row["margin"] = pair.margin
    return row


def _written(pair: Pair, answer: str) -> Any:
    """Return an answer in the form of its prompt: a text, or a list of messages."""
    if isinstance(pair.prompt, str):
        return answer
    return [{"role": "assistant", "content": answer}]


# Balance by length


def balance_parts(parts: Parts) -> Parts:
    """Return the reward model's two parts as `balance_lengths` keeps them. Raises RLHFError D11 if too few pairs."""
    kept: Parts = {}
    for name in MIN_BALANCED:
        pairs = parts[name]
        kept[name] = [pairs[index] for index in balance_lengths(character_lengths(pairs))]
    if all(len(kept[name]) >= least for name, least in MIN_BALANCED.items()):
        return kept

    text = (
        f"--balance-length would leave {len(kept['pairs'])} of {len(parts['pairs'])} pairs to train the reward model "
        f"and {len(kept['held-out'])} of {len(parts['held-out'])} to measure it; "
        f"at least {MIN_BALANCED['pairs']} and {MIN_BALANCED['held-out']} are needed"
    )
    lacking = "shorter" if longer_share(parts["pairs"]) > 0.5 else "longer"
    hint = f"leave it out, or bring more pairs in which the {lacking} answer is the chosen one"
    raise RLHFError("D11", text, where="--data", hint=hint)


def balance_lengths(lengths: Sequence[tuple[int, int]]) -> list[int]:
    """Return the indices of pairs whose lengths (chosen, rejected) do not tell which answer was chosen, in order.

    Each pair whose chosen answer is the shorter one keeps the nearest of those whose chosen answer is as many times the
    longer one, or the other way round if these are fewer.
    """
    kept: list[int] = []
    shorter_chosen: list[tuple[float, int]] = []  # the logarithm of the ratio of the lengths, and the index
    longer_chosen: list[tuple[float, int]] = []
    for index, (chosen, rejected) in enumerate(lengths):
        ratio = abs(math.log((chosen + 1) / (rejected + 1)))
        if chosen == rejected:
            kept.append(index)
        elif chosen < rejected:
            shorter_chosen.append((ratio, index))
        else:
            longer_chosen.append((ratio, index))

    rarer, others = sorted([shorter_chosen, longer_chosen], key=len)
    others.sort()
    for ratio, index in sorted(rarer):
        place = bisect(others, (ratio, index))
        neighbours = [i for i in (place - 1, place) if 0 <= i < len(others)]
        nearest = min(neighbours, key=lambda i: abs(others[i][0] - ratio))
        kept += [index, others.pop(nearest)[1]]
    return sorted(kept)


def character_lengths(pairs: Sequence[Pair]) -> list[tuple[int, int]]:
    """Return the lengths of chosen and rejected answers in characters."""
    return [(len(pair.chosen), len(pair.rejected)) for pair in pairs]


def longer_share(pairs: Sequence[Pair]) -> float:
    """Return the share of pairs in which the longer answer is the chosen one; 0.5 if all lengths are equal."""
    longer = [chosen > rejected for chosen, rejected in character_lengths(pairs) if chosen != rejected]
    return sum(longer) / len(longer) if longer else 0.5
