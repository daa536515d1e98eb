"""Which pair an annotator sees next, and what is stored of the choice; the same for page, terminal and judge."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rlhf_cli import __version__
from rlhf_cli.commands.label.store import LabelStore
from rlhf_cli.data.labels import Choice, Label
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.data.tokens import Conversation
from rlhf_cli.errors import RLHFError

# What the annotator chooses -> the choice of a label, for the answers shown in the order [0, 1] and [1, 0].
SLOTS: dict[str, tuple[Choice, Choice]] = {
    "1": ("first", "second"),
    "2": ("second", "first"),
    "tie": ("tie", "tie"),
    "bad": ("bad", "bad"),
    "skip": ("skip", "skip"),
}
MAX_TAGS, MAX_TAG_CHARACTERS = 20, 60


@dataclass(frozen=True)
class Pair:
    """Two answers to be compared."""

    name: str  # prompt's row : numbers of the answers
    prompt: str | Conversation
    answers: tuple[str, str]
    sources: tuple[str, str]
    ended: tuple[bool, bool] = (True, True)  # False: cut off at the longest length


@dataclass(frozen=True)
class Shown:
    """A pair as an annotator sees it."""

    pair: Pair
    order: tuple[int, int]

    @property
    def answers(self) -> tuple[str, str]:
        first, second = self.order
        return self.pair.answers[first], self.pair.answers[second]

    @property
    def ended(self) -> tuple[bool, bool]:
        first, second = self.order
        return self.pair.ended[first], self.pair.ended[second]


class Refused(ValueError):
    """A choice that is not stored; the message says why."""


class LabelSession:
    """The pairs to label, in their order, and the labels so far.

    With several annotators, `overlap` of the pairs are labelled by all of them, each other pair by one.
    """

    def __init__(
        self, pairs: Sequence[Pair], store: LabelStore, annotators: Sequence[str], *, overlap: float, seed: int
    ) -> None:
        self.pairs = {pair.name: pair for pair in pairs}
        self.store = store
        self.annotators = annotators
        self.seed = seed
        self._assigned = _assign(pairs, annotators, overlap)

    def next(self, annotator: str) -> Shown | None:
        """Return the annotator's next pair, None if all are labelled."""
        return next(self.pending(annotator), None)

    def pending(self, annotator: str) -> Iterator[Shown]:
        """Yield the annotator's pairs that have no label."""
        for pair in self._assigned[annotator]:
            if self.store.get(pair.name, annotator) is None:
                yield self.show(pair, annotator)

    def show(self, pair: Pair, annotator: str) -> Shown:
        """Return a pair in the order that this annotator sees it in, which depends on nothing else."""
        swapped = derive_seed(self.seed, f"label/order/{annotator}/{pair.name}") % 2
        return Shown(pair, (1, 0) if swapped else (0, 1))

    def choose(
        self,
        annotator: str,
        name: str,
        slot: str,
        *,
        seconds: float,
        tags: Sequence[str] = (),
        order: tuple[int, int] | None = None,
    ) -> Label:
        """Store a choice. The same choice sent again is stored once. `order`: another one than that of `show`.

        Raises Refused for an unknown pair or choice, or a second label; RLHFError E03 if it cannot be written.
        """
        pair = self.pairs.get(name)
        if pair is None:
            raise Refused(f"there is no pair {name!r:.40}")
        if slot not in SLOTS:
            raise Refused(f"{slot!r:.40} is not one of {', '.join(SLOTS)}")
        _require_tags(tags)

        order = order or self.show(pair, annotator).order
        choice = SLOTS[slot][order[0]]
        earlier = self.store.get(name, annotator)
        if earlier is not None:
            if earlier.choice == choice:
                return earlier
            raise Refused(f"the pair {name} has a label: {earlier.choice}; undo it first")

        label = Label(
            pair=name,
            prompt=pair.prompt,
            answers=list(pair.answers),
            sources=list(pair.sources),
            order=list(order),
            choice=choice,
            annotator=annotator,
            seconds=round(seconds, 3),
            time=round(time.time(), 3),
            ended=list(pair.ended),
            tags=list(tags),
            rlhf=__version__,
        )
        self.store.add(label)
        return label

    def undo(self, annotator: str, name: str | None = None) -> Shown | None:
        """Take back the annotator's last label and return its pair; None if there is none.

        With the pair's `name` nothing is done if its label has been taken back already: the request came twice.
        """
        last = self.store.last(annotator)
        if last is None or last.pair not in self.pairs:
            return None
        if name is None or name == last.pair:
            self.store.undo(last, round(time.time(), 3))
            return self.show(self.pairs[last.pair], annotator)
        return None

    def progress(self, annotator: str) -> "LabelProgress":
        """Return how far an annotator is."""
        assigned = self._assigned[annotator]
        done = [label for pair in assigned if (label := self.store.get(pair.name, annotator))]
        return LabelProgress(len(done), len(assigned), [label.seconds for label in done])

    @property
    def store_size(self) -> int:
        """Number of labels in the file, of all pairs and annotators."""
        return len(self.store.labels)

    @property
    def done(self) -> int:
        """Number of labels of all annotators."""
        return sum(self.progress(annotator).done for annotator in self.annotators)

    @property
    def total(self) -> int:
        """Number of labels that all annotators are to give."""
        return sum(map(len, self._assigned.values()))


@dataclass(frozen=True)
class LabelProgress:
    """Labels of one annotator."""

    done: int
    total: int
    seconds: Sequence[float]

    @property
    def an_hour(self) -> float | None:
        """Labels an hour at the usual pace: a break does not change the median of the last ones."""
        recent = [each for each in self.seconds[-50:] if each > 0]
        return 3600 / median(recent) if recent else None

    def __str__(self) -> str:
        pace = f", {self.an_hour:.0f} an hour" if self.an_hour else ""
        return f"{self.done} of {self.total} labels{pace}"


def _assign(pairs: Sequence[Pair], annotators: Sequence[str], overlap: float) -> Mapping[str, list[Pair]]:
    """Return the pairs of each annotator: evenly spaced ones for all, the others in turn."""
    assigned: dict[str, list[Pair]] = {annotator: [] for annotator in annotators}
    alone = 0
    for number, pair in enumerate(pairs):
        is_shared = int((number + 1) * overlap) > int(number * overlap)
        if is_shared or len(annotators) == 1:
            for mine in assigned.values():
                mine.append(pair)
        else:
            assigned[annotators[alone % len(annotators)]].append(pair)
            alone += 1
    return assigned


def _require_tags(tags: Any) -> None:
    """Raise Refused unless these are a few short texts."""
    are_texts = isinstance(tags, list | tuple) and all(isinstance(tag, str) for tag in tags)
    if not are_texts or len(tags) > MAX_TAGS or any(len(tag) > MAX_TAG_CHARACTERS for tag in tags):
        raise Refused(f"tags are at most {MAX_TAGS} texts of at most {MAX_TAG_CHARACTERS} characters")


def parse_annotators(text: str) -> list[str]:
    """Return the names in `a,b`. Raises RLHFError C11 for none, or one that occurs twice."""
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise RLHFError(
            "C11", f"--annotators {text}: names must differ, and none may be empty", hint="--annotators a,b"
        )
    return names
