"""Ratings of two scales in one source, such as 0 to 1 beside 1 to 10.

One mixture is nearly certain: all fractions are below 1, although there are whole ratings far above. Of a single scale
some of that many fractions are between its larger numbers, too, or none is in the upper half of 0 to 1: ratios such as
1/8, 1/4, 1/2, 1, 4, 8.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

from rlhf_cli import terminal
from rlhf_cli.data.readers import RowLocation
from rlhf_cli.errors import RLHFError

LEAST_WHOLE = 3  # a whole rating from here on is of a scale beyond 1
LIKELY = 3  # fractions
CERTAIN = 5  # fractions, and as many whole ratings from LEAST_WHOLE on
CERTAIN_DIFFERENT = 3  # fractions
HINT = "bring all ratings to one scale, for example those up to 1 by a factor; if all are of one, write whole numbers"


class Rated(Protocol):
    """An answer with its rating."""

    location: RowLocation
    rating: float


def check_scales(groups: Sequence[Sequence[Rated]], rating: str, *, gaps_count: bool) -> None:
    """Raise RLHFError D21 for ratings of two scales; warn (D21) where they are likely, or do no harm.

    `groups`: answers that are compared with each other; two scales in different groups do no harm, unless the size of a
    difference matters (`gaps_count`).
    """
    answers = list(chain.from_iterable(groups))
    fractions = [answer for answer in answers if not _is_whole(answer)]
    whole = [answer for answer in answers if _is_far_above_one(answer)]
    if len(fractions) < LIKELY or not whole or not _are_of_0_to_1([answer.rating for answer in fractions]):
        return

    low = fractions[0]
    high = whole[0]
    mixed = [group for group in groups if any(map(_is_far_above_one, group)) and not all(map(_is_whole, group))]
    if mixed:
        low = next(answer for answer in mixed[0] if not _is_whole(answer))
        high = next(answer for answer in mixed[0] if _is_far_above_one(answer))
    place = "the same row" if high.location == low.location else high.location.short
    text = f'"{rating}" is {low.rating:g} here and {high.rating:g} in {place}: ratings of two scales'
    if mixed:
        text += ", which are compared with each other"

    num_different = len({answer.rating for answer in fractions})
    is_certain = min(len(fractions), len(whole)) >= CERTAIN and num_different >= CERTAIN_DIFFERENT
    if is_certain and (mixed or gaps_count):
        raise RLHFError("D21", text, where=str(low.location), hint=HINT)
    terminal.warn("D21", text, where=str(low.location), hint=HINT)


def _are_of_0_to_1(fractions: Sequence[float]) -> bool:
    return min(fractions) > 0 and 0.5 < max(fractions) < 1


def _is_whole(answer: Rated) -> bool:
    return answer.rating.is_integer()


def _is_far_above_one(answer: Rated) -> bool:
    return answer.rating >= LEAST_WHOLE and _is_whole(answer)
