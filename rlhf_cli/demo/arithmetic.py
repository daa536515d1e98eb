"""Word problems of the preset `math`, generated from a seed: worked answers for SFT, prompts with answers for PPO.

A template is an opening, one or two changes and a question. One template in five is held out: its text occurs in no
training file, though each of its sentences does. No template occurs twice with the same numbers, in any file.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path

from rlhf_cli.jsonl import write_jsonl

HELD_OUT = 0.2  # of the templates
SHRUGS = 0.25  # of the demonstrations: no attempt at an answer
SMALL, LARGE = (2, 15), (6, 25)  # numbers, from and to
# Difficulty -> possible (number of steps, range of numbers). One step with large numbers carries or borrows a digit.
DIFFICULTIES = {"easy": [(1, SMALL)], "medium": [(1, LARGE), (2, SMALL)], "hard": [(2, LARGE)]}
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
    demonstration, problem = ("prompt", "completion"), ("prompt", "answer", "difficulty")
    for name, templates, count, keys in (
        ("heldout", held_out, sizes.held_out, problem),
        ("sft_eval", held_out, sizes.evaluation, demonstration),
        ("prompts", train, sizes.prompts, problem),
        ("sft", train, sizes.demonstrations, demonstration),
    ):
        rows = problems(templates, count, random.Random(f"{seed} {name}"), used)
        write_jsonl(folder / f"data/{name}.jsonl", ({key: row[key] for key in keys} for row in rows))
    rows = problems(train, sizes.words, random.Random(f"{seed} words"), set())
    texts = (re.sub(r"\d", "", row["prompt"] + row["completion"]) for row in rows)
    write_jsonl(folder / "data/words.jsonl", ({"text": text} for text in texts))


def split(seed: int) -> tuple[list[Template], list[Template]]:
    """Return the templates as (training, held out): of each sequence of operations a fifth, chosen by the seed."""
    train, held_out = [], []
    for operations in ("+", "-", "++", "+-", "-+", "--", "*+", "*-"):
        changes = [CHANGES[operation] for operation in operations if operation != "*"]
        texts = list(product(OPENINGS["*" if "*" in operations else "+"], *changes, QUESTIONS))
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
    fitting = {
        kind: [t for t in templates if len(t.operations) == kind[0] and ("*" not in t.operations or kind[1] == SMALL)]
        for kinds in DIFFICULTIES.values()
        for kind in kinds
    }
    for difficulty, _ in zip(cycle(DIFFICULTIES), range(count), strict=False):
        steps, limits = draw.choice(DIFFICULTIES[difficulty])
        while True:
            template = draw.choice(fitting[steps, limits])
            numbers = _draw_numbers(template.operations, limits, draw)
            if _fits(template.operations, numbers, limits) and (template, numbers) not in used:
                break
        used.add((template, numbers))
        worked = compute(template.operations, numbers)
        answer = str(worked[-1][1])
        completion = " ".join(["", *(text for text, _ in worked), f"The answer is {answer}."])
        if draw.random() < SHRUGS:
            completion = f" {draw.choice(('I do not know.', 'That is hard to say.', 'Who can tell?'))}"
        prompt = _fill(template, numbers, draw)
        yield {"prompt": prompt, "completion": completion, "answer": answer, "difficulty": difficulty}


def compute(operations: str, numbers: Sequence[int]) -> list[tuple[str, int]]:
    """Return the text of each step, such as `17 + 25 = 42.`, and its result."""
    steps, value = [], numbers[0]
    for operation, number in zip(operations, numbers[1:], strict=True):
        result = {"+": value + number, "-": value - number, "*": value * number}[operation]
        steps.append((f"{value} {operation} {number} = {result}.", result))
        value = result
    return steps


def _draw_numbers(operations: str, limits: tuple[int, int], draw: random.Random) -> tuple[int, ...]:
    factors = [draw.randint(2, 9) for _ in range(2)] if "*" in operations else []
    return (*factors, *(draw.randint(*limits) for _ in range(len(operations) + 1 - len(factors))))


def _fits(operations: str, numbers: Sequence[int], limits: tuple[int, int]) -> bool:
    """Return True if every result is positive, and a single step with large numbers carries or borrows."""
    one, other = numbers[0] % 10, numbers[1] % 10
    carries = one + other >= 10 if operations == "+" else one < other
    positive = all(result > 0 for _, result in compute(operations, numbers))
    return positive and (carries or limits == SMALL or len(operations) > 1)


def _fill(template: Template, numbers: Sequence[int], draw: random.Random) -> str:
    name, other = draw.sample(NAMES, 2)
    words = {"name": name, "other": other, "things": draw.choice(THINGS)}
    rest, sentences = list(numbers), []
    for sentence in template.sentences:
        slots = {slot: rest.pop(0) for slot in ("a", "b") if f"{{{slot}}}" in sentence}
        sentences.append(sentence.format(**words, **slots))
    return " ".join(sentences)
