"""PPO on two machines with a rollout server on a third: the network namespaces of scripts/two_hosts.sh, as root."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from group import HELPERS, child, command
from ppo_folder import PPO, lines, manifest, must_succeed, write, write_models
from run_cli import ROOT, rlhf

from tests.ppo.test_vllm_server import CPU, VLLM

pytestmark = pytest.mark.distributed
SCRIPT = ROOT / "scripts/two_hosts.sh"
SERVER = "10.77.0.3"


@pytest.fixture(scope="module", autouse=True)
def networks() -> None:
    """Skip where no network namespace can be made."""
    if not shutil.which("ip"):
        pytest.skip("there is no program ip: install iproute2")
    name = f"rlhf-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"network namespaces need root: {made.stderr.strip()}")
    subprocess.run(["ip", "netns", "del", name], check=True)


def test_two_machines_train_a_sharded_policy_on_what_a_server_on_a_third_draws(run_folder: Path) -> None:
    """The responses and scores are those of two processes on one machine, without a server."""
    write_models(run_folder, tie_word_embeddings=True)
    settings = PPO["ppo"] | {"per_device_train_batch_size": 2, "fsdp": True, "total_episodes": 16}
    write(run_folder, "ppo", PPO | {"ppo": settings})
    server = f"{sys.executable} {HELPERS / 'stand_in_vllm.py'} {run_folder / 'sft_model'} {SERVER} 8000"
    engine = f"models.engine={{vllm: {{url: 'http://{SERVER}:8000'}}}}"
    ran = child("timeout", 220, SCRIPT, "ppo", run_folder / "ppo.yaml", engine, PYTHON=sys.executable, SERVER=server)
    must_succeed(ran, f"http://{SERVER}:8000 generate the responses")
    names = ("samples.jsonl", "metrics.jsonl")
    by_server = [lines(run_folder / "ppo" / name) for name in names]

    must_succeed(child(*command(run_folder / "ppo.yaml", "--fresh")))
    samples, metrics = (lines(run_folder / "ppo" / name) for name in names)
    assert [row["response"] for row in by_server[0]] == [row["response"] for row in samples]
    for key in ("objective/scores", "objective/kl", "policy/grad_norm"):
        assert [row[key] for row in by_server[1]] == pytest.approx([row[key] for row in metrics], rel=1e-4, abs=1e-4)


@pytest.mark.vllm
@pytest.mark.skipif(not VLLM, reason="RLHF_VLLM is not set: make vllm-test sets it")
def test_two_machines_train_a_sharded_policy_on_what_vllm_on_a_third_draws(run_folder: Path) -> None:
    """The server is started as `rlhf serve` prints, and is sent the weights through the shared disk."""
    write_models(run_folder, head_dim=32)  # vLLM's attention on a CPU takes no smaller ones
    settings = PPO["ppo"] | {"per_device_train_batch_size": 2, "fsdp": True, "total_episodes": 16}
    models = PPO["models"] | {"engine": {"vllm": {"url": f"http://{SERVER}:8000", "sync": "disk"}}}
    write(run_folder, "ppo", PPO | {"ppo": settings, "models": models})
    printed = must_succeed(rlhf("serve", run_folder, "--rollouts")).stdout
    variables = " ".join(f"{name}={value}" for name, value in CPU.items())
    command_line = printed[printed.index("env ") :].strip().replace("vllm serve", f"{variables} {VLLM} serve")
    config = run_folder / "ppo.yaml"
    ran = child(SCRIPT, "ppo", config, PYTHON=sys.executable, SERVER=f"{command_line} --enforce-eager", timeout=600)
    must_succeed(ran, f"http://{SERVER}:8000 generate the responses")
    metrics = lines(run_folder / "ppo/metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2] and manifest(run_folder)["engine"] == "vllm"
    assert max(row["rollout/logprob_gap"] for row in metrics) < 1e-4
