"""`function:`: a Python function of texts, plain or async; and how any reward that reads text is asked."""

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
from rlhf_cli.ppo.rewards.source import Failed, Place, TextReward


@dataclass
class FunctionReward:
    """A Python function of (prompts, responses), two lists of text without special tokens, that returns a list of
    numbers; a coroutine is awaited.

    Raises RLHFError R05 where the function raises, returns the wrong count, or a non-number.
    """

    name: str
    function: TextReward
    tokenizer: Any

    def __call__(self, rollout: Rollout) -> Tensor:
        device = rollout.ids.device
        prompts, responses = rollout.to(torch.device("cpu")).texts(self.tokenizer)
        return torch.tensor(call_text_reward(self.name, self.function, prompts, responses), device=device)


def call_text_reward(name: str, function: TextReward, prompts: list[str], responses: list[str]) -> list[float]:
    """The function's scores as floats, one a row. Raises RLHFError R05 as FunctionReward does."""
    try:
        scores = answers(function, prompts, responses)
    except Failed as error:
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
        if not _finite(score):
            raise RLHFError(
                "R05",
                f"reward `{name}` returned {reprlib.repr(score)} for row {row} (prompt: {prompts[row][:60]!r})",
                hint="return a finite number",
            )
    return [float(score) for score in scores]


def _finite(score: Any) -> bool:
    """Whether it is a number that a float can hold."""
    try:
        return not isinstance(score, bool) and isinstance(score, Real) and math.isfinite(score)
    except OverflowError:  # a whole number above 1.8e308
        return False


def answers(function: TextReward, prompts: list[str], responses: list[str]) -> list[Any]:
    """What the function returns, as a list; what it has to be awaited for is awaited. Raises what it raises."""
    found: Any = function(prompts, responses)
    return list(_loop().run(_awaited(found)) if inspect.isawaitable(found) else found)


@cache
def _loop() -> asyncio.Runner:
    """One loop for all calls: a client that a function keeps open belongs to the loop that it was opened on."""
    return asyncio.Runner()


async def _awaited(found: Any) -> Any:
    return await found


def make(section: Any, place: Place) -> TextReward:
    """The function that `function:` names. Raises RLHFError C17."""
    return load_function(section.function, folder=place.folder, where=place.where("function"))


def load_function(spec: str, *, folder: Path | None = None, where: str | None = None) -> TextReward:
    """The function named `package.module:function`, importable from `folder` (the config's) or the working directory as
    well.

    Raises RLHFError C17 where it cannot be imported or called.
    """
    module, _, name = spec.partition(":")
    sys.path += [path for path in map(str, (folder or Path.cwd(), Path.cwd())) if path not in sys.path]
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever a user's module may raise while it is imported
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
def leaving_no_bytecode() -> Iterator[None]:
    """Within, Python leaves no compiled copy of a function's file beside it: a run that is looked at stays as it is."""
    was, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = was
