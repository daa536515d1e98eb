"""`rlhf launch`: sizes from the plan, what it refuses, and what its options change in the file of Slurm.

Modules: `cli/launch.py`, `commands/launch/run.py`.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from bad_inputs import replace
from plans import on_a_cpu, plan_json
from run_cli import is_one_error, must_succeed, rlhf

from rlhf_cli.commands.launch.job import LAUNCHER_BYTES

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_progress_lines")]
H100 = ("--gpu", "h100")


def launched(*arguments: object) -> str:
    """Return the file that is printed."""
    return str(must_succeed(rlhf("launch", *arguments)).stdout)


def directives(text: str) -> dict[str, str]:
    """Return the options of sbatch."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.M))


def test_sizes_are_those_of_the_plan(three: Path) -> None:
    text = launched("slurm", ".", "--nodes", 2, "--gpus", 4, *H100, "--trust-remote-code")
    assert "export RLHF_TRUST_REMOTE_CODE=1\n" in text
    stages = plan_json(".", "--gpu", "h100", "--nproc", "8", "--machines", "2")
    options = directives(text)
    assert (options["nodes"], options["gpus-per-node"], options["cpus-per-task"]) == ("2", "4", "32")
    weights = max(4 * sum(stage["parameters"].values()) for stage in stages.values())
    assert options["mem"] == f"{-(-(4 * weights + 5 * LAUNCHER_BYTES) // 2**30)}G"
    assert 50 <= int(options["signal"].removeprefix("B:TERM@")) <= 60  # small models: 50 s, a step and a checkpoint
    assert f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={options['signal'].removeprefix('B:TERM@')}\n" in text
    assert "--nnodes=2 --nproc-per-node=4" in text and "for stage in sft reward ppo; do" in text
    assert f"run={three}\n" in text
    assert "NCCL_SOCKET_IFNAME" in text and "GLOO_SOCKET_IFNAME" not in text
    assert f"Printed by: rlhf launch slurm {three} --nodes 2 --gpus 4 --gpu h100 --trust-remote-code (rlhf" in text


@on_a_cpu
def test_a_machine_without_a_gpu_is_one_process_on_each_node(three: Path) -> None:
    assert is_one_error(rlhf("launch", "slurm", ".", "--gpus", 2), "C11", "--gpu h100")
    text = launched("slurm", ".", "--nodes", 3, "--cpus", 5, "--only", "ppo", "--flops", "1e9")
    options = directives(text)
    assert (options["nodes"], options["cpus-per-task"]) == ("3", "5") and "gpus-per-node" not in options
    assert "--nnodes=3 --nproc-per-node=1" in text and "OMP_NUM_THREADS=5\n" in text
    assert "CUDA_VISIBLE_DEVICES=\n" in text and "GLOO_SOCKET_IFNAME" in text
    assert "for stage in ppo; do" in text


def test_servers_are_the_last_nodes_and_ready_before_the_trainers(three: Path) -> None:
    replace("ppo.yaml", "scorer}", "scorer, engine: {vllm: {url: http://127.0.0.1:8123}}}")
    arguments = ("slurm", ".", "--nodes", 3, "--servers", 1, "--gpus", 2, *H100)
    text = launched(*arguments)  # PPO writes the model that the server reads: to wait for it first would be for ever
    assert "/health" not in text and "ppo/engine/reference/step_000000 ]; do sleep" in text
    replace("model/config.json", '"tie_word_embeddings": true', '"tie_word_embeddings": false')
    text = launched(*arguments)
    assert directives(text)["nodes"] == "3" and "--nnodes=2 --nproc-per-node=2" in text
    assert "start --nodes=1 --relative=2" in text and "RLHF_ROLLOUT_URLS=$(printf ',http://%s:8123'" in text
    start, health = text.index("start --nodes=1 --relative=2"), text.index("/health")
    assert start < health < text.index("start --nodes=2 --relative=0")


def test_servers_are_started_again_for_an_evaluation_that_samples_from_them(three: Path) -> None:
    replace("ppo.yaml", "scorer}", "scorer, engine: {vllm: {url: http://127.0.0.1:8123}}}")
    three.joinpath("eval.yaml").write_text(
        "models: {reward: scorer, engine: {vllm: {url: http://127.0.0.1:8123}}}\ndata: {prompts: rows.jsonl}\n"
    )
    for engine in ("slurm", "jobset"):
        text = launched(engine, ".", "--nodes", 3, "--servers", 1, "--gpus", 2, *H100)
        assert '[[ $stage = ppo || $stage = eval ]] && [ ! -e "$run/$stage/manifest.json" ]' in text
        assert ("$stage/engine/reference/step_000000" if engine == "slurm" else "$run/eval/engine/reference") in text


REFUSALS: dict[str, tuple[str, list[Any], str]] = {
    "unknown engine": ("C07", ["slrum", "."], "did you mean slurm?"),
    "no run": ("C09", ["slurm", "nowhere"], "no such folder: nowhere"),
    "a file": ("C09", ["slurm", "ppo.yaml"], "is a file, not the folder of a run"),
    "unknown stage": ("C07", ["slurm", ".", "--only", "rewards"], "did you mean reward?"),
    "absent stage": ("C09", ["slurm", ".", "--only", "dpo"], "has no dpo.yaml"),
    "only servers": ("C11", ["slurm", ".", "--servers", 2, "--nodes", 2], "no node is left to train"),
    "SFT of adapters": ("C11", ["slurm", ".", "--servers", 1, "--nodes", 2], "SFT trains adapters"),
    "no engine": ("C11", ["slurm", ".", "--servers", 1, "--nodes", 2], "set models.engine"),
    "no GPU of a GPU": ("C11", ["slurm", ".", "--gpus", 0, *H100], "the plan is for a GPU"),
    "GPU without a name": ("C11", ["skypilot", ".", "--gpu", "24", "--flops", "1e14"], "by the name of their GPU"),
    "image": ("C17", ["slurm", ".", "--image", "rlhf"], "skypilot, jobset, trainjob"),
    "partition": ("C17", ["jobset", ".", "--partition", "main"], "it is for slurm"),
    "servers of a TrainJob": ("C17", ["trainjob", ".", "--servers", 1, "--nodes", 2], "jobset"),
    "two lines": ("S03", ["slurm", ".", "--partition", "a\n#SBATCH --uid=0"], "cannot be printed"),
    "does not fit": ("E03", ["slurm", ".", "--gpu", "0.001", "--flops", "1e14"], "a GPU of 0.001 GiB has 1.1 MB"),
}


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in REFUSALS.items()])
def test_what_cannot_run_is_one_line(case: tuple[str, list[Any], str], three: Path) -> None:
    code, arguments, text = case
    if text == "SFT trains adapters":
        replace("ppo.yaml", "scorer}", "scorer, engine: {vllm: {url: http://127.0.0.1:8123}}, adapters: {kind: lora}}")
        replace("sft.yaml", "model: {", "model: {adapters: {kind: lora}, ")
    assert is_one_error(rlhf("launch", *arguments), code, text)


def test_a_file_is_written_once(three: Path) -> None:
    result = must_succeed(rlhf("launch", "slurm", ".", *H100, "-o", "run.sbatch"), "run.sbatch is written")
    assert result.stdout == ""
    first = Path("run.sbatch").read_text()
    assert first.startswith("#!/bin/bash\n") and first == launched("slurm", ".", *H100)
    assert is_one_error(rlhf("launch", "slurm", ".", *H100, "-o", "run.sbatch"), "C15", "may have been edited")
    assert Path("run.sbatch").read_text() == first
