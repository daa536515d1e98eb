"""R01-R05 and the best policy, through the real `rlhf ppo` on tiny models."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from damages import flip
from ppo_folder import ONE, PPO, lines, ppo, untimed, write
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_cli import runs
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.stages.ppo_samples import NUM_CANDIDATES, BestPolicy, Snapshots, evenly_spaced_steps

pytestmark = pytest.mark.training

COUNTED = """
import pathlib, math
calls = pathlib.Path(__file__).with_name("calls")

def count():
    calls.write_text(str(int(calls.read_text()) + 1 if calls.exists() else 1))
    return int(calls.read_text())

def constant(prompts, responses):
    return [0.5] * len(responses)

def breaks(prompts, responses):
    if count() == 4:
        raise KeyError("no such word")
    return [float(len(response)) for response in responses]

def length(prompts, responses):
    return [float(len(response)) for response in responses]
"""


def by_function(folder: Path, name: str, **settings) -> None:
    (folder / "alarm_rewards.py").write_text(COUNTED)
    config = {**PPO, "rewards": {"mine": {"function": f"alarm_rewards:{name}"}}, "ppo": {**PPO["ppo"], **settings}}
    write(folder, "ppo", config)


def manifest(folder: Path) -> dict:
    return json.loads((folder / "ppo/manifest.json").read_text())


def test_r01_names_step_row_prompt_and_the_last_good_checkpoint(run_folder, monkeypatch):
    """The third update's reward model answers nan for its second row."""
    from rlhf_cli.rewards.model import ModelReward

    plain, calls = ModelReward.__call__, []

    def poisoned(self, rollout):
        calls.append(1)
        scores = plain(self, rollout)
        return scores.index_fill(0, torch.tensor(1), float("nan")) if len(calls) == 4 else scores

    monkeypatch.setattr(ModelReward, "__call__", poisoned)  # calls: update 1, update 2, its samples no; update 3
    calls.append(0)
    result = ppo(run_folder)
    assert result.exit_code == 1 and "Traceback" not in result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert re.match(r"error\[R01\]: step 3: score `reward` is not finite in row 1; .*its prompt: 'tell me about", line)
    assert "last good checkpoint: " in result.stderr and "ppo/state/step_000002" in result.stderr
    monkeypatch.undo()
    assert ppo(run_folder).exit_code == 0 and len(lines(run_folder / "ppo/metrics.jsonl")) == 4


def test_r01_a_learning_rate_that_blows_up_leaves_only_finite_checkpoints(run_folder):
    result = ppo(
        run_folder, "-s", "ppo.learning_rate=1e30", "-s", "output.save_steps=1", "-s", "ppo.ratio_threshold=null"
    )
    assert result.exit_code == 1 and "error[R01]: step " in result.stderr and "Traceback" not in result.output
    assert "lower ppo.learning_rate" in result.stderr
    saved = list((run_folder / "ppo/state").glob("step_*/tensors.safetensors"))
    assert all(tensor.isfinite().all() for path in saved for tensor in load_file(path).values())
    assert not (run_folder / "ppo/manifest.json").exists()


def test_r02_equal_rewards_warn_once_end_the_run_after_ten_updates_and_count_on_after_a_resume(run_folder):
    """Stopped at step 10, the run's last state is of step 8: two more updates, and it stops again."""
    by_function(run_folder, "constant", total_episodes=96)
    result = ppo(run_folder, "output.save_steps=4")
    assert result.exit_code == 1 and result.stderr.count("warning[R02]") == 1
    assert "warning[R02]: step 1: all 8 rewards are 0.5" in result.stderr
    assert "error[R02]: step 10: all 8 rewards are 0.5, for 10 updates in a row" in result.stderr
    assert len(lines(run_folder / "ppo/metrics.jsonl")) == 10
    again = ppo(run_folder, "output.save_steps=4")
    assert "resumes at step 8 of 12" in again.stderr and again.exit_code == 1
    assert "warning[R02]" not in again.stderr and "error[R02]: step 10" in again.stderr


def test_r03_responses_that_never_end(run_folder):
    never = ppo(run_folder, "ppo.total_episodes=16", "-s", "ppo.stop_token_id=250", "-s", "ppo.response_length=3")
    assert (
        never.exit_code == 0 and "warning[R03]: step 1: 0 of 8 responses end with the stop token (0%)" in never.stderr
    )
    assert never.stderr.count("warning[R03]") == 1 and "hint: raise ppo.response_length" in never.stderr


def test_r03_is_silent_where_no_end_is_wanted(run_folder):
    assert "R03" not in ppo(run_folder, ONE, "-s", "ppo.stop_token=none").stderr


def test_r04_kl_stop_ends_the_run_and_keeps_the_best_policy(run_folder):
    settings = ("-s", "ppo.kl_stop=0.8", "-s", "ppo.total_episodes=160", "-s", "output.snapshots=0")
    result = ppo(run_folder, *settings)
    assert result.exit_code == 1, result.output
    metrics, made = lines(run_folder / "ppo/metrics.jsonl"), manifest(run_folder)
    stopped = metrics[-1]["step"]
    assert stopped < 20 and metrics[-1]["objective/kl_k1"] > 0.8
    assert all(row["objective/kl_k1"] <= 0.8 for row in metrics[:-1])
    assert f"step {stopped}: KL to the SFT policy is" in result.stderr and "over ppo.kl_stop 0.8" in result.stderr
    assert "error[R04]: --set ppo.kl_stop: " in result.stderr and "holds the best policy, of step" in result.stderr
    assert made["model_is"] == "the best step" and made["step"] == made["best"]["step"] < stopped
    assert "over ppo.kl_stop" in made["stopped"]
    (kept,) = (run_folder / "ppo/snapshots").glob("step_*")
    assert kept.name == f"step_{made['step']:06d}"
    assert (kept / "model.safetensors").read_bytes() == (run_folder / "ppo/model/model.safetensors").read_bytes()
    again = ppo(run_folder, *settings)
    assert again.exit_code == 0 and "finished already" in again.stderr
    (run_folder / "ppo/manifest.json").unlink()
    flip(kept / "model.safetensors")
    again = ppo(run_folder, *settings)
    assert again.exit_code == 1 and f"error[M05]: {kept} is damaged: model.safetensors" in again.stderr
    assert not (run_folder / "ppo/manifest.json").exists()


def test_r04_warns_of_a_kl_below_zero_beyond_noise(run_folder, monkeypatch):
    """A reference that is better at the policy's own words than the policy: no sampler of the policy does that."""
    from rlhf_cli.ppo import losses as formulas

    plain = formulas.token_logprobs
    monkeypatch.setattr(
        formulas, "token_logprobs", lambda z, ids, t: plain(z, ids, t) * (1 if z.requires_grad else 0.9)
    )
    calls = []

    def shifted(logits, ids, temperature):
        calls.append(1)
        return plain(logits, ids, temperature) + (0.5 if len(calls) % 2 == 0 else 0.0)

    monkeypatch.setattr(formulas, "token_logprobs", shifted)
    result = ppo(run_folder, "-s", "ppo.total_episodes=8", "-s", "ppo.ratio_threshold=null")
    assert (
        "warning[R04]: step 1: KL to the SFT policy is -" in result.stderr
        and "below 0 by more than noise" in result.stderr
    )


def test_r05_a_reward_function_that_raises_leaves_a_state_to_go_on_from(run_folder):
    by_function(run_folder, "breaks")
    failed = ppo(run_folder, "-s", "output.save_steps=4")
    assert failed.exit_code == 1 and "error[R05]: reward `mine` raised KeyError: 'no such word'" in failed.stderr
    assert [path.name for path in (run_folder / "ppo/state").glob("step_*")] == ["step_000003"]
    again = ppo(run_folder, "-s", "output.save_steps=4")
    assert again.exit_code == 0 and "resumes at step 3 of 4" in again.stderr


def test_r08_a_skipped_minibatch_is_said_once(run_folder):
    result = ppo(run_folder, "-s", "ppo.learning_rate=0.1", "-s", "ppo.ratio_threshold=1.05")
    assert result.stderr.count("warning[R08]") == 1 and "passed ppo.ratio_threshold 1.05" in result.stderr
    assert any(row["policy/skipped_minibatches"] > 0 for row in lines(run_folder / "ppo/metrics.jsonl"))


def test_the_best_policy_is_kept_beside_the_even_ones(run_folder):
    assert ppo(run_folder, "-s", "ppo.total_episodes=96").exit_code == 0
    best, metrics = manifest(run_folder)["best"], lines(run_folder / "ppo/metrics.jsonl")
    names = {path.name for path in (run_folder / "ppo/snapshots").glob("step_*")}
    assert names == {"step_000006", "step_000012", f"step_{best['step']:06d}"}
    values, before = {}, 0
    for point in sorted({1} | evenly_spaced_steps(12, NUM_CANDIDATES)):
        window = [row["objective/rlhf_reward"] for row in metrics[before:point]]
        values[point - 1], before = sum(window) / len(window), point  # by the policy after the update before
    assert best["value"] == pytest.approx(max(values.values())) and values[best["step"]] == max(values.values())


def test_best_by_hand():
    best, seen = BestPolicy(), []
    for step, reward in enumerate([1.0, 0.0, 3.0, 5.0, 0.0], start=1):
        best.window.append(reward)
        if step in (1, 3, 5):
            seen.append((best.close_window(step), best.step, best.value))
    assert seen == [(True, 1, 1.0), (True, 3, 1.5), (True, 5, 2.5)]


def test_the_best_policy_goes_by_one_coefficient_and_one_unit(run_folder):
    """The controller moves kl_coef at every update, and the running deviation the scale of the scores."""
    moving = ["adap_kl_ctrl=true", "target=0.01", "horizon=40", "use_score_scaling=true", "kl_coef=0.5"]
    given = [part for each in (*moving, "missing_eos_penalty=0.25") for part in ("-s", f"ppo.{each}")]
    assert ppo(run_folder, "-s", "ppo.total_episodes=64", *given).exit_code == 0
    best, metrics = manifest(run_folder)["best"], lines(run_folder / "ppo/metrics.jsonl")
    assert metrics[-1]["objective/kl_coef"] != 0.5, "it moved"
    values = {
        row["step"] - 1: row["objective/score/reward"]
        - 0.25 * (1 - row["objective/eos_fraction"])
        - 0.5 * row["objective/kl"]
        for row in metrics
    }
    assert best["value"] == pytest.approx(max(values.values()), abs=1e-5)
    assert values[best["step"]] == max(values.values())
    assert best["metric"] == "objective/scores before use_score_scaling - 0.5 * objective/kl"


def snapshots(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings) -> Snapshots:
    """Snapshots of a run of ten updates, without models."""
    monkeypatch.setattr(Snapshots, "_save", lambda self, step: self.path(step).mkdir(parents=True, exist_ok=True))
    config = SimpleNamespace(
        folder=folder, held_out=[], ppo=PPOSettings(total_episodes=80, **settings), output=SimpleNamespace(snapshots=1)
    )
    return Snapshots(config, SimpleNamespace(num_updates=10), runs.CheckpointTimer())


def numbers(score: float, kl: float = 0.0, kl_coef: float = 0.05) -> dict[str, float]:
    return {"objective/scores": score, "objective/kl": kl, "objective/kl_coef": kl_coef}


def test_a_coefficient_that_grows_makes_no_earlier_policy_the_best(tmp_path, monkeypatch):
    """By each update's own coefficient the values would be 1 and 1 - 4 * 0.5."""
    settings = {"kl_coef": 0.1, "adap_kl_ctrl": True}
    kept = snapshots(tmp_path, monkeypatch, **settings)
    kept.record_metrics(1, numbers(1.0, 0.0, 0.1), None)
    kept.record_metrics(2, numbers(2.0, 4.0, 0.5), None)
    assert kept.manifest_fields()["best"] == {
        "step": 1,
        "metric": "objective/scores - 0.1 * objective/kl",
        "value": 1.6,
    }
    again = snapshots(tmp_path, monkeypatch, **settings)
    again.load_state_dict(kept.state_dict())
    assert again.manifest_fields() == kept.manifest_fields()


def test_a_run_of_before_goes_on_by_its_own_rule(tmp_path, monkeypatch):
    """Its best value is in the unit of that rule: 2 - 0.5 * 4 is less than 1, though 2 - 0.1 * 4 is more."""
    kept = snapshots(tmp_path, monkeypatch, kl_coef=0.1, adap_kl_ctrl=True)
    kept.load_state_dict({"step": 0, "value": 1.0, "window": []})
    kept.record_metrics(2, numbers(2.0, 4.0, 0.5), None)
    assert kept.manifest_fields()["best"] == {
        "step": 0, "metric": "objective/scores - objective/kl_coef * objective/kl", "value": 1.0,
    }  # fmt: skip


# Options that only the stage can show


def test_generate_ref_response_puts_the_references_own_words_beside(trained_folder):
    run_folder = trained_folder
    rows = untimed(run_folder / "ppo/metrics.jsonl")
    beside = ppo(run_folder, "--fresh", "-s", "ppo.generate_ref_response=true", "-s", "ppo.learning_rate=1e-3")
    assert beside.exit_code == 0 and rows == untimed(run_folder / "ppo/metrics.jsonl")
    samples = lines(run_folder / "ppo/samples.jsonl")
    assert all(isinstance(row["ref_response"], str) and isinstance(row["ref_score"], float) for row in samples)
    assert any(row["ref_response"] != row["response"] for row in samples) and "its score" in beside.stdout
    first = [(row["prompt"], row["ref_response"]) for row in samples if row["step"] == 2]
    assert len(first) == len(set(first)) == 8


def test_ptx_rows_of_all_forms(run_folder):
    forms = {
        "pairs": [{"prompt": "tell me", "completion": " about the sea"}] * 3,
        "texts": [{"text": "about the moon and the hill"}] * 3,
    }
    for name, rows in forms.items():
        (run_folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write(run_folder, "ppo", {**PPO, "data": {**PPO["data"], "ptx_data": f"{name}.jsonl"}})
        assert ppo(run_folder, "--fresh", "-s", "ppo.ptx_coef=1.0").exit_code == 0
        losses = [row["loss/ptx_avg"] for row in lines(run_folder / "ppo/metrics.jsonl")]
        assert losses[-1] < losses[0]
    alone = ppo(run_folder, "--fresh")
    assert (
        alone.exit_code == 2
        and "error[C17]" in alone.stderr
        and "data.ptx_data has no effect without ppo.ptx_coef" in alone.stderr
    )


def test_policy_head_saves_a_value_model_with_the_policys_body(run_folder):
    write(run_folder, "ppo", {**PPO, "models": {**PPO["models"], "value": "policy_head"}})
    assert ppo(run_folder).exit_code == 0
    value = AutoModelForSequenceClassification.from_pretrained(run_folder / "ppo/value")
    policy = AutoModelForCausalLM.from_pretrained(run_folder / "ppo/model")
    assert value.num_labels == 1 and value.score.weight.abs().max() > 0
    pairs = zip(value.model.parameters(), policy.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_c06_more_shared_layers_than_there_are(run_folder):
    result = ppo(run_folder, "-s", "ppo.num_shared_layers=2")
    assert (
        result.exit_code == 2
        and "error[C06]: --set ppo.num_shared_layers: ppo.num_shared_layers 2 of 2 layers" in result.stderr
    )
    assert ppo(run_folder, ONE, "--fresh", "-s", "ppo.num_shared_layers=1").exit_code == 0


def test_m05_a_state_of_an_older_version(trained_folder):
    """It had no hash of itself, and knew nothing of the logs."""
    run_folder = trained_folder
    (run_folder / "ppo/manifest.json").unlink()
    for state in (run_folder / "ppo/state").glob("step_*"):
        (state / "state.json").write_text(json.dumps({"schema": 1, "name": state.name, "files": {}}))
    refused = ppo(run_folder)
    assert refused.exit_code == 1 and "error[M05]" in refused.stderr and "by an older version" in refused.stderr


def test_the_best_policy_that_a_state_knows_stays_until_another_state_is_saved(tmp_path, monkeypatch):
    """A run that goes on from that state may end with it."""
    kept = snapshots(tmp_path, monkeypatch)
    kept.save_if_due(0)
    there = []
    for step, score in enumerate((1.0, 2.0, 3.0, 0.0), 1):
        kept.record_metrics(step, numbers(score), None)
        kept.save_if_due(step)
        if step == 2:
            there.append(runs.state_steps(kept.folder))
            kept.prune(2)
        there.append(runs.state_steps(kept.folder))
    # The best by step 2 is the policy after step 1; that of step 2 itself waits for the numbers of step 3.
    assert there == [[0, 1], [0, 1, 2], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    kept.path(10).mkdir()  # the last one is of those that stay
    kept.prune(10)
    assert runs.state_steps(kept.folder) == [2, 10]
    kept.prune(2)
    assert runs.state_steps(kept.folder) == [2]
