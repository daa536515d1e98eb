"""Texts of others on a page: nothing in them may act, and what cannot be seen is made visible."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_cli.commands.report.runs import at, is_number
from rlhf_cli.errors import redact
from rlhf_cli.evaluation import render
from rlhf_cli.evaluation.render import ResponsePair, Row, response_pairs
from rlhf_cli.evaluation.reward_model import (
    MAX_ECE,
    MIN_PROBE_LIMIT,
    OVER_LONG_LIMIT,
    SWAPPED_PROMPT_LIMIT,
    ece_limit,
    mean_confidence,
)
from rlhf_cli.statistics import with_interval

GENERATOR = "rlhf report"  # how we know our own pages: no other file is ever replaced
# Control characters but newline and tab; what turns the direction of a text; what has no width; halves of characters.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def visible(text: str) -> str:
    """The text without secrets, each character that one could not see as its number: `[U+202E]`."""
    return UNSEEN.sub(lambda found: f"[U+{ord(found[0]):04X}]", redact(text))


def finalize(value: Any) -> Any:
    """For Jinja: what a template prints. Markup is ours and stays; all else is escaped behind this."""
    if value is None or hasattr(value, "__html__"):
        return value
    return visible(str(value))


def number(value: float) -> str:
    """A number in few digits, a real minus sign in front where it is below 0."""
    text = f"{value:.3g}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.2g}" if abs(value) < 1e-3 else ""
    return (text or f"{value:,.0f}").replace("-", "\N{MINUS SIGN}")


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def bounds(interval: Any) -> str:
    """An interval of shares as percents: ` [58, 68]`; nothing where there is none."""
    return f" [{100 * interval[0]:.0f}, {100 * interval[1]:.0f}]" if interval else ""


def count(number_of: int, word: str) -> str:
    """`1 update`, `40 updates`."""
    return f"{number_of:,} {word}{'' if number_of == 1 else 's'}"


def rated(rate: Mapping[str, Any]) -> str:
    """A win rate with its interval, if it has one: `52 % [46, 58]`."""
    return percent(rate["value"]) + bounds(rate.get("ci95"))


WON = ("comparison", "won", "at equal length", "ties", "of")


def judge_table(report: Mapping[str, Any]) -> list[str]:
    """The names of those that scored the answers."""
    return list(at(report, "models.sft.judges") or [])


def won(report: Mapping[str, Any]) -> list[list[str]]:
    """A row of `WON` for each win rate."""
    rows = []
    for pair, how, judge, rate in render.win_rate_rows(report):
        value, equal = rated(rate), rate.get("length_controlled")
        told = "-" if equal is None else percent(equal)
        rows.append([f"{pair}, {judge}{how}", value, told, str(rate.get("ties", "-")), str(rate.get("n", "-"))])
    return rows


def policies(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(columns, a row for each policy): its distance from SFT, its answers' length, and its mean by each judge."""
    names, rows = judge_table(report), []
    for how, section in (("", report), (", near-greedy", report.get("greedy") or {})):
        for name, told in (section.get("models") or {}).items():
            kl = with_interval(told["kl"], told.get("kl_ci95")) if "kl" in told else "-"
            means = [mean(told["judges"][judge]) for judge in names]
            length, ended = f"{told['response_length_mean']:.1f}", percent(told["eos_fraction"])
            rows.append([render.model_label(name) + how, kl, length, ended, *means])
    return ["policy", "KL, nats", "length", "ended", *names], rows


def mean(told: Mapping[str, Any]) -> str:
    """A judge's mean with its interval."""
    return with_interval(told["mean"], told.get("ci95"))


TOLD = {
    "reward": "what the token earned: the KL penalty, and at the last token the score",
    "kl": "how much likelier the policy makes the token than the SFT policy does, in nats",
    "value": "what the value model expects from here on",
    "advantage": "how much better than expected: PPO makes tokens above 0 likelier, those below 0 less likely",
}


@dataclass(frozen=True)
class Token:
    """A token of a strip: its value, and its shade from -1 to 1."""

    text: str
    value: str
    shade: float


@dataclass(frozen=True)
class Strip:
    """One quantity over the response; `most` is the value of the full colour."""

    name: str
    about: str
    most: str
    tokens: list[Token]


@dataclass(frozen=True)
class HeatMap:
    """A response by its tokens."""

    step: int
    prompt: str
    strips: list[Strip]


def last_heat_map(samples: Sequence[Mapping[str, Any]]) -> HeatMap | None:
    """Of the last row that tells its tokens; None where none does."""
    for row in reversed(samples):
        told = row.get("tokens")
        if isinstance(told, Mapping) and (strips := _strips(told)):
            return HeatMap(row["step"], str(row.get("prompt", "")), strips)
    return None


def _strips(told: Mapping[str, Any]) -> list[Strip]:
    texts, strips = told.get("text"), []
    for name, about in TOLD.items():
        values = told.get(name)
        if not isinstance(texts, list) or not isinstance(values, list) or len(values) != len(texts) or not values:
            continue
        if not all(is_number(value) for value in values):
            continue
        most = max(abs(value) for value in values) or 1.0
        tokens = [
            Token(_drawn(str(text)), number(value), round(value / most, 3))
            for text, value in zip(texts, values, strict=True)
        ]
        strips.append(Strip(name, about, number(most), tokens))
    return strips


def _drawn(text: str) -> str:
    """A token's text with its line breaks to be seen; a part of a letter that stands with a later token is a dot."""
    return (
        text.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}").replace("\t", "\N{RIGHTWARDS ARROW}")
        or "\N{MIDDLE DOT}"
    )


EACH = 3  # pairs of a kind: enough to see a habit, few enough to be read


@dataclass(frozen=True)
class Shown:
    """Pairs that are shown for one reason."""

    title: str
    pairs: list[ResponsePair]


def chosen(found: Sequence[ResponsePair]) -> list[Shown]:
    """What is shown of the pairs, a pair once: by gain from both ends and around the middle, then by change."""
    left = sorted(found, key=lambda pair: (-pair.gain, pair.index))
    best = _take(left, left[:EACH])
    worst = sorted(left, key=lambda pair: (pair.gain, pair.index))[:EACH]
    lost = [pair for pair in worst if pair.gain < 0]
    worst = _take(left, lost or worst)
    middle = sorted(pair.gain for pair in found)[len(found) // 2] if found else 0.0
    median = _take(left, sorted(left, key=lambda pair: (abs(pair.gain - middle), pair.index))[:EACH])
    moved = _take(left, sorted(left, key=lambda pair: (*(-each for each in pair.change), pair.index))[:EACH])
    shown = [
        Shown("Where PPO gained most", best),
        Shown("Where PPO lost most" if lost else "Where PPO gained least", worst),
        Shown("In the middle", median),
        Shown("Where PPO changed most", moved),
    ]
    return [each for each in shown if each.pairs]


def _take(left: list[ResponsePair], taken: list[ResponsePair]) -> list[ResponsePair]:
    for pair in taken:
        left.remove(pair)
    return taken


def lengths(answers: Sequence[Row]) -> dict[str, list[int]]:
    """Tokens of each of SFT's and PPO's answers, of the pairs' mode."""
    found = response_pairs(answers)
    return (
        {"SFT": [pair.sft["length"] for pair in found], "PPO": [pair.ppo["length"] for pair in found]} if found else {}
    )


def notes(card: Mapping[str, Any]) -> Iterator[str]:
    """What each line of the card's table is, what its limit is, and why that is another one in other runs."""
    yield (
        "A line is flagged where it is beyond its limit by more than chance: of "
        f"{card['n']:,} pairs and {card['adversarial']['n']:,} probed prompts a value may be off. In brackets, 95 % "
        "intervals. A probe is held to more than its own interval, since there are "
        f"{len(card['adversarial']['probes'])} of them, and a limit that was estimated is off as well. Where there are "
        "no brackets, the value counts."
    )
    yield _calibration(card)
    yield (
        "Score with length: from \N{MINUS SIGN}1 to 1, and 0 where longer answers score neither better nor worse than "
        "short ones."
    )
    if longer := card.get("longer_answer"):
        yield (
            f"Longer answer preferred: by the reward model in {percent(longer['preferred'])} of the pairs whose "
            f"answers differ in length, by those who chose in {percent(longer['chosen'])}. It has no limit of its own."
        )
    yield (
        "Beaten by ...: how often an answer that was made to be bad scores above the chosen one, then by how much its "
        "score is higher (+) or lower (-) on the mean. Such an answer should not win more often than one that people "
        f"rejected, so the limit is the share of pairs that this model gets wrong, {percent(1 - card['accuracy'])} "
        f"here, and {percent(MIN_PROBE_LIMIT)} at least. Of the good answer three times over the limit is "
        f"{percent(OVER_LONG_LIMIT)}, of one to another prompt {percent(SWAPPED_PROMPT_LIMIT)}."
    )


def _calibration(card: Mapping[str, Any]) -> str:
    sure, why = mean_confidence(card), "; with few pairs, what chance alone comes to"
    if ece_limit(card) > MAX_ECE:
        why = f"; here it is {number(ece_limit(card))}, since with so few pairs chance alone comes to that"
    return (
        "Calibration: of the answers that they prefer, the scores say that these are the better ones with a chance of "
        f"{percent(sure)} on the mean, and {percent(card['accuracy'])} are; where more is said than comes true, the "
        "model is sure of too much. The error (ECE) is how far the two are apart, over groups of like chance. Its "
        f"limit is {number(MAX_ECE)}{why}."
    )
