"""Reference implementation: the state before an update, its responses, and the models' outputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.config.ppo_batches import LengthRange
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.data.sampling import derive_seed

Quantities = dict[str, list[float]]  # quantity -> values, by row and token, by row, or by optimizer step
Scorer = Callable[[list[list[int]], list[list[int]]], list[float]]  # prompts and responses -> one raw score per row
Step = dict[str, float]


@dataclass
class Adam:
    """AdamW's state of one parameter: two moments of its gradient, and the number of updates."""

    first: Tensor
    second: Tensor
    updates: int


@dataclass(frozen=True)
class Source:
    """A reward source: a scorer, or an ensemble whose scores are ensemble_score by `combine`."""

    scorers: dict[str, Scorer]
    weight: float
    clip: float | None
    combine: str | None = None  # None for a single scorer; else mean, min or mean_minus_std
    std_coef: float = 1.0


@dataclass
class ReferenceState:
    """The state before an update. The models are in float64; the update changes policy and value."""

    settings: PPOSettings
    seed: int
    update: int  # updates made before this one
    updates: int  # of the whole run
    kl_coef: float
    score_moments: tuple[int, float, float]  # of the run: count, mean, sum of squared deviations
    policy: Any
    ref: Any
    value: Any  # a one-label sequence classifier; or a linear head on the policy's last hidden state
    value_is_head: bool
    sources: dict[str, Source]
    adam: dict[str, dict[str, Adam]]  # "policy" and "value" -> parameter name -> its state, if any
    ptx: Sequence[tuple[list[int], list[int]]]  # prompts and completions for the language-model loss
    prompts: list[list[int]]
    responses: list[list[int]]
    stop_token_id: int | None
    near_tie: float = 1e-3  # nats: smaller gaps between two tokens may be decided by rounding

    @property
    def rows(self) -> range:
        return range(len(self.prompts))

    @property
    def policy_is_trained(self) -> bool:
        """Return False during the first value_only_updates, which train only the value model."""
        return self.update >= self.settings.value_only_updates


# 1. Responses: sampled from softmax(logits / temperature), with random numbers keyed by (row, step, token)


def length_limit(settings: PPOSettings, seed: int, update: int) -> int:
    """Return the maximum response length of this update; sampled for each update if it is a range."""
    length = settings.response_length
    if not isinstance(length, LengthRange):
        return length
    return length.min + derive_seed(seed, "length", update) % (length.max - length.min + 1)


@torch.no_grad()
def check_sampling(state: ReferenceState, tick: Callable[[], None]) -> Quantities:
    """Sample each token again by the Gumbel trick: argmax_v (z_v / temperature + g_v), g_v = -log E_v, E_v ~ Exp(1).

    Maddison, Tarlow and Minka 2014 (arXiv 1411.0030). z are the logits before the token; one pass over the row gives
    those of all its tokens. Counted as `unexplained`: a token below the maximum by more than `near_tie`, a response
    that continues after a stop token, and one that ends early without a stop token.
    """
    limit = length_limit(state.settings, state.seed, state.update)
    best, unexplained = [], 0
    for row in state.rows:
        seed, response = derive_seed(state.seed, "sample", state.update, row), state.responses[row]
        for step, z in enumerate(response_logits(state, state.policy, row)):
            token, noise = response[step], exponential(seed, step, len(z)).to(z.device)
            perturbed = z / state.settings.temperature - noise.log()
            best.append(float(perturbed.argmax()))
            unexplained += bool(perturbed.max() - perturbed[token] > state.near_tie)
        continues = state.stop_token_id in response[:-1]
        ends_early = response[-1] != state.stop_token_id and len(response) != limit
        unexplained += continues or ends_early
        tick()
    return {"response tokens": best, "response tokens unexplained": [float(unexplained)]}


def lowbias32(x: Tensor) -> Tensor:
    """Return Wellons' lowbias32 hash of unsigned 32-bit numbers, in int64."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) % 2**32
    return x ^ (x >> 16)


def exponential(seed: int, step: int, count: int) -> Tensor:
    """Return E_v ~ Exp(1) of a token, (V,) float64: -log(1 - u_v), u_v from 31 bits of a hash of (seed, step, v)."""
    low, high = torch.tensor([seed % 2**32]), torch.tensor([seed // 2**32])
    first = lowbias32(low ^ lowbias32(torch.tensor([step])))
    second = lowbias32((high + first) % 2**32)
    bits = lowbias32(((lowbias32(torch.arange(count)) ^ first) + second) % 2**32)
    return -torch.log1p(-(bits % 2**31 + 0.5) * 2.0**-31)


# 2. What the models say, one unpadded row at a time


def row_ids(state: ReferenceState, row: int) -> Tensor:
    """Return the row as a batch of one, (1, T)."""
    return torch.tensor([state.prompts[row] + state.responses[row]], device=state.policy.device)


def predicting_positions(state: ReferenceState, row: int) -> slice:
    """Return the positions of a row whose logits predict its response tokens."""
    prompt, response = len(state.prompts[row]), len(state.responses[row])
    return slice(prompt - 1, prompt + response - 1)


def response_logits(state: ReferenceState, model: Any, row: int) -> Tensor:
    """Return the logits that predict each response token, (response length, V)."""
    return model(input_ids=row_ids(state, row), use_cache=False).logits[0, predicting_positions(state, row)]


def response_values(state: ReferenceState, row: int) -> Tensor:
    """Return the value before each response token, (response length,).

    The gradient of a value head reaches the policy if the policy is trained.
    """
    body = (state.policy if state.value_is_head else state.value).base_model
    with_grad = torch.is_grad_enabled() and (state.policy_is_trained or not state.value_is_head)
    with torch.set_grad_enabled(with_grad):
        hidden = body(input_ids=row_ids(state, row), use_cache=False).last_hidden_state[
            0, predicting_positions(state, row)
        ]
    return hidden @ state.value.score.weight[0] if state.value_is_head else classifier_score(state.value, hidden)


def classifier_score(model: Any, hidden: Tensor) -> Tensor:
    """Return a classifier's score of each hidden state, normalized by its config's reward_mean and reward_std."""
    raw = model.score(hidden)[..., 0]
    return (raw - getattr(model.config, "reward_mean", 0.0)) / getattr(model.config, "reward_std", 1.0)


def log_softmax(z: Tensor) -> Tensor:
    """Return log p_v = z_v - log sum_u exp z_u of one position, (V,)."""
    largest = z.detach().max()
    return z - (largest + torch.exp(z - largest).sum().log())
