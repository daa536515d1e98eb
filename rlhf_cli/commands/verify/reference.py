"""Reference implementation of a PPO update: a loop over rows, in float64, each formula with its source.

Its numbered sections read as the algorithm: responses, model outputs, scores, rewards and advantages (1 to 4: here),
losses, optimizer steps and metrics (5 to 7: reference_update). It is written from the papers and the options' help
texts, and shares only the settings and random seeds with rlhf_cli/ppo: no padding, masks, micro-batches, caches or
torch optimizer. It relies on autograd and the models' own forward().

A row is an episode: a prompt and a response, lists of token ids. T is the number of its response tokens, V the size of
the vocabulary. Logarithms are natural, KL is in nats. Tensors are on the CPU.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev, stdev
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.config.ppo import LengthRange, PPOSettings
from rlhf_cli.data.sampling import derive_seed

Quantities = dict[str, Any]  # quantity -> values, by row and token, by row, or by optimizer step
Scorer = Callable[[list[list[int]], list[list[int]]], list[float]]  # prompts and responses -> one raw score per row


@dataclass
class Adam:
    """AdamW's state of one parameter: two moments of its gradient, and the number of updates."""

    first: Tensor
    second: Tensor
    updates: int


@dataclass(frozen=True)
class ReferenceReward:
    """A reward source: a scorer, or an ensemble."""

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
    value: Any  # a one-label sequence classifier; a linear head on the policy's last hidden state; None without values
    value_is_head: bool
    sources: dict[str, ReferenceReward]
    adam: dict[str, dict[str, Adam]]  # "policy" and "value" -> parameter name -> its state, if any
    ptx: Sequence[tuple[list[int], list[int]]]  # prompts and completions for the language-model loss
    prompts: list[list[int]]
    responses: list[list[int]]
    drawn_logprobs: list[Tensor]  # of the response tokens, by the engine that drew them; empty if another drew them
    stop_token_ids: frozenset[int]
    average: dict[str, Tensor]  # parameter name -> average of the policy's weights; empty without one
    near_tie: float = 1e-3  # nats: smaller gaps between two tokens may be decided by rounding

    @property
    def models(self) -> dict[str, Any]:
        """Return the trained models: the policy, and the value model if there is one."""
        return {name: model for name in ("policy", "value") if (model := getattr(self, name)) is not None}

    @property
    def policy_is_trained(self) -> bool:
        """Return False during the first value_only_updates, which train only the value model."""
        return self.update >= self.settings.value_only_updates


# 1. Responses: sampled from softmax(logits / temperature), with random numbers keyed by (row, step, token)


def length_limit(state: ReferenceState) -> int:
    """Return the maximum response length of this update; sampled for each update if it is a range."""
    length = state.settings.response_length
    if not isinstance(length, LengthRange):
        return length
    return length.min + derive_seed(state.seed, "length", state.update) % (length.max - length.min + 1)


@torch.no_grad()
def check_sampling(state: ReferenceState, tick: Callable[[], None]) -> Quantities:
    """Sample each token again by the Gumbel trick: argmax_v (z_v / temperature + g_v), g_v = -log E_v, E_v ~ Exp(1).

    Maddison, Tarlow and Minka 2014 (arXiv 1411.0030). z are the logits before the token; one pass over the row gives
    those of all its tokens. Counted as `unexplained`: a token below the maximum by more than `near_tie`, a response
    that continues after a stop token, and one that ends early without a stop token.
    """
    best, unexplained = [], 0
    for row, response in enumerate(state.responses):
        seed = derive_seed(state.seed, "sample", state.update, row)
        for step, z in enumerate(response_logits(state.policy, state.prompts[row], response)):
            perturbed = z / state.settings.temperature - exponential(seed, step, len(z)).log()
            best.append(int(perturbed.argmax()))
            unexplained += bool(perturbed.max() - perturbed[response[step]] > state.near_tie)
        continues = not state.stop_token_ids.isdisjoint(response[:-1])
        ends_early = not ended(state, response) and len(response) != length_limit(state)
        unexplained += continues or ends_early
        tick()
    return {"response tokens": best, "response tokens unexplained": [unexplained]}


def lowbias32(x: Tensor) -> Tensor:
    """Return Wellons' lowbias32 hash of unsigned 32-bit numbers, in int64."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) % 2**32
    return x ^ (x >> 16)


def exponential(seed: int, step: int, count: int) -> Tensor:
    """Return E_v ~ Exp(1) of a token, (V,) float64: -log(1 - u_v), u_v from 31 bits of a hash of (seed, step, v)."""
    low = torch.tensor([seed % 2**32])
    high = torch.tensor([seed // 2**32])
    first = lowbias32(low ^ lowbias32(torch.tensor([step])))
    second = lowbias32((high + first) % 2**32)

    tokens = lowbias32(torch.arange(count))
    bits = lowbias32(((tokens ^ first) + second) % 2**32)
    uniform = (bits % 2**31 + 0.5) * 2.0**-31
    return -torch.log1p(-uniform)


# 2. Model outputs, one unpadded row at a time


def row_ids(prompt: list[int], response: list[int], model: Any) -> Tensor:  # (1, P + T)
    return torch.tensor([prompt + response], device=model.device)


def response_logits(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """Return the logits that predict each response token, (T, V)."""
    logits: Tensor = model(input_ids=row_ids(prompt, response, model), use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1].cpu()


def response_values(state: ReferenceState, row: int) -> Tensor:
    """Return the value before each response token, (T,).

    The gradient of a value head reaches the policy if the policy is trained.
    """
    body = (state.policy if state.value_is_head else state.value).base_model
    body = getattr(body, "model", body)  # of Llama 4 the base model has a head
    ids = row_ids(state.prompts[row], state.responses[row], body)
    with_grad = torch.is_grad_enabled() and (state.policy_is_trained or not state.value_is_head)
    with torch.set_grad_enabled(with_grad):
        hidden = body(input_ids=ids, use_cache=False).last_hidden_state[0, len(state.prompts[row]) - 1 : -1]
    score = hidden @ state.value.score.weight[0] if state.value_is_head else classifier_score(state.value, hidden)
    return score.cpu()


def classifier_score(model: Any, hidden: Tensor) -> Tensor:
    """Return a classifier's score of each hidden state, normalized by its config's reward_mean and reward_std."""
    raw: Tensor = model.score(hidden)[..., 0]
    return (raw - getattr(model.config, "reward_mean", 0.0)) / getattr(model.config, "reward_std", 1.0)


def log_probs(state: ReferenceState, model: Any, row: int) -> Tensor:
    """Return the log-probabilities of each response token's alternatives at the sampling temperature, (T, V)."""
    logits = response_logits(model, state.prompts[row], state.responses[row])
    return torch.log_softmax(logits / state.settings.temperature, -1)


def of_tokens(logp: Tensor, tokens: list[int]) -> Tensor:
    """Return the log-probabilities of the tokens, (T,), among those of all alternatives, (T, V)."""
    return logp[range(len(tokens)), tokens]


# 3. Scores


@torch.no_grad()
def model_scores(
    model: Any,
    end_token_ids: Sequence[int],
    closing_ids: Sequence[int],
    prompts: list[list[int]],
    responses: list[list[int]],
) -> list[float]:
    """Return a reward model's score of each row, at its last token, as if it ended with the first end token.

    After a conversation, whose turns end with it too, `closing_ids` follow it.
    A model whose padding is this token, or that has none, is read at the last token that is not its padding.
    """
    end, others = next(iter(end_token_ids), None), end_token_ids[1:]
    pad = model.config.get_text_config().pad_token_id
    scores = []
    for prompt, response in zip(prompts, responses, strict=True):
        row = prompt + response
        if end is not None and row[-1] in others:
            row[-1] = end
        if row[-1] == end and end in prompt:
            row += closing_ids
        last = len(row) - 1
        if end is None or end == pad:
            last = max((i for i, token in enumerate(row) if token != pad), default=0)
        hidden = model.base_model(input_ids=row_ids(row, [], model), use_cache=False).last_hidden_state
        scores.append(float(classifier_score(model, hidden[0, last])))
    return scores


def function_scores(score: Any, tokenizer: Any, prompts: list[list[int]], responses: list[list[int]]) -> list[float]:
    """Return a function's score of each row, decoded without special tokens; NaN for None."""
    texts = [[tokenizer.decode(ids, skip_special_tokens=True) for ids in side] for side in (prompts, responses)]
    return [math.nan if value is None else float(value) for value in score(*texts, responses)]


def ensemble_score(source: ReferenceReward, scores: Sequence[float]) -> float:
    """Return an ensemble's score of a row: its members' mean, minimum, or mean - std_coef * standard deviation.

    Coste et al. 2023 (arXiv 2310.02743), with the standard deviation instead of the variance.
    """
    if source.combine == "min":
        return min(scores)
    return fmean(scores) - (source.std_coef * pstdev(scores) if source.combine == "mean_minus_std" else 0.0)


def weighted_sum(state: ReferenceState, raw: Mapping[str, list[float]], row: int) -> float:
    """Return the sum of a row's scores by its sources: each clipped to -clip .. clip, times its weight.

    A NaN is no score: the source does not count for the row.
    """
    total = 0.0
    for name, source in state.sources.items():
        if math.isnan(raw[name][row]):
            continue
        limit = math.inf if source.clip is None else source.clip
        total += source.weight * min(max(raw[name][row], -limit), limit)
    return total


def update_moments(moments: tuple[int, float, float], scores: list[float]) -> tuple[int, float, float]:
    """Add scores to the run's moments: count, mean and sum of squared deviations."""
    count, mean, squares = moments
    total = count + len(scores)
    new_mean = (count * mean + sum(scores)) / total
    spread = squares + count * (mean - new_mean) ** 2 + sum((score - new_mean) ** 2 for score in scores)
    return total, new_mean, spread


def final_scores(state: ReferenceState, summed: list[float], moments: tuple[int, float, float]) -> list[float]:
    """Turn the sum of the sources into the score on a response's last token.

    In this order: minus the run's mean (use_score_norm), over its standard deviation; clipped; minus
    missing_eos_penalty if there is no stop token; minus factor * max(0, l - (L - n)) / n, with the length l and its
    limit L (Yu et al. 2025, equation 13).
    """
    settings = state.settings
    count, mean, squares = moments
    deviation = math.sqrt(squares / (count - 1)) if count > 1 else 0.0
    scores = []
    for score, response in zip(summed, state.responses, strict=True):
        if settings.use_score_scaling and deviation > 0:
            score = (score - mean if settings.use_score_norm else score) / deviation
        if settings.score_clip is not None:
            score = min(max(score, -settings.score_clip), settings.score_clip)
        if settings.missing_eos_penalty is not None and state.stop_token_ids and not ended(state, response):
            score -= settings.missing_eos_penalty
        if (overlong := settings.overlong_penalty) is not None:
            over = max(0, len(response) - (length_limit(state) - overlong.tokens))
            score -= overlong.factor * over / overlong.tokens
        scores.append(score)
    return scores


def ended(state: ReferenceState, response: list[int]) -> bool:
    return response[-1] in state.stop_token_ids


# 4. Rewards, advantages, returns


@dataclass
class ReferenceExperience:
    """Everything computed before the optimizer steps. Quantities of tokens are tensors (T,), one for each row."""

    logprobs: list[Tensor]
    ref_logprobs: list[Tensor]
    values: list[Tensor]  # empty without a value model
    kl: list[Tensor]  # by kl_estimator
    member_scores: dict[str, dict[str, list[float]]]  # source -> scorer -> score of each row
    raw: dict[str, list[float]]  # source -> score of each row
    scores: list[float]  # on the last token
    score_moments: tuple[int, float, float]  # these among them
    rewards: list[Tensor]
    advantages: list[Tensor]
    returns: list[Tensor]  # empty without a value model

    @property
    def scored(self) -> dict[str, list[float]]:
        """Return the scores of each source, without those of the rows that it does not score."""
        return {name: [score for score in raw if not math.isnan(score)] for name, raw in self.raw.items()}

    def quantities(self) -> Quantities:
        """Return the quantities, in the order in which they are computed."""
        outputs, targets = (
            {name: torch.cat(rows) for name in names if (rows := getattr(self, name))}
            for names in (("logprobs", "ref_logprobs", "values", "kl"), ("rewards", "advantages", "returns"))
        )
        scores = {f"score {name}": raw for name, raw in self.scored.items()} | {"scores": self.scores}
        return outputs | scores | {"running scores": self.score_moments} | targets


def token_kl(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) at tokens sampled from the policy, from two log-probs: r = ref - policy.

    k1 = -r, k2 = r^2 / 2, k3 = exp(r) - 1 - r (Schulman 2020, "Approximating KL divergence"), abs = |r|.
    """
    r = ref_logprobs - logprobs
    return {"k1": -r, "k2": r * r / 2, "k3": torch.exp(r) - 1 - r, "abs": abs(r)}[kind]


def full_kl(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Return the exact KL(policy || reference) of each next token: sum_v p_v (log p_v - log q_v)."""
    return (logp.exp() * (logp - ref_logp)).sum(-1)


@torch.no_grad()
def make_experience(state: ReferenceState, tick: Callable[[], None]) -> ReferenceExperience:
    """Compute log-probs, values and scores; then rewards, advantages and returns."""
    settings, rows = state.settings, range(len(state.prompts))
    logprobs, ref_logprobs, values, kl = [], [], [], []
    for row, response in enumerate(state.responses):
        logp, ref_logp = (log_probs(state, model, row) for model in (state.policy, state.ref))
        logprobs.append(of_tokens(logp, response))
        ref_logprobs.append(of_tokens(ref_logp, response))
        if settings.kl_estimator == "full":
            kl.append(full_kl(logp, ref_logp))
        else:
            kl.append(token_kl(logprobs[row], ref_logprobs[row], settings.kl_estimator))
        values += [] if state.value is None else [response_values(state, row)]
        tick()
    member_scores = {
        name: {member: scorer(state.prompts, state.responses) for member, scorer in source.scorers.items()}
        for name, source in state.sources.items()
    }
    raw = {
        name: [ensemble_score(source, scores) for scores in zip(*member_scores[name].values(), strict=True)]
        for name, source in state.sources.items()
    }
    summed = [weighted_sum(state, raw, row) for row in rows]
    moments = update_moments(state.score_moments, summed)
    scores = final_scores(state, summed, moments)
    rewards = [token_rewards(state, kl[row], scores[row]) for row in rows]
    if settings.whiten_rewards:
        rewards = whitened(rewards, keep_mean=True)
    if state.value is None:
        advantages, returns = group_advantages(state, rewards), []
    else:
        advantages = [gae(rewards[row], values[row], settings.gamma, settings.lam) for row in rows]
        returns = [advantages[row] + values[row] for row in rows]
    if settings.advantage_norm == "batch":
        advantages = whitened(advantages, keep_mean=False)
    return ReferenceExperience(
        logprobs, ref_logprobs, values, kl, member_scores, raw, scores, moments, rewards, advantages, returns
    )


def token_rewards(state: ReferenceState, kl: Tensor, score: float) -> Tensor:
    """Return r_t = -kl_coef KL_t, plus the score at the last token (Ziegler et al. 2019, arXiv 1909.08593, 2.1).

    With kl_in loss the reward has no KL term.
    """
    rewards = -kl * (state.kl_coef if state.settings.kl_in == "reward" else 0.0)
    rewards[-1] += score
    return rewards


def whitened(rows: list[Tensor], *, keep_mean: bool) -> list[Tensor]:
    """Return (x - mean) / sqrt(variance + 1e-8) over all tokens, unbiased variance; plus the mean with keep_mean.

    Ziegler et al. 2019's code, lm-human-preferences, `whiten`; Huang et al. 2024 (arXiv 2403.17031), section 7.
    """
    tokens = torch.cat(rows)
    mean = tokens.mean()
    variance = ((tokens - mean) ** 2).sum() / max(len(tokens) - 1, 1)
    return [(x - mean) / torch.sqrt(variance + 1e-8) + mean * keep_mean for x in rows]


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """Return A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t, V = 0 after the last token.

    Schulman et al. 2016 (arXiv 1506.02438), equations 11 and 16, as a double sum.
    """
    steps = range(len(rewards))
    following = torch.cat([values[1:], torch.zeros(1)])
    delta = (rewards + gamma * following - values).tolist()
    return torch.tensor([sum((gamma * lam) ** (s - t) * delta[s] for s in steps[t:]) for t in steps])


def group_advantages(state: ReferenceState, rewards: list[Tensor]) -> list[Tensor]:
    """Return the advantage of each response, at all its tokens, by the returns of the responses to its prompt.

    rloo: the return minus the mean of the others (Ahmadian et al. 2024, arXiv 2402.14740). grpo: (return - mean) / (std
    + 1e-4) with the unbiased standard deviation (Shao et al. 2024, arXiv 2402.03300, section 4.1.2; TRL's 1e-4).
    """
    returns, samples = [float(row.sum()) for row in rewards], state.settings.num_samples_per_prompt
    advantages = []
    for row, own in enumerate(returns):
        first = row - row % samples
        group = returns[first : first + samples]
        if state.settings.advantage == "rloo":
            others = [group[i] for i in range(samples) if first + i != row]
            advantage = own - fmean(others)
        else:
            advantage = (own - fmean(group)) / (stdev(group) + 1e-4)
        advantages.append(torch.full_like(rewards[row], advantage))
    return advantages
