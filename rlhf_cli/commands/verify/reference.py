"""Reference implementation of a PPO update: loops over rows and tokens, in float64, each formula with its source.

Its numbered sections read as the algorithm: responses (1, 2: reference_state), scores, rewards and advantages (3, 4:
reference_scores), losses and optimizer steps (5, 6: reference_update), metrics (7: here). It is written from the papers
and the options' help texts, and shares only the settings and random seeds with rlhf_cli/ppo: no padding, masks,
micro-batches, caches or torch optimizer. It relies on autograd and the models' own forward().

A row is an episode: a prompt and a response, lists of token ids. Logarithms are natural, KL is in nats.
"""

import math
from collections.abc import Callable

from rlhf_cli.commands.verify.reference_scores import Experience, ended, make_experience, variance
from rlhf_cli.commands.verify.reference_state import Quantities, ReferenceState, Step
from rlhf_cli.commands.verify.reference_update import learning_rate, run_optimizer_steps

# 7. Metrics of an update (metrics.jsonl)


def metrics(state: ReferenceState, experience: Experience, steps: list[Step], epochs: int) -> Quantities:
    """Return the metrics: sums over a response's tokens, means over rows and over the optimizer steps."""
    settings, rows = state.settings, len(state.prompts)
    kl, score = mean_sum(experience.kl), sum(experience.scores) / rows
    kl_penalty = -state.kl_coef * kl if settings.kl_in == "reward" else 0.0
    pairs = zip(experience.logprobs, experience.ref_logprobs, strict=True)
    log_ratios = [[p - q for p, q in zip(*pair, strict=True)] for pair in pairs]
    ends = sum(ended(state, response) for response in state.responses)
    lengths = [len(response) for response in state.responses]
    values = {
        "episode": float((state.update + 1) * rows),
        "objective/kl": kl,
        "objective/kl_k1": mean_sum(log_ratios),
        "objective/entropy": -mean_sum(experience.logprobs),
        "objective/non_score_reward": kl_penalty,
        "objective/rlhf_reward": kl_penalty + score,
        "objective/scores": score,
        **{f"objective/score/{name}": sum(raw) / rows for name, raw in experience.raw.items()},
        **disagreements(state, experience),
        "objective/kl_coef": state.kl_coef,
        "objective/response_length": sum(lengths) / rows,
        "objective/eos_fraction": ends / rows,
        "objective/repetition": sum(repetition(response) for response in state.responses) / rows,
        "val/num_eos_tokens": float(ends),
        "val/explained_variance": explained_variance(experience),
        "tokens/real": float(sum(lengths) + sum(len(prompt) for prompt in state.prompts)),
        **mean_metrics(steps),
        "policy/epochs": float(epochs),
        "lr": learning_rate(state, "policy"),
        "value/lr": learning_rate(state, "value"),
        "next kl_coef": next_kl_coef(state, kl),
    }
    return {name: [value] for name, value in values.items()}


def disagreements(state: ReferenceState, experience: Experience) -> dict[str, float]:
    """Return the mean score of each ensemble member, and the mean over rows of the deviation between members."""
    values: dict[str, float] = {}
    for name, members in experience.member_scores.items():
        if state.sources[name].combine is not None:
            values |= {f"objective/score/{name}/{member}": sum(raw) / len(raw) for member, raw in members.items()}
            deviations = [math.sqrt(variance([raw[row] for raw in members.values()])) for row in state.rows]
            values[f"objective/disagreement/{name}"] = sum(deviations) / len(deviations)
    return values


def repetition(response: list[int]) -> float:
    """Return the share of trigrams that occurred earlier in the response."""
    trigrams = [tuple(response[i : i + 3]) for i in range(len(response) - 2)]
    return sum(trigram in trigrams[:i] for i, trigram in enumerate(trigrams)) / len(trigrams) if trigrams else 0.0


def mean_sum(rows: list[list[float]]) -> float:
    return sum(sum(row) for row in rows) / len(rows)


def mean_metrics(steps: list[Step]) -> Step:
    """Return the means over the steps, without those skipped by ratio_threshold unless all were skipped."""
    counted = [step for step in steps if not step["skipped"]] or steps
    means = {name: sum(step[name] for step in counted) / len(counted) for name in counted[0]}
    if all(step["skipped"] for step in steps):
        means |= {"policy/grad_norm": 0.0, "value/grad_norm": 0.0}
    means["val/ratio_var"] = sum((step["val/ratio"] - means["val/ratio"]) ** 2 for step in counted) / len(counted)
    means["policy/skipped_minibatches"] = sum(step["skipped"] for step in steps)
    means["policy/first_ratio_error"] = steps[0]["ratio_error"]
    return {name: value for name, value in means.items() if name not in ("ratio_error", "skipped")}


def explained_variance(experience: Experience) -> float:
    """Return 1 - Var(R - V) / Var(R) over all tokens; 0 if the returns do not vary."""
    returns = [x for row in experience.returns for x in row]
    values = [x for row in experience.values for x in row]
    spread = variance(returns)
    return 1 - variance([r - v for r, v in zip(returns, values, strict=True)]) / spread if spread else 0.0


def next_kl_coef(state: ReferenceState, kl: float) -> float:
    """Return kl_coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon), with n the update's episodes.

    Ziegler et al. 2019, section 2.2. The coefficient is constant while the policy is not trained.
    """
    settings = state.settings
    if not settings.adap_kl_ctrl or not state.policy_is_trained:
        return state.kl_coef
    error = min(max(kl / settings.target - 1, -0.2), 0.2)
    return state.kl_coef * (1 + error * len(state.prompts) / settings.horizon)


def update(state: ReferenceState, tick: Callable[[], None] = lambda: None) -> Quantities:
    """Run the update on given responses; return its quantities. `tick` is called after each row."""
    experience = make_experience(state, tick)
    steps, epochs = run_optimizer_steps(state, experience, tick)
    return (
        experience.quantities()
        | {f"{name}, each step": [step[name] for step in steps if name in step] for name in steps[0]}
        | metrics(state, experience, steps, epochs)
    )
