"""GPUs that need not be here, by name."""

import json
from pathlib import Path

import pytest
from plans import phase, plan

from rlhf_cli.planning.target import Target, gpu_table

pytestmark = pytest.mark.usefixtures("no_progress_lines")


def test_gpus_by_name(three: Path) -> None:
    """Each has its memory, a rate and a source; a name that is a number is a name."""
    for name, gpu in gpu_table().items():
        target = Target.of(name.upper(), 1)
        assert (target.memory, target.peak_flops, target.planned) == (round(gpu["gib"] * 2**30), gpu["flops"], True)
        assert 20 < gpu["gib"] < 200 and 5e13 < gpu["flops"] < 2e15 and len(gpu["source"]) > 10
    assert Target.of("4090", 1).memory < Target.of("24", 1).memory
    result = json.loads(plan("sft.yaml", "--gpu", "h100", "--json").stdout)
    stage = result["stages"]["sft"]
    assert result["device"] == "a GPU h100 of 79.6 GiB" and stage["fits"] is True
    assert stage["step_seconds"]["step"] == pytest.approx(phase(stage, "step")["flops"] / (0.4 * 989e12))
    for name, hint in (
        ("h10", "did you mean h100?"),
        ("big", "for example --gpu h100"),
        ("-1", "for example --gpu h100"),
    ):
        refused = plan("sft.yaml", f"--gpu={name}")
        assert refused.exit_code == 2 and f"error[C07]: --gpu {name}: not a size in GiB" in refused.stderr
        assert f"hint: {hint}\n" in refused.stderr
