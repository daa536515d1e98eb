"""Reading preference pairs, and splitting them into parts that share no prompt."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_cli import data
from rlhf_cli.config.sources import DataSource
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
MAX_ANSWERS = 4  # per prompt, for SFT, so that prompts have similar weights
Parts = dict[str, list[Pair]]


@dataclass(frozen=True)
class PairFormat:
    """The pairs of a file in the form in which they are written."""

    pairs: list[Pair]
    read: int  # rows of the file
    text: str  # one line: what the prompts are
    chat_template: str | None  # to set in sft.yaml


def read_pairs(source: DataSource, tokenizer: Any, *, plain: bool) -> PairFormat:
    """Read the valid pairs of a source in the form that suits the tokenizer; warnings count the other rows.

    With a chat template, prompts become conversations unless `plain`. Without one, conversations use chatml and
    transcripts stay text. Raises RLHFError D01-D12.
    """
    pairs, rows, transcripts = data.preference_pairs(source)
    chats = any(not isinstance(pair.prompt, str) for pair in pairs)
    if chats and transcripts and (plain or not tokenizer.chat_template):
        text = "dialogues in one text, as the model has no chat template" if not plain else "dialogues in one text"
        return PairFormat([pair.as_text() for pair in pairs], rows, text, None)
    if chats:
        template = None if tokenizer.chat_template else "chatml"
        text = "conversations" + (", in chatml: the model has no chat template of its own" if template else "")
        return PairFormat(pairs, rows, text, template)
    if tokenizer.chat_template and not plain:
        return PairFormat([_as_chat(pair) for pair in pairs], rows, "conversations, by the model's chat template", None)
    if _lacks_separator(pairs):
        spaced = [replace(p, chosen=f" {p.chosen}", rejected=f" {p.rejected}") for p in pairs]
        return PairFormat(spaced, rows, "plain text, a space put before each answer", None)
    return PairFormat(pairs, rows, "plain text", None)


def _as_chat(pair: Pair) -> Pair:
    chosen, rejected = pair.chosen.strip(), pair.rejected.strip()
    return replace(pair, prompt=[{"role": "user", "content": pair.prompt}], chosen=chosen, rejected=rejected)


def _lacks_separator(pairs: list[Pair]) -> bool:
    """Return True if most answers would join the last word of their prompts without a space."""
    joined = [pair for pair in pairs if not str(pair.prompt)[-1:].isspace() and not pair.chosen[:1].isspace()]
    return len(joined) > len(pairs) / 2


def split_pairs(pairs: Sequence[Pair], seed: int) -> Parts:
    """Split the pairs into parts; all pairs of a prompt, or of a conversation's first message, share a part.

    Raises RLHFError D11 for fewer than 20 distinct prompts.
    """
    keys = split_keys(pairs)
    if len(keys) < MIN_PROMPTS:
        text = f"{len(keys)} different prompts; at least {MIN_PROMPTS} are needed to hold some of them out"
        raise RLHFError("D11", text, where="--data", hint="bring pairs for more prompts")
    random.Random(f"{seed} preferences").shuffle(keys)
    counts = {name: round(share * len(keys)) for name, share in SHARES.items()}
    counts["held-out"] = min(counts["held-out"], MAX_HELD_OUT)
    counts["pairs"] = len(keys) - sum(count for name, count in counts.items() if name != "pairs")
    names = iter([name for name, count in counts.items() for _ in range(count)])
    part_of = dict(zip(keys, names, strict=True))
    parts: Parts = {name: [] for name in SHARES}
    for pair in pairs:
        parts[part_of[data.split_key(pair.prompt)]].append(pair)
    for name, part in parts.items():
        random.Random(f"{seed} {name}").shuffle(part)  # eval takes the first ones, which must be a random sample
    return parts


def split_keys(pairs: Sequence[Pair]) -> list[str]:
    """Return the distinct keys that decide the part of a prompt, in order."""
    return list(dict.fromkeys(data.split_key(pair.prompt) for pair in pairs))


def most_chosen(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs for SFT: of each prompt the MAX_ANSWERS answers that were chosen most often, each once."""
    answers: dict[str, Counter[str]] = {}
    first: dict[tuple[str, str], Pair] = {}
    for pair in pairs:
        prompt = repr(pair.prompt)
        answers.setdefault(prompt, Counter())[pair.chosen] += 1
        first.setdefault((prompt, pair.chosen), pair)
    selected = {(prompt, answer) for prompt, counts in answers.items() for answer, _ in counts.most_common(MAX_ANSWERS)}
    return [pair for key, pair in first.items() if key in selected]


def example(pair: Pair) -> dict[str, Any]:
    """Return the row {prompt, completion} of the chosen answer."""
    return {"prompt": pair.prompt, "completion": _answer(pair, pair.chosen)}


def preference(pair: Pair) -> dict[str, Any]:
    """Return the row {prompt, chosen, rejected[, margin]}."""
    row = {
        "prompt": pair.prompt,
        "chosen": _answer(pair, pair.chosen),
        "rejected": _answer(pair, pair.rejected),
    }
    return row if pair.margin is None else {**row, "margin": pair.margin}


def distinct_prompts(pairs: list[Pair]) -> list[Any]:
    """Return each prompt once, in order."""
    return list({repr(pair.prompt): pair.prompt for pair in pairs}.values())


def prompts(pairs: list[Pair]) -> Iterator[dict[str, Any]]:
    """Return a row {prompt} for each distinct prompt."""
    return ({"prompt": prompt} for prompt in distinct_prompts(pairs))


def _answer(pair: Pair, text: str) -> Any:
    return text if isinstance(pair.prompt, str) else [{"role": "assistant", "content": text}]
