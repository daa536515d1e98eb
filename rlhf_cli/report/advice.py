"""What to do about what is seen, with one voice: no key is to be raised in one place and lowered in another."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from rlhf_cli.report.differences import said
from rlhf_cli.report.runs import at

Way = Literal["raise", "lower", "set"]
# PPO's metrics, those first whose advice counts before that of the others: a policy that is not read as it wrote;
# updates that go too far; a value model that explains nothing; a policy that goes where it should not. A score that
# does not rise is last, since each of the others may be why. docs/tuning.md has the same order.
CAUSES = (
    "policy/first_ratio_error",
    "policy/skipped_minibatches", "val/ratio", "policy/approxkl_avg", "policy/clipfrac_avg", "policy/grad_norm",
    "loss/value_avg", "value/grad_norm", "val/explained_variance",
    "objective/kl_k1", "policy/entropy_avg", "objective/disagreement/NAME", "objective/repetition",
    "objective/eos_fraction", "objective/response_length",
    "objective/scores",
)  # fmt: skip


@dataclass(frozen=True)
class Move:
    """A key by its whole path, and which way it should go; `to` is what it should be set to."""

    way: Way
    key: str
    to: str = ""


@dataclass(frozen=True)
class Advice:
    """What to do: keys, each of which may help, the likeliest first, and what is to be done beside.

    `after` names the finding that comes first, where this one had wanted the opposite.
    """

    moves: tuple[Move, ...] = ()
    beside: str = ""
    after: str = ""

    def __bool__(self) -> bool:
        return bool(self.moves or self.beside)

    def text(self, config: Mapping[str, Any] | None) -> str:
        """In words, with the values that the keys have in this config."""
        told = [way + " " + " or ".join(_key(move, config) for move in moves) for way, moves in _by_way(self.moves)]
        text = "; ".join(filter(None, [", or ".join(told), self.beside]))
        first = f"\N{LEFT DOUBLE QUOTATION MARK}{self.after}\N{RIGHT DOUBLE QUOTATION MARK} comes first: "
        return first + text if self.after else text


NONE = Advice()


def _by_way(moves: Sequence[Move]) -> Iterator[tuple[str, list[Move]]]:
    for way, together in groupby(moves, key=lambda move: move.way):
        yield way, list(together)


def _key(move: Move, config: Mapping[str, Any] | None) -> str:
    now = at(config, move.key)
    if move.to:
        return f"{move.key}: {move.to}"
    return move.key if now is None or isinstance(now, Mapping) else f"{move.key} (here {said(now)})"


def one_voice(wishes: Sequence[tuple[str, Advice]]) -> list[Advice]:
    """What to do about each finding, given what it is called and what it wants alone, those that count most first.

    One that would move a key against an earlier one waits for that.
    """
    decided: dict[str, tuple[str, Move]] = {}
    heard = []
    for name, advice in wishes:
        against = (decided[move.key] for move in advice.moves if move.key in decided)
        wanted = {move.key: move.way for move in advice.moves}
        if other := next((found for found in against if found[1].way != wanted[found[1].key]), None):
            advice = Advice((other[1],), after=other[0])
        for move in advice.moves:
            decided.setdefault(move.key, (name, move))
        heard.append(advice)
    return heard
