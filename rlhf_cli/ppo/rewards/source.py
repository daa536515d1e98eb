"""What a source of reward is, and how one that reads text is made of its section in ppo.yaml."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from rlhf_cli.models.batch import EnsembleScores, Rollout

TextReward = Callable[[list[str], list[str]], Sequence[float]]


class RewardSource(Protocol):
    def __call__(self, rollout: Rollout) -> Tensor | EnsembleScores:
        """Raw score (B,) float32 of each row."""
        ...


class Failed(Exception):
    """A source of ours cannot give its scores; `hint` is the fix. It becomes an R05 that names the source."""

    def __init__(self, text: str, hint: str) -> None:
        super().__init__(text)
        self.hint = hint


@dataclass(frozen=True)
class Place:
    """Where a source's section stands, and what is there for it."""

    folder: Path  # the config's
    where: Callable[[str], str]  # a key of the section -> FILE:LINE
    model: Path | None = None  # the folder of the model that it names
    trust_remote_code: bool = False
    load: bool = True  # else it is only looked at: no weights are read


def make(kind: str, section: Any, place: Place) -> TextReward:
    """The text reward of a section whose key `kind` is set. Raises RLHFError C01, C06, C07, C17 for what is wrong."""
    return import_module(f"rlhf_cli.ppo.rewards.{kind}").make(section, place)
