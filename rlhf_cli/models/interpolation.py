"""Policies between the SFT model and PPO's in weight space: SFT + share * (PPO - SFT).

Ramé et al. 2024 (WARP, arXiv 2406.16768, section 3.3) and Lin et al. 2023 (arXiv 2309.06256). It needs no training.
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
    require_same_weights(policy, sft)
    for weight, start in zip(policy.parameters(), sft.parameters(), strict=True):
        start = start.to(weight.device, torch.float32)
        weight.copy_(torch.lerp(start, weight.float(), share))


def scales_exactly(policy: Parent) -> bool:
    """Return True if a policy is an adapter which `lora.scale_adapters` interpolates towards its base: not DoRA."""
    adapter = read_adapter(policy.model)
    return adapter is not None and not adapter.get("use_dora")


def require_same_weights(policy: Any, sft: Any) -> None:
    """Raise RLHFError C17 if two models differ in the names or shapes of their weights."""
    ours, theirs = ({name: list(weight.shape) for name, weight in m.named_parameters()} for m in (policy, sft))
    if ours == theirs:
        return
    name = next(name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name))
    shapes = f"{name} is {ours.get(name, 'missing')}, in the SFT model {theirs.get(name, 'missing')}"
    text = f"a policy with other weights than the SFT model cannot be interpolated: {shapes}"
    raise RLHFError("C17", text, hint="only a policy that was trained from this SFT model can be interpolated")


def check_interpolation(policy: Parent, sft: Parent, trust_remote_code: bool) -> None:
    """Raise RLHFError C17 if two models differ in their weights; reads their configs only."""
    configs = [load.read_config(parent.model, trust_remote_code) for parent in (policy, sft)]
    options = {"trust_remote_code": trust_remote_code}
    require_same_weights(*(build.empty_model(AutoModelForCausalLM, config, **options) for config in configs))
