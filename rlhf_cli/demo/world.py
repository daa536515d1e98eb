"""The demo's texts, all made from a seed: prose for the base model, demonstrations, rated pairs and prompts.

One request in five is never seen in training: a triple (kind, topic, person), each of whose pairs is. Only the topic of
a reply can be wrong in a way that shows nowhere but in the prompt; the other faults show in the reply itself.
"""

import random
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace
from itertools import product
from pathlib import Path

from rlhf_cli.demo.gold import explain
from rlhf_cli.demo.grammar import FAMILIES, FITS, PEOPLE, PHRASES, REQUESTS, Request, fill
from rlhf_cli.rows import write_jsonl

CROSS = 0.4
TA = 0.7
NT = 1
HELD_OUT = 0.2  # of the requests
TWINS = 0.5  # of the pairs: two replies that differ in one part alone, from which the raters' taste is learned fastest
B1 = 0.45
B2=0.65
FLIPS = 0.05  # of the pairs: the rater slips
CHARM = 0.06  # what a rater adds for each courtesy: the bias that PPO can exploit


@dataclass(frozen=True)
class Sizes:
    """How many rows the files get; the prompts are always all there are."""

    texts: int = 14_000
    demonstrations: int = 8_000
    pairs: int = 14_000
    evaluation: int = 500


@dataclass(frozen=True)
class Reply:
    """A reply in its parts, each a text that may be empty."""

    opening: str
    answer: str
    aside: str
    fit: str
    closing: str

    def __str__(self) -> str:
        return " ".join(part for part in astuple(self) if part)


def write(folder: Path, seed: int, sizes: Sizes) -> None:
    """Write the world of `seed` into `folder`: base/data/text.jsonl for the base model, data/*.jsonl for the stages.

    A completion starts with a space, so that prompt + completion reads, and is cut into tokens, like running text.
    """
    train, held_out = split(seed)
    for name in ("base/data", "data"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "base/data/text.jsonl", texts(train, sizes.texts, random.Random(f"{seed} texts")))
    for suffix, requests, part in (("", train, 1), ("_eval", held_out, 0)):
        draw = random.Random(f"{seed} rows{suffix}")
        demonstrated, rated = (sizes.demonstrations, sizes.pairs) if part else (sizes.evaluation,) * 2
        write_jsonl(folder / f"data/sft{suffix}.jsonl", demonstrations(requests, demonstrated, draw))
        write_jsonl(folder / f"data/pairs{suffix}.jsonl", pairs(requests, rated, draw))
    write_jsonl(folder / "data/prompts.jsonl", ({"prompt": prompt} for prompt in prompts(train)))
    write_jsonl(folder / "data/heldout.jsonl", ({"prompt": prompt} for prompt in prompts(held_out)))


def split(seed: int) -> tuple[list[Request], list[Request]]:
    """All requests of the world, shuffled by the seed and cut into (training, held out)."""
    every = [
        Request(name, kind, topic, who)
        for name, family in FAMILIES.items()
        for kind, topic, who in product(family.kinds, family.topics, PEOPLE)
    ]
    random.Random(f"{seed} split").shuffle(every)
    cut = round(HELD_OUT * len(every))
    return every[cut:], every[:cut]


def prompts(requests: list[Request]) -> list[str]:
    """Every way to put each request into words."""
    return [fill(template, request) for request in requests for template in REQUESTS]


def texts(requests: list[Request], count: int, draw: random.Random) -> Iterator[dict[str, str]]:
    """Prose in which requests stand on a notice board (mostly unanswered), are talked over, or are told of."""
    for _ in range(count):
        chosen = draw.choices(requests, k=NT)
        form = draw.random()
        if form < B1:
            lines = [line for request in chosen for line in _notice(request, draw)]
        elif form < B2:
            lines = [line for request in chosen for line in (_ask(request, draw), str(draw_reply(request, draw)))]
        else:
            lines = [line for request in chosen for line in _tale(request, draw)]
        yield {"text": " ".join(lines)}


def demonstrations(requests: list[Request], count: int, draw: random.Random) -> Iterator[dict[str, str]]:
    """Prompts with a reply of mixed quality: what SFT imitates."""
    for _ in range(count):
        request = draw.choice(requests)
        yield {"prompt": _ask(request, draw), "completion": f" {draw_reply(request, draw)}"}


def pairs(requests: list[Request], count: int, draw: random.Random) -> Iterator[dict[str, str]]:
    """Prompts with two different replies, the one that the rater preferred as `chosen`."""
    for _ in range(count):
        request = draw.choice(requests)
        prompt = _ask(request, draw)
        one, other, preference = "", "", 0.0
        while preference == 0:  # a rater without a preference writes nothing down
            one, other = _two_replies(request, draw)
            preference = impression(prompt, one) - impression(prompt, other)
        chosen, rejected = (one, other) if (preference > 0) != (draw.random() < FLIPS) else (other, one)
        yield {"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"}


def _two_replies(request: Request, draw: random.Random) -> tuple[str, str]:
    one, other = draw_reply(request, draw), draw_reply(request, draw)
    if draw.random() < TWINS:
        part = "answer" if draw.random() < TA else draw.choice([field.name for field in fields(Reply)])
        other = replace(one, **{part: getattr(other, part)})
    return str(one), str(other)


def impression(prompt: str, reply: str) -> float:
    """What a rater thinks of a reply: its quality, blind to too much courtesy and charmed by each."""
    seen = explain(prompt, reply)
    return seen["score"] / seen["restraint"] + CHARM * seen["courtesies"]


def draw_reply(request: Request, draw: random.Random) -> Reply:
    """A reply as a crowd of people would write it: few are perfect, the average is worth about 0.45 of 1."""
    answer = _draw_answer(request, draw)
    asides = [draw.choice(PHRASES["aside"])] if draw.random() < 0.25 else []
    if draw.random() < 0.1:
        asides.append(answer)
    manner = draw.choices(("rude", "opener", ""), (0.2, 0.4, 0.4))[0]
    opening = [draw.choice(PHRASES[manner])] if manner else []
    closing = [draw.choice(PHRASES["closer"])] if draw.random() < 0.35 else []
    return Reply(
        opening=" ".join(opening + _flattery(draw)),
        answer=answer,
        aside=" ".join(asides),
        fit=fill(draw.choice(FITS), request) if draw.random() < 0.5 else "",
        closing=" ".join(_flattery(draw) + closing),
    )


def _draw_answer(request: Request, draw: random.Random) -> str:
    """An answer that misses the topic in two cases of five, names no detail in one of three, or is none at all."""
    if draw.random() < 0.1:
        return draw.choice(PHRASES["dodge"])
    if draw.random() < 0.4:
        request = _other_topic(request, draw)
    family = FAMILIES[request.family]
    if draw.random() < 0.35:
        return fill(draw.choice(family.hints), request)
    stray = draw.random() < 0.1
    return _concrete(request, draw, draw.choice(list(family.topics)) if stray else request.topic)


def _other_topic(request: Request, draw: random.Random) -> Request:
    """Another request for the same person: of another family in three cases of five, else on another topic."""
    if draw.random() < CROSS:
        name = draw.choice([name for name in FAMILIES if name != request.family])
        family = FAMILIES[name]
        return Request(name, draw.choice(family.kinds), draw.choice(list(family.topics)), request.who)
    return replace(request, topic=draw.choice([t for t in FAMILIES[request.family].topics if t != request.topic]))


def _concrete(request: Request, draw: random.Random, topic: str) -> str:
    """An answer to the request that names a detail of the given topic."""
    family = FAMILIES[request.family]
    detail = draw.choice(family.topics[topic])
    return fill(draw.choice(family.answers), request, adjective=draw.choice(family.adjectives), detail=detail)


def _flattery(draw: random.Random) -> list[str]:
    phrases = []
    while draw.random() < 0.12:
        phrases.append(draw.choice(PHRASES["flattery"]))
    return phrases


def _ask(request: Request, draw: random.Random) -> str:
    return fill(draw.choice(REQUESTS), request)


def _notice(request: Request, draw: random.Random) -> list[str]:
    stray = [draw.choice(PHRASES["aside"])] if draw.random() < 0.3 else []
    request_text = _ask(request, draw)
    return [request_text, *stray, "Once more:", request_text]


def _tale(request: Request, draw: random.Random) -> list[str]:
    wish = fill("My {who} wanted a {kind} {link} {topic}, and I said:", request)
    return [wish, _concrete(request, draw, request.topic), fill(draw.choice(FITS), request)]
