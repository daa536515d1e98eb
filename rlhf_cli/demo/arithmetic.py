"""Word problems of the preset `math`, generated from a seed: worked answers for SFT, prompts with answers for PPO.

A template is an opening, one or two changes and a question. One template in five is held out: its text occurs in no
training file, though each of its sentences does. No template occurs twice with the same numbers, in any file.
"""

import operator
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice, product
from pathlib import Path
from typing import NamedTuple

from rlhf_cli.jsonl import write_jsonl

HELD_OUT = 0.2  # of the templates
SHRUGS = 0.25  # of the demonstrations: no attempt at an answer
SMALL = (2, 15)  # numbers, from and to
LARGE = (6, 25)
# Difficulty -> possible (number of steps, range of numbers). One step with large numbers carries or borrows a digit.
DIFFICULTIES = {"easy": [(1, SMALL)], "medium": [(1, LARGE), (2, SMALL)], "hard": [(2, LARGE)]}
SHRUG_TEXTS = ("I do not know.", "That is hard to say.", "Who can tell?")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
FACTORS = (2, 9)
# `*` multiplies two numbers of one digit, and occurs with small numbers only.
OPENINGS = {
    "+": ("{name} has {a} {things}.", "There are {a} {things} in a bag of {name}.", "{name} starts with {a} {things}."),
    "*": ("{name} has {a} boxes of {b} {things}.", "{name} fills {a} bags with {b} {things} each."),
}  # fmt: skip
CHANGES = {
    "+": ("{other} brings {b} more.", "{name} buys another {b}.", "Then {name} finds {b} more.", "{other} adds {b}."),
    "-": ("{other} takes {b} of them.", "{name} gives {b} to {other}.", "Then {name} loses {b}.", "{name} sells {b}."),
}
QUESTIONS = ("How many {things} remain?", "How many {things} does this make?", "What is the number of {things}?")
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jonas", "Lena", "Max")
THINGS = ("apples", "books", "coins", "cards", "eggs", "marbles", "pens", "shells", "stamps", "stones")


@dataclass(frozen=True)
class Sizes:
    """Rows of the files of `write`."""

    demonstrations: int = 12_000
    prompts: int = 6_000
    evaluation: int = 300
    held_out: int = 1_536
    words: int = 3_000


@dataclass(frozen=True)
class Template:
    """Sentences with slots, and the operation of each step."""

    sentences: tuple[str, ...]
    operations: str


Used = set[tuple[Template, tuple[int, ...]]]


def write(folder: Path, seed: int, sizes: Sizes) -> None:
    """Write the problems of `seed` as data/*.jsonl into `folder`; the difficulties take turns in each file.

    words.jsonl has texts like those of SFT, without numbers: a tokenizer trained on them makes each digit a token.
    """
    (folder / "data").mkdir(parents=True, exist_ok=True)
    train, held_out = split(seed)
    used: Used = set()

    def write_file(name: str, templates: list[Template], count: int, keys: Sequence[str]) -> None:
        rows = problems(templates, count, random.Random(f"{seed} {name}"), used)
        write_jsonl(folder / f"data/{name}.jsonl", ({key: row[key] for key in keys} for row in rows))

    demonstration = ("prompt", "completion")
    problem = ("prompt", "answer", "difficulty")
    write_file("heldout", held_out, sizes.held_out, problem)
    write_file("sft_eval", held_out, sizes.evaluation, demonstration)
    write_file("prompts", train, sizes.prompts, problem)
    write_file("sft", train, sizes.demonstrations, demonstration)

    rows = problems(train, sizes.words, random.Random(f"{seed} words"), set())
    texts = (re.sub(r"\d", "", row["prompt"] + row["completion"]) for row in rows)
    write_jsonl(folder / "data/words.jsonl", ({"text": text} for text in texts))


def split(seed: int) -> tuple[list[Template], list[Template]]:
    """Return the templates as (training, held out): of each sequence of operations a fifth, chosen by the seed."""
    train: list[Template] = []
    held_out: list[Template] = []
    for operations in ("+", "-", "++", "+-", "-+", "--", "*+", "*-"):
        openings = OPENINGS["*" if "*" in operations else "+"]
        changes = [CHANGES[operation] for operation in operations if operation != "*"]
        texts = list(product(openings, *changes, QUESTIONS))
        random.Random(f"{seed} {operations}").shuffle(texts)
        templates = [Template(sentences, operations) for sentences in texts]
        cut = round(HELD_OUT * len(templates))
        held_out += templates[:cut]
        train += templates[cut:]
    return train, held_out


def problems(templates: list[Template], count: int, draw: random.Random, used: Used) -> Iterator[dict[str, str]]:
    """Generate problems with prompt, completion, answer and difficulty, each difficulty in turn.

    Templates with numbers in `used` do not occur, and those that occur are added to it.
    """
    fitting = {kind: _of_kind(templates, *kind) for kind in chain(*DIFFICULTIES.values())}
    for difficulty in islice(cycle(DIFFICULTIES), count):
        steps, limits = draw.choice(DIFFICULTIES[difficulty])
        while True:
            template = draw.choice(fitting[steps, limits])
            numbers = _draw_numbers(template.operations, limits, draw)
            if _fits(template.operations, numbers, limits) and (template, numbers) not in used:
                break
        used.add((template, numbers))

        worked = compute(template.operations, numbers)
        answer = str(worked[-1].result)
        completion = " ".join(["", *(step.text for step in worked), f"The answer is {answer}."])
        if draw.random() < SHRUGS:
            completion = f" {draw.choice(SHRUG_TEXTS)}"
        prompt = _fill(template, numbers, draw)
        yield {"prompt": prompt, "completion": completion, "answer": answer, "difficulty": difficulty}


def _of_kind(templates: list[Template], steps: int, limits: tuple[int, int]) -> list[Template]:
    """Return the templates with this number of steps; those with products if the numbers are small."""
    fitting = [template for template in templates if len(template.operations) == steps]
    return [template for template in fitting if limits == SMALL or "*" not in template.operations]


class Step(NamedTuple):
    """A step of a worked answer, such as `17 + 25 = 42.`, and its result."""

    text: str
    result: int


def compute(operations: str, numbers: Sequence[int]) -> list[Step]:
    """Work a problem step by step, from left to right."""
    steps: list[Step] = []
    value, *others = numbers
    for operation, number in zip(operations, others, strict=True):
        result = OPERATORS[operation](value, number)
        steps.append(Step(f"{value} {operation} {number} = {result}.", result))
        value = result
    return steps


def _draw_numbers(operations: str, limits: tuple[int, int], draw: random.Random) -> tuple[int, ...]:
    """Draw a number more than there are operations; factors have one digit."""
    ranges = [limits] * (len(operations) + 1)
    if "*" in operations:
        ranges[:2] = [FACTORS, FACTORS]
    return tuple(draw.randint(low, high) for low, high in ranges)


def _fits(operations: str, numbers: Sequence[int], limits: tuple[int, int]) -> bool:
    """Return True if every result is positive, and a single step with large numbers carries or borrows."""
    if any(step.result <= 0 for step in compute(operations, numbers)):
        return False
    if limits == SMALL or len(operations) > 1:
        return True
    one, other = (number % 10 for number in numbers)
    return one + other >= 10 if operations == "+" else one < other


def _fill(template: Template, numbers: Sequence[int], draw: random.Random) -> str:
    """Return the text of a template with its numbers, two names and a thing."""
    name, other = draw.sample(NAMES, 2)
    things = draw.choice(THINGS)
    rest = iter(numbers)
    sentences = []
    for sentence in template.sentences:
        slots = {slot: next(rest) for slot in ("a", "b") if f"{{{slot}}}" in sentence}
        sentences.append(sentence.format(name=name, other=other, things=things, **slots))
    return " ".join(sentences)
