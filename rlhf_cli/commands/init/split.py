"""Preference pairs read from any form, and cut into parts that share no prompt."""

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
USES = {
    "sft": "SFT learns the chosen answers",
    "pairs": "the reward model learns to tell them apart",
    "prompts": "PPO answers them",
    "held-out": "evaluation alone",
}
MOST_HELD_OUT = 1000  # prompts: a win rate's interval is then 0.06 wide
LEAST = 20  # different prompts, so that two are held out
ANSWERS = 4  # of a prompt, at most, that SFT learns: no prompt weighs many times what another one does
Parts = dict[str, list[Pair]]


@dataclass(frozen=True)
class Style:
    """The pairs of a file, and how they are written down."""

    pairs: list[Pair]
    read: int  # rows of the file
    text: str  # one line: what the prompts are
    chat_template: str | None  # to be set in sft.yaml


def read(source: DataSource, tokenizer: Any, *, plain: bool) -> Style:
    """All usable pairs of a source in the form that suits the tokenizer; the other rows are counted in warnings.

    With a chat template prompts become conversations (unless `plain`); without one, conversations get chatml and
    transcripts stay text. Raises RLHFError D01-D12.
    """
    pairs, rows, transcripts = data.preference_pairs(source)
    chats = any(not isinstance(pair.prompt, str) for pair in pairs)
    if chats and transcripts and (plain or not tokenizer.chat_template):
        text = "dialogues in one text, as the model has no chat template" if not plain else "dialogues in one text"
        return Style([pair.as_text() for pair in pairs], rows, text, None)
    if chats:
        template = None if tokenizer.chat_template else "chatml"
        text = "conversations" + (", in chatml: the model has no chat template of its own" if template else "")
        return Style(pairs, rows, text, template)
    if tokenizer.chat_template and not plain:
        return Style([_as_chat(pair) for pair in pairs], rows, "conversations, by the model's chat template", None)
    if _runs_together(pairs):
        spaced = [replace(p, chosen=f" {p.chosen}", rejected=f" {p.rejected}") for p in pairs]
        return Style(spaced, rows, "plain text, a space put before each answer", None)
    return Style(pairs, rows, "plain text", None)


def _as_chat(pair: Pair) -> Pair:
    chosen, rejected = pair.chosen.strip(), pair.rejected.strip()
    return replace(pair, prompt=[{"role": "user", "content": pair.prompt}], chosen=chosen, rejected=rejected)


def _runs_together(pairs: list[Pair]) -> bool:
    """Whether most answers would be glued to the last word of their prompts."""
    glued = [pair for pair in pairs if not str(pair.prompt)[-1:].isspace() and not pair.chosen[:1].isspace()]
    return len(glued) > len(pairs) / 2


def cut(pairs: Sequence[Pair], seed: int) -> Parts:
    """The pairs by part; all pairs of a prompt, and of conversations that open alike, fall into the same one.

    Raises RLHFError D11 for fewer than 20 different prompts.
    """
    keys = openings(pairs)
    if len(keys) < LEAST:
        text = f"{len(keys)} different prompts; at least {LEAST} are needed to hold some of them out"
        raise RLHFError("D11", text, where="--data", hint="bring pairs for more prompts")
    random.Random(f"{seed} preferences").shuffle(keys)
    counts = {name: round(share * len(keys)) for name, share in SHARES.items()}
    counts["held-out"] = min(counts["held-out"], MOST_HELD_OUT)
    counts["pairs"] = len(keys) - sum(count for name, count in counts.items() if name != "pairs")
    names = iter([name for name, count in counts.items() for _ in range(count)])
    part_of = dict(zip(keys, names, strict=True))
    parts: Parts = {name: [] for name in SHARES}
    for pair in pairs:
        parts[part_of[data.split_key(pair.prompt)]].append(pair)
    for name, part in parts.items():
        random.Random(f"{seed} {name}").shuffle(part)  # eval takes the first ones: they are a fair sample then
    return parts


def openings(pairs: Sequence[Pair]) -> list[str]:
    """The different prompts by what decides their part, in order."""
    return list(dict.fromkeys(data.split_key(pair.prompt) for pair in pairs))


def chosen_most(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs whose chosen answers SFT learns: of a prompt the ANSWERS that were chosen most often, each once."""
    answers: dict[str, Counter[str]] = {}
    first: dict[tuple[str, str], Pair] = {}
    for pair in pairs:
        prompt = repr(pair.prompt)
        answers.setdefault(prompt, Counter())[pair.chosen] += 1
        first.setdefault((prompt, pair.chosen), pair)
    taken = {(prompt, answer) for prompt, counts in answers.items() for answer, _ in counts.most_common(ANSWERS)}
    return [pair for key, pair in first.items() if key in taken]


def example(pair: Pair) -> dict[str, Any]:
    """{prompt, completion} of the chosen answer."""
    return {"prompt": pair.prompt, "completion": _answer(pair, pair.chosen)}


def preference(pair: Pair) -> dict[str, Any]:
    """{prompt, chosen, rejected[, margin]}."""
    row = {
        "prompt": pair.prompt,
        "chosen": _answer(pair, pair.chosen),
        "rejected": _answer(pair, pair.rejected),
    }
    return row if pair.margin is None else {**row, "margin": pair.margin}


def distinct(pairs: list[Pair]) -> list[Any]:
    """Each prompt once, in order."""
    return list({repr(pair.prompt): pair.prompt for pair in pairs}.values())


def prompts(pairs: list[Pair]) -> Iterator[dict[str, Any]]:
    """{prompt}, each one once."""
    return ({"prompt": prompt} for prompt in distinct(pairs))


def _answer(pair: Pair, text: str) -> Any:
    return text if isinstance(pair.prompt, str) else [{"role": "assistant", "content": text}]
