"""The update: experience, optimizer steps, average, metrics; and all that it computes, by name."""

from typing import Any

import torch

from tests.reference.advantages import Experience, make_experience
from tests.reference.metrics import update_metrics
from tests.reference.optimization import average_policy, run_optimizer_steps
from tests.reference.state import State

Quantities = dict[str, Any]  # quantity -> values, by row and token, by row, or by optimizer step


def update(state: State) -> Quantities:
    """Run the update on given responses; return its quantities, in the order in which they are computed."""
    experience = make_experience(state)
    steps, epochs = run_optimizer_steps(state, experience)
    average_policy(state)

    each_step = {f"{name}, each step": [step[name] for step in steps if name in step] for name in steps[0]}
    metrics = update_metrics(state, experience, steps, epochs)
    return {
        **experience_quantities(experience),
        **each_step,
        **{name: [value] for name, value in metrics.items()},
    }


def experience_quantities(experience: Experience) -> Quantities:
    scores = experience.scores
    quantities: Quantities = {
        "logprobs": torch.cat(experience.logprobs),
        "ref_logprobs": torch.cat(experience.ref_logprobs),
        "kl": torch.cat(experience.kl),
    }
    if experience.values:
        quantities["values"] = torch.cat(experience.values)
    for name, given in scores.given.items():
        quantities[f"score {name}"] = given
    quantities["scores"] = scores.final
    quantities["running scores"] = scores.moments
    quantities["rewards"] = torch.cat(experience.rewards)
    quantities["advantages"] = torch.cat(experience.advantages)
    if experience.returns:
        quantities["returns"] = torch.cat(experience.returns)
    return quantities
