"""What a judge is asked about two answers, and how its reply is read."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from stand_in_judge import StandIn

from rlhf_cli.judges.question import RUBRIC, Question, read_winner
from tests.judges.test_pairwise import PAIRS, judge_of


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
