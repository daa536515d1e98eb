"""PPO sharded over processes by FSDP2: checkpoints, signals, errors. The numbers: tests/distributed/test_ppo.py.

Modules: `models/sharding.py`.
"""

import json
import pickle
import shutil
import signal
from pathlib import Path

import pytest
import torch
from canaries import Trap
from chaos.fingerprint import differences, fingerprint
from group import HELPERS, TORCHRUN, TWO_MACHINES, child, command, imported_at_start, stop_and_resume
from ppo_folder import PPO, lines, must_succeed, ppo, rlhf, write
from run_cli import is_one_error

from rlhf_cli import runs
from rlhf_cli.models import load, save
from rlhf_cli.runs import checkpoints
from tests.distributed.test_ppo import TWO
from tests.reference.comparison import compare_run, disagreements

pytestmark = pytest.mark.distributed


@pytest.fixture
def sharded(run_folder: Path) -> Path:
    settings = PPO["ppo"] | TWO | {"fsdp": True, "total_episodes": 80}
    write(run_folder, "ppo", PPO | {"ppo": settings, "output": {"save_steps": 5, "keep": 9, "snapshots": 2}})
    return run_folder


@pytest.mark.parametrize("value", ["reward", "policy_head"])
def test_the_stage_writes_the_files_of_an_unsharded_run(sharded: Path, value: str) -> None:
    """Policy, value model and snapshots are plain folders, and one process can verify a sharded checkpoint."""
    changes = ("-s", f"models.value={value}", "-s", "ppo.generate_ref_response=true")
    result = child(*command(sharded / "ppo.yaml", *changes))
    assert result.returncode == 0 and "E01" not in result.stderr, result.stderr
    metrics, models = lines(sharded / "ppo/metrics.jsonl"), plain_models(sharded)
    state = runs.state_at(sharded / "ppo/state", 5)
    assert {path.name for path in (state / "shards").iterdir()} == {"__0_0.distcp", "__1_0.distcp", ".metadata"}
    must_succeed(rlhf("verify", sharded, "--step", "6"))
    assert disagreements(compare_run(sharded, 6)) == {}
    assert child(*command(sharded / "ppo.yaml", *changes, "--fresh", "-s", "ppo.fsdp=false")).returncode == 0
    for line, expected in zip(metrics, lines(sharded / "ppo/metrics.jsonl"), strict=True):
        for key in ("objective/scores", "objective/kl", "policy/grad_norm", "loss/policy_avg", "loss/value_avg"):
            assert line[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), key
    for name, weights in plain_models(sharded).items():
        assert torch.allclose(models[name], weights, atol=1e-3), name


def test_only_the_first_process_reads_weights_and_a_limit_restores_the_best_policy(sharded: Path) -> None:
    """Policy (and reference), reward model and value model; then the best policy, which is saved."""
    changes = ("-s", "ppo.kl_stop=1e-6", "-s", "ppo.learning_rate=0.01")
    result = child(*TORCHRUN, HELPERS / "group_loading.py", sharded, *changes)
    assert result.returncode == 1 and "error[R04]" in result.stderr, result.stderr
    manifest, models = json.loads((sharded / "ppo/manifest.json").read_text()), plain_models(sharded)
    assert manifest["model_is"] == "the best step" and "value" not in models  # its value model is that of no step kept
    assert torch.equal(models["model"], models[f"step_{manifest['step']:06d}"])
    full, empty = (Path(f"{sharded}/loads.{rank}").read_text().splitlines() for rank in (0, 1))
    names = [line.split()[0] for line in full]
    assert names[:3] == ["sft_model", "reward_model", "reward_model"] and names[3].startswith("step_")
    assert full == [f"{name} full" for name in names] and empty == [f"{name} empty" for name in names]


@pytest.mark.parametrize("fsdp", ["true", '"hybrid"'])
def test_no_thread_of_a_group_is_left_when_the_processes_end(sharded: Path, fsdp: str) -> None:
    """One that is left may abort the process while Python ends."""
    code = f"""
import atexit, os

def write():
    with open({str(sharded / "threads")!r}, "a") as file:
        file.write(f"{{len(os.listdir('/proc/self/task'))}}\\n")

if "RANK" in os.environ:
    atexit.register(write)
"""
    variables = {"PYTHONPATH": imported_at_start(sharded, TWO_MACHINES + code)}
    words = command(sharded / "ppo.yaml", "-s", f"ppo.fsdp={fsdp}", "-s", "ppo.total_episodes=32", processes=4)
    must_succeed(child(*words, "-s", "ppo.per_device_train_batch_size=1", **variables))
    assert (sharded / "threads").read_text().split() == ["1"] * 4


def plain_models(folder: Path) -> dict[str, torch.Tensor]:
    models = {"model": load.load_causal_lm(folder / "ppo/model")}
    if (folder / "ppo/value").exists():
        models["value"] = load.load_reward_model(folder / "ppo/value")
    for path in sorted((folder / "ppo/snapshots").iterdir()):
        models[path.name] = load.load_causal_lm(path)
    return {name: torch.cat([w.detach().reshape(-1) for w in model.parameters()]) for name, model in models.items()}


@pytest.mark.parametrize("fsdp", [True, "hybrid"])
def test_resume_equals_a_straight_run(sharded: Path, fsdp: bool | str) -> None:
    """Of two processes, or of two machines with two each; and another number of machines changes only rounding."""
    count, rank, stop = (4, 3, signal.SIGKILL) if fsdp == "hybrid" else (2, None, signal.SIGTERM)
    variables = {"PYTHONPATH": imported_at_start(sharded, TWO_MACHINES)} if fsdp == "hybrid" else {}
    settings = PPO["ppo"] | {"fsdp": fsdp, "per_device_train_batch_size": 4 // count, "total_episodes": 128}
    write(sharded, "ppo", PPO | {"ppo": settings, "output": {"save_steps": 5}})
    stop_and_resume(sharded / "ppo.yaml", "step_000005", stop, rank, processes=count, **variables)
    resumed, words = fingerprint(sharded / "ppo"), command(sharded / "ppo.yaml", processes=count)
    result = child(*words, "--fresh", **variables)
    assert result.returncode == 0 and "warning[E0" not in result.stderr, result.stderr
    different = differences(resumed, fingerprint(sharded / "ppo"))
    assert [name for name in different if not name.startswith("state/")] == []
    if fsdp == "hybrid":
        models = plain_models(sharded)
        (sharded / "ppo/manifest.json").unlink()
        shutil.rmtree(sharded / "ppo/state/step_000016")
        result = child(*words)  # all on one machine
        assert result.returncode == 0 and "resumes at step 15 of 16" in result.stderr, result.stderr
        assert "warning[E05]" in result.stderr and "machines 2 -> 1" in result.stderr
        assert "warning[E01]" in result.stderr and "all 4 processes are on one" in result.stderr
        for name, weights in plain_models(sharded).items():
            assert torch.allclose(models[name], weights, atol=1e-6), name


def test_metadata_that_would_run_code_is_refused(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest's hash is right: whoever can write the checkpoint can write its manifest."""
    monkeypatch.chdir(sharded)
    assert child(*command(sharded / "ppo.yaml", "-s", "ppo.total_episodes=40")).returncode == 0
    state = runs.state_at(sharded / "ppo/state", 5)
    (state / "shards/.metadata").write_bytes(pickle.dumps(Trap(Path("ran"))))
    checkpoints._write_manifest(state, state.name)
    with pytest.raises(Exception, match="contains non-tensor objects; they were not executed"):
        save.load_tree(state)
    assert not Path("ran").exists()


def test_options_that_exclude_fsdp_and_fsdp_in_one_process(sharded: Path) -> None:
    for more in ("ppo.num_shared_layers=1", "ppo.optim=adamw_8bit", "models.adapters.kind=lora", "ppo.average=0.9"):
        assert is_one_error(ppo(sharded, "-s", more), "C17"), more
    result = ppo(sharded)
    assert result.exit_code == 0 and "warning[E01]" in result.stderr
    assert "fsdp shards models over several processes, and this is one process: it has no effect" in result.stderr
