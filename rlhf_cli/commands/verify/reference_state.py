"""What an update starts from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.config.ppo_batches import LengthRange
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.data.sampling import derive_seed

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


# 1. The responses: drawn from softmax(logits / temperature), by numbers keyed by (row, step, token)


def length_limit(settings: PPOSettings, seed: int, update: int) -> int:
    """Most tokens of a response of this update; drawn anew for each update where a range is given."""
    length = settings.response_length
    if not isinstance(length, LengthRange):
        return length
    return length.min + derive_seed(seed, "length", update) % (length.max - length.min + 1)


@torch.no_grad()
def draws(start: Start, tick: Callable[[], None]) -> Numbers:
    """Each token once more, by the Gumbel trick: argmax_v (z_v / temperature + g_v), g_v = -log E_v, E_v ~ Exp(1).

    Maddison, Tarlow and Minka 2014 (arXiv 1411.0030). z is of the tokens before: of a causal model one pass over the
    whole row gives it for all of them.
    A token that is not the largest by more than `near_tie` cannot be put down to rounding, nor can a response that goes
    on after a stop token, or breaks off before its limit: `unexplained`.
    """
    limit = length_limit(start.settings, start.seed, start.update)
    best, unexplained = [], 0
    for row in start.rows:
        seed, response = derive_seed(start.seed, "sample", start.update, row), start.responses[row]
        for step, z in enumerate(response_logits(start, start.policy, row)):
            token, noise = response[step], exponential(seed, step, len(z)).to(z.device)
            perturbed = z / start.settings.temperature - noise.log()
            best.append(float(perturbed.argmax()))
            unexplained += bool(perturbed.max() - perturbed[token] > start.near_tie)
        goes_on = start.stop_token_id in response[:-1]
        breaks_off = response[-1] != start.stop_token_id and len(response) != limit
        unexplained += goes_on or breaks_off
        tick()
    return {"response tokens": best, "response tokens unexplained": [float(unexplained)]}


def mixed(x: Tensor) -> Tensor:
    """Wellons' lowbias32 of unsigned 32-bit numbers, in int64."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) % 2**32
    return x ^ (x >> 16)


def exponential(seed: int, step: int, count: int) -> Tensor:
    """E_v ~ Exp(1) of a row's tokens, (V,) float64: -log(1 - u_v), u_v of 31 bits of a hash of (seed, step, v)."""
    low, high = torch.tensor([seed % 2**32]), torch.tensor([seed // 2**32])
    first = mixed(low ^ mixed(torch.tensor([step])))
    second = mixed((high + first) % 2**32)
    bits = mixed(((mixed(torch.arange(count)) ^ first) + second) % 2**32)
    return -torch.log1p(-(bits % 2**31 + 0.5) * 2.0**-31)


# 2. What the models say, one unpadded row at a time


def ids_of(start: Start, row: int) -> Tensor:
    """The row as a batch of one, (1, T)."""
    return torch.tensor([start.prompts[row] + start.responses[row]], device=start.policy.device)


def before_each(start: Start, row: int) -> slice:
    """The positions of a row that come before its response tokens: what stands there predicts the token after it."""
    prompt, response = len(start.prompts[row]), len(start.responses[row])
    return slice(prompt - 1, prompt + response - 1)


def response_logits(start: Start, model: Any, row: int) -> Tensor:
    """The logits that predict each response token, (response length, V)."""
    return model(input_ids=ids_of(start, row), use_cache=False).logits[0, before_each(start, row)]


def response_values(start: Start, row: int) -> Tensor:
    """The value before each response token, (response length,).

    A head on the policy reads its last hidden state, and teaches it too, where the policy learns.
    """
    body = (start.policy if start.value_is_head else start.value).base_model
    learns = torch.is_grad_enabled() and (start.policy_learns or not start.value_is_head)
    with torch.set_grad_enabled(learns):
        hidden = body(input_ids=ids_of(start, row), use_cache=False).last_hidden_state[0, before_each(start, row)]
    return hidden @ start.value.score.weight[0] if start.value_is_head else classified(start.value, hidden)


def classified(model: Any, hidden: Tensor) -> Tensor:
    """A classifier's number for each of some hidden states, on the scale that its config tells."""
    raw = model.score(hidden)[..., 0]
    return (raw - getattr(model.config, "reward_mean", 0.0)) / getattr(model.config, "reward_std", 1.0)


def log_softmax(z: Tensor) -> Tensor:
    """log p_v = z_v - log sum_u exp z_u, of one position, (V,)."""
    largest = z.detach().max()
    return z - (largest + torch.exp(z - largest).sum().log())
