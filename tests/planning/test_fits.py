"""How many responses fit at once."""

import json

import pytest
from ppo_folder import ppo, settings, untimed
from run_cli import rlhf

from rlhf_cli import runs
from rlhf_cli.config.loading import load
from rlhf_cli.models import devices
from rlhf_cli.planning import fits
from rlhf_cli.planning.target import Target
from rlhf_cli.ppo.rollout import HFEngine


@pytest.mark.full
def test_a_gpu_generates_as_many_responses_at_a_time_as_fit(run_folder, monkeypatch):
    """On an imagined GPU, as `rlhf plan` says, the log says how many; all numbers are those of 8 at once."""
    batches, generate = [], HFEngine._generate_ids
    monkeypatch.setattr(HFEngine, "_generate_ids", lambda self, rows: batches.append(len(rows)) or generate(self, rows))
    config = run_folder / "ppo.yaml"

    def planned(gib: float) -> int:
        result = rlhf("plan", config, "--gpu", gib, "--json", "--flops", "1e9", "-s", "ppo.bf16=false")
        (rollout,) = (
            each for each in json.loads(result.stdout)["stages"]["ppo"]["phases"] if each["name"] == "rollout"
        )
        assert rollout["total"] <= 0.85 * gib * 2**30 or rollout["rows"] == 1
        return rollout["rows"]

    sizes = [2**-power for power in range(15)]
    rows = [planned(gib) for gib in sizes]
    assert rows == sorted(rows, reverse=True) and rows[0] == 8 and rows[-1] == 1
    assert ppo(run_folder, *settings("num_sample_generations=0")).exit_code == 0
    assert set(batches) == {8}
    metrics = run_folder / "ppo/metrics.jsonl"
    expected, identity = untimed(metrics), (run_folder / "ppo/identity.json").read_bytes()
    gaps = [row.pop(name) for row in expected for name in ("rollout/logprob_gap", "rollout/logprob_gap_p99")]
    target = Target(True, 2**40, "a GPU")
    monkeypatch.setattr(fits, "_target", lambda: target)
    gib, few = next((gib, count) for gib, count in zip(sizes, rows, strict=True) if count < 8)
    monkeypatch.setattr(devices, "available_bytes", lambda: round(gib * 2**30))
    batches.clear()
    result = ppo(run_folder, *settings("num_sample_generations=0"), "--fresh")
    assert set(batches) == {few} and result.stderr.count(f"{few} of 8 responses are generated at a time") == 1
    found = untimed(metrics)
    others = [row.pop(name) for row in found for name in ("rollout/logprob_gap", "rollout/logprob_gap_p99")]
    assert max(gaps + others) < 1e-5  # rounding, which depends on the number of rows
    assert found == expected and (run_folder / "ppo/identity.json").read_bytes() == identity


def test_a_model_that_cannot_be_counted_generates_all_rows_at_once(run_folder, monkeypatch):
    """As one with code of its own, whose config the planner does not run."""
    config = load("ppo", run_folder / "ppo.yaml")
    monkeypatch.setattr(fits, "_target", lambda: Target(True, 2**40, "a GPU"))
    monkeypatch.setattr(devices, "available_bytes", lambda: 2**20)
    parents = runs.open_parents(config)
    assert fits.rollout_rows(config, parents, prompt_length=8, episodes=8).rows < 8
    sft = json.loads((run_folder / "sft_model/config.json").read_text())
    own_code = {**sft, "auto_map": {"AutoModelForCausalLM": "own.Model"}, "model_type": "own"}
    (run_folder / "sft_model/config.json").write_text(json.dumps(own_code))
    assert fits.rollout_rows(config, parents, prompt_length=8, episodes=8).rows == 8
