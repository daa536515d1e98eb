"""`models.adapters` of PPO: four models on one base, through the real commands."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folder import run
from bad_inputs import rlhf

pytestmark = pytest.mark.training
LORA = ("-s", "models.adapters={kind: lora, r: 3}")


def test_run(adapters_copy: Path) -> None:
    manifest = run(adapters_copy, "ppo", *LORA, "-s", "ppo.num_sample_generations=0", "-s", "models.value=policy_head")
    print(json.dumps(manifest, indent=1))
    for p in sorted((adapters_copy / "ppo").rglob("*")):
        print(p.relative_to(adapters_copy))
    print((adapters_copy / "ppo/metrics.jsonl").read_text())
    print((adapters_copy / "ppo/value/adapter_config.json").read_text())
    print(rlhf("replay", str(adapters_copy)).stdout)
    print(rlhf("replay", str(adapters_copy), "--step", "1").stdout)
    print(run(adapters_copy, "eval")["metrics"])
    r = rlhf(
        "eval",
        "-s",
        "models.ppo=ppo/snapshots/step_000002",
        "-s",
        "eval.temperature=0.7",
        "-s",
        "eval.response_length=6",
        "-s",
        "run=there",
    )
    print(r.stdout, r.stderr)
    assert 0
