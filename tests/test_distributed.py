"""`--nproc`: what the command makes of the ends of its processes; and the variables of launchers."""

import os
from pathlib import Path
from typing import Any

import pytest
from bad_inputs import check
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api

from rlhf_cli import config, distributed
from rlhf_cli.errors import RLHFError
from rlhf_cli.runs.resolve import weights_bytes
from tests.stages.common.test_machine import GROUP


def ends(monkeypatch: pytest.MonkeyPatch, *codes: int) -> None:
    """Processes that end with these codes, the first of them last."""

    class Failure(ProcessFailure):
        def __post_init__(self) -> None:
            self.message, self.timestamp = "", -self.local_rank

    def start(*arguments: Any) -> None:
        failures = {rank: Failure(rank, 0, code, "") for rank, code in enumerate(codes) if code}
        raise ChildFailedError("rlhf", failures)

    for name in ("OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.setenv(name, "1")  # else it sets them for this process
    monkeypatch.setattr(api, "elastic_launch", lambda config, entry: start)


@pytest.mark.parametrize(("codes", "code"), [((2, 1), 2), ((1, 2), 2), ((2, -6), 2), ((1, 1), 1), ((143, 143), 143)])
def test_the_exit_code_is_that_of_the_cause(monkeypatch: pytest.MonkeyPatch, codes: tuple[int, int], code: int) -> None:
    """Who waits for a process that has refused its inputs ends with 1, and may be seen first."""
    ends(monkeypatch, *codes)
    assert distributed.launch_group(2, ["sft"]) == code


def test_large_models_have_more_time_to_stop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model of 1 GB in bfloat16 has a checkpoint of 6 GB, which takes 30 s at 200 MB/s."""
    ends(monkeypatch, 143, 143)
    (tmp_path / "sft/model").mkdir(parents=True)
    with (tmp_path / "sft/model/model.safetensors").open("wb") as file:
        file.truncate(10**9)
    (tmp_path / "ppo.yaml").write_text("data: {prompts: none.jsonl}\nppo: {total_episodes: 64}")
    size_of_weights = weights_bytes(config.load("ppo", tmp_path / "ppo.yaml"))
    for size, seconds in ((0, "50"), (size_of_weights, "80")):
        monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
        assert distributed.launch_group(2, ["ppo"], weights_bytes=size) == 143
        assert os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == seconds


def test_a_process_that_was_killed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ends(monkeypatch, 1, -9)
    with pytest.raises(RLHFError, match="process 1 of 2 was killed by SIGKILL"):
        distributed.launch_group(2, ["sft"])


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "OMPI_COMM_WORLD_SIZE": "1"},
        {"WORLD_SIZE": "", "MASTER_ADDR": ""},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # sbatch alone
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun -n 1 within it
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},  # torchrun
        {"PMI_RANK": "1", "OMPI_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    ],
)
def test_e04_one_process_is_fine(folder: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert check("sft.yaml").exit_code == 0
    assert distributed.rank() == distributed.local_rank() == 0 and distributed.local_world_size() == 1


def test_e04_a_rank_beyond_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**GROUP, "RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RLHFError, match=r"error\[E04\]: RANK: RANK is 2 in a group of 2 processes"):
        distributed.check_group()


def test_processes_of_a_group_start_no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """RLHF_NPROC is the default of --nproc, and each of them would start as many again."""
    seen: list[str | None] = []
    monkeypatch.setenv(distributed.NPROC_VARIABLE, "2")
    launch = lambda *_: lambda *_: seen.append(os.environ.get(distributed.NPROC_VARIABLE))  # noqa: E731
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", launch)
    assert distributed.launch_group(2, []) == 0 and seen == [None]
