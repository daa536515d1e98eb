"""Rewards that read text: the protocol of reward sources, `function:`, and how reward functions are called.

Imports no torch, so that the trial of functions starts at once.
"""

import asyncio
import importlib
import inspect
import math
import reprlib
import sys
import sysconfig
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rlhf_cli.config.ppo import RewardSourceSettings
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.rewards.results import ALL_ROWS, PER_ROW, RewardFormError, as_list, is_finite_number, is_number
from rlhf_cli.rewards.signature import RewardFn, Signature, TextRows

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_cli.models.batch import EnsembleScores, Rollout

# Other kinds than `function` -> module of rewards/ with a function `make`
MODULE_OF_KIND = {"builtin": "builtin", "url": "http", "pipeline": "classifier", "openai": "judge"}
FORM_ERRORS = (TypeError, AttributeError)  # raised by a function that reads another form


class RolloutReward(Protocol):
    """Scores a rollout.

    A source may have three attributes; a plain function has none. `may_skip_rows`, True: a row may have no score.
    `splits_rows`, True: a row's score does not depend on the other rows, so each process may score a part.
    `prepare(rollout)`: called on all processes before the rollout is scored.
    """

    def __call__(self, rollout: "Rollout") -> "Tensor | EnsembleScores":
        """Return the raw score of each row, (B,) float32; NaN for none, if the source has `may_skip_rows`."""
        ...


def may_skip_rows(source: RolloutReward | None) -> bool:
    """Return True if a NaN of the source is no score, rather than an error."""
    return getattr(source, "may_skip_rows", False)


@dataclass(frozen=True)
class RewardContext:
    """Location of a rewards section, and the files and options for building its reward."""

    folder: Path  # the config's
    where: Callable[[str], str]  # key of the section -> FILE:LINE
    name: str = ""  # of the source
    run: Path = Path()  # folder of the run
    model: Path | None = None  # folder of the model that the section names
    trust_remote_code: bool = False
    load: bool = True  # False: validate only, load no weights


def make_reward_fn(kind: str, section: RewardSourceSettings, context: RewardContext) -> RewardFn:
    """Build the reward function of a section whose key `kind` is set. Raises RLHFError C01, C06, C07, C17."""
    if kind == "function":
        assert section.function is not None
        return load_function(section.function, folder=context.folder, where=context.where("function"))
    reward_fn: RewardFn = importlib.import_module(f"rlhf_cli.rewards.{MODULE_OF_KIND[kind]}").make(section, context)
    return reward_fn


def load_function(spec: str, *, folder: Path | None = None, where: str | None = None) -> RewardFn:
    """Import `package.module:function`; `folder` (the config's) and the working directory are on the path.

    Raises RLHFError C17 if it cannot be imported or called.
    """
    module, _, name = spec.partition(":")
    places = [folder or Path.cwd(), Path.cwd()]
    sys.path += [path for path in map(str, places) if path not in sys.path]
    _refuse_installed_name(module, places, where)
    try:
        function: RewardFn = getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may raise anything on import
        hint = "write package.module:function, of an installed package or a file beside the config"
        if module.endswith(".py"):
            hint = f"write the module without .py: {module.removesuffix('.py')}:{name}"
        raise RLHFError("C17", f"cannot import `{spec}`: {error}", where=where, hint=hint) from error
    if not callable(function):
        raise RLHFError("C17", f"`{spec}` is not a function", where=where)
    return function


def _refuse_installed_name(module: str, places: Sequence[Path], where: str | None) -> None:
    """Raise RLHFError C17 if a module is both installed and a file in one of `places`."""
    top = module.partition(".")[0]
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if top not in sys.stdlib_module_names and not PathFinder.find_spec(top, folders):
        return
    path = module.replace(".", "/")
    for place in places:
        for file in (place / f"{path}.py", place / path / "__init__.py"):
            if file.is_file():
                text = f"{shown(file)} has the name of an installed module, `{top}`"
                text += ", which Python would import in its place"
                raise RLHFError("C17", text, where=where, hint="rename the file, and name it here")


@contextmanager
def no_bytecode_files() -> Iterator[None]:
    """Context manager that disables .pyc files, so that inspecting a run does not change its folder."""
    previous = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = previous


@dataclass
class FunctionReward:
    """A Python function that returns a number, or None for no score, per row; called as `Signature` says.

    A coroutine is awaited. Raises RLHFError R05 if the function raises, or returns a wrong count or a non-number.
    """

    name: str
    function: RewardFn
    tokenizer: Any
    may_skip_rows: ClassVar[bool] = True

    def __call__(self, rollout: "Rollout") -> "Tensor":
        import torch

        rows = TextRows.of(rollout, self.tokenizer)
        scores = score_texts(self.name, self.function, rows, every_row=False)
        return torch.tensor([math.nan if score is None else score for score in scores], device=rollout.ids.device)


def score_texts(name: str, function: RewardFn, rows: TextRows, *, every_row: bool = True) -> list[Any]:
    """Return a finite float per row, or None unless `every_row`. Raises RLHFError R05 as FunctionReward does.

    It is a RewardFormError if the function is of another form, so that it fails for any responses.
    """
    prompts = rows.prompts
    try:
        scores = call_reward_fn(function, rows)
    except RewardFormError as error:
        (problem,) = error.problems
        raise RewardFormError(f"reward `{name}` {problem.text}", problem.hint or "") from error
    except RLHFError as error:
        (problem,) = error.problems
        raise RLHFError("R05", f"reward `{name}`: {problem.text}", hint=problem.hint) from error
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        text = f"reward `{name}` raised {type(error).__name__}: {error}"
        cause = wrong_form(function, rows.first()) if isinstance(error, FORM_ERRORS) else None
        if cause:
            reason, hint = cause
            raise RewardFormError(f"{text}; {reason}", hint) from error
        raise RLHFError("R05", text, hint="call it by itself on one prompt and response") from error

    if len(scores) != len(prompts):
        raise RewardFormError(f"reward `{name}` returned {len(scores)} scores for {len(prompts)} responses", PER_ROW)
    for row, score in enumerate(scores):
        may_be_none = score is None and not every_row
        if may_be_none or is_finite_number(score):
            continue
        text = f"reward `{name}` returned {reprlib.repr(score)} for row {row} (prompt: {prompts[row][:60]!r})"
        if score is None:
            raise RLHFError("R05", text, hint="return a finite number: judges score every row")
        if isinstance(score, float):  # another response may have a score
            raise RLHFError("R05", text, hint="return a finite number")
        raise RewardFormError(text, "return a finite number")
    return [None if score is None else float(score) for score in scores]


def wrong_form(function: RewardFn, row: TextRows) -> tuple[str, str] | None:
    """Return why a function raises for one row, with a hint, if it does not when it is called in another form."""
    signature = Signature.of(function)
    if _returns(function, *signature.arguments(row)):
        return None
    if signature.form == "TRL" and _returns(function, *signature.arguments(row.in_other_form())):
        text = "it reads prompts or completions as messages, but the prompts of the data are texts"
        hint = 'read a completion as completions[i], or write each prompt as [{"role": "user", "content": ...}]'
        if row.conversations:
            text = "it reads prompts or completions as texts, but the prompts of the data are conversations"
            hint = 'read a completion as completions[i][0]["content"]'
        return text, f"TRL passes messages for conversations, and texts for texts: {hint}"

    arguments, named = signature.arguments(row)
    one_of_each = [values[0] for values in arguments]
    one_of_named = {name: values[0] for name, values in named.items()}
    if _returns(function, one_of_each, one_of_named, one_sample=True):
        return "it is a function of one sample, as verl's compute_score", ALL_ROWS
    return None


def _returns(function: RewardFn, arguments: list[Any], named: dict[str, Any], *, one_sample: bool = False) -> bool:
    """Return True if a call returns a list, or for `one_sample` a number or a dict with `score`."""
    with suppress(Exception, SystemExit, asyncio.CancelledError):
        result = _resolved(function(*arguments, **named))
        if one_sample:
            return is_number(result) or (isinstance(result, dict) and "score" in result)
        return bool(as_list(result))
    return False


def call_reward_fn(function: RewardFn, rows: TextRows) -> list[Any]:
    """Call the function, await a coroutine, and return its scores as `as_list` does."""
    return awaited(Signature.of(function).call(function, rows))


def awaited(result: Any) -> list[Any]:
    """Return a function's result as a list, that of a coroutine once it is done."""
    return as_list(_resolved(result))


def _resolved(result: Any) -> Any:
    """Return the result of a call, that of a coroutine once it is done."""
    return _event_loop().run(_await(result)) if inspect.isawaitable(result) else result


@cache
def _event_loop() -> asyncio.Runner:
    """Return one event loop for all calls: a client kept open by a function belongs to the loop that opened it."""
    return asyncio.Runner()


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
