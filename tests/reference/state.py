"""What an update starts from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlhf_cli.config.ppo import LengthRange, PPOSettings
from rlhf_cli.data.sampling import derive_seed

Scorer = Callable[[list[list[int]], list[list[int]]], list[float]]  # prompts and responses -> one raw score a row


@dataclass
class Adam:
    """AdamW's state of one parameter: two moments of its gradient, and the number of updates."""

    first: Tensor
    second: Tensor
    updates: int


@dataclass(frozen=True)
class Reward:
    """A reward source: a scorer, or an ensemble."""

    scorers: dict[str, Scorer]
    weight: float
    clip: float | None
    combine: str | None = None  # None for a single scorer; else mean, min or mean_minus_std
    std_coef: float = 1.0


@dataclass
class State:
    """The state before an update. The models are in float64; the update changes policy, value, Adam and average."""

    settings: PPOSettings
    seed: int
    update: int  # updates made before this one
    updates: int  # of the whole run
    kl_coef: float
    score_moments: tuple[int, float, float]  # of the run: count, mean, sum of squared deviations
    policy: Any
    ref: Any
    value: Any  # a one-label sequence classifier; a linear head on the policy's last hidden state; None without values
    value_is_head: bool
    sources: dict[str, Reward]
    adam: dict[str, dict[str, Adam]]  # "policy" and "value" -> parameter name -> its state, if any
    average: dict[str, Tensor]  # parameter name -> average of the policy's weights; empty without one
    ptx: Sequence[tuple[list[int], list[int]]]  # prompts and completions for the language-model loss
    prompts: list[list[int]]
    responses: list[list[int]]
    drawn_logprobs: list[Tensor]  # of the response tokens, by the engine that drew them
    stop_token_ids: frozenset[int]
    near_tie: float  # nats: smaller gaps between two tokens may be decided by rounding

    @property
    def models(self) -> dict[str, Any]:
        """The trained models: the policy, and the value model if there is one."""
        models = {"policy": self.policy}
        if self.value is not None:
            models["value"] = self.value
        return models

    @property
    def rows(self) -> range:
        return range(len(self.prompts))

    @property
    def policy_is_trained(self) -> bool:
        """False during the first value_only_updates, which train only the value model."""
        return self.update >= self.settings.value_only_updates

    @property
    def length_limit(self) -> int:
        """The maximum response length of this update; sampled for each update if it is a range."""
        length = self.settings.response_length
        if not isinstance(length, LengthRange):
            return length
        return length.min + derive_seed(self.seed, "length", self.update) % (length.max - length.min + 1)

    def ended(self, row: int) -> bool:
        """Return True if a response ends with a stop token."""
        return self.responses[row][-1] in self.stop_token_ids
