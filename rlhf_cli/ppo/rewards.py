"""Sources that score responses. A source is any callable `Rollout -> (B,) float32`, or -> Opinions of an ensemble;
to add a kind, add a class here.
"""

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhf_cli.errors import RLHFError
from rlhf_cli.models import packing, reading
from rlhf_cli.ppo.records import Opinions, Rollout

TextReward = Callable[[list[str], list[str]], Sequence[float]]


class RewardSource(Protocol):
    def __call__(self, rollout: Rollout) -> Tensor | Opinions:
        """Raw score (B,) float32 of each row."""
        ...


@dataclass
class ModelReward:
    """A one-label sequence classifier that shares the policy's tokenizer:

    it reads the rollout's own ids, at the last real token. `packed`: its rows end to end, where the model can
    (models/packing.py).
    """

    model: Any
    max_rows: int = 64
    max_tokens: int | None = None
    packed: bool = True

    def __post_init__(self) -> None:
        self.packed = self.packed and packing.enable([self.model])

    def __call__(self, rollout: Rollout) -> Tensor:
        return reading.rollout_scores(self.model, rollout, max_rows=self.max_rows, max_tokens=self.max_tokens)


@dataclass
class EnsembleReward:
    """Several reward models as one source: `combine` is a key of COMBINE (Coste et al. 2023, arXiv 2310.02743)."""

    members: dict[str, ModelReward]
    combine: str = "mean"
    std_coef: float = 1.0

    def __call__(self, rollout: Rollout) -> Opinions:
        scores = {name: member(rollout) for name, member in self.members.items()}
        opinions = Opinions(torch.stack(list(scores.values())).mean(0), scores)
        return replace(opinions, score=COMBINE[self.combine](opinions, self.std_coef))


COMBINE: dict[str, Callable[[Opinions, float], Tensor]] = {
    "mean": lambda opinions, _: opinions.score,
    "min": lambda opinions, _: torch.stack(list(opinions.members.values())).amin(0),
    "mean_minus_std": lambda opinions, std_coef: opinions.score - std_coef * opinions.disagreement,
}


@dataclass
class FunctionReward:
    """A Python function of (prompts, responses), two lists of text without special tokens, that returns a list of
    numbers.

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
        scores = list(function(prompts, responses))
    except (Exception, SystemExit) as error:
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
        if isinstance(score, bool) or not isinstance(score, Real) or not math.isfinite(score):
            raise RLHFError(
                "R05",
                f"reward `{name}` returned {score!r} for row {row} (prompt: {prompts[row][:60]!r})",
                hint="return a finite number",
            )
    return [float(score) for score in scores]


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
