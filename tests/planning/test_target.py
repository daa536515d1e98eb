"""GPUs that need not be here, by name."""

import json
from pathlib import Path

import pytest
from plans import phase, plan

from rlhf_cli.models import devices
from rlhf_cli.planning.target import Card, Target, card_of, gpu_table

pytestmark = pytest.mark.usefixtures("no_progress_lines")


def test_gpus_by_name(three: Path) -> None:
    """Each has its memory, a rate and a source; a name that is a number is a name."""
    for name, gpu in gpu_table().items():
        target = Target.of(name.upper(), 1)
        assert target.card == Card(gpu["flops"], gpu["bandwidth"])
        assert (target.memory, target.planned) == (round(gpu["gib"] * 2**30), True)
        assert 20 < gpu["gib"] < 200 and 5e13 < gpu["flops"] < 2e15 and len(gpu["source"]) > 10
        assert 50 < gpu["flops"] / gpu["bandwidth"] < 450  # FLOP for each byte
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


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("AMD Instinct MI300X", "mi300x"),
        ("the CPU", None),
    ],
)
def test_a_gpu_that_is_here_is_known_by_its_name(
    driver: str, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "device_name", lambda: driver)
    assert Target.of(None, 1).card == (card_of(gpu_table()[name]) if name else None)
