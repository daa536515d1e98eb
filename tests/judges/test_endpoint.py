"""Eleven faults of an endpoint: a bounded wait, then one line, and nothing lost."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stand_in_judge
from stand_in_judge import MODEL, StandIn, failure, reply

from rlhf_cli.config.judges import OpenAIJudge
from rlhf_cli.errors import RLHFError, redact
from rlhf_cli.judges import endpoint
from rlhf_cli.judges.endpoint import PLACEHOLDER
from rlhf_cli.judges.pairwise import Comparison, Pair, PairwiseJudge

PAIRS = [Pair(f"what is number {n}?", f"This is the number {n}.", "dull words") for n in range(4)]
FIRST_WINS = Comparison("1", "2")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.01)
    with stand_in_judge.stand_in() as server:
        yield server


def judge_of(server: StandIn, folder: Path, **settings: Any) -> PairwiseJudge:
    settings = {"url": server.url, "model": MODEL, "max_wait": 0.3, "timeout": 5.0, **settings}
    return PairwiseJudge.of("llm", OpenAIJudge(**settings), folder, lambda key: f"eval.yaml:{key}")


def error_of(judge: PairwiseJudge) -> str:
    """Return the one problem of a judge that fails, as one line and one hint."""
    with pytest.raises(RLHFError) as caught:
        judge.compare(PAIRS)
    (problem,) = caught.value.problems
    assert len(problem.line().splitlines()) <= 2 and caught.value.exit_code == 1, problem
    return problem.line()


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        (stand_in_judge.nonsense, "J01", """answers '{"winner":', and not one of {"winner": "1"}"""),
        (stand_in_judge.prose, "J01", "answers 'Both answers have their merits"),
        (stand_in_judge.busy_for_an_hour, "J03", "answered 429: 'rate limit reached', and asks to wait 3600 s (1 try"),
        (stand_in_judge.broken, "J03", "answered 500: 'internal error' ("),
        (stand_in_judge.slow, "J03", "gave no answer within 0.1 s ("),
        (stand_in_judge.closed, "J03", "cannot be reached: Server disconnected"),
    ],
)
def test_a_fault_of_every_call_is_one_line(
    server: StandIn, tmp_path: Path, fault: Callable[[Any], Any], code: str, says: str
) -> None:
    assert judge_of(server, tmp_path).compare(PAIRS[:1]) == [FIRST_WINS]
    server.every = fault
    line = error_of(judge_of(server, tmp_path, timeout=0.1))
    assert line.startswith(f"error[{code}]: judge llm: ") and says in line, line
    assert len(stand_in_judge.answered(tmp_path)) == 2, "the answers before it are kept"


@pytest.mark.parametrize("fault", [stand_in_judge.busy, stand_in_judge.broken, stand_in_judge.closed])
def test_a_fault_for_a_while_is_waited_for(server: StandIn, tmp_path: Path, fault: Callable[[Any], Any]) -> None:
    server.faults = [fault] * 3
    judge = judge_of(server, tmp_path, concurrency=1)
    assert judge.compare(PAIRS) == [FIRST_WINS] * len(PAIRS)
    assert len(server.requests) == 2 * len(PAIRS) + 3
    assert judge.cost.asked == judge.cost.calls == 2 * len(PAIRS), "what was not answered costs nothing"


def test_an_endpoint_without_json_schema_is_asked_without(
    server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.every = stand_in_judge.without_schema
    assert judge_of(server, tmp_path, concurrency=1).compare(PAIRS) == [FIRST_WINS] * len(PAIRS)
    refused = [body for body in server.requests if "response_format" in body]
    assert len(refused) == 1 and len(server.requests) == 2 * len(PAIRS) + 1
    assert capsys.readouterr().err.count("refuses a JSON Schema, and is asked without one") == 1


def test_a_refusal_is_not_repeated_and_says_what_to_do(server: StandIn, tmp_path: Path) -> None:
    server.every = stand_in_judge.other_model
    line = error_of(judge_of(server, tmp_path, model="nobody", concurrency=1))
    assert "answered 404: 'The model `nobody` does not exist.'" in line and "under /models" in line
    assert len(server.requests) == 1

    for status, code, says in ((401, None, "key_env"), (429, "insufficient_quota", "no credit")):
        server.every = lambda body, status=status, code=code: failure(status, "no", code)
        assert says in error_of(judge_of(server, tmp_path, concurrency=1))

    server.every = lambda body: failure(400, "the context has 10 tokens")  # with and without a schema
    line = error_of(judge_of(server, tmp_path, concurrency=1))
    assert "answered 400: 'the context has 10 tokens'" in line and "such as {temperature: 1}" in line


@pytest.mark.parametrize(
    ("status", "text", "code"),
    [
        (400, "This model's maximum context length is 64 tokens. However, you requested 20 output tokens", None),
        (400, "Please reduce the length of the messages.", "context_length_exceeded"),
        (400, "the request exceeds the available context size, try increasing it", None),
        (500, "the request exceeds the available context size. try increasing the context size", None),
        (400, "The input (900 tokens) is longer than the model's context length (64 tokens).", None),
        (422, "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 64", None),
        (400, "prompt is too long: 900 tokens > 64 maximum", None),
        (400, "The input token count (900) exceeds the maximum number of tokens allowed (64).", None),
    ],
)
def test_a_pair_that_is_too_long_is_skipped_and_asked_about_the_next_time(
    server: StandIn, tmp_path: Path, status: int, text: str, code: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    server.every = lambda body: failure(status, text, code) if "number 2" in body["messages"][0]["content"] else None
    judge = judge_of(server, tmp_path)
    found = judge.compare(PAIRS)
    assert found == [FIRST_WINS, FIRST_WINS, Comparison(is_too_long=True), FIRST_WINS] and judge.endpoint.sends_schema
    assert (judge.cost.too_long, judge.cost.asked, len(server.requests)) == (1, 6, 8)
    assert capsys.readouterr().err.count("pairs that are too long for it are skipped: ") == 1
    with pytest.raises(RLHFError) as caught:
        judge.require_few_too_long(found)
    (problem,) = caught.value.problems
    assert problem.code == "J05" and "1 of 4 pairs are too long for stand-in" in problem.text
    judge.require_few_too_long([*found, *[FIRST_WINS] * 6])

    server.every = None
    server.requests.clear()
    assert judge_of(server, tmp_path).compare(PAIRS) == [FIRST_WINS] * 4 and len(server.requests) == 2


def test_a_judge_that_refuses_the_probe_as_too_long_is_one_line(server: StandIn, tmp_path: Path) -> None:
    server.every = lambda body: stand_in_judge.too_long(body, 100)
    with pytest.raises(RLHFError) as caught:
        judge_of(server, tmp_path).pass_probe()
    (problem,) = caught.value.problems
    assert problem.code == "J05" and "even the short texts of the probe are too long" in problem.text


@pytest.mark.parametrize("body", [b"", b"[]", b"<html>", b'{"choices": []}', b'{"choices": [{"message": null}]}'])
def test_an_answer_of_another_form_is_asked_for_once_more(server: StandIn, tmp_path: Path, body: bytes) -> None:
    server.every = lambda _: (200, body, {})
    line = error_of(judge_of(server, tmp_path, concurrency=1))
    assert "J01" in line and "answers nothing" in line and len(server.requests) == 2
    server.every = None
    server.faults = [lambda _: (200, body, {})]
    judge = judge_of(server, tmp_path)
    assert judge.compare(PAIRS[:1]) == [FIRST_WINS]
    assert (judge.cost.answers, judge.cost.calls) == (2, 3)


def test_the_request_has_the_schema_temperature_0_and_the_parameters(server: StandIn, tmp_path: Path) -> None:
    judge_of(server, tmp_path, parameters={"max_tokens": 20, "seed": 1}).compare(PAIRS[:1])
    for body in server.requests:
        assert (body["temperature"], body["max_tokens"], body["seed"], body["model"]) == (0, 20, 1, MODEL)
        schema = body["response_format"]["json_schema"]["schema"]
        assert schema["properties"] == {"winner": {"type": "string", "enum": ["1", "2", "tie"]}}
    judge_of(server, tmp_path / "warm", parameters={"temperature": 1}).compare(PAIRS[:1])
    assert server.requests[-1]["temperature"] == 1


def test_the_key_is_that_of_the_environment_and_never_shown(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keys(**settings: Any) -> set[str]:
        server.keys.clear()
        judge_of(server, tmp_path / str(settings), **settings).compare(PAIRS[:1])
        return set(server.keys)

    assert keys() == {PLACEHOLDER}
    monkeypatch.setenv("OPENAI_API_KEY", "the-key-of-openai")
    monkeypatch.setenv("MINE", "a-key-of-mine-1234")
    assert keys(model="a") == {"the-key-of-openai"}
    assert keys(key_env="MINE") == {"a-key-of-mine-1234"} and keys(key_env=None) == {PLACEHOLDER}
    assert redact("x a-key-of-mine-1234") == "x [secret]"
    written = "".join(path.read_text() for path in tmp_path.rglob("*.jsonl"))
    assert "a-key-of-mine" not in written and "the-key-of" not in written

    for value, says in (("", "MINE is not set"), ("two\nlines", "a character that no key has")):
        monkeypatch.setenv("MINE", value)
        with pytest.raises(RLHFError, match=says) as caught:
            judge_of(server, tmp_path, key_env="MINE")
        assert (caught.value.problems[0].where, caught.value.exit_code) == ("eval.yaml:key_env", 2)


def test_without_the_package_the_error_has_the_command(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RLHFError) as caught:
        judge_of(server, tmp_path)
    (problem,) = caught.value.problems
    assert problem.code == "E09" and "pip install -e '.[judge]'" in (problem.hint or "")


def test_calls_are_made_at_the_same_time(server: StandIn, tmp_path: Path) -> None:
    server.every = stand_in_judge.slow
    judge_of(server, tmp_path, concurrency=3).compare(PAIRS[:3])
    assert server.most_at_once == 3


def test_a_reply_behind_thoughts_is_read(server: StandIn, tmp_path: Path) -> None:
    def thinking(body: Any) -> stand_in_judge.Answer:
        return reply(f'<think>{{"winner": "tie"}} or not?</think>\n```json\n{{"winner": "{server.winner(body)}"}}\n```')

    server.every = thinking
    assert judge_of(server, tmp_path).compare(PAIRS[:1]) == [FIRST_WINS]
