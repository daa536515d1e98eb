"""Word problems of the preset `math`, generated from a seed: worked answers for SFT, prompts with answers for PPO.

A template is an opening, one or two changes and a question. One template in five is held out: its text occurs in no
training file, though that of each of its sentences does. No template occurs twice with the same numbers, in any file.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rlhf_cli.jsonl import write_jsonl

HELD_OUT = 0.2  # of the templates
TOKENIZER_ROWS = 3_000
DIFFICULTIES = ("easy", "medium", "hard")
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jonas", "Lena", "Max")
THINGS = ("apples", "books", "coins", "cards", "eggs", "marbles", "pens", "shells", "stamps", "stones")
OPENINGS = {
    "": ("{name} has {a} {things}.", "There are {a} {things} on the table of {name}.", "{name} starts with {a} {things}."),
    "*": ("{name} has {a} boxes of {b} {things}.", "{name} fills {a} bags with {b} {things} each."),
}  # fmt: skip
CHANGES = {
    "+": ("{other} brings {b} more.", "{name} buys another {b}.", "Then {name} finds {b} more.", "{other} adds {b}."),
    "-": ("{other} takes {b} of them.", "{name} gives {b} to {other}.", "Then {name} loses {b}.", "{name} sells {b}."),
}
QUESTIONS = ("How many {things} are there now?", "How many {things} does this make?", "What is the number of {things}?")


@dataclass(frozen=True)
class Sizes:
    """Rows of the files of `write`."""

    demonstrations: int = 12_000
    prompts: int = 6_000
    evaluation: int = 300
    held_out: int = 1_536


@dataclass(frozen=True)
class Template:
    """Sentences with slots, and the operation of each step: `+`, `-`, or `*` if the opening has two numbers."""

    sentences: tuple[str, ...]
    operations: str


@dataclass(frozen=True)
class Problem:
    """A problem with a worked answer."""

    prompt: str
    worked: str
    answer: int
    difficulty: str

    @property
    def demonstration(self) -> dict[str, str]:
        """Return the row of a file of demonstrations."""
        return {"prompt": self.prompt, "completion": f" {self.worked}"}

    @property
    def row(self) -> dict[str, str]:
        """Return the row of a file of prompts."""
        return {"prompt": self.prompt, "answer": str(self.answer), "difficulty": self.difficulty}


def write(folder: Path, seed: int, sizes: Sizes) -> None:
    """Write the problems of `seed` as data/*.jsonl into `folder`; the difficulties take turns in each file.

    A completion starts with a space, so that prompt + completion is read and tokenized like running text. words.jsonl
    has the texts of SFT without numbers: a tokenizer that is trained on them makes each digit a token.
    """
    (folder / "data").mkdir(parents=True, exist_ok=True)
    train, held_out = split(seed)
    used: set[tuple[Template, tuple[int, ...]]] = set()
    for name, templates, count in (
        ("heldout", held_out, sizes.held_out), ("sft_eval", held_out, sizes.evaluation),
        ("prompts", train, sizes.prompts), ("sft", train, sizes.demonstrations),
    ):  # fmt: skip
        rows = problems(templates, count, random.Random(f"{seed} {name}"), used)
        write_jsonl(folder / f"data/{name}.jsonl", [each.demonstration if "sft" in name else each.row for each in rows])
    texts = problems(train, TOKENIZER_ROWS, random.Random(f"{seed} words"), set())
    write_jsonl(folder / "data/words.jsonl", ({"text": re.sub(r"\d", "", f"{each.prompt} {each.worked}")} for each in texts))


def split(seed: int) -> tuple[list[Template], list[Template]]:
    """Return the templates, shuffled by the seed, as (training, held out); a fifth of each sequence of operations."""
    train, held_out = [], []
    for operations in ("+", "-", "++", "+-", "-+", "--", "*+", "*-"):
        opening = OPENINGS["*" if operations[0] == "*" else ""]
        changes = [CHANGES[operation] for operation in operations if operation != "*"]
        templates = [Template(sentences, operations) for sentences in product(opening, *changes, QUESTIONS)]
        random.Random(f"{seed} {operations}").shuffle(templates)
        cut = round(HELD_OUT * len(templates))
        train += templates[cut:]
        held_out += templates[:cut]
    return train, held_out


def problems(
    templates: list[Template], count: int, draw: random.Random, used: set[tuple[Template, tuple[int, ...]]]
) -> Iterator[Problem]:
    """Generate problems of every difficulty in turn, without the pairs (template, numbers) in `used`, and add theirs."""
    for index in range(count):
        difficulty = DIFFICULTIES[index % len(DIFFICULTIES)]
        steps = draw.choice({"easy": (1,), "medium": (1, 2), "hard": (2,)}[difficulty])
        fitting = [t for t in templates if len(t.operations) == steps and (difficulty != "hard" or "*" not in t.operations)]
        while True:
            template = draw.choice(fitting)
            numbers = draw_numbers(template.operations, difficulty, draw)
            if numbers and (template, numbers) not in used:
                break
        used.add((template, numbers))
        yield fill(template, numbers, difficulty, draw)


def draw_numbers(operations: str, difficulty: str, draw: random.Random) -> tuple[int, ...]:
    """Return random numbers for the operations; none if they do not fit.

    Every result is positive. One step of medium difficulty carries or borrows a digit.
    """
    large = difficulty == "hard" or (difficulty == "medium" and len(operations) == 1)
    least, most = (11, 99) if large else (2, 20)
    numbers = [draw.randint(least, most) for _ in range(len(operations) + 1)]
    if operations[0] == "*":
        numbers[:2] = [draw.randint(2, 9), draw.randint(2, 9)]
    if any(result < 1 for _, result in compute(operations, numbers)):
        return ()
    ones = numbers[0] % 10 + numbers[1] % 10 if operations == "+" else 10 - numbers[0] % 10 + numbers[1] % 10
    return () if difficulty == "medium" and large and ones < (10 if operations == "+" else 11) else tuple(numbers)


def compute(operations: str, numbers: list[int] | tuple[int, ...]) -> list[tuple[str, int]]:
    """Return each step as text, and its result."""
    steps, value = [], numbers[0]
    for operation, number in zip(operations, numbers[1:], strict=True):
        result = {"+": value + number, "-": value - number, "*": value * number}[operation]
        steps.append((f"{value} {operation} {number} = {result}.", result))
        value = result
    return steps


def fill(template: Template, numbers: tuple[int, ...], difficulty: str, draw: random.Random) -> Problem:
    """Return the problem of a template with these numbers, and random names and things."""
    name, other = draw.sample(NAMES, 2)
    words = {"name": name, "other": other, "things": draw.choice(THINGS)}
    rest, sentences = list(numbers), []
    for sentence in template.sentences:
        slots = {slot: rest.pop(0) for slot in ("a", "b") if f"{{{slot}}}" in sentence}
        sentences.append(sentence.format(**words, **slots))
    steps = compute(template.operations, numbers)
    worked = " ".join([*(text for text, _ in steps), f"The answer is {steps[-1][1]}."])
    return Problem(" ".join(sentences), worked, steps[-1][1], difficulty)
