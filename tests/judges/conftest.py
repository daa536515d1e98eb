"""A judge that a stand-in plays."""

from collections.abc import Iterator

import pytest
import stand_in_judge
from stand_in_judge import StandIn


@pytest.fixture
def server() -> Iterator[StandIn]:
    with stand_in_judge.stand_in() as server:
        yield server
