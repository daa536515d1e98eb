"""`builtin:`: ready reward functions. To add one, write a function and a line of READY.

Each takes its parameters by name, refuses senseless ones by ValueError, and returns a text reward. pydantic checks the
types, bounds and names that a signature tells. All of them read the response alone.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, validate_call

from rlhf_cli.errors import Problem, RLHFError, nearest
from rlhf_cli.ppo.rewards.source import Place, TextReward

Count = Annotated[int, Field(ge=0)]
Factor = Annotated[float, Field(gt=0)]
Texts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


def make(section: Any, place: Place) -> TextReward:
    """The function `builtin:` with `parameters:`. Raises RLHFError C07 for an unknown name, C17 for bad parameters."""
    name, known = section.builtin, ", ".join(READY)
    if name not in READY:
        near = nearest(name, READY)
        hint = f"did you mean {near}?" if near else "or write a Python function: function: module:name"
        raise RLHFError("C07", f'builtin "{name}" is not one of {known}', where=place.where("builtin"), hint=hint)
    strict = validate_call(config=ConfigDict(strict=True, allow_inf_nan=False))
    try:
        return strict(READY[name])(**section.parameters)
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise RLHFError.of([_problem(name, detail, place) for detail in details]) from error
    except ValueError as error:
        text = f"builtin {name}: {error}"
        raise RLHFError("C17", text, where=place.where("parameters"), hint=_takes(name)) from error


def _problem(name: str, detail: Any, place: Place) -> Problem:
    key = ".".join(str(part) for part in detail["loc"]) or "parameters"
    said = {"unexpected_keyword_argument": "there is no such parameter", "missing_keyword_only_argument": "is missing"}
    text = f"builtin {name}: {key}: {said.get(detail['type'], detail['msg'])}"
    return Problem("C17", text, place.where(f"parameters.{key}"), _takes(name))


def _takes(name: str) -> str:
    """The parameters of a ready function, as a hint."""
    names = [each for each in READY[name].__annotations__ if each != "return"]
    return f"{name} takes {', '.join(names)}; docs/rewards.md tells what they do"


def _each(score: Callable[[str], float]) -> TextReward:
    return lambda prompts, responses: [score(response) for response in responses]


def length(
    *, least: Count = 0, most: Count | None = None, unit: Literal["words", "characters"] = "words", scale: Factor = 1.0
) -> TextReward:
    """0 for a length from `least` to `most`; outside, minus the distance to it over `scale`."""
    if most is None and not least:
        raise ValueError("give least, most or both")
    if most is not None and most < least:
        raise ValueError(f"most {most} is below least {least}")

    def score(text: str) -> float:
        size = len(text) if unit == "characters" else len(text.split())
        over = 0 if most is None else max(0, size - most)
        return -(max(0, least - size) + over) / scale

    return _each(score)


def regex(*, pattern: str, whole: bool = False, ignore_case: bool = False) -> TextReward:
    """1 where the pattern (Python's re) is found, else 0; `whole`: where it matches the whole response.

    `.` matches line breaks too. White space around the response does not count.
    """
    if not pattern:
        raise ValueError("an empty pattern is found everywhere")
    try:
        compiled = re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"the pattern {pattern!r} is no regular expression: {error}") from None
    find = compiled.fullmatch if whole else compiled.search
    return _each(lambda text: float(find(text.strip()) is not None))


def keyword(*, words: Texts, most: Annotated[int, Field(gt=0)] = 1, ignore_case: bool = True) -> TextReward:
    """How often any of the words stands in the response, as words of their own, `most` times at most, over `most`."""
    if any(not word.strip() for word in words):
        raise ValueError("words holds an empty one")
    either = "|".join(re.escape(word.strip()) for word in sorted(words, key=len, reverse=True))
    found = re.compile(rf"(?<!\w)(?:{either})(?!\w)", re.IGNORECASE if ignore_case else 0)
    return _each(lambda text: min(most, len(found.findall(text))) / most)


def repetition(*, words: Annotated[int, Field(gt=0, le=100)] = 3) -> TextReward:
    """Minus the share of runs of so many words that stood in the response before; 0 for a shorter one."""

    def score(text: str) -> float:
        said = text.split()
        runs = Counter(tuple(said[place : place + words]) for place in range(len(said) - words + 1))
        return len(runs) / runs.total() - 1 if runs else 0.0

    return _each(score)


READY: dict[str, Callable[..., TextReward]] = {
    "length": length,
    "regex": regex,
    "keyword": keyword,
    "repetition": repetition,
}
