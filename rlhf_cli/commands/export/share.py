"""Export of a policy between SFT and PPO: SFT + share * (PPO - SFT)."""

import os
from dataclasses import dataclass
from typing import Any

from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.models import interpolation, load, lora
from rlhf_cli.runs.integrity import verify_parents
from rlhf_cli.runs.parents import Parent, is_hub_id, open_parent


def check_share(share: float | None) -> None:
    if share is not None and not 0 < share < 1:
        text = f"--interpolate {share:g}: not between 0 (the SFT model) and 1 (the PPO policy)"
        raise RLHFError("C06", text, hint="for example --interpolate 0.5")


@dataclass(frozen=True)
class InterpolatedWeights:
    """SFT + share * (PPO - SFT), and the SFT model that PPO started from."""

    share: float
    sft: Parent

    def __str__(self) -> str:
        return f" at share {self.share:g} from its SFT model"

    def apply(self, model: Any, policy: Parent, trust_remote_code: bool) -> Any:
        """Return the interpolated model of the policy's loaded model; of adapters without a copy of the weights."""
        if interpolation.scales_exactly(policy):
            lora.scale_adapters(model, self.share)
            return model
        model = lora.merge_and_unload(model)
        sft = load.load_causal_lm(self.sft.model, trust_remote_code=trust_remote_code)
        interpolation.interpolate(model, sft, self.share)
        return model


def sft_of(ppo: Parent) -> Parent:
    """Return the SFT model that PPO started from. Raises RLHFError C11 for another stage, M01 or M10 if it changed."""
    if ppo.stage != "ppo":
        text = f"--interpolate: {shown(ppo.path)} was written by the {ppo.stage} stage, and only PPO starts from SFT"
        raise RLHFError("C11", text, hint="omit --interpolate")
    entry = ppo.manifest.parents["models.sft"]
    path = entry.path if is_hub_id(entry.path) else os.path.abspath(ppo.path / entry.path)
    sft = open_parent(path, expect=("sft",), key="models.sft", where="", revision=entry.revision)
    verify_parents({sft.key: sft})
    if sft.sha256 != entry.sha256:
        text = f"--interpolate: {shown(sft.path)} is no longer the model that PPO was trained with"
        raise RLHFError("M10", text, hint="run PPO again, or restore the old SFT model")
    return sft
