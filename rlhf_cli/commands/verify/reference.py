"""One PPO update the slow way: loops over rows and tokens, in float64, every formula written out with its source.

To be read as the algorithm, seven sections from top to bottom: start, responses, judging, learning, measuring. It is
written from the papers and the options' texts alone, and shares with rlhf_cli/ppo nothing but the settings and the
seeds, which say what random numbers an update draws: no padding, no masks, no micro-batches, no caches, no optimizer of
torch. Autograd and the models' own forward are taken on trust. `draws` looks at the responses, `update` is what is made
of them.

A row is an episode: a prompt and a response, lists of token ids; the response ends with its stop token, or where the
length limit cut it. Logarithms are natural, KL is in nats. `Start` is what goes in, `Numbers` what comes out.
"""

import math
from collections.abc import Callable

from rlhf_cli.commands.verify.reference_scores import Judged, ended, function_scores, judge, model_scores, variance
from rlhf_cli.commands.verify.reference_state import Adam, Numbers, Scorer, Source, Start, Step, draws
from rlhf_cli.commands.verify.reference_update import learn, learning_rate

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
        "objective/repetition": sum(repeated(response) for response in start.responses) / rows,
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


def repeated(response: list[int]) -> float:
    """Share of the runs of three tokens that stood in the response before."""
    runs = [tuple(response[place : place + 3]) for place in range(len(response) - 2)]
    return sum(run in runs[:place] for place, run in enumerate(runs)) / len(runs) if runs else 0.0


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


def next_kl_coef(start: Start, kl: float) -> float:
    """kl_coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon), n the update's episodes.

    Ziegler et al. 2019, section 2.2. While the policy does not learn the KL is no answer to the coefficient.
    """
    settings = start.settings
    if not settings.adap_kl_ctrl or not start.policy_learns:
        return start.kl_coef
    error = min(max(kl / settings.target - 1, -0.2), 0.2)
    return start.kl_coef * (1 + error * len(start.prompts) / settings.horizon)


__all__ = [
    "Adam",
    "Numbers",
    "Scorer",
    "Source",
    "Start",
    "draws",
    "function_scores",
    "learning_rate",
    "model_scores",
    "update",
]


def update(start: Start, tick: Callable[[], None] = lambda: None) -> Numbers:
    """The update of responses that are there: judge them, learn from them. `tick` is called after each row."""
    judged = judge(start, tick)
    steps, epochs = learn(start, judged, tick)
    return (
        judged.numbers()
        | {f"{name}, each step": [step[name] for step in steps if name in step] for name in steps[0]}
        | metrics(start, judged, steps, epochs)
    )
