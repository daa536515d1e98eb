"""What a judge may cost at most."""

from pathlib import Path

import pytest
from stand_in_judge import StandIn

from rlhf_cli.errors import RLHFError
from rlhf_cli.judges.pairwise import Comparison
from tests.judges.test_pairwise import PAIRS, judge_of


def test_max_calls_ends_it_with_what_it_has(server: StandIn, tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as caught:
        judge_of(server, tmp_path, max_calls=4, concurrency=1).compare(PAIRS)
    assert caught.value.problems[0].code == "J04" and len(server.requests) == 4
    judge = judge_of(server, tmp_path, max_calls=6)
    assert judge.compare(PAIRS) == [Comparison("1", "2")] * 5 and judge.cost.asked == 6
