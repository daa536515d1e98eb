"""PPO cut up over two processes by FSDP2: the numbers of one that has all, states in parts, stops, refusals."""

import json
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from ppo_folder import PPO, lines, ppo, rlhf, write
from test_cli import is_one_error
from test_group_ppo import NAMES, TWO, child, left, one_and_two, stage, started, when

from rlhf_cli import runs
from rlhf_cli.models import load, save
from rlhf_cli.runs import checkpoints

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], ...]:
    """What one process finds that has all, and each of two that have parts."""
    return one_and_two(tmp_path_factory.mktemp("group"), "fsdp")


@pytest.mark.parametrize("name", NAMES)
def test_parts_learn_what_the_whole_learns(both, name: str) -> None:
    one, first, second = (each[name] for each in both)
    limit = 1e-12 if "float64" in name else 1e-5
    assert one["rollouts"] == first["rollouts"] == second["rollouts"]
    for model in ("policy", "value"):
        assert torch.equal(first[model], second[model])
        assert (one[model] - first[model]).norm() <= limit * one[model].norm(), model
    for ours, theirs, again in zip(one["stats"], first["stats"], second["stats"], strict=True):
        assert theirs == again
        for key in ("loss/policy_avg", "loss/value_avg", "policy/grad_norm", "value/grad_norm", "objective/kl"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e3 * limit, abs=10 * limit), key


def test_each_process_holds_about_half(both) -> None:
    for found in both[1:]:
        assert 0.5 <= found["plain, torch.float32"]["held"] < 0.52  # norms and the value model's head are whole
    assert both[0]["plain, torch.float32"]["held"] == 1


@pytest.mark.parametrize("name", ["loss", "reward", "reward model"])
def test_what_one_process_finds_wrong_all_of_them_raise(both, name: str) -> None:
    one, first, second = (each[f"error in the {name}"] for each in both)
    assert first == second == one


# The command


@pytest.fixture
def cut(run_folder: Path) -> Path:
    settings = PPO["ppo"] | TWO | {"fsdp": True, "total_episodes": 80}
    write(run_folder, "ppo", PPO | {"ppo": settings, "output": {"save_steps": 5, "keep": 9, "snapshots": 2}})
    return run_folder


@pytest.mark.parametrize("value", ["reward", "policy_head"])
def test_the_stage_leaves_what_it_leaves_uncut(cut: Path, value: str) -> None:
    """Policy, value model and snapshots as plain folders, and a state in parts that one process can replay."""
    told = ("-s", f"models.value={value}", "-s", "ppo.generate_ref_response=true")
    result = child(*stage(cut, *told))
    assert result.returncode == 0 and "E01" not in result.stderr, result.stderr
    metrics, models = lines(cut / "ppo/metrics.jsonl"), plain_models(cut)
    state = runs.state_at(cut / "ppo/state", 5)
    assert {path.name for path in (state / "shards").iterdir()} == {"__0_0.distcp", "__1_0.distcp", ".metadata"}
    replayed = rlhf("replay", cut, "--step", "6")
    assert replayed.exit_code == 0, replayed.output
    assert child(*stage(cut, *told, "--fresh", "-s", "ppo.fsdp=false")).returncode == 0
    for ours, theirs in zip(metrics, lines(cut / "ppo/metrics.jsonl"), strict=True):
        for key in ("objective/scores", "objective/kl", "policy/grad_norm", "loss/policy_avg", "loss/value_avg"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key
    for name, weights in plain_models(cut).items():
        assert torch.allclose(models[name], weights, atol=1e-3), name


def plain_models(folder: Path) -> dict[str, torch.Tensor]:
    found = {"model": load.load_causal_lm(folder / "ppo/model"), "value": load.load_reward_model(folder / "ppo/value")}
    for path in sorted((folder / "ppo/snapshots").iterdir()):
        found[path.name] = load.load_causal_lm(path)
    return {name: torch.cat([w.detach().reshape(-1) for w in model.parameters()]) for name, model in found.items()}


def test_stopped_it_goes_on_to_the_same_bytes(cut: Path) -> None:
    write(
        cut, "ppo", PPO | {"ppo": PPO["ppo"] | TWO | {"fsdp": True, "total_episodes": 128}, "output": {"save_steps": 5}}
    )
    process = started(cut)
    when(cut, 5, process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    again = child(*stage(cut))
    assert again.returncode == 0 and "resumes at step" in again.stderr, again.stderr
    broken = left(cut)
    assert child(*stage(cut, "--fresh")).returncode == 0
    assert left(cut) == broken


def test_the_best_policy_is_put_back_where_a_limit_stops_the_run(cut: Path) -> None:
    result = child(*stage(cut, "-s", "ppo.kl_stop=1e-6", "-s", "ppo.learning_rate=0.01"))
    assert result.returncode == 1 and result.stderr.count("error[R04]") == 1, result.stderr
    told = json.loads((cut / "ppo/manifest.json").read_text())
    assert told["model_is"] == "the best step"
    models = plain_models(cut)
    assert torch.equal(models["model"], models[f"step_{told['step']:06d}"])


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("ran"),)


def test_a_list_of_places_that_would_run_code_is_refused(cut: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hash is right: somebody who can write the state can write its manifest."""
    monkeypatch.chdir(cut)
    assert child(*stage(cut, "-s", "ppo.total_episodes=40")).returncode == 0
    state = runs.state_at(cut / "ppo/state", 5)
    (state / "shards/.metadata").write_bytes(pickle.dumps(Evil()))
    checkpoints._write_manifest(state, state.name)
    with pytest.raises(Exception, match="holds something else than numbers, none of which was run"):
        save.load_tree(state)
    assert not Path("ran").exists()


def test_what_cannot_be_cut_up_is_refused_and_one_process_has_nothing_to_cut(cut: Path) -> None:
    for more in ("ppo.num_shared_layers=1", "ppo.optim=adamw_8bit", "models.adapters.kind=lora"):
        assert is_one_error(ppo(cut, "-s", more), "C17"), more
    result = ppo(cut)
    assert result.exit_code == 0 and "warning[E01]" in result.stderr
    assert "fsdp shards models over several processes, and this is one process: it has no effect" in result.stderr
