"""Judges that compare two answers: both orders, the file of answers, and the probe.

Modules: `judges/answers.py`, `judges/probe.py`, `judges/question.py`.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stand_in_judge
from stand_in_judge import MODEL, StandIn, reply

from rlhf_cli import jsonl
from rlhf_cli.config.judges import OpenAIJudge
from rlhf_cli.errors import RLHFError
from rlhf_cli.judges import probe
from rlhf_cli.judges.pairwise import Comparison, Pair, PairwiseJudge
from rlhf_cli.judges.question import RUBRIC, Question, read_winner

PAIRS = [Pair(f"what is number {n}?", f"This is the number {n}.", "dull words") for n in range(5)]


@pytest.fixture
def server() -> Iterator[StandIn]:
    with stand_in_judge.stand_in() as server:
        yield server


def judge_of(server: StandIn, folder: Path, **settings: Any) -> PairwiseJudge:
    settings = {"url": server.url, "model": MODEL, "key_env": None, **settings}
    return PairwiseJudge.of("llm", OpenAIJudge(**settings), folder, lambda key: key)


@pytest.mark.parametrize(
    ("winners", "points", "consistent", "slots"),
    [
        (("1", "2"), 1.0, True, [1.0, 0.0]),
        (("2", "1"), 0.0, True, [0.0, 1.0]),
        (("tie", "tie"), 0.5, True, []),
        (("1", "1"), 0.5, False, [1.0, 1.0]),
        (("2", "2"), 0.5, False, [0.0, 0.0]),
        (("1", "tie"), 0.5, False, [1.0]),
        (("tie", "1"), 0.5, False, [1.0]),
        ((), 0.5, False, []),
    ],
)
def test_a_disagreement_of_the_orders_is_a_tie(
    winners: tuple[Any, ...], points: float, consistent: bool, slots: list[float]
) -> None:
    comparison = Comparison(*winners)
    assert (comparison.points, comparison.is_consistent, comparison.slots) == (points, consistent, slots)


def test_each_pair_is_asked_in_both_orders_and_equal_answers_are_not(server: StandIn, tmp_path: Path) -> None:
    pairs = [*PAIRS[:2], Pair("what?", "the same", "the same"), PAIRS[0], Pair(PAIRS[0].prompt, *"xy")]
    judge = judge_of(server, tmp_path)
    found = judge.compare(pairs)
    assert found == [Comparison("1", "2")] * 2 + [Comparison(), Comparison("1", "2"), Comparison("tie", "tie")]
    shown = {body["messages"][0]["content"] for body in server.requests}
    assert len(shown) == len(server.requests) == 6, "a pair that occurs twice is asked once"
    assert (judge.cost.answers, judge.cost.calls, judge.cost.prompt_tokens) == (6, 6, 1200)


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


def test_an_answer_is_of_its_model_rubric_parameters_and_texts(server: StandIn, tmp_path: Path) -> None:
    judge_of(server, tmp_path).compare(PAIRS[:1])
    changes: list[dict[str, Any]] = [{"model": "b"}, {"rubric": RUBRIC + "."}, {"parameters": {"seed": 1}}]
    for settings in changes:
        server.requests.clear()
        judge_of(server, tmp_path, **settings).compare(PAIRS[:1])
        assert len(server.requests) == 2, settings
    server.requests.clear()
    judge_of(server, tmp_path, concurrency=1, timeout=9, max_calls=1, key_env=None).compare(PAIRS[:1])
    judge_of(server, tmp_path, url=f"{server.url}/").compare(PAIRS[:1])
    assert server.requests == [], "how it is asked changes no answer"
    keys = {Question(*texts).key("m", {}, "r") for texts in itertools.permutations(("a", "b", "c"))}
    assert len(keys) == 6


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


def test_max_calls_ends_it_with_what_it_has(server: StandIn, tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as caught:
        judge_of(server, tmp_path, max_calls=4, concurrency=1).compare(PAIRS)
    assert caught.value.problems[0].code == "J04" and len(server.requests) == 4
    judge = judge_of(server, tmp_path, max_calls=6)
    assert judge.compare(PAIRS) == [Comparison("1", "2")] * 5 and judge.cost.asked == 6


# The probe


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


# What is asked, and what is read


def test_texts_with_marks_of_the_rubric_are_not_filled_in() -> None:
    text = Question("{first}", "{second} {prompt}", "{x} {0}").text("P {prompt} A {first} B {second}")
    assert text.startswith("P {first} A {second} {prompt} B {x} {0}\n\nReply with one JSON object")


@pytest.mark.parametrize(
    ("text", "winner"),
    [
        ('{"winner": "1"}', "1"),
        ('{"winner": 2}', "2"),
        (' {"winner":"tie"} ', "tie"),
        ('{"winner": "1"} no, {"winner": "2"}', "2"),
        ('{"winner": "3"}', None),
        ('{"winner": null}', None),
        ('{"winner": ["1"]}', None),
        ('{"loser": "1"}', None),
        ("1", None),
        ("", None),
        ("{not JSON}", None),
    ],
)
def test_a_winner_is_read_from_a_json_object_alone(text: str, winner: str | None) -> None:
    assert read_winner(text) == winner
