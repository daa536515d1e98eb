"""`--nproc`: what the command makes of the ends of its processes. That they train is tests/test_group_*.py."""

from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api

from rlhf_cli import distributed
from rlhf_cli.errors import RLHFError


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


def test_a_process_that_was_killed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ends(monkeypatch, 1, -9)
    with pytest.raises(RLHFError, match="process 1 of 2 was killed by SIGKILL"):
        distributed.launch_group(2, ["sft"])
