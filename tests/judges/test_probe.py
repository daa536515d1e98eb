"""The probe of a judge: pairs with a known better answer, before it is asked anything else."""

import json
from pathlib import Path

import pytest
from stand_in_judge import StandIn, reply

from rlhf_cli import jsonl
from rlhf_cli.errors import RLHFError
from rlhf_cli.judges import probe
from tests.judges.test_pairwise import judge_of


def test_the_probe_has_16_pairs_that_differ_as_they_should() -> None:
    pairs = probe.probe_pairs()
    assert len(pairs) == probe.NUM_PAIRS == 16
    shuffled, swapped, equal = pairs[:6], pairs[6:12], pairs[12:]
    for pair in shuffled:
        assert pair.bad and pair.bad != pair.good and sorted(pair.bad.split()) == sorted(pair.good.split())
    for pair in swapped:
        assert pair.bad != pair.good and pair.bad in {each.good for each in pairs}
    assert all(pair.bad is None for pair in equal)
    questions = [question for pair in pairs for question, _ in probe.questions_of(pair)]
    assert len(set(questions)) == probe.NUM_CALLS == 28
    assert probe.probe_pairs() == pairs, "the answers of the probe are kept, too"


def test_a_judge_passes_with_4_wrong_pairs_and_not_with_5() -> None:
    pairs = probe.probe_pairs()
    for wrong in (0, 4, 5):
        answers = {question: right for pair in pairs for question, right in probe.questions_of(pair)}
        for pair in pairs[:wrong]:
            question, _ = probe.questions_of(pair)[1]
            answers[question] = "tie"
        assert probe.num_wrong(answers) == wrong
    assert probe.MAX_WRONG == 4


@pytest.mark.full
@pytest.mark.parametrize("winner", ["1", "2", "tie"])
def test_a_judge_that_always_says_the_same_fails_the_probe(server: StandIn, tmp_path: Path, winner: str) -> None:
    server.every = lambda body: reply(json.dumps({"winner": winner}))
    judge = judge_of(server, tmp_path)
    with pytest.raises(RLHFError) as caught:
        judge.pass_probe()
    (problem,) = caught.value.problems
    wrong = 12 if winner == "tie" else 16
    assert problem.code == "J02" and f"{wrong} of 16 pairs with a known result are wrong" in problem.text
    judge_of(server, tmp_path, probe=False).pass_probe()
    assert len(server.requests) == probe.NUM_CALLS


def test_a_sensible_judge_passes_the_probe_once(server: StandIn, tmp_path: Path) -> None:
    judge_of(server, tmp_path).pass_probe()
    judge_of(server, tmp_path).pass_probe()
    assert len(server.requests) == len(list(jsonl.read_jsonl(tmp_path / "judges/llm.jsonl"))) == 28
