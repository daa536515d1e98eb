"""Rewards that read text: the protocol of reward sources, `function:`, `builtin:`, and how reward functions are called.

To add a built-in reward, write a function at the end of this file and add it to BUILTIN_REWARDS.
"""

import asyncio
import importlib
import inspect
import math
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
from pydantic import ConfigDict, Field, ValidationError, validate_call
from torch import Tensor

from rlhf_cli.config.ppo import RewardSource as RewardSection
from rlhf_cli.errors import Problem, RLHFError, did_you_mean
from rlhf_cli.models.batch import EnsembleScores, Rollout
from rlhf_cli.rewards.signature import RewardFn, Signature, TextRows

MODULE_OF_KIND = {"url": "http", "pipeline": "classifier"}  # other kinds: modules of rewards/ with a function `make`


class RewardSource(Protocol):
    """Scores a rollout. A source that `may_skip_rows` has this attribute, True; a plain function has none."""

    def __call__(self, rollout: Rollout) -> Tensor | EnsembleScores:
        """Return the raw score of each row, (B,) float32; NaN for none, if the source has `may_skip_rows`."""
        ...


def may_skip_rows(source: RewardSource | None) -> bool:
    """Return True if a NaN of the source is no score, rather than an error."""
    return getattr(source, "may_skip_rows", False)


@dataclass(frozen=True)
class RewardContext:
    """Location of a rewards section, and the files and options for building its reward."""

    folder: Path  # the config's
    where: Callable[[str], str]  # key of the section -> FILE:LINE
    model: Path | None = None  # folder of the model that the section names
    trust_remote_code: bool = False
    load: bool = True  # False: validate only, load no weights


def make_reward_fn(kind: str, section: RewardSection, context: RewardContext) -> RewardFn:
    """Build the reward function of a section whose key `kind` is set. Raises RLHFError C01, C06, C07, C17."""
    if kind == "function":
        assert section.function is not None
        return load_function(section.function, folder=context.folder, where=context.where("function"))
    if kind == "builtin":
        return _make_builtin(section, context)
    reward_fn: RewardFn = importlib.import_module(f"rlhf_cli.rewards.{MODULE_OF_KIND[kind]}").make(section, context)
    return reward_fn


def load_function(spec: str, *, folder: Path | None = None, where: str | None = None) -> RewardFn:
    """Import `package.module:function`; `folder` (the config's) and the working directory are on the path.

    Raises RLHFError C17 if it cannot be imported or called.
    """
    module, _, name = spec.partition(":")
    sys.path += [path for path in map(str, (folder or Path.cwd(), Path.cwd())) if path not in sys.path]
    try:
        function: RewardFn = getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may raise anything on import
        hint = "write package.module:function, of an installed package or a file beside the config"
        raise RLHFError("C17", f"cannot import `{spec}`: {error}", where=where, hint=hint) from error
    if not callable(function):
        raise RLHFError("C17", f"`{spec}` is not a function", where=where)
    return function


@contextmanager
def no_bytecode_files() -> Iterator[None]:
    """Context manager that disables .pyc files, so that inspecting a run does not change its folder."""
    previous, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = previous


@dataclass
class FunctionReward:
    """A Python function that returns a list of one number, or None for no score, per row; called as `Signature` says.

    A coroutine is awaited. Raises RLHFError R05 if the function raises, or returns a wrong count or a non-number.
    """

    name: str
    function: RewardFn
    tokenizer: Any
    may_skip_rows: ClassVar[bool] = True

    def __call__(self, rollout: Rollout) -> Tensor:
        rows = TextRows.of(rollout, self.tokenizer)
        scores = score_texts(self.name, self.function, rows, every_row=False)
        return torch.tensor([math.nan if score is None else score for score in scores], device=rollout.ids.device)


def score_texts(name: str, function: RewardFn, rows: TextRows, *, every_row: bool = True) -> list[Any]:
    """Return a finite float per row, or None unless `every_row`. Raises RLHFError R05 as FunctionReward does."""
    prompts = rows.prompts
    try:
        scores = call_reward_fn(function, rows)
    except RLHFError as error:
        (problem,) = error.problems
        raise RLHFError("R05", f"reward `{name}`: {problem.text}", hint=problem.hint) from error
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        text = f"reward `{name}` raised {type(error).__name__}: {error}"
        raise RLHFError("R05", text, hint="call it by itself on one prompt and response") from error
    if len(scores) != len(prompts):
        text = f"reward `{name}` returned {len(scores)} scores for {len(prompts)} responses"
        raise RLHFError("R05", text, hint="return one number per response")
    for row, score in enumerate(scores):
        if not (_is_finite_number(score) or (score is None and not every_row)):
            text = f"reward `{name}` returned {reprlib.repr(score)} for row {row} (prompt: {prompts[row][:60]!r})"
            raise RLHFError("R05", text, hint="return a finite number")
    return [None if score is None else float(score) for score in scores]


def _is_finite_number(score: Any) -> bool:
    """Return True if `score` is a real number that fits a float."""
    with suppress(OverflowError):  # an integer above 1.8e308
        return not isinstance(score, bool) and isinstance(score, Real) and math.isfinite(score)
    return False


def call_reward_fn(function: RewardFn, rows: TextRows) -> list[Any]:
    """Call the function, await a coroutine, and return the unchecked result as a list."""
    return awaited(Signature.of(function).call(function, rows))


def awaited(result: Any) -> list[Any]:
    """Return a function's result as a list, that of a coroutine once it is done."""
    return list(_event_loop().run(_await(result)) if inspect.isawaitable(result) else result)


@cache
def _event_loop() -> asyncio.Runner:
    """Return one event loop for all calls: a client kept open by a function belongs to the loop that opened it."""
    return asyncio.Runner()


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


# Built-in rewards. A function takes its parameters by keyword, raises ValueError for invalid combinations, and returns
# a reward function of the response. pydantic checks types, bounds and names by its signature.

PARAMETER_ERRORS = {"unexpected_keyword_argument": "is not a parameter", "missing_keyword_only_argument": "is missing"}
Count = Annotated[int, Field(ge=0)]
Factor = Annotated[float, Field(gt=0)]
Texts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


def _make_builtin(section: RewardSection, context: RewardContext) -> RewardFn:
    """Raises RLHFError C07 for an unknown name, C17 for bad parameters."""
    assert section.builtin is not None
    name, known = section.builtin, ", ".join(BUILTIN_REWARDS)
    if name not in BUILTIN_REWARDS:
        hint = did_you_mean(name, BUILTIN_REWARDS) or "or write a Python function: function: module:name"
        raise RLHFError("C07", f'builtin "{name}" is not one of {known}', where=context.where("builtin"), hint=hint)
    strict = validate_call(config=ConfigDict(strict=True, allow_inf_nan=False))
    try:
        return strict(BUILTIN_REWARDS[name])(**section.parameters)
    except ValidationError as error:
        problems = []
        for detail in error.errors(include_url=False):
            key = ".".join(str(part) for part in detail["loc"]) or "parameters"
            text = f"builtin {name}: {key}: {PARAMETER_ERRORS.get(detail['type'], detail['msg'])}"
            problems.append(Problem("C17", text, context.where(f"parameters.{key}"), _parameter_hint(name)))
        raise RLHFError.from_problems(problems) from error
    except ValueError as error:
        text = f"builtin {name}: {error}"
        raise RLHFError("C17", text, where=context.where("parameters"), hint=_parameter_hint(name)) from error


def _parameter_hint(name: str) -> str:
    """Return a hint that lists the parameters of a built-in reward."""
    parameters = [parameter for parameter in BUILTIN_REWARDS[name].__annotations__ if parameter != "return"]
    return f"{name} takes {', '.join(parameters)}; docs/rewards.md describes them"


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
        raise ValueError("an empty pattern matches everything")
    try:
        compiled = re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"the pattern {pattern!r} is not a regular expression: {error}") from None
    match = compiled.fullmatch if whole else compiled.search
    return _score_responses(lambda text: float(match(text.strip()) is not None))


def keyword(*, words: Texts, most: Annotated[int, Field(gt=0)] = 1, ignore_case: bool = True) -> RewardFn:
    """Return the number of occurrences of `words` as separate words, capped at `most`, divided by `most`."""
    if any(not word.strip() for word in words):
        raise ValueError("words contains an empty word")
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
