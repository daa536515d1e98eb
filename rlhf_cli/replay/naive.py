"""One PPO update the slow way: loops over rows and tokens, in float64, every formula written out with its source.

To be read from top to bottom, as the algorithm. It is written from the papers and the options' texts alone, and shares
with rlhf_cli/ppo nothing but the settings and the seeds, which say what random numbers an update draws: no padding, no
masks, no micro-batches, no caches, no optimizer of torch. Autograd and the models' own forward are taken on trust.
`draws` looks at the responses, `update` is what is made of them.

A row is an episode: a prompt and a response, lists of token ids; the response ends with its stop token, or where the
length limit cut it. Logarithms are natural, KL is in nats. `Start` is what goes in, `Numbers` what comes out.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_cli.ppo.seeds import derive
from rlhf_cli.ppo.settings import LengthRange, PPOSettings

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


def update(start: Start, tick: Callable[[], None] = lambda: None) -> Numbers:
    """The update of responses that are there: judge them, learn from them. `tick` is called after each row."""
    judged = judge(start, tick)
    steps, epochs = learn(start, judged, tick)
    return (
        judged.numbers()
        | {f"{name}, each step": [step[name] for step in steps if name in step] for name in steps[0]}
        | metrics(start, judged, steps, epochs)
    )


# 1. The responses: drawn from softmax(logits / temperature), one generator a row


def length_limit(settings: PPOSettings, seed: int, update: int) -> int:
    """Most tokens of a response of this update; drawn anew for each update where a range is given."""
    length = settings.response_length
    if not isinstance(length, LengthRange):
        return length
    return length.min + derive(seed, "length", update) % (length.max - length.min + 1)


@torch.no_grad()
def draws(start: Start, tick: Callable[[], None]) -> Numbers:
    """Each token once more, by the Gumbel trick: argmax_v (z_v / temperature + g_v), g_v = -log E_v, E_v ~ Exp(1).

    Maddison, Tarlow and Minka 2014 (arXiv 1411.0030). E is the next row of V float32 numbers of the row's
    own generator. z is of the tokens before: of a causal model one pass over the whole row gives it for all of them.
    A token that is not the largest by more than `near_tie` cannot be put down to rounding, nor can a response that goes
    on after a stop token, or breaks off before its limit: `unexplained`.
    """
    limit = length_limit(start.settings, start.seed, start.update)
    best, unexplained = [], 0
    for row in start.rows:
        generator = torch.Generator(start.policy.device).manual_seed(derive(start.seed, "sample", start.update, row))
        response = start.responses[row]
        for token, z in zip(response, response_logits(start, start.policy, row), strict=True):
            noise = torch.empty(len(z), dtype=torch.float, device=z.device).exponential_(generator=generator)
            perturbed = z / start.settings.temperature - noise.double().log()
            best.append(float(perturbed.argmax()))
            unexplained += bool(perturbed.max() - perturbed[token] > start.near_tie)
        goes_on = start.stop_token_id in response[:-1]
        breaks_off = response[-1] != start.stop_token_id and len(response) != limit
        unexplained += goes_on or breaks_off
        tick()
    return {"response tokens": best, "response tokens unexplained": [float(unexplained)]}


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


# 3. Scores


@torch.no_grad()
def model_scores(model: Any, prompts: list[list[int]], responses: list[list[int]]) -> list[float]:
    """A reward model's score of each row, at its last token that is not the reward model's padding."""
    scores = []
    for prompt, response in zip(prompts, responses, strict=True):
        row = prompt + response
        place = max((i for i, token in enumerate(row) if token != model.config.pad_token_id), default=0)
        hidden = model.base_model(input_ids=torch.tensor([row], device=model.device), use_cache=False).last_hidden_state
        scores.append(float(classified(model, hidden[0, place])))
    return scores


def function_scores(
    function: Callable[[list[str], list[str]], Sequence[float]],
    tokenizer: Any,
    prompts: list[list[int]],
    responses: list[list[int]],
) -> list[float]:
    """A Python function's score of each row, which it reads as text without special tokens."""
    texts = [[tokenizer.decode(ids, skip_special_tokens=True) for ids in side] for side in (prompts, responses)]
    return [float(score) for score in function(texts[0], texts[1])]


def combined(source: Source, opinions: list[float]) -> float:
    """An ensemble's score of a row: the mean, the least, or the mean less std_coef deviations of its members.

    Coste et al. 2023 (arXiv 2310.02743), with the deviation in place of the variance.
    """
    mean = sum(opinions) / len(opinions)
    return {
        None: mean,  # of one
        "mean": mean,
        "min": min(opinions),
        "mean_minus_std": mean - source.std_coef * math.sqrt(variance(opinions)),
    }[source.combine]


def weighted(source: Source, score: float) -> float:
    """What a source adds to the sum: its score, clipped to -clip .. clip, times its weight."""
    limit = math.inf if source.clip is None else source.clip
    return source.weight * min(max(score, -limit), limit)


def with_scores(so_far: tuple[int, float, float], scores: list[float]) -> tuple[int, float, float]:
    """Count, mean and summed squared deviations of all scores of the run, these added."""
    count, mean, squares = so_far
    total = count + len(scores)
    new_mean = (count * mean + sum(scores)) / total
    spread = squares + count * (mean - new_mean) ** 2 + sum((score - new_mean) ** 2 for score in scores)
    return total, new_mean, spread


def place(start: Start, summed: list[float], so_far: tuple[int, float, float]) -> list[float]:
    """Sum of the sources -> the score on a response's last token (PPO-OPTIONS, "Order").

    Scaled by the run's deviation so far, less its mean with use_score_norm; clipped; less missing_eos_penalty where no
    stop token came; less factor max(0, l - (L - n)) / n, l the length, L its limit (Yu et al. 2025, equation 13).
    """
    settings = start.settings
    count, mean, squares = so_far
    deviation = math.sqrt(squares / (count - 1)) if count > 1 else 0.0
    limit = length_limit(settings, start.seed, start.update)
    placed = []
    for score, response in zip(summed, start.responses, strict=True):
        if settings.use_score_scaling and deviation > 0:
            score = (score - mean if settings.use_score_norm else score) / deviation
        if settings.score_clip is not None:
            score = min(max(score, -settings.score_clip), settings.score_clip)
        if settings.missing_eos_penalty is not None and start.stop_token_id is not None and not ended(start, response):
            score -= settings.missing_eos_penalty
        if (overlong := settings.overlong_penalty) is not None:
            over = max(0, len(response) - (limit - overlong.tokens)) / overlong.tokens
            score -= overlong.factor * over
        placed.append(score)
    return placed


def ended(start: Start, response: list[int]) -> bool:
    return start.stop_token_id is not None and response[-1] == start.stop_token_id


# 4. Rewards, advantages, returns


@dataclass
class Judged:
    """Everything that is fixed before the update learns. Lists of rows, of lists of tokens where it is by token."""

    logprobs: list[list[float]]
    ref_logprobs: list[list[float]]
    values: list[list[float]]
    kl: list[list[float]]  # the chosen estimator
    opinions: dict[str, dict[str, list[float]]]  # each source's scorers' scores
    raw: dict[str, list[float]]  # each source's own score
    placed: list[float]  # what lands on the last token
    scores_so_far: tuple[int, float, float]  # these among them
    rewards: list[list[float]]
    advantages: list[list[float]]
    returns: list[list[float]]

    def numbers(self) -> Numbers:
        by_token = ("logprobs", "ref_logprobs", "values", "kl", "rewards", "advantages", "returns")
        flat = {name: [x for row in getattr(self, name) for x in row] for name in by_token}
        scores = {f"score {name}": raw for name, raw in self.raw.items()} | {"scores": self.placed}
        read = ("logprobs", "ref_logprobs", "values", "kl")
        made = ("rewards", "advantages", "returns")
        moments = {"running scores": [float(x) for x in self.scores_so_far]}
        return {n: flat[n] for n in read} | scores | moments | {n: flat[n] for n in made}


def token_kl(logprob: float, ref_logprob: float, kind: str) -> float:
    """KL(policy || reference) of a token drawn from the policy, estimated from two log-probs: r = ref - policy.

    k1 = -r, k2 = r^2 / 2, k3 = exp(r) - 1 - r (Schulman 2020, "Approximating KL divergence"), abs = |r|.
    """
    r = ref_logprob - logprob
    return {"k1": -r, "k2": r * r / 2, "k3": math.exp(r) - 1 - r, "abs": abs(r)}[kind]


def whole_kl(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """KL(policy || reference) of the next token: sum_v p_v (log p_v - log q_v)."""
    return (logp.exp() * (logp - ref_logp)).sum()


@torch.no_grad()
def judge(start: Start, tick: Callable[[], None]) -> Judged:
    """Log-probs, values, scores; then rewards, advantages and returns."""
    settings = start.settings
    logprobs, ref_logprobs, values, kl = [], [], [], []
    for row in start.rows:
        pairs = zip(response_logits(start, start.policy, row), response_logits(start, start.ref, row), strict=True)
        ours, theirs, apart = [], [], []
        for token, (z, ref_z) in zip(start.responses[row], pairs, strict=True):
            logp, ref_logp = log_softmax(z / settings.temperature), log_softmax(ref_z / settings.temperature)
            ours.append(float(logp[token]))
            theirs.append(float(ref_logp[token]))
            exact = settings.kl_estimator == "full"
            apart.append(
                float(whole_kl(logp, ref_logp)) if exact else token_kl(ours[-1], theirs[-1], settings.kl_estimator)
            )
        logprobs.append(ours)
        ref_logprobs.append(theirs)
        kl.append(apart)
        values.append(response_values(start, row).tolist())
        tick()
    opinions = {
        name: {each: score(start.prompts, start.responses) for each, score in source.scorers.items()}
        for name, source in start.sources.items()
    }
    raw = {
        name: [combined(source, [said[row] for said in opinions[name].values()]) for row in start.rows]
        for name, source in start.sources.items()
    }
    summed = [sum(weighted(source, raw[name][row]) for name, source in start.sources.items()) for row in start.rows]
    so_far = with_scores(start.scores_so_far, summed)
    placed = place(start, summed, so_far)
    rewards = [token_rewards(start, kl[row], placed[row]) for row in start.rows]
    if settings.whiten_rewards:
        rewards = whitened(rewards, keep_mean=True)
    advantages = [gae(rewards[row], values[row], settings.gamma, settings.lam) for row in start.rows]
    returns = [[a + v for a, v in zip(advantages[row], values[row], strict=True)] for row in start.rows]
    if settings.advantage_norm == "batch":
        advantages = whitened(advantages, keep_mean=False)
    return Judged(logprobs, ref_logprobs, values, kl, opinions, raw, placed, so_far, rewards, advantages, returns)


def token_rewards(start: Start, kl: list[float], score: float) -> list[float]:
    """r_t = -kl_coef KL_t, and the score on top of the last token (Ziegler et al. 2019, arXiv 1909.08593, 2.1).

    With kl_in loss the KL is no part of the reward.
    """
    coefficient = start.kl_coef if start.settings.kl_in == "reward" else 0.0
    rewards = [-coefficient * x for x in kl]
    rewards[-1] += score
    return rewards


def whitened(rows: list[list[float]], *, keep_mean: bool) -> list[list[float]]:
    """(x - mean) / sqrt(variance + 1e-8) over all tokens of the update, unbiased variance; the mean put back if asked.

    Ziegler et al. 2019's code, lm-human-preferences, `whiten`; Huang et al. 2024 (arXiv 2403.17031), section 7.
    """
    tokens = [x for row in rows for x in row]
    mean = sum(tokens) / len(tokens)
    variance = sum((x - mean) ** 2 for x in tokens) / max(len(tokens) - 1, 1)
    return [[(x - mean) / math.sqrt(variance + 1e-8) + mean * keep_mean for x in row] for row in rows]


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t, and V is 0 after the last token.

    Schulman et al. 2016 (arXiv 1506.02438), equations 11 and 16, as the double sum that it is.
    """
    length = len(rewards)
    following = [*values[1:], 0.0]
    delta = [rewards[t] + gamma * following[t] - values[t] for t in range(length)]
    return [sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, length)) for t in range(length)]


# 5. The loss of a token


def token_loss(start: Start, judged: Judged, row: int, t: int, z: Tensor, value: Tensor, ref_z: Tensor | None) -> Any:
    """The loss of response token t of a row, a scalar with gradient, and what it is made of, as numbers.

    `z` and `ref_z` (V,) are the logits before it, `value` its value, as the models are now.
    """
    settings = start.settings
    old, ref = judged.logprobs[row][t], judged.ref_logprobs[row][t]
    logp = log_softmax(z / settings.temperature)
    logprob = logp[start.responses[row][t]]
    ratio = torch.exp(logprob - old)
    surrogate, clipped = clipped_surrogate(settings, ratio, judged.advantages[row][t])
    error, value_clipped = value_error(settings, value, judged.values[row][t], judged.returns[row][t])
    entropy = -(logp.exp() * logp).sum()
    policy = surrogate - settings.entropy_coef * entropy
    if settings.kl_in == "loss":
        policy = policy + start.kl_coef * kl_loss(settings, logp, logprob, old, ref, ref_z)
    loss = settings.vf_coef * error + (policy if start.policy_learns else 0.0)
    return loss, {
        "loss/policy_avg": surrogate.item(),
        "loss/value_avg": error.item(),
        "policy/clipfrac_avg": float(clipped),
        "policy/entropy_avg": entropy.item(),
        "policy/approxkl_avg": (logprob.item() - old) ** 2 / 2,
        "policy/policykl": old - logprob.item(),
        "val/ratio": ratio.item(),
        "val/clipfrac_avg": float(value_clipped),
    }


def clipped_surrogate(settings: PPOSettings, ratio: Tensor, advantage: float) -> tuple[Tensor, bool]:
    """-min(ratio A, clip(ratio, 1 - eps, 1 + eps_high) A), and whether a bound holds (Schulman et al. 2017, eq. 7).

    eps_high is cliprange where cliprange_high is not set (Yu et al. 2025, arXiv 2503.14476, section 3.1). With
    dual_clip c and A < 0 the objective is at least c A (Ye et al. 2020, arXiv 1912.09729, equation 5).
    """
    high = settings.cliprange if settings.cliprange_high is None else settings.cliprange_high
    objective, clipped = ratio * advantage, False
    bounded = torch.clamp(ratio, 1 - settings.cliprange, 1 + high) * advantage
    if bounded < objective:
        objective, clipped = bounded, True
    if settings.dual_clip is not None and advantage < 0 and objective < settings.dual_clip * advantage:
        objective, clipped = 0 * ratio + settings.dual_clip * advantage, True
    return -objective, clipped


def value_error(settings: PPOSettings, value: Tensor, old: float, target: float) -> tuple[Tensor, bool]:
    """max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2) / 2, and whether the clipped one is the larger.

    OpenAI baselines, ppo2; Huang et al. 2024 (arXiv 2403.17031), section 7.
    """
    plain = (value - target) ** 2
    bounded = (torch.clamp(value, old - settings.cliprange_value, old + settings.cliprange_value) - target) ** 2
    return (bounded / 2, True) if bounded > plain else (plain / 2, False)


def kl_loss(
    settings: PPOSettings, logp: Tensor, logprob: Tensor, old: float, ref: float, ref_z: Tensor | None
) -> Tensor:
    """The KL penalty of kl_in loss. full: exact. k2, and k3 with k2's gradient, times the importance ratio as a number.

    grad k2 = (log pi - log ref) grad log pi, which is the KL's gradient at a token that the policy drew.
    """
    if ref_z is not None:
        return whole_kl(logp, log_softmax(ref_z / settings.temperature))
    r = ref - logprob
    loss = r * r / 2
    if settings.kl_estimator == "k3":
        loss = loss + (torch.exp(r) - 1 - r).item() - loss.item()
    return math.exp(logprob.item() - old) * loss


# 6. The update: epochs of minibatches, an optimizer step for each


def learn(start: Start, judged: Judged, tick: Callable[[], None]) -> tuple[list[Step], int]:
    """All optimizer steps of the update, and in how many epochs they were made."""
    settings = start.settings
    trainable(start)
    steps: list[Step] = []
    for epoch in range(settings.num_ppo_epochs):
        steps += [optimizer_step(start, judged, rows, epoch, tick) for rows in minibatches(start, epoch)]
        if settings.early_stopping and steps[-1]["policy/policykl"] > 1.5 * settings.target_kl:
            return steps, epoch + 1
    return steps, settings.num_ppo_epochs


def trainable(start: Start) -> None:
    """Everything of policy and value learns, but the embeddings and first layers that num_shared_layers freezes."""
    start.value.requires_grad_(True)
    start.policy.requires_grad_(True)
    if count := start.settings.num_shared_layers:
        layers = start.policy.config.get_text_config().num_hidden_layers
        for module in start.policy.modules():
            if isinstance(module, nn.Embedding):
                module.requires_grad_(False)
            if isinstance(module, nn.ModuleList) and len(module) == layers:
                for layer in module[:count]:
                    layer.requires_grad_(False)


def minibatches(start: Start, epoch: int) -> Iterator[list[int]]:
    """The rows in a random order, cut into num_mini_batches parts of one size."""
    draw = torch.Generator().manual_seed(derive(start.seed, "minibatches", start.update, epoch))
    order = torch.randperm(len(start.prompts), generator=draw).tolist()
    size = len(order) // start.settings.num_mini_batches
    for first in range(0, len(order), size):
        yield order[first : first + size]


def optimizer_step(start: Start, judged: Judged, rows: list[int], epoch: int, tick: Callable[[], None]) -> Step:
    """One minibatch: the mean loss of its response tokens, its gradient, one step of AdamW.

    None is made where the mean ratio passes ratio_threshold.
    """
    settings = start.settings
    start.policy.zero_grad(set_to_none=True)
    start.value.zero_grad(set_to_none=True)
    tokens = sum(len(start.responses[row]) for row in rows)
    means: Step = defaultdict(float)
    first_error = 0.0
    for row in rows:
        parts = row_losses(start, judged, row)
        (sum(loss for loss, _ in parts) / tokens).backward()
        for _, facts in parts:
            first_error = max(first_error, abs(facts["val/ratio"] - 1))
            for name, number in facts.items():
                means[name] += number / tokens
        tick()
    if settings.ptx_coef and start.policy_learns:
        means["loss/ptx_avg"] = language_model_loss(start, rows, epoch)
    skipped = settings.ratio_threshold is not None and means["val/ratio"] > settings.ratio_threshold
    if not skipped:
        for name, model in (("policy", start.policy), ("value", start.value)):
            means[f"{name}/grad_norm"] = clip(model, settings.max_grad_norm)
            adamw(start, name, model)
    return {**means, "ratio_error": first_error, "skipped": float(skipped)}


def row_losses(start: Start, judged: Judged, row: int) -> list[Any]:
    """(loss, its parts) of each response token of a row."""
    settings = start.settings
    with torch.set_grad_enabled(start.policy_learns):
        logits = response_logits(start, start.policy, row)
    values = response_values(start, row)
    ref_logits = None
    if settings.kl_in == "loss" and settings.kl_estimator == "full":
        with torch.no_grad():
            ref_logits = response_logits(start, start.ref, row)
    return [
        token_loss(start, judged, row, t, logits[t], values[t], None if ref_logits is None else ref_logits[t])
        for t in range(len(start.responses[row]))
    ]


def language_model_loss(start: Start, rows: list[int], epoch: int) -> float:
    """Adds the gradient of ptx_coef times the mean of -log p(token) over the completions of ptx rows.

    Ouyang et al. 2022 (arXiv 2203.02155), equation 2. A row of ptx is drawn for each episode of the minibatch.
    """
    chosen = [start.ptx[derive(start.seed, "ptx", start.update, epoch, row) % len(start.ptx)] for row in rows]
    tokens = sum(len(completion) for _, completion in chosen)
    total = 0.0
    for prompt, completion in chosen:
        ids = torch.tensor([prompt + completion], device=start.policy.device)
        logits = start.policy(input_ids=ids, use_cache=False).logits[0]
        surprise: Any = 0.0
        for t, token in enumerate(completion):
            surprise = surprise - log_softmax(logits[len(prompt) - 1 + t])[token] / tokens
        (start.settings.ptx_coef * surprise).backward()
        total += surprise.item()
    return total


def clip(model: Any, limit: float) -> float:
    """Scales a model's gradient down to the norm `limit` where it is longer; returns its norm before.

    g min(1, limit / (|g| + 1e-6)): Pascanu et al. 2013 (arXiv 1211.5063), algorithm 1, with torch's 1e-6.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = math.sqrt(sum(float((g * g).sum()) for g in gradients))
    for gradient in gradients:
        gradient *= min(1.0, limit / (norm + 1e-6))
    return norm


@torch.no_grad()
def adamw(start: Start, name: str, model: Any) -> None:
    """One step of AdamW on each parameter that has a gradient (Loshchilov and Hutter 2019, arXiv 1711.05101, alg. 2).

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2        m' = m / (1 - b1^t)        v' = v / (1 - b2^t)
    w = w - lr decay w - lr m' / (sqrt(v') + eps); biases and norms, which have one dimension, do not decay.
    """
    settings, lr = start.settings, learning_rate(start, name)
    b1, b2 = settings.adam_beta1, settings.adam_beta2
    for parameter, w in model.named_parameters():
        if (g := w.grad) is None:
            continue
        memory = start.adam[name].setdefault(parameter, Adam(torch.zeros_like(w), torch.zeros_like(w), 0))
        memory.updates += 1
        memory.first = b1 * memory.first + (1 - b1) * g
        memory.second = b2 * memory.second + (1 - b2) * g * g
        first = memory.first / (1 - b1**memory.updates)
        second = memory.second / (1 - b2**memory.updates)
        decay = settings.weight_decay if w.ndim >= 2 else 0.0
        w.copy_(w - lr * decay * w - lr * first / (second.sqrt() + settings.adam_epsilon))


def learning_rate(start: Start, name: str) -> float:
    """The rate of this update, of `policy` or `value`: its peak times the share that the named schedule has now.

    k updates were made of n, w of them warm-up, over which the share rises from 0 to 1 (transformers, optimization.py).
    The policy's schedule begins after the updates that train the value model alone.
    """
    settings = start.settings
    own = settings.value_learning_rate if name == "value" else None
    peak = settings.learning_rate if own is None else own
    alone = settings.value_only_updates if name == "policy" else 0
    k, n = max(start.update - alone, 0), start.updates - alone
    w = settings.warmup_steps if settings.warmup_steps is not None else math.ceil((settings.warmup_ratio or 0.0) * n)
    if name == "value" and settings.value_warmup_steps is not None:
        w = settings.value_warmup_steps
    if settings.lr_scheduler_type == "constant":
        return peak
    if k < w:
        return peak * k / w
    done = (k - w) / max(1, n - w)
    cosine = (1 + math.cos(math.pi * done)) / 2
    end = 1e-7 if peak > 1e-7 else 0.0  # of the polynomial one
    return {
        "constant_with_warmup": peak,
        "linear": peak * max(0.0, 1 - done),
        "cosine": peak * cosine,
        "cosine_with_min_lr": peak * (0.1 + 0.9 * cosine),
        "polynomial": (peak - end) * (1 - done) + end,
        "inverse_sqrt": peak / math.sqrt((k - w + (w or 10_000)) / (w or 10_000)),
    }[settings.lr_scheduler_type]


# 7. What an update is measured by (CONTRACT, metrics.jsonl)


def metrics(start: Start, judged: Judged, steps: list[Step], epochs: int) -> Numbers:
    """Sums over a response's tokens, means over rows; means over the optimizer steps that were made."""
    settings, rows = start.settings, len(start.prompts)
    kl, score = mean_sum(judged.kl), sum(judged.placed) / rows
    penalty = -start.kl_coef * kl if settings.kl_in == "reward" else 0.0
    r = [[p - q for p, q in zip(*pair, strict=True)] for pair in zip(judged.logprobs, judged.ref_logprobs, strict=True)]
    ends = sum(ended(start, response) for response in start.responses)
    lengths = [len(response) for response in start.responses]
    found = {
        "episode": float((start.update + 1) * rows),
        "objective/kl": kl,
        "objective/kl_k1": mean_sum(r),
        "objective/entropy": -mean_sum(judged.logprobs),
        "objective/non_score_reward": penalty,
        "objective/rlhf_reward": penalty + score,
        "objective/scores": score,
        **{f"objective/score/{name}": sum(raw) / rows for name, raw in judged.raw.items()},
        **disagreements(start, judged),
        "objective/kl_coef": start.kl_coef,
        "objective/response_length": sum(lengths) / rows,
        "objective/eos_fraction": ends / rows,
        "val/num_eos_tokens": float(ends),
        "val/explained_variance": explained_variance(judged),
        "tokens/real": float(sum(lengths) + sum(len(prompt) for prompt in start.prompts)),
        **averages(steps),
        "policy/epochs": float(epochs),
        "lr": learning_rate(start, "policy"),
        "value/lr": learning_rate(start, "value"),
        "next kl_coef": next_kl_coef(start, kl),
    }
    return {name: [number] for name, number in found.items()}


def disagreements(start: Start, judged: Judged) -> dict[str, float]:
    """Of each ensemble: its members' mean scores, and the mean over rows of the deviation between them."""
    found: dict[str, float] = {}
    for name, said in judged.opinions.items():
        if start.sources[name].combine is not None:
            found |= {f"objective/score/{name}/{each}": sum(raw) / len(raw) for each, raw in said.items()}
            apart = [math.sqrt(variance([raw[row] for raw in said.values()])) for row in start.rows]
            found[f"objective/disagreement/{name}"] = sum(apart) / len(apart)
    return found


def mean_sum(rows: list[list[float]]) -> float:
    return sum(sum(row) for row in rows) / len(rows)


def averages(steps: list[Step]) -> Step:
    """Means over the steps; those that ratio_threshold skipped are left out, unless all were."""
    made = [step for step in steps if not step["skipped"]] or steps
    found = {name: sum(step[name] for step in made) / len(made) for name in made[0]}
    if all(step["skipped"] for step in steps):
        found |= {"policy/grad_norm": 0.0, "value/grad_norm": 0.0}  # no step, no gradient taken
    found["val/ratio_var"] = sum((step["val/ratio"] - found["val/ratio"]) ** 2 for step in made) / len(made)
    found["policy/skipped_minibatches"] = sum(step["skipped"] for step in steps)
    found["policy/first_ratio_error"] = steps[0]["ratio_error"]
    return {name: number for name, number in found.items() if name not in ("ratio_error", "skipped")}


def explained_variance(judged: Judged) -> float:
    """1 - Var(R - V) / Var(R) over all tokens; 0 where the returns do not vary."""
    returns = [x for row in judged.returns for x in row]
    values = [x for row in judged.values for x in row]
    spread = variance(returns)
    return 1 - variance([r - v for r, v in zip(returns, values, strict=True)]) / spread if spread else 0.0


def variance(numbers: list[float]) -> float:
    mean = sum(numbers) / len(numbers)
    return sum((x - mean) ** 2 for x in numbers) / len(numbers)


def next_kl_coef(start: Start, kl: float) -> float:
    """kl_coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon), n the update's episodes.

    Ziegler et al. 2019, section 2.2. While the policy does not learn the KL is no answer to the coefficient.
    """
    settings = start.settings
    if not settings.adap_kl_ctrl or not start.policy_learns:
        return start.kl_coef
    error = min(max(kl / settings.target - 1, -0.2), 0.2)
    return start.kl_coef * (1 + error * len(start.prompts) / settings.horizon)
