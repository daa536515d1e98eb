"""`function:`: a Python function of texts, sync or async; calling any reward that reads text."""

import asyncio
import importlib
import inspect
import math
import reprlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.errors import RLHFError
from rlhf_cli.models.batch import Rollout
from rlhf_cli.rewards.source import RewardContext, RewardError, RewardFn


@dataclass
class FunctionReward:
    """A Python function of (prompts, responses), lists of text without special tokens, that returns a list of numbers.

    A coroutine is awaited. Raises RLHFError R05 if the function raises, or returns a wrong count or a non-number.
    """

    name: str
    function: RewardFn
    tokenizer: Any

    def __call__(self, rollout: Rollout) -> Tensor:
        device = rollout.ids.device
        prompts, responses = rollout.to(torch.device("cpu")).texts(self.tokenizer)
        return torch.tensor(score_texts(self.name, self.function, prompts, responses), device=device)


def score_texts(name: str, function: RewardFn, prompts: list[str], responses: list[str]) -> list[float]:
    """Return one finite score per response. Raises RLHFError R05 as FunctionReward does."""
    try:
        scores = call_reward_fn(function, prompts, responses)
    except RewardError as error:
        raise RLHFError("R05", f"reward `{name}`: {error}", hint=error.hint) from error
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        raise RLHFError(
            "R05",
            f"reward `{name}` raised {type(error).__name__}: {error}",
            hint="call it by itself on one prompt and response",
        ) from error
    if len(scores) != len(prompts):
        raise RLHFError(
            "R05",
            f"reward `{name}` returned {len(scores)} scores for {len(prompts)} responses",
            hint="return one number a response",
        )
    for row, score in enumerate(scores):
        if not _is_finite_number(score):
            raise RLHFError(
                "R05",
                f"reward `{name}` returned {reprlib.repr(score)} for row {row} (prompt: {prompts[row][:60]!r})",
                hint="return a finite number",
            )
    return [float(score) for score in scores]


def _is_finite_number(score: Any) -> bool:
    """Return True if `score` is a real number that fits a float."""
    try:
        return not isinstance(score, bool) and isinstance(score, Real) and math.isfinite(score)
    except OverflowError:  # an integer above 1.8e308
        return False


def call_reward_fn(function: RewardFn, prompts: list[str], responses: list[str]) -> list[Any]:
    """Call the function, await a coroutine, and return the unchecked result as a list."""
    result: Any = function(prompts, responses)
    return list(_event_loop().run(_await(result)) if inspect.isawaitable(result) else result)


@cache
def _event_loop() -> asyncio.Runner:
    """Return one event loop for all calls: a client kept open by a function belongs to the loop that opened it."""
    return asyncio.Runner()


async def _await(awaitable: Any) -> Any:
    return await awaitable


def make(section: Any, context: RewardContext) -> RewardFn:
    """Load the function that `function:` names. Raises RLHFError C17."""
    return load_function(section.function, folder=context.folder, where=context.where("function"))


def load_function(spec: str, *, folder: Path | None = None, where: str | None = None) -> RewardFn:
    """Import `package.module:function`; `folder` (the config's) and the working directory are on the path.

    Raises RLHFError C17 if it cannot be imported or called.
    """
    module, _, name = spec.partition(":")
    sys.path += [path for path in map(str, (folder or Path.cwd(), Path.cwd())) if path not in sys.path]
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may raise anything on import
        raise RLHFError(
            "C17",
            f"cannot import `{spec}`: {error}",
            where=where,
            hint="write package.module:function, of an installed package or a file beside the config",
        ) from error
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
