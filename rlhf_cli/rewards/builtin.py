"""`builtin:`: reward functions that come with rlhf, by name.

The verifiers, most of which compare a response with a column of the data, are modules of verifiers/: to add one, write
a module with a function of its name there. The others are functions of this file, in REWARDS, named in BUILTINS. Each
takes its parameters by keyword, raises ValueError for invalid combinations, and returns a reward function; pydantic
checks types, bounds and names by its signature.
"""

import importlib
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, cast

from pydantic import ConfigDict, Field, ValidationError, validate_call

from rlhf_cli.config.ppo import BUILTINS
from rlhf_cli.errors import Problem, RLHFError, did_you_mean, install_hint
from rlhf_cli.rewards import verifiers
from rlhf_cli.rewards.function import RewardContext
from rlhf_cli.rewards.signature import RewardFn

PARAMETER_ERRORS = {"unexpected_keyword_argument": "is not a parameter", "missing_keyword_only_argument": "is missing"}
Count = Annotated[int, Field(ge=0)]
Factor = Annotated[float, Field(gt=0)]
Texts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


def make(section: Any, context: RewardContext) -> RewardFn:
    """Build the reward of a section with `builtin` and `parameters`.

    Raises RLHFError C07 for an unknown name, C17 for bad parameters, E09 for a missing package.
    """
    name = section.builtin
    if name not in BUILTINS:
        hint = did_you_mean(name, BUILTINS) or "or write a Python function: function: module:name"
        text = f'builtin "{name}" is not one of {", ".join(BUILTINS)}'
        raise RLHFError("C07", text, where=context.where("builtin"), hint=hint)
    build = builder(name)
    strict = validate_call(config=ConfigDict(strict=True, allow_inf_nan=False))
    try:
        return strict(build)(**section.parameters)
    except ValidationError as error:
        problems = []
        for detail in error.errors(include_url=False):
            key = ".".join(str(part) for part in detail["loc"]) or "parameters"
            fault = PARAMETER_ERRORS.get(detail["type"], detail["msg"])
            text = f"builtin {name}: {key}: {fault}"
            problems.append(Problem("C17", text, context.where(f"parameters.{key}"), _parameter_hint(name, build)))
        raise RLHFError.from_problems(problems) from error
    except ModuleNotFoundError as error:
        text = f"builtin {name} needs the package {error.name}, which is not installed"
        raise RLHFError("E09", text, where=context.where("builtin"), hint=install_hint("verifiers")) from error
    except ValueError as error:
        text = f"builtin {name}: {error}"
        raise RLHFError("C17", text, where=context.where("parameters"), hint=_parameter_hint(name, build)) from error


def builder(name: str) -> Callable[..., RewardFn]:
    """Return the function that builds a reward from its parameters."""
    if name in REWARDS:
        return REWARDS[name]
    module = importlib.import_module(f"{verifiers.__name__}.{name}")
    return cast(Callable[..., RewardFn], getattr(module, name))


def _parameter_hint(name: str, build: Callable[..., RewardFn]) -> str:
    """Return a hint that lists the parameters of a built-in reward."""
    parameters = [parameter for parameter in build.__annotations__ if parameter != "return"]
    return f"{name} takes {', '.join(parameters)}; docs/verifiers.md describes them"


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
        missing = max(0, least - size)
        excess = 0 if most is None else max(0, size - most)
        return -(missing + excess) / scale

    return _score_responses(score)


def keyword(*, words: Texts, most: Annotated[int, Field(gt=0)] = 1, ignore_case: bool = True) -> RewardFn:
    """Return the number of occurrences of `words` as separate words, capped at `most`, divided by `most`."""
    if any(not word.strip() for word in words):
        raise ValueError("words contains an empty word")
    longest_first = sorted(words, key=len, reverse=True)
    alternatives = "|".join(re.escape(word.strip()) for word in longest_first)
    compiled = re.compile(rf"(?<!\w)(?:{alternatives})(?!\w)", re.IGNORECASE if ignore_case else 0)
    return _score_responses(lambda text: min(most, len(compiled.findall(text))) / most)


def repetition(*, words: Annotated[int, Field(gt=0, le=100)] = 3) -> RewardFn:
    """Return minus the fraction of n-grams of `words` words that repeat an earlier one; 0 without n-grams."""

    def score(text: str) -> float:
        tokens = text.split()
        starts = range(len(tokens) - words + 1)
        if not starts:
            return 0.0
        distinct = {tuple(tokens[start : start + words]) for start in starts}
        return len(distinct) / len(starts) - 1

    return _score_responses(score)


REWARDS: dict[str, Callable[..., RewardFn]] = {
    "length": length,
    "keyword": keyword,
    "repetition": repetition,
}
