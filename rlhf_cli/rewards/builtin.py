"""`builtin:`: built-in reward functions. To add one, write a function here and add it to BUILTIN_REWARDS.

A function takes its parameters by keyword, raises ValueError for invalid combinations, and returns a reward function.
pydantic checks types, bounds and names by its signature. All of them read only the response.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, validate_call

from rlhf_cli.errors import Problem, RLHFError, closest_match
from rlhf_cli.rewards.source import RewardContext, RewardFn

Count = Annotated[int, Field(ge=0)]
Factor = Annotated[float, Field(gt=0)]
Texts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


def make(section: Any, context: RewardContext) -> RewardFn:
    """Build `builtin:` with its `parameters:`. Raises RLHFError C07 for an unknown name, C17 for bad parameters."""
    name, known = section.builtin, ", ".join(BUILTIN_REWARDS)
    if name not in BUILTIN_REWARDS:
        near = closest_match(name, BUILTIN_REWARDS)
        hint = f"did you mean {near}?" if near else "or write a Python function: function: module:name"
        raise RLHFError("C07", f'builtin "{name}" is not one of {known}', where=context.where("builtin"), hint=hint)
    strict = validate_call(config=ConfigDict(strict=True, allow_inf_nan=False))
    try:
        return strict(BUILTIN_REWARDS[name])(**section.parameters)
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise RLHFError.from_problems([_problem(name, detail, context) for detail in details]) from error
    except ValueError as error:
        text = f"builtin {name}: {error}"
        raise RLHFError("C17", text, where=context.where("parameters"), hint=_parameter_hint(name)) from error


def _problem(name: str, detail: Any, context: RewardContext) -> Problem:
    key = ".".join(str(part) for part in detail["loc"]) or "parameters"
    texts = {"unexpected_keyword_argument": "there is no such parameter", "missing_keyword_only_argument": "is missing"}
    text = f"builtin {name}: {key}: {texts.get(detail['type'], detail['msg'])}"
    return Problem("C17", text, context.where(f"parameters.{key}"), _parameter_hint(name))


def _parameter_hint(name: str) -> str:
    """Return a hint that lists the parameters of a built-in reward."""
    parameters = [parameter for parameter in BUILTIN_REWARDS[name].__annotations__ if parameter != "return"]
    return f"{name} takes {', '.join(parameters)}; docs/rewards.md tells what they do"


def _score_responses(score: Callable[[str], float]) -> RewardFn:
    return lambda prompts, responses: [score(response) for response in responses]


def length(
    *, least: Count = 0, most: Count | None = None, unit: Literal["words", "characters"] = "words", scale: Factor = 1.0
) -> RewardFn:
    """Return 0 for a length in [`least`, `most`], else minus the distance to that range divided by `scale`."""
    if most is None and not least:
        raise ValueError("give least, most or both")
    if most is not None and most < least:
        raise ValueError(f"most {most} is below least {least}")

    def score(text: str) -> float:
        size = len(text) if unit == "characters" else len(text.split())
        excess = 0 if most is None else max(0, size - most)
        return -(max(0, least - size) + excess) / scale

    return _score_responses(score)


def regex(*, pattern: str, whole: bool = False, ignore_case: bool = False) -> RewardFn:
    """Return 1 if the pattern (Python's re) occurs in the response, or with `whole` matches all of it; else 0.

    `.` matches line breaks too. White space around the response is stripped.
    """
    if not pattern:
        raise ValueError("an empty pattern is found everywhere")
    try:
        compiled = re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"the pattern {pattern!r} is no regular expression: {error}") from None
    match = compiled.fullmatch if whole else compiled.search
    return _score_responses(lambda text: float(match(text.strip()) is not None))


def keyword(*, words: Texts, most: Annotated[int, Field(gt=0)] = 1, ignore_case: bool = True) -> RewardFn:
    """Return the number of occurrences of `words` as separate words, capped at `most`, divided by `most`."""
    if any(not word.strip() for word in words):
        raise ValueError("words holds an empty one")
    alternatives = "|".join(re.escape(word.strip()) for word in sorted(words, key=len, reverse=True))
    compiled = re.compile(rf"(?<!\w)(?:{alternatives})(?!\w)", re.IGNORECASE if ignore_case else 0)
    return _score_responses(lambda text: min(most, len(compiled.findall(text))) / most)


def repetition(*, words: Annotated[int, Field(gt=0, le=100)] = 3) -> RewardFn:
    """Return minus the fraction of n-grams of `words` words that repeat an earlier one; 0 without n-grams."""

    def score(text: str) -> float:
        tokens = text.split()
        ngrams = Counter(tuple(tokens[start : start + words]) for start in range(len(tokens) - words + 1))
        return len(ngrams) / ngrams.total() - 1 if ngrams else 0.0

    return _score_responses(score)


BUILTIN_REWARDS: dict[str, Callable[..., RewardFn]] = {
    "length": length,
    "regex": regex,
    "keyword": keyword,
    "repetition": repetition,
}
