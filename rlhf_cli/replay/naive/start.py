"""What an update starts from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlhf_cli.ppo.settings import PPOSettings

Numbers = dict[str, list[float]]  # quantity -> its numbers, by row and token, by row, or by optimizer step
Scorer = Callable[[list[list[int]], list[list[int]]], list[float]]  # prompts and responses -> one raw score a row
Step = dict[str, float]


@dataclass
class Adam:
    """What AdamW remembers of one parameter: two moments of its gradient, and how often it was updated."""

    first: Tensor
    second: Tensor
    updates: int


@dataclass(frozen=True)
class Source:
    """One source of reward: a scorer, or an ensemble of several, whose scores `combine` makes one of."""

    scorers: dict[str, Scorer]
    weight: float
    clip: float | None
    combine: str | None = None  # None where there is one scorer; else mean, min or mean_minus_std
    std_coef: float = 1.0


@dataclass
class Start:
    """What an update starts from. The models are in float64; the update changes policy and value."""

    settings: PPOSettings
    seed: int
    update: int  # updates made before this one
    updates: int  # of the whole run
    kl_coef: float
    scores_so_far: tuple[int, float, float]  # how many, their mean, their summed squared deviations from it
    policy: Any
    ref: Any
    value: Any  # a one-label sequence classifier; or a linear head on the policy's last hidden state
    value_is_head: bool
    sources: dict[str, Source]
    adam: dict[str, dict[str, Adam]]  # "policy" and "value" -> parameter name -> its state, where it has one
    ptx: Sequence[tuple[list[int], list[int]]]  # prompts and completions for the language-model loss
    prompts: list[list[int]]
    responses: list[list[int]]
    stop_token_id: int | None
    near_tie: float = 1e-3  # nats by which rounding may turn a draw

    @property
    def rows(self) -> range:
        return range(len(self.prompts))

    @property
    def policy_learns(self) -> bool:
        """The first value_only_updates of a run train the value model alone."""
        return self.update >= self.settings.value_only_updates
