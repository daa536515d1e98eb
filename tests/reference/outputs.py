"""Outputs of the models, one unpadded row at a time."""

from typing import Any

import torch
from torch import Tensor

from tests.reference.state import State


def row_ids(prompt: list[int], response: list[int], model: Any) -> Tensor:
    """Return the ids of a row for a model, (1, P + T)."""
    return torch.tensor([prompt + response], device=model.device)


def response_logits(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """Return the logits that predict each response token, (T, V)."""
    logits: Tensor = model(input_ids=row_ids(prompt, response, model), use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1].cpu()


def log_probs(state: State, model: Any, row: int) -> Tensor:
    """Return the log-probabilities of each response token's alternatives at the sampling temperature, (T, V)."""
    logits = response_logits(model, state.prompts[row], state.responses[row])
    return torch.log_softmax(logits / state.settings.temperature, -1)


def of_tokens(logp: Tensor, tokens: list[int]) -> Tensor:
    """Return the log-probabilities of the tokens, (T,), among those of all alternatives, (T, V)."""
    return logp[range(len(tokens)), tokens]


def response_values(state: State, row: int) -> Tensor:
    """Return the value before each response token, (T,).

    The gradient of a value head reaches the policy if the policy is trained.
    """
    prompt = state.prompts[row]
    body = (state.policy if state.value_is_head else state.value).base_model
    body = getattr(body, "model", body)  # of Llama 4 the base model has a head
    with_grad = torch.is_grad_enabled() and (state.policy_is_trained or not state.value_is_head)
    with torch.set_grad_enabled(with_grad):
        states = body(input_ids=row_ids(prompt, state.responses[row], body), use_cache=False).last_hidden_state
    hidden = states[0, len(prompt) - 1 : -1]

    if state.value_is_head:
        return (hidden @ state.value.score.weight[0]).cpu()
    return classifier_score(state.value, hidden, torch.arange(len(hidden), device=hidden.device)).cpu()


def classifier_score(model: Any, hidden: Tensor, length: Tensor | int) -> Tensor:
    """Return a classifier's score of each hidden state, behind answers of this length, on its config's scale."""
    raw: Tensor = model.score(hidden)[..., 0]
    raw = raw - getattr(model.config, "reward_length_slope", 0.0) * (
        length - getattr(model.config, "reward_length_mean", 0.0)
    )
    mean = getattr(model.config, "reward_mean", 0.0)
    deviation = getattr(model.config, "reward_std", 1.0)
    return (raw - mean) / deviation
