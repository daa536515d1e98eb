"""R01-R05 and the best policy, through the real `rlhf ppo` on tiny models."""

import copy
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from damages import flip
from ppo_folder import ONE, PPO, fails, lines, manifest, must_succeed, ppo, settings, steps, weights, write
from safetensors.torch import load_file

from rlhf_cli import runs
from rlhf_cli.config.base import Output
from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.models import save
from rlhf_cli.ppo import losses
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.rewards.model import ModelReward
from rlhf_cli.stages.ppo.policy_snapshots import NUM_CANDIDATES, Snapshots, evenly_spaced_steps

pytestmark = pytest.mark.full


def metrics_of(folder: Path) -> list[dict]:
    return lines(folder / "ppo/metrics.jsonl")


def test_r01_names_step_row_prompt_and_the_last_good_checkpoint(run_folder, monkeypatch):
    """The third update's reward model returns nan for its second row."""
    plain, calls = ModelReward.__call__, []

    def poisoned(self, rollout):
        calls.append(1)
        scores = plain(self, rollout)
        return scores.index_fill(0, torch.tensor(1), float("nan")) if len(calls) == 3 else scores

    with monkeypatch.context() as patched:
        patched.setattr(ModelReward, "__call__", poisoned)
        result = ppo(run_folder)
    fails(result, "R01", "last good checkpoint: ", "ppo/state/step_000002", exit_code=1)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert re.match(r"error\[R01\]: step 3: score `reward` is not finite in row 1; .*its prompt: 'tell me about", line)
    assert ppo(run_folder).exit_code == 0 and len(metrics_of(run_folder)) == 4


def test_r01_a_learning_rate_that_diverges_leaves_only_finite_checkpoints(run_folder):
    result = ppo(run_folder, *settings("learning_rate=1e30", "output.save_steps=1", "ratio_threshold=null"))
    fails(result, "R01", "error[R01]: step ", "lower ppo.learning_rate", exit_code=1)
    saved = list((run_folder / "ppo/state").glob("step_*/tensors.safetensors"))
    assert all(tensor.isfinite().all() for path in saved for tensor in load_file(path).values())
    assert not (run_folder / "ppo/manifest.json").exists()


def test_r19_an_engine_with_old_weights_ends_the_run_after_a_save(run_folder, monkeypatch):
    plain, stale = HFEngine.generate, []

    def generate(self, prompts):
        stale.append(copy.deepcopy(self.model))
        return plain(replace(self, model=stale[0 if len(stale) > 2 else -1]), prompts)

    options = settings("learning_rate=0.01", "max_logprob_gap=0.02", "num_sample_generations=0", "output.save_steps=4")
    with monkeypatch.context() as patched:
        patched.setattr(HFEngine, "generate", generate)
        result = ppo(run_folder, *options)
    fails(result, "R19", "error[R19]: step 3: the engine's log-probs differ", "ppo.max_logprob_gap 0.02", exit_code=1)
    assert steps(run_folder / "ppo/state") == {2} and len(metrics_of(run_folder)) == 2
    again = ppo(run_folder, *options)
    assert again.exit_code == 0 and "resumes at step 2 of 4" in again.stderr
    assert all(row["rollout/logprob_gap_p99"] < 1e-4 for row in metrics_of(run_folder))


def test_r02_equal_rewards_warn_once_end_the_run_after_ten_updates_and_count_on_after_a_resume(run_folder):
    """Stopped at step 10, the run's last checkpoint is of step 8: two more updates, and it stops again."""
    (run_folder / "alarm_rewards.py").write_text("constant = lambda prompts, responses: [0.5] * len(responses)\n")
    rewards = {"mine": {"function": "alarm_rewards:constant"}}
    write(run_folder, "ppo", {**PPO, "rewards": rewards, "ppo": {**PPO["ppo"], "total_episodes": 96}})
    result = ppo(run_folder, "output.save_steps=4")
    fails(result, "R02", "error[R02]: step 10: all 8 rewards are 0.5, for 10 updates in a row", exit_code=1)
    assert result.stderr.count("warning[R02]") == 1 and "warning[R02]: step 1: all 8 rewards are 0.5" in result.stderr
    assert len(metrics_of(run_folder)) == 10
    again = ppo(run_folder, "output.save_steps=4")
    fails(again, "R02", "resumes at step 8 of 12", "error[R02]: step 10", exit_code=1)
    assert "warning[R02]" not in again.stderr


def test_r03_r08_responses_that_never_end_and_skipped_minibatches_are_reported_once(run_folder):
    never = ppo(run_folder, *settings("total_episodes=16", "stop_token_id=250", "response_length=3"))
    warning = "warning[R03]: step 1: 0 of 8 responses end with the stop token (0%)"
    assert never.exit_code == 0 and warning in never.stderr and never.stderr.count("warning[R03]") == 1
    assert "hint: raise ppo.response_length" in never.stderr
    assert "R03" not in ppo(run_folder, *settings(ONE, "stop_token=none"), "--fresh").stderr
    result = ppo(run_folder, *settings("learning_rate=0.1", "ratio_threshold=1.05"), "--fresh")
    assert result.stderr.count("warning[R08]") == 1 and "exceeds ppo.ratio_threshold 1.05" in result.stderr
    assert any(row["policy/skipped_minibatches"] > 0 for row in metrics_of(run_folder))


@pytest.mark.parametrize("average", ["null", "0.5"])  # the best policy is not averaged again
def test_r04_kl_stop_ends_the_run_and_keeps_the_best_policy(run_folder, average):
    options = settings("kl_stop=0.8", "total_episodes=160", "output.snapshots=0", f"average={average}")
    result = ppo(run_folder, *options)
    metrics, made = metrics_of(run_folder), manifest(run_folder)
    stopped = metrics[-1]["step"]
    assert stopped < 20 and [row["objective/kl_k1"] > 0.8 for row in metrics] == [False] * (stopped - 1) + [True]
    kl = f"step {stopped}: KL to the SFT policy is"
    fails(result, "R04", "error[R04]: --set ppo.kl_stop: ", kl, "over ppo.kl_stop 0.8", exit_code=1)
    assert "holds the best policy, of step" in result.stderr and "over ppo.kl_stop" in made["stopped"]
    assert made["model_is"] == "the best step" and made["step"] == made["best"]["step"] < stopped
    (kept,) = (run_folder / "ppo/snapshots").glob("step_*")
    assert kept.name == f"step_{made['step']:06d}"
    assert (kept / "model.safetensors").read_bytes() == weights(run_folder)
    assert not (run_folder / "ppo/value").exists(), "the value model is that of the last step"
    must_succeed(ppo(run_folder, *options), "finished already")
    (run_folder / "ppo/manifest.json").unlink()
    flip(kept / "model.safetensors")
    fails(ppo(run_folder, *options), "M05", f"{kept} is damaged: model.safetensors", exit_code=1)
    assert not (run_folder / "ppo/manifest.json").exists()


def test_r04_warns_of_a_kl_below_zero_beyond_noise(run_folder, monkeypatch):
    """A reference that gives the policy's own samples a higher probability: no sampler of the policy does that."""
    plain, calls = losses.token_logprobs, []

    def shifted(logits, ids, temperature):
        calls.append(1)
        return plain(logits, ids, temperature) + (0.5 if len(calls) % 2 == 0 else 0.0)

    monkeypatch.setattr(losses, "token_logprobs", shifted)
    stderr = ppo(run_folder, *settings(ONE, "ratio_threshold=null", "max_logprob_gap=9")).stderr
    assert "warning[R04]: step 1: KL to the SFT policy is -" in stderr and "below 0 by more than noise" in stderr


def test_m05_a_state_of_an_older_version(trained_folder):
    """It had no hash of itself, and no positions of the logs."""
    (trained_folder / "ppo/manifest.json").unlink()
    for state in (trained_folder / "ppo/state").glob("step_*"):
        (state / "state.json").write_text(json.dumps({"schema": 1, "name": state.name, "files": {}}))
    fails(ppo(trained_folder), "M05", "by an older version", exit_code=1)


# The best policy


def test_the_best_policy_is_kept_besides_the_evenly_spaced_ones(run_folder):
    assert ppo(run_folder, *settings("total_episodes=96")).exit_code == 0
    best, metrics = manifest(run_folder)["best"], metrics_of(run_folder)
    assert steps(run_folder / "ppo/snapshots") == {6, 12, best["step"]}
    values, start = {}, 0
    for point in sorted({1} | evenly_spaced_steps(12, NUM_CANDIDATES)):
        values[point - 1] = fmean(row["objective/rlhf_reward"] for row in metrics[start:point])  # of the policy before
        start = point
    assert best["value"] == pytest.approx(max(values.values())) and values[best["step"]] == max(values.values())
    for updates in (8, 100, 157, 10_000):
        eighths = sorted(evenly_spaced_steps(updates, Output().snapshots))
        assert len(eighths) == 8 and eighths[-1] == updates
        assert all(abs(after - before - updates / 8) <= 1 for before, after in pairwise([0, *eighths]))


def test_the_best_policy_is_chosen_with_one_coefficient_and_one_unit(run_folder):
    """The controller moves kl_coef at every update, and the running deviation the scale of the scores."""
    moving = ["adap_kl_ctrl=true", "target=0.01", "horizon=40", "use_score_scaling=true", "kl_coef=0.5"]
    options = settings("total_episodes=64", "missing_eos_penalty=0.25", *moving)
    assert ppo(run_folder, *options).exit_code == 0
    best, metrics = manifest(run_folder)["best"], metrics_of(run_folder)
    assert metrics[-1]["objective/kl_coef"] != 0.5, "it moved"
    values = {}
    for row in metrics:
        score = row["objective/score/reward"] - 0.25 * (1 - row["objective/eos_fraction"])
        values[row["step"] - 1] = score - 0.5 * row["objective/kl"]
    assert best["value"] == pytest.approx(max(values.values()), abs=1e-5)
    assert values[best["step"]] == max(values.values())
    assert best["metric"] == "objective/scores before use_score_scaling - 0.5 * objective/kl"


@pytest.fixture
def snapshots(tmp_path, monkeypatch):
    """Snapshots of a run of ten updates, without models."""
    monkeypatch.setattr(save, "save_model", lambda *_: None)
    trainer = SimpleNamespace(averaged_policy=nullcontext)
    components = SimpleNamespace(num_updates=10, policy=None, tokenizer=None, trainer=trainer)

    def build(**settings) -> Snapshots:
        ppo, output = PPOSettings(total_episodes=80, **settings), SimpleNamespace(snapshots=1)
        config = SimpleNamespace(folder=tmp_path, held_out=[], ppo=ppo, output=output)
        return Snapshots(config, components, runs.CheckpointTimer())

    return build


def numbers(score: float, kl: float = 0.0, kl_coef: float = 0.05) -> dict[str, float]:
    return {"objective/scores": score, "objective/kl": kl, "objective/kl_coef": kl_coef}


def test_the_best_policy_of_a_checkpoint_is_kept_until_the_next_checkpoint(snapshots):
    """A run that resumes from that checkpoint may end with it."""
    kept, saved = snapshots(), []
    kept.save_if_due(0)
    for step, score in enumerate((1.0, 2.0, 3.0, 0.0), 1):
        kept.record_metrics(step, numbers(score), None)
        kept.save_if_due(step)
        if step == 2:
            saved.append(runs.state_steps(kept.folder))
            kept.prune(2)
        saved.append(runs.state_steps(kept.folder))
    # The best by step 2 is the policy after step 1; that of step 2 waits for the numbers of step 3.
    assert saved == [[0, 1], [0, 1, 2], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    kept.save_if_due(10)  # the last one is always kept
    kept.prune(10)
    assert runs.state_steps(kept.folder) == [2, 10]
    kept.prune(2)
    assert runs.state_steps(kept.folder) == [2]
