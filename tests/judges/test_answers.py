"""The file of a judge's answers: nothing is asked twice, and a line that is no answer is named."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from run_cli import ROOT
from stand_in_judge import MODEL, StandIn

from rlhf_cli.errors import RLHFError
from rlhf_cli.judges.pairwise import Comparison
from tests.judges.test_pairwise import PAIRS, judge_of


def test_a_second_evaluation_calls_nothing_and_a_cut_one_goes_on(server: StandIn, tmp_path: Path) -> None:
    first = judge_of(server, tmp_path)
    found = first.compare(PAIRS[:2])
    server.requests.clear()
    again = judge_of(server, tmp_path)
    assert again.compare(PAIRS[:2]) == found and server.requests == []
    assert (again.cost.asked, again.cost.answers, again.cost.prompt_tokens) == (0, 4, first.cost.prompt_tokens)

    path = tmp_path / "judges/llm.jsonl"
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in (last + 1, last + 20, len(whole) - 2):  # killed while the last line was written
        path.write_bytes(whole[:cut])
        server.requests.clear()
        assert judge_of(server, tmp_path).compare(PAIRS[:2]) == found
        assert len(server.requests) == 1 and len(path.read_bytes()) == len(whole)
    path.write_bytes(whole[:-1])  # whole, without its line break: an editor may have removed it
    server.requests.clear()
    assert judge_of(server, tmp_path).compare(PAIRS[:2]) == found
    assert server.requests == [] and path.read_bytes() == whole


def test_a_line_that_is_no_answer_is_named(server: StandIn, tmp_path: Path) -> None:
    judge_of(server, tmp_path).compare(PAIRS[:1])
    path = tmp_path / "judges/llm.jsonl"
    good = path.read_text()
    for line, code in (('{"key": "x", "winner": "3"}', "D03"), ("nonsense", "D03"), ("[1]", "D12")):
        path.write_text(f"{good}{line}\n")
        with pytest.raises(RLHFError) as caught:
            judge_of(server, tmp_path)
        (problem,) = caught.value.problems
        assert problem.code == code and (problem.where or "").partition(":")[2].startswith("3"), problem
        assert path.read_text() == f"{good}{line}\n"

    outside = tmp_path / "outside.jsonl"
    outside.write_text(good)
    path.unlink()
    path.symlink_to(outside)
    with pytest.raises(RLHFError) as caught:
        judge_of(server, tmp_path)
    assert caught.value.problems[0].code == "S03"


def test_two_processes_do_not_ask_one_judge_at_once(server: StandIn, tmp_path: Path) -> None:
    asked = threading.Event()
    go_on = threading.Event()

    def wait(body: Any) -> None:
        asked.set()
        go_on.wait(30)

    server.every = wait
    other = f"""
from pathlib import Path
from rlhf_cli.config.judges import OpenAIJudge
from rlhf_cli.judges.pairwise import Pair, PairwiseJudge
settings = OpenAIJudge(url={server.url!r}, model={MODEL!r}, key_env=None)
judge = PairwiseJudge.of("llm", settings, Path({str(tmp_path)!r}), str)
judge.compare([Pair(f"what is number {{n}}?", f"This is the number {{n}}.", "dull words") for n in range(5)])
"""
    process = subprocess.Popen([sys.executable, "-c", other], cwd=ROOT)
    try:
        assert asked.wait(30)
        with pytest.raises(RLHFError) as caught:
            judge_of(server, tmp_path)
        (problem,) = caught.value.problems
        assert problem.code == "C15" and f"llm.jsonl: process {process.pid}, for " in problem.text
    finally:
        go_on.set()
    assert process.wait(30) == 0
    rows = [json.loads(line) for line in (tmp_path / "judges/llm.jsonl").read_text().splitlines()]
    judge = judge_of(server, tmp_path)
    assert judge.compare(PAIRS) == [Comparison("1", "2")] * 5 and judge.cost.asked == 0
    assert len(rows) == len({row["key"] for row in rows}) == len(server.requests) == 10
