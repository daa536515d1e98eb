"""PPO sharded over two processes by FSDP2: the numbers of one process, sharded checkpoints, signals, errors."""

import json
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from ppo_folder import PPO, lines, ppo, rlhf, write
from run_cli import is_one_error
from test_group_ppo import NAMES, TWO, child, one_and_two, results_of, stage, started, when

from rlhf_cli import runs
from rlhf_cli.models import load, save
from rlhf_cli.runs import checkpoints

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], ...]:
    """Results of one process with all weights, and of each of two with shards."""
    return one_and_two(tmp_path_factory.mktemp("group"), "fsdp")


@pytest.mark.parametrize("name", NAMES)
def test_sharded_models_train_the_same_weights(both, name: str) -> None:
    one, first, second = (each[name] for each in both)
    limit = 1e-12 if "float64" in name else 1e-5
    assert one["rollouts"] == first["rollouts"] == second["rollouts"]
    for model in ("policy", "value"):
        assert torch.equal(first[model], second[model])
        assert (one[model] - first[model]).norm() <= limit * one[model].norm(), model
    for expected, stats, other_stats in zip(one["stats"], first["stats"], second["stats"], strict=True):
        assert stats == other_stats
        for key in ("loss/policy_avg", "loss/value_avg", "policy/grad_norm", "value/grad_norm", "objective/kl"):
            assert expected[key] == pytest.approx(stats[key], rel=1e3 * limit, abs=10 * limit), key


def test_each_process_has_about_half_of_the_weights(both) -> None:
    for results in both[1:]:
        assert 0.5 <= results["plain, torch.float32"]["held"] < 0.52  # norms and the value model's head are replicated
    assert both[0]["plain, torch.float32"]["held"] == 1


@pytest.mark.parametrize("name", ["loss", "reward", "reward model"])
def test_an_error_of_one_process_is_raised_in_all(both, name: str) -> None:
    one, first, second = (each[f"error in the {name}"] for each in both)
    assert first == second == one


# The command


@pytest.fixture
def sharded(run_folder: Path) -> Path:
    settings = PPO["ppo"] | TWO | {"fsdp": True, "total_episodes": 80}
    write(run_folder, "ppo", PPO | {"ppo": settings, "output": {"save_steps": 5, "keep": 9, "snapshots": 2}})
    return run_folder


@pytest.mark.parametrize("value", ["reward", "policy_head"])
def test_the_stage_writes_the_files_of_an_unsharded_run(sharded: Path, value: str) -> None:
    """Policy, value model and snapshots are plain folders, and one process can verify a sharded checkpoint."""
    changes = ("-s", f"models.value={value}", "-s", "ppo.generate_ref_response=true")
    result = child(*stage(sharded, *changes))
    assert result.returncode == 0 and "E01" not in result.stderr, result.stderr
    metrics, models = lines(sharded / "ppo/metrics.jsonl"), plain_models(sharded)
    state = runs.state_at(sharded / "ppo/state", 5)
    assert {path.name for path in (state / "shards").iterdir()} == {"__0_0.distcp", "__1_0.distcp", ".metadata"}
    replayed = rlhf("replay", sharded, "--step", "6")
    assert replayed.exit_code == 0, replayed.output
    assert child(*stage(sharded, *changes, "--fresh", "-s", "ppo.fsdp=false")).returncode == 0
    for line, expected in zip(metrics, lines(sharded / "ppo/metrics.jsonl"), strict=True):
        for key in ("objective/scores", "objective/kl", "policy/grad_norm", "loss/policy_avg", "loss/value_avg"):
            assert line[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), key
    for name, weights in plain_models(sharded).items():
        assert torch.allclose(models[name], weights, atol=1e-3), name


def plain_models(folder: Path) -> dict[str, torch.Tensor]:
    models = {"model": load.load_causal_lm(folder / "ppo/model"), "value": load.load_reward_model(folder / "ppo/value")}
    for path in sorted((folder / "ppo/snapshots").iterdir()):
        models[path.name] = load.load_causal_lm(path)
    return {name: torch.cat([w.detach().reshape(-1) for w in model.parameters()]) for name, model in models.items()}


def test_resume_equals_a_straight_run(sharded: Path) -> None:
    settings = PPO["ppo"] | TWO | {"fsdp": True, "total_episodes": 128}
    write(sharded, "ppo", PPO | {"ppo": settings, "output": {"save_steps": 5}})
    process = started(sharded)
    when(sharded, 5, process)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143, stderr
    resumed = child(*stage(sharded))
    assert resumed.returncode == 0 and "resumes at step" in resumed.stderr, resumed.stderr
    files = results_of(sharded)
    assert child(*stage(sharded, "--fresh")).returncode == 0
    assert results_of(sharded) == files


def test_a_run_stopped_by_its_kl_limit_saves_the_best_policy(sharded: Path) -> None:
    result = child(*stage(sharded, "-s", "ppo.kl_stop=1e-6", "-s", "ppo.learning_rate=0.01"))
    assert result.returncode == 1 and result.stderr.count("error[R04]") == 1, result.stderr
    manifest = json.loads((sharded / "ppo/manifest.json").read_text())
    assert manifest["model_is"] == "the best step"
    models = plain_models(sharded)
    assert torch.equal(models["model"], models[f"step_{manifest['step']:06d}"])


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("ran"),)


def test_metadata_that_would_run_code_is_refused(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest's hash is right: whoever can write the checkpoint can write its manifest."""
    monkeypatch.chdir(sharded)
    assert child(*stage(sharded, "-s", "ppo.total_episodes=40")).returncode == 0
    state = runs.state_at(sharded / "ppo/state", 5)
    (state / "shards/.metadata").write_bytes(pickle.dumps(Evil()))
    checkpoints._write_manifest(state, state.name)
    with pytest.raises(Exception, match="contains non-tensor objects; they were not executed"):
        save.load_tree(state)
    assert not Path("ran").exists()


def test_options_that_exclude_fsdp_and_fsdp_in_one_process(sharded: Path) -> None:
    for more in ("ppo.num_shared_layers=1", "ppo.optim=adamw_8bit", "models.adapters.kind=lora"):
        assert is_one_error(ppo(sharded, "-s", more), "C17"), more
    result = ppo(sharded)
    assert result.exit_code == 0 and "warning[E01]" in result.stderr
    assert "fsdp shards models over several processes, and this is one process: it has no effect" in result.stderr
