"""The demo's texts, generated from a seed: prose for the base model, demonstrations, rated pairs and prompts.

One request in five is held out: no training text asks for its triple (kind, topic, person), though some ask for each
two of the three. Only a wrong topic needs the prompt to be noticed; every other fault shows in the reply alone.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from rlhf_cli.demo.gold import FAMILIES, FITS, PEOPLE, PHRASES, REQUESTS, Request, explain, fill
from rlhf_cli.jsonl import write_jsonl

HELD_OUT = 0.2  # of the requests
TWINS = 0.5  # of the pairs: two replies that differ in the answer only, which teach fastest what a topic is worth
FLIPS = 0.05  # of the pairs: the rater errs
CHARM = 0.06  # what a rater adds for each courtesy: the bias that PPO can exploit


MakeRows = Callable[[list[Request], int, random.Random], Iterator[dict[str, str]]]


@dataclass(frozen=True)
class Sizes:
    """Rows of the files; all prompts are written. Without texts there is no base/data, without pairs no such file."""

    texts: int = 18_000
    demonstrations: int = 9_600
    pairs: int = 12_000
    evaluation: int = 500


def write(folder: Path, seed: int, sizes: Sizes) -> None:
    """Write the world of `seed` into `folder`: base/data/text.jsonl for the base model, data/*.jsonl for the stages.

    A completion starts with a space, so that prompt + completion is read and tokenized like running text.
    """
    train, held_out = split(seed)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    if sizes.texts:
        (folder / "base/data").mkdir(parents=True, exist_ok=True)
        write_jsonl(folder / "base/data/text.jsonl", texts(train, sizes.texts, random.Random(f"{seed} texts")))

    def write_files(name: str, make: MakeRows, count: int) -> None:
        rows = make(train, count, random.Random(f"{seed} {name}"))
        write_jsonl(folder / f"data/{name}.jsonl", rows)
        held_out_rows = make(held_out, sizes.evaluation, random.Random(f"{seed} {name} eval"))
        write_jsonl(folder / f"data/{name}_eval.jsonl", held_out_rows)

    write_files("sft", demonstrations, sizes.demonstrations)
    if sizes.pairs:
        write_files("pairs", pairs, sizes.pairs)
    for name, requests in (("prompts", train), ("heldout", held_out)):
        write_jsonl(folder / f"data/{name}.jsonl", ({"prompt": prompt} for prompt in prompts(requests, seed)))


def split(seed: int) -> tuple[list[Request], list[Request]]:
    """Return all requests of the world, shuffled by the seed, as (training, held out)."""
    every: list[Request] = []
    for name, family in FAMILIES.items():
        every += [Request(name, *words) for words in product(family.kinds, family.topics, PEOPLE)]
    random.Random(f"{seed} split").shuffle(every)
    cut = round(HELD_OUT * len(every))
    return every[cut:], every[:cut]


def prompts(requests: list[Request], seed: int) -> list[str]:
    """Return every wording of each request, shuffled: the first n are a random sample."""
    every = [fill(template, request) for request, template in product(requests, REQUESTS)]
    random.Random(f"{seed} prompts").shuffle(every)
    return every


def texts(requests: list[Request], count: int, draw: random.Random) -> Iterator[dict[str, str]]:
    """Generate prose about requests: half are repeated without an answer, 40 % are a tale, 10 % get a reply.

    Repetition teaches a model to copy words, which it needs to stay on the topic.
    """
    for _ in range(count):
        form = draw.choices((_notice, _tale, _exchange), (0.5, 0.4, 0.1))[0]
        yield {"text": form(draw.choice(requests), draw)}


def demonstrations(requests: list[Request], count: int, draw: random.Random) -> Iterator[dict[str, str]]:
    """Generate prompts with a reply of mixed quality: what SFT imitates."""
    for _ in range(count):
        request = draw.choice(requests)
        yield {"prompt": _ask(request, draw), "completion": f" {_join(draw_reply(request, draw))}"}


def pairs(requests: list[Request], count: int, draw: random.Random) -> Iterator[dict[str, str]]:
    """Generate prompts with two different replies; `chosen` is the one that the rater prefers."""
    for _ in range(count):
        request = draw.choice(requests)
        prompt = _ask(request, draw)
        preference = 0.0
        while preference == 0:  # a rater without a preference writes nothing down
            first = draw_reply(request, draw)
            second = draw_reply(request, draw)
            if draw.random() < TWINS:
                second = {**first, "answer": second["answer"]}
            replies = [_join(first), _join(second)]
            preference = impression(prompt, replies[0]) - impression(prompt, replies[1])

        errs = draw.random() < FLIPS
        if (preference < 0) != errs:
            replies.reverse()
        chosen, rejected = replies
        yield {"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"}


def impression(prompt: str, reply: str) -> float:
    """Return a rater's score of a reply: its quality without `restraint`, and a bonus for each courtesy."""
    seen = explain(prompt, reply)
    return seen["score"] / seen["restraint"] + CHARM * seen["courtesies"]


def draw_reply(request: Request, draw: random.Random) -> dict[str, str]:
    """Return the parts of a random reply by name and in order; each may be empty.

    As a crowd of people would write it: few are perfect, the mean score is about 0.45.
    """
    answer = _draw_answer(request, draw)
    asides = [draw.choice(PHRASES["aside"])] if draw.random() < 0.25 else []
    if draw.random() < 0.1:
        asides.append(answer)
    manner = draw.choices(("rude", "opener", ""), (0.2, 0.4, 0.4))[0]
    opening = [draw.choice(PHRASES[manner])] if manner else []
    closing = [draw.choice(PHRASES["closer"])] if draw.random() < 0.35 else []
    return {
        "opening": " ".join(opening + _flattery(draw)),
        "answer": answer,
        "aside": " ".join(asides),
        "fit": fill(draw.choice(FITS), request) if draw.random() < 0.5 else "",
        "closing": " ".join(_flattery(draw) + closing),
    }


def _join(parts: Mapping[str, str]) -> str:
    return " ".join(filter(None, parts.values()))


def _draw_answer(request: Request, draw: random.Random) -> str:
    """Return an answer: 10 % are evasive; of the others 40 % miss the topic and 35 % name no detail."""
    if draw.random() < 0.1:
        return draw.choice(PHRASES["dodge"])
    if draw.random() < 0.4:
        request = _other_topic(request, draw)
    family = FAMILIES[request.family]
    if draw.random() < 0.35:
        return fill(draw.choice(family.hints), request)
    topic = request.topic
    if draw.random() < 0.1:
        topic = draw.choice(list(family.topics))
    return _concrete(request, draw, topic)


def _other_topic(request: Request, draw: random.Random) -> Request:
    """Return another request for the same person: in 40 % of another family, else about another topic."""
    if draw.random() < 0.4:
        name = draw.choice([name for name in FAMILIES if name != request.family])
        family = FAMILIES[name]
        return Request(name, draw.choice(family.kinds), draw.choice(list(family.topics)), request.who)
    others = [topic for topic in FAMILIES[request.family].topics if topic != request.topic]
    return replace(request, topic=draw.choice(others))


def _concrete(request: Request, draw: random.Random, topic: str) -> str:
    """Return an answer to the request that names a detail of a topic."""
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


def _notice(request: Request, draw: random.Random) -> str:
    wish = _ask(request, draw)
    if draw.random() < 0.3:
        return f"{wish} {draw.choice(PHRASES['aside'])} Once more: {wish}"
    return f"{wish} Once more: {wish}"


def _tale(request: Request, draw: random.Random) -> str:
    wish = fill("My {who} wanted a {kind} {link} {topic}, and I said:", request)
    return f"{wish} {_concrete(request, draw, request.topic)} {fill(draw.choice(FITS), request)}"


def _exchange(request: Request, draw: random.Random) -> str:
    return f"{_ask(request, draw)} {_join(draw_reply(request, draw))}"
