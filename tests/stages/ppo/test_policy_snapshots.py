"""The best policy, which a run ends with or keeps, through the real `rlhf ppo` on tiny models."""

import json
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
from damages import flip
from ppo_folder import fails, lines, manifest, must_succeed, ppo, settings, steps, weights

from rlhf_cli import runs
from rlhf_cli.config.base import Output
from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.models import save
from rlhf_cli.stages.ppo.policy_snapshots import NUM_CANDIDATES, Snapshots, evenly_spaced_steps

pytestmark = pytest.mark.full


def metrics_of(folder: Path) -> list[dict]:
    return lines(folder / "ppo/metrics.jsonl")


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
