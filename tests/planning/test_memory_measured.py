"""The estimate, compared with the peak memory of real stages in processes of their own."""

from pathlib import Path

import pytest
from plan_cases import Case, measured, write
from plans import on_a_cpu, planned

from rlhf_cli.planning.memory import OTHER_BYTES

SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4}
SIZES |= {"num_hidden_layers": 2, "num_key_value_heads": 2}
UPDATES = {"total_episodes": 32, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
UPDATES |= {"num_ppo_epochs": 1, "response_length": 32, "stop_token": "none", "missing_eos_penalty": None}
LONG = {"total_episodes": 16, "per_device_train_batch_size": 8, "response_length": 440, "micro_batch_tokens": 4096}
DEEP = {"hidden_size": 192, "intermediate_size": 500, "num_hidden_layers": 16}
SFT = {"max_steps": 2, "per_device_train_batch_size": 8}
CASES = {
    "a large vocabulary": Case("ppo", {**SIZES, "vocab_size": 50_000}, UPDATES, prompt=16),
    "deep and narrow": Case("ppo", {**SIZES, **DEEP}, UPDATES, prompt=48),
    "long responses": Case("ppo", {**SIZES, "num_hidden_layers": 6}, {**UPDATES, **LONG}, prompt=16),
    "sft": Case("sft", {**SIZES, "vocab_size": 16_000, "num_hidden_layers": 4}, SFT, prompt=64, answer=128),
}
# glibc's malloc keeps freed memory below these sizes: a process holds more than its tensors (docs/results/memory.md).
MALLOC_RETURNS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@on_a_cpu
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_at_most_a_quarter_above_the_peak(case: str, here: Path) -> None:
    """Of the tensors where malloc gives freed memory back, and of the process as it is, which varies."""
    stage = planned(str(write(CASES[case], here / "planned")))[CASES[case].stage]
    tensors = max(phase["total"] for phase in stage["phases"]) + OTHER_BYTES
    peak = measured(CASES[case], here / "exact", **MALLOC_RETURNS)
    assert peak > 300e6 and 1.0 <= tensors / peak <= 1.15
    usual = measured(CASES[case], here / "usual")
    assert 0.9 <= (tensors + stage["holes"]) / usual <= 1.25
