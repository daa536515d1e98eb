"""What a judge may cost at most: all commands of a run together."""

from pathlib import Path

import pytest
import stand_in_judge
from stand_in_judge import StandIn

from rlhf_cli.config.judges import OpenAIJudge
from rlhf_cli.errors import RLHFError
from rlhf_cli.judges.answers import paid_calls
from rlhf_cli.judges.costs import MostCost, describe_cost
from rlhf_cli.judges.pairwise import Comparison
from tests.judges.test_pairwise import PAIRS, judge_of


def test_max_calls_counts_what_the_run_has_paid_for_before(server: StandIn, tmp_path: Path) -> None:
    judge = judge_of(server, tmp_path, max_calls=10)
    assert judge.compare(PAIRS[:2]) == [Comparison("1", "2")] * 2
    assert describe_cost(judge).endswith("; 4 calls of this run are paid for, and max_calls allows 6 more")
    with pytest.raises(RLHFError) as caught:
        judge_of(server, tmp_path, max_calls=9).compare(PAIRS)
    (problem,) = caught.value.problems
    assert problem.code == "J04" and "needs 6 calls more, and 4 of this run are paid for" in problem.text
    assert "set max_calls: 10;" in (problem.hint or "") and len(server.requests) == 4, "nothing is paid for in vain"
    judge = judge_of(server, tmp_path, max_calls=10)
    assert judge.compare(PAIRS) == [Comparison("1", "2")] * 5 and judge.cost.asked == 6
    assert judge_of(server, tmp_path, max_calls=1).compare(PAIRS) == [Comparison("1", "2")] * 5, "answers on disk"


def test_replies_without_a_winner_are_paid_for_however_often_it_starts(server: StandIn, tmp_path: Path) -> None:
    server.every = stand_in_judge.prose
    codes = []
    for _ in range(6):
        with pytest.raises(RLHFError) as caught:
            judge_of(server, tmp_path, max_calls=9, concurrency=1).compare(PAIRS[:1])
        codes.append(caught.value.problems[0].code)
    assert codes == ["J01"] * 4 + ["J04"] * 2 and len(server.requests) == 8

    server.every = None
    with pytest.raises(RLHFError) as caught:
        judge_of(server, tmp_path, max_calls=9).compare(PAIRS[:1])
    assert "set max_calls: 10" in (caught.value.problems[0].hint or "")
    assert judge_of(server, tmp_path, max_calls=10).compare(PAIRS[:1]) == [Comparison("1", "2")], "it is asked again"
    assert paid_calls(tmp_path / "judges/llm.jsonl") == len(server.requests) == 10


def test_the_cost_before_says_what_is_paid_for() -> None:
    judge = OpenAIJudge(url="http://localhost:1/v1", model="m", max_calls=100, probe=False)
    assert str(MostCost.of(judge, 30, 50, response_tokens=100)) == "at most 60 calls, about 26 thousand tokens"
    text = str(MostCost.of(judge, 30, 50, response_tokens=100, paid=40))
    assert text.endswith("; 40 calls of this run are paid for, and max_calls allows 60 more")
    text = str(MostCost.of(judge, 30, 50, response_tokens=100, paid=70))
    assert text.endswith(" allows 30 more; max_calls: 130 is enough if all answers are new")
