"""Hybrid sharding: machines and processes by what each process was started with."""

import pytest

from rlhf_cli.errors import RLHFError
from rlhf_cli.experimental.hybrid_sharding import machines_and_processes
from rlhf_cli.models.parallel import ProcessGroup


@pytest.mark.parametrize(
    ("places", "wrong"),
    [
        ([(0, 2), (1, 2), (0, 2), (1, 2)], None),
        ([(0, 2), (1, 2), (0, 1)], "process 2 is number 1 of 1 on its machine, process 0 is one of 2"),
        ([(0, 1), (0, 2), (1, 2)], "process 1 is number 1 of 2 on its machine, process 0 is one of 1"),
        ([(0, 2), (1, 2), (0, 2)], "process 2 is number 1 of 2"),
        ([(0, 2), (0, 2), (1, 2), (1, 2)], "process 1 is number 1 of 2 on its machine"),  # machines take turns
    ],
)
def test_hybrid_sharding_needs_equal_machines(
    monkeypatch: pytest.MonkeyPatch, places: list[tuple[int, int]], wrong: str | None
) -> None:
    monkeypatch.setattr(ProcessGroup, "all_gather_object", lambda self, value: places)
    if wrong is None:
        assert machines_and_processes(ProcessGroup(1, 4)) == (2, 2)
        return
    with pytest.raises(RLHFError, match=rf"error\[E04\]: LOCAL_WORLD_SIZE: .*{wrong}"):
        machines_and_processes(ProcessGroup(1, len(places)))
