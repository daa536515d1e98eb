"""The protocol of a reward source, and the factory of sources that read text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from rlhf_cli.models.batch import EnsembleScores, Rollout

RewardFn = Callable[[list[str], list[str]], Sequence[float]]  # (prompts, responses) -> one score per response
# Key of a rewards section -> the module of this package whose `make` builds its reward function.
MODULES = {"function": "function", "builtin": "builtin", "url": "http", "pipeline": "classifier"}


class RewardSource(Protocol):
    def __call__(self, rollout: Rollout) -> Tensor | EnsembleScores:
        """Return the raw score of each row, (B,) float32."""
        ...


class RewardError(Exception):
    """A built-in reward source failed; `hint` is the fix. It is reported as R05 with the source's name."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class RewardContext:
    """Location of a rewards section, and the files and options for building its reward."""

    folder: Path  # the config's
    where: Callable[[str], str]  # key of the section -> FILE:LINE
    model: Path | None = None  # folder of the model that the section names
    trust_remote_code: bool = False
    load: bool = True  # False: validate only, load no weights


def make_reward_fn(kind: str, section: Any, context: RewardContext) -> RewardFn:
    """Build the reward function of a section whose key `kind` is set. Raises RLHFError C01, C06, C07, C17."""
    return import_module(f"rlhf_cli.rewards.{MODULES[kind]}").make(section, context)
