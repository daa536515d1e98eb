"""`policies` and `eval.interpolate` of eval.yaml, on trained policies.

Modules: `evaluation/summary.py`.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folder import logits
from ppo_folder import EVAL, evaluate, lines, manifest, must_succeed, rlhf, write
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import Result

pytestmark = pytest.mark.full
QUICK = {"n": 8, "best_of": [2], "frontier": False, "per_device_batch_size": 8}
POLICIES = {"same": "same", "before": "sft_model", "half": "half"}


def halfway(ours: Any, theirs: Any) -> Any:
    """Change a model to the mean of the two, by state dict."""
    both = ours.state_dict(), theirs.state_dict()
    ours.load_state_dict({name: (both[0][name].double() + both[1][name].double()) / 2 for name in both[0]})
    return ours


def fails(result: Result, code: str, *texts: str) -> None:
    errors = [line for line in result.stderr.splitlines() if line.startswith("error[")]
    assert len(errors) == 1 and errors[0].startswith(f"error[{code}]"), result.stderr
    assert all(text in result.stderr for text in texts) and result.exit_code == 2, result.stderr
    assert "Traceback" not in result.stderr


def exported(run: Path, out: Path, *arguments: str) -> Path:
    must_succeed(rlhf("export", run, "--out", out, "--interpolate", "0.5", *arguments))
    return out


def test_policies_are_evaluated_beside_and_between_sft_and_ppo(trained_folder: Path) -> None:
    run = trained_folder
    shutil.copytree(run / "ppo/model", run / "same")
    plain = [AutoModelForCausalLM.from_pretrained(run / name) for name in ("ppo/model", "sft_model")]
    half = AutoModelForCausalLM.from_pretrained(exported(run, run / "half"))
    assert torch.allclose(logits(half), logits(halfway(*plain)), atol=1e-5), "an export has the by-hand weights"
    card = (run / "half/README.md").read_text()
    assert "SFT + 0.5 (PPO - SFT)" in card and "Its KL from the SFT model is unknown." in card
    assert "This card has no evaluation of this model." in card
    write(run, "eval", {**EVAL, "policies": POLICIES, "eval": {**QUICK, "interpolate": [0.9999999, 0.5]}})
    report, result = evaluate(run)
    models, rates = report["models"], report["win_rate"]
    assert list(models) == ["sft", "ppo", "before", "half", "same"] == list(report["greedy"]["models"])
    assert models["same"] == models["ppo"] and rates["same_vs_sft"] == rates["ppo_vs_sft"]
    assert models["before"] == models["sft"] and rates["ppo_vs_before"] == rates["ppo_vs_sft"]
    tie = rates["ppo_vs_same"]["short"]
    assert (tie["value"], tie["ties"], tie["n"]) == (0.5, 8, 8) and models["before"]["kl"] == 0 < models["ppo"]["kl"]
    between, end = report["interpolated"]
    assert (between["share"], end["share"]) == (0.5, 0.9999999)
    for point, name in ((between, "half"), (end, "ppo")):
        assert point["kl"] == pytest.approx(models[name]["kl"], rel=1e-4)
        assert point["reward"] == pytest.approx(models[name]["reward_mean"], rel=1e-4)
        assert point["win_rate"]["short"]["value"] == rates[f"{name}_vs_sft"]["short"]["value"]
    assert between["kl"] != pytest.approx(end["kl"], rel=0.01)
    rows = [(row["model"], row["mode"]) for row in lines(run / "eval/samples.jsonl")]
    assert rows.count(("half", "greedy")) == rows.count(("interpolated_0.5", "sampled")) == 8
    assert "eval 14/14 round" in result.stderr, "five policies in two modes, two shares, two draws"
    parents = manifest(run, "eval")["parents"]
    assert parents["policies.same"] == {
        "path": "../same",
        "stage": "foreign",
        "sha256": parents["policies.same"]["sha256"],
    }
    page = (run / "eval/report.html").read_text()
    assert "PPO over same by judge short: 0.500 [" in page and "; share 0.5: " in page
    assert "PPO over same by judge short: 0.500 [" in result.stdout and (run / "eval/frontier.svg").is_file()
    card = (exported(run, run / "measured") / "README.md").read_text()
    chosen = report["selected"] if report["selected"].get("share") == 0.5 else between  # without bias of the choice
    assert f"its KL from the SFT model is {chosen['kl']:.3f} " in card and "is unknown" not in card
    changed = load_file(run / "same/model.safetensors")
    save_file({name: weight + 1 for name, weight in changed.items()}, run / "same/model.safetensors", {"format": "pt"})
    fails(rlhf("eval", "-c", run / "eval.yaml"), "C15", "policies.same")
