"""Updates of a PPO run: what warns, what ends it, and the checkpoint that is left."""

import copy
import re
from dataclasses import replace

import pytest
import torch
from ppo_folder import ONE, PPO, fails, ppo, settings, steps, write
from safetensors.torch import load_file

from rlhf_cli.ppo import losses
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.rewards.model import ModelReward
from tests.stages.ppo.test_policy_snapshots import metrics_of

pytestmark = pytest.mark.full


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


def test_r04_warns_of_a_kl_below_zero_beyond_noise(run_folder, monkeypatch):
    """A reference that gives the policy's own samples a higher probability: no sampler of the policy does that."""
    plain, calls = losses.token_logprobs, []

    def shifted(logits, ids, temperature):
        calls.append(1)
        return plain(logits, ids, temperature) + (0.5 if len(calls) % 2 == 0 else 0.0)

    monkeypatch.setattr(losses, "token_logprobs", shifted)
    stderr = ppo(run_folder, *settings(ONE, "ratio_threshold=null", "max_logprob_gap=9")).stderr
    assert "warning[R04]: step 1: KL to the SFT policy is -" in stderr and "below 0 by more than noise" in stderr
