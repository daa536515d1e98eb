"""The demo as a user runs it, and all that it promises. Minutes, so only in `make test-slow`."""

import json
from pathlib import Path

import pytest
from run_cli import child, must_succeed


def rlhf(*arguments: str, cwd: Path) -> str:
    done = must_succeed(child(*arguments, cwd=cwd))
    return done.stdout


@pytest.mark.slow
def test_the_demo_keeps_its_promises(tmp_path: Path) -> None:
    rlhf("init", "demo", "demo", cwd=tmp_path)
    shown = rlhf("run", "demo", cwd=tmp_path)
    report = json.loads((tmp_path / "demo/eval/report.json").read_text())
    sft, ppo, rates = report["models"]["sft"], report["models"]["ppo"], report["win_rate"]
    assert rates["ppo_vs_sft"]["gold"]["value"] >= 0.75 and rates["ppo_vs_sft"]["gold"]["ci95"][0] > 0.65
    assert rates["sft_vs_base"]["gold"]["value"] >= 0.75
    assert sft["eos_fraction"] >= 0.9 and ppo["eos_fraction"] >= 0.9
    assert 0.70 <= report["reward_model"]["accuracy"] <= 0.95
    assert ppo["kl"] <= 20 and ppo["distinct_fraction"] >= 0.5
    assert 0.5 <= ppo["response_length_mean"] / sft["response_length_mean"] <= 2
    assert "PPO over SFT" in shown and shown.count("prompt  ") >= 3

    again = rlhf("run", "demo", cwd=tmp_path)
    assert again.count("up to date") == 4 and "PPO over SFT" in again
    config = tmp_path / "demo/ppo.yaml"
    config.write_text(config.read_text().replace("kl_coef: 0.05", "kl_coef: 0.1"))
    planned = rlhf("run", "demo", "--dry-run", cwd=tmp_path)
    assert "ppo.kl_coef 0.05 -> 0.1" in planned
    assert all(f"{stage:<8} up to date" in planned for stage in ("sft", "reward")), planned
