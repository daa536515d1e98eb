"""Policies on the line through the SFT model and PPO's in weight space: SFT + share * (PPO - SFT).

Between them: Ramé et al. 2024 (WARP, arXiv 2406.16768, section 3.3) and Lin et al. 2023 (arXiv 2309.06256). Beyond PPO:
Zheng et al. 2024 (arXiv 2404.16792, section 2). It needs no training.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rlhf_cli.errors import RLHFError
from rlhf_cli.models import build, load
from rlhf_cli.runs.model_files import read_adapter
from rlhf_cli.runs.parents import Parent


@torch.no_grad()
def interpolate(policy: Any, sft: Any, share: float) -> None:
    """Replace a policy's weights by SFT + share * (policy - SFT), computed in float32. Raises RLHFError C17.

    Weights that are tied are one parameter, which is moved once.
    """
    _refuse(compare_weights(policy, sft))
    for weight, start in zip(policy.parameters(), sft.parameters(), strict=True):
        start = start.to(weight.device, torch.float32)
        weight.copy_(torch.lerp(start, weight.float(), share))


def scales_exactly(policy: Parent) -> bool:
    """Return True if a policy is an adapter which `lora.scale_adapters` interpolates towards its base: not DoRA."""
    adapter = read_adapter(policy.model)
    return adapter is not None and not adapter.get("use_dora")


def compare_weights(policy: Any, sft: Any) -> str | None:
    """Return the first difference of a policy in the names or shapes of its weights, None if there is none."""
    ours = {name: list(weight.shape) for name, weight in policy.named_parameters()}
    theirs = {name: list(weight.shape) for name, weight in sft.named_parameters()}
    for name in {**theirs, **ours}:
        own = ours.get(name, "missing")
        other = theirs.get(name, "missing")
        if own != other:
            return f"{name} is {own}, in the SFT model {other}"
    return None


def compare_configs(policy: Parent, sft: Parent, trust_remote_code: bool) -> str | None:
    """Return the result of `compare_weights` for two folders; reads their configs only."""
    configs = [load.read_config(parent.model, trust_remote_code) for parent in (policy, sft)]
    options = {"trust_remote_code": trust_remote_code}
    return compare_weights(*(build.empty_model(AutoModelForCausalLM, config, **options) for config in configs))


def check_interpolation(policy: Parent, sft: Parent, trust_remote_code: bool) -> None:
    """Raise RLHFError C17 if two models differ in their weights; reads their configs only."""
    _refuse(compare_configs(policy, sft, trust_remote_code))


def _refuse(difference: str | None) -> None:
    if difference:
        text = f"a policy with other weights than the SFT model cannot be interpolated: {difference}"
        hint = "only a policy that was trained from this SFT model can be interpolated"
        raise RLHFError("C17", text, hint=hint)
