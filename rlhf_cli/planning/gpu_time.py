"""Seconds of PPO's phases on a GPU of gpus.toml, from its peak FLOP/s and its memory bandwidth.

The four constants fit the updates of 135 M to 1.5 B parameters that were recorded on one H200 with compiled layers
(docs/results/gpu.md); all of them are met within a factor of two.
"""

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.planning.estimate import Estimate
from rlhf_cli.planning.memory import Phase
from rlhf_cli.planning.model_size import BFLOAT16, FLOAT32, ModelSize
from rlhf_cli.planning.target import Card

PRODUCTS_ATTAIN = 0.6  # of the peak FLOP/s, in a pass over whole rows
BYTES_BESIDE_PRODUCTS = 5.8  # that norms, activations and copies move for each FLOP of a pass, times the width
READS = 2.3  # of weights and cached keys and values in a token step, in time
LOGIT_PASSES = 23.0  # over the float32 logits of a token step: head, filters, noise and log-probs, in time
LAYER_S = {"graph": 50e-6, "hf": 500e-6}  # of a token step, to start the kernels of a layer


def ppo_seconds(stage: Estimate, config: PPOConfig, card: Card) -> dict[str, float]:
    """Return the seconds of each phase of PPO on a card."""
    seconds: dict[str, float] = {}
    for phase in stage.phases:
        if phase.name == "rollout":
            layer_s = LAYER_S[config.engine_name(gpu=True)]
            seconds[phase.name] = _rollout(phase, stage, card, layer_s=layer_s)
        else:
            seconds[phase.name] = _passes(phase.flops, stage.policy, card)
    return seconds


def _passes(flops: float, model: ModelSize, card: Card) -> float:
    """Return the seconds of passes over whole rows: their products, and what moves bytes between these."""
    products = flops / (PRODUCTS_ATTAIN * card.peak_flops)
    moved = flops * BYTES_BESIDE_PRODUCTS / model.shape.hidden
    return products + moved / card.bandwidth


def _rollout(phase: Phase, stage: Estimate, card: Card, *, layer_s: float) -> float:
    """Return the seconds of all responses of an update: passes over their prompts, and a step for each token."""
    policy = stage.policy
    shape = policy.shape
    lengths = stage.data.lengths.average
    batches = phase.flops / policy.generation_flops(phase.rows, lengths)
    prompts = _passes(policy.forward_flops(phase.rows, lengths.prompt, phase.rows), policy, card)

    weights = BFLOAT16 * shape.parameters
    cached = policy.cache * phase.rows * (lengths.prompt + lengths.response / 2)
    logits = FLOAT32 * phase.rows * shape.vocabulary
    moved = READS * (weights + cached) + LOGIT_PASSES * logits
    token = shape.layers * layer_s + moved / card.bandwidth
    return batches * (prompts + lengths.response * token)
