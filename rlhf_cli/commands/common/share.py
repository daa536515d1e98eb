"""Policies on the line through SFT and PPO as export and chat build them: SFT + share * (PPO - SFT)."""

from typing import Any

from rlhf_cli.config.eval import MAX_SHARE
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import interpolation, load, lora
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.resolve import sft_of


def check_share(share: float | None) -> None:
    """Raise RLHFError C06 for a share of another policy than those of `eval.interpolate`."""
    if share is not None and (share == 1 or not 0 < share <= MAX_SHARE):
        allowed = f"above 0 (the SFT model), at most {MAX_SHARE:g}, and not 1 (the PPO policy)"
        raise RLHFError("C06", f"--interpolate {share:g}: must be {allowed}", hint="for example --interpolate 0.5")


def load_between(policy: Parent, share: float, trust_remote_code: bool) -> Any:
    """Load SFT + share * (policy - SFT) on the CPU; of adapters as a peft model, without a copy of the weights.

    Raises RLHFError M01 or M10 if PPO's SFT model is missing or has changed.
    """
    sft = sft_of(policy)
    model = load.load_unmerged(policy.model, trust_remote_code=trust_remote_code)
    if interpolation.scales_exactly(policy):
        lora.scale_adapters(model, share)
        return model
    model = lora.merge_and_unload(model)
    interpolation.interpolate(model, load.load_causal_lm(sft.model, trust_remote_code=trust_remote_code), share)
    return model
