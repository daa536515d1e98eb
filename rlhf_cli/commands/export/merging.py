"""`rlhf export --merge`: a weighted mean of the weights of policies that were trained from one SFT model.

Wortsman et al. 2022 (model soups, arXiv 2203.05482); of policies of RLHF: Ramé et al. 2024 (WARP, arXiv 2406.16768,
section 3.2), with the mean in place of SLERP.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.models import interpolation, load
from rlhf_cli.runs.layout import POLICY_STAGES
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.resolve import LAST, MergedPolicy, resolve_model, sft_of


def resolve_merged(ppo: Parent, assignments: Sequence[str]) -> tuple[MergedPolicy, ...]:
    """Return the policies of `FOLDER=WEIGHT` assignments, of PPO runs the last ones.

    Raises RLHFError C06 for weights that are not above 0 or leave nothing to PPO's policy, C17 for a model that is no
    policy or was trained from another SFT model, and as `resolve_model` does.
    """
    weights = [_parse(assignment) for assignment in assignments]
    total = sum(weight for _, weight in weights)
    if total >= 1:
        text = f"--merge: the weights sum to {total:g}, and the exported policy has what they leave of 1"
        raise RLHFError("C06", text, hint="lower them; --merge FOLDER=0.5 gives both the same weight")

    merged = []
    for folder, weight in weights:
        other = resolve_model(folder, stage=None, step=LAST).model
        if other.stage not in POLICY_STAGES or not _have_one_start(ppo, other):
            text = f"--merge: {shown(other.path)} is not a policy trained from the SFT model of {shown(ppo.path)}"
            raise RLHFError("C17", text, hint="only policies that were trained from one SFT model can be merged")
        merged.append(MergedPolicy(other, weight))
    return tuple(merged)


def _parse(assignment: str) -> tuple[Path, float]:
    folder, _, number = assignment.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not folder or not weight > 0:
        text = f"--merge {assignment}: must be FOLDER=WEIGHT, with a weight above 0"
        raise RLHFError("C06", text, hint="for example --merge runs/first/dpo=0.35")
    return Path(folder), weight


def _have_one_start(ppo: Parent, other: Parent) -> bool:
    """Return True if both were trained from the same model, by its hash."""
    first = ppo.manifest.start
    second = other.manifest.start
    return first is not None and second is not None and first.sha256 == second.sha256


def load_merged(ppo: Parent, merged: Sequence[MergedPolicy], share: float | None, trust_remote_code: bool) -> Any:
    """Load the weighted mean of PPO's policy and others on the CPU, adapters merged into their bases.

    With a share it is SFT + share * (mean - SFT).
    """

    def read(policy: Parent) -> Any:
        return load.load_causal_lm(policy.model, trust_remote_code=trust_remote_code)

    model = read(ppo)
    mass = 1 - sum(other.weight for other in merged)
    for other in merged:
        mass += other.weight
        interpolation.interpolate(model, read(other.model), 1 - other.weight / mass)
    if share is not None:
        interpolation.interpolate(model, read(sft_of(ppo)), share)
    return model
