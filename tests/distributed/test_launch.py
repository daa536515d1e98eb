"""The script in the containers of `rlhf launch`, in two processes of this machine in place of two pods."""

import filecmp
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from run_cli import child, must_succeed

pytestmark = pytest.mark.distributed
WAIT_S = 600
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
PYTHON = "/opt/venv/bin/python"


def free_ports() -> int:
    """Return a port that is free, and likely those after it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_pods(script: str) -> list[subprocess.Popen[bytes]]:
    """Start the script as Kubeflow's runtime does, on two nodes."""
    address = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_ports())}
    return [
        subprocess.Popen(["bash", "-c", script], env={**ONE_THREAD, **address, "PET_NODE_RANK": str(rank)})
        for rank in range(2)
    ]


def test_pods_that_are_evicted_save_and_new_ones_end_in_the_same_bytes(tmp_path: Path) -> None:
    run, straight = tmp_path / "ci", tmp_path / "straight"
    for folder in (run, straight):
        must_succeed(child("init", "ci", folder))
    must_succeed(child("sft", straight, "--nproc", 2, env=ONE_THREAD))
    printed = must_succeed(child("launch", "trainjob", run, "--nodes", 2, "--cpus", 1, "--only", "sft")).stdout
    *_, job = yaml.safe_load_all(printed)
    (script,) = job["spec"]["trainer"]["args"]
    script = script.replace("/runs/", f"{tmp_path}/").replace(PYTHON, sys.executable)

    pods = start_pods(script)
    end = time.monotonic() + WAIT_S
    while not (run / "sft/metrics.jsonl").is_file():
        assert time.monotonic() < end and all(pod.poll() is None for pod in pods)
        time.sleep(0.1)
    for pod in pods:
        pod.send_signal(signal.SIGTERM)
    assert [pod.wait(WAIT_S) for pod in pods] != [0, 0]
    assert not (run / "sft/manifest.json").exists() and list((run / "sft/state").iterdir())

    assert [pod.wait(WAIT_S) for pod in start_pods(script)] == [0, 0]
    logs = "".join(log.read_text() for log in run.glob("launch/*/sft-0.log"))
    assert "saved; the same command resumes" in logs and "resumes at step" in logs, logs
    name = "sft/model/model.safetensors"
    assert filecmp.cmp(run / name, straight / name, shallow=False)
