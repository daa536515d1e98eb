"""`rlhf eval`, `check`, `plan` and `report` with a language model as judge, which a stand-in plays."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stand_in_judge
import yaml
from ppo_folder import EVAL, evaluate, fails, lines, manifest, must_succeed, rlhf, write
from report_run import text_of
from stand_in_judge import MODEL, StandIn

from rlhf_cli.judges.question import shown_prompt

pytestmark = pytest.mark.full
QUICK = {
    "n": 12, "best_of": [2], "frontier": False, "interpolate": [], "modes": ["sampled"], "per_device_batch_size": 8,
}  # fmt: skip


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with stand_in_judge.stand_in(stand_in_judge.longer) as server:
        yield server


@pytest.fixture
def run(trained_folder: Path, server: StandIn) -> Path:
    judged(trained_folder, server)
    return trained_folder


def judged(run: Path, server: StandIn, **settings: Any) -> None:
    llm = {"openai": {"url": server.url, "model": MODEL, **settings}}
    write(run, "eval", {**EVAL, "judges": {"short": "judges:short", "llm": llm}, "eval": QUICK})


def test_an_evaluation_asks_once_and_shows_how_far_to_believe_it(run: Path, server: StandIn) -> None:
    report, result = evaluate(run)
    rate = report["win_rate"]["ppo_vs_sft"]["llm"]
    samples = lines(run / "eval/samples.jsonl")
    ours, theirs = ([row["response"].strip() for row in samples if row["model"] == name] for name in ("ppo", "sft"))
    expected = [(len(a) > len(b)) + 0.5 * (len(a) == len(b)) for a, b in zip(ours, theirs, strict=True)]
    assert rate["value"] == sum(expected) / 12 and rate["n"] == 12
    different = {(a, b) for a, b in zip(ours, theirs, strict=True) if a != b}
    assert different and rate["consistency"] == 1.0 and {"first_slot", "agreement"} <= rate.keys()
    if any(len(a) != len(b) for a, b in different):
        assert rate["first_slot"] == 0.5 and rate["agreement"]["short"]["value"] < 1
    assert "llm" not in report["models"]["ppo"]["judges"] and report["judge_kinds"]["llm"] == "openai"
    cost = report["judge_costs"]["llm"]
    assert cost["calls"] == cost["answers"] == len(server.requests) <= 28 + 24
    assert f"judge llm: {len(server.requests)} calls now" in result.stderr
    assert f"Judge llm, {MODEL}: both orders agree on 1.000" in result.stdout
    assert re.search(r"^PPO over SFT +llm +0\.", result.stdout, re.MULTILINE)
    assert f"Judge llm, {MODEL}: both orders agree on 1.000" in text_of((run / "eval/report.html").read_text())

    server.requests.clear()
    kept = (run / "judges/llm.jsonl").read_bytes()
    again, result = evaluate(run, "--fresh")
    assert again == report and server.requests == [] and (run / "judges/llm.jsonl").read_bytes() == kept
    assert f"judge llm: 0 calls now, {cost['answers']} answers were on disk" in result.stderr
    judged(run, server, url="http://127.0.0.1:9/v1", concurrency=1, max_calls=60, timeout=1.0)
    assert "finished already" in must_succeed(rlhf("eval", "-c", run / "eval.yaml")).stderr
    must_succeed(rlhf("check", run / "eval.yaml", "-s", "judges.llm.openai.key_env=NOT_SET"))


def test_an_evaluation_that_a_fault_ends_goes_on(run: Path, server: StandIn) -> None:
    faults = {
        stand_in_judge.prose: ("J01", "answers 'Both answers have their merits"),
        stand_in_judge.nonsense: ("J01", """answers '{"winner":'"""),
        stand_in_judge.busy_for_an_hour: ("J03", "asks to wait 3600 s (1 try, max_wait 300 s)"),
    }
    server.faults = [lambda body: None] * 28  # the probe
    for number, (fault, says) in enumerate(faults.items(), start=1):
        server.faults += [lambda body: None] * 2
        server.every = fault
        result = rlhf("eval", "-c", run / "eval.yaml", "-s", "judges.llm.openai.concurrency=1")
        fails(result, *says, exit_code=1)
        assert len(stand_in_judge.answered(run)) == 28 + 2 * number and not (run / "eval/manifest.json").exists()

    server.every = None
    server.requests.clear()
    report, _ = evaluate(run)
    assert len(server.requests) == report["judge_costs"]["llm"]["answers"] - 34
    assert manifest(run, "eval")["metrics"]["win_rate"]["ppo_vs_sft"]["llm"]["n"] == 12


def test_a_judge_that_always_takes_the_first_ends_before_anything_is_sampled(run: Path, server: StandIn) -> None:
    server.every = stand_in_judge.same_slot
    result = rlhf("eval", "-c", run / "eval.yaml")
    fails(result, "J02", "16 of 16 pairs", exit_code=1)
    assert len(server.requests) == 28 and "round" not in result.stderr


def test_a_judge_that_prefers_a_place_behind_its_probe_is_said_to_say_nothing(run: Path, server: StandIn) -> None:
    server.faults = [lambda body: None] * 28
    server.every = stand_in_judge.same_slot
    report, result = evaluate(run)
    rate = report["win_rate"]["ppo_vs_sft"]["llm"]
    assert (rate["value"], rate["consistency"], rate["first_slot"]) == (0.5, 0.0, 1.0)
    assert "of the pairs, fewer than by guessing: its rate says nothing about the answers" in result.stdout


def test_pairs_that_are_too_long_do_not_count_and_more_than_a_tenth_of_them_end_it(run: Path, server: StandIn) -> None:
    def refuse(*letters: str) -> None:
        long = [f"what is a {letter}?" for letter in letters]
        server.every = lambda body: stand_in_judge.too_long(body, 0 if any(p in str(body) for p in long) else 9999)

    refuse(*"abcdefghijkl")
    fails(
        rlhf("eval", "-c", run / "eval.yaml"),
        "J05",
        "pairs are too long for stand-in: \"This model's maxim",
        exit_code=1,
    )
    assert not (run / "eval/report.json").exists()

    server.requests.clear()
    refuse("b")
    report, result = evaluate(run)
    rate = report["win_rate"]["ppo_vs_sft"]["llm"]
    assert rate["n"] == 11 and report["n"] == 12 and report["judge_costs"]["llm"]["too_long"] == 1
    assert "too long for it, and not counted: 1 of 12 pairs" in result.stdout
    assert result.stderr.count("are skipped: ") == 1 and "1 too long for it; all answers" in result.stderr

    server.every = None
    server.requests.clear()
    report, _ = evaluate(run, "--fresh")
    assert report["win_rate"]["ppo_vs_sft"]["llm"]["n"] == 12 and "too_long" not in report["judge_costs"]["llm"]
    assert len(server.requests) == 2, "the skipped pair alone"


@pytest.mark.parametrize(("weight", "count"), [(1.0, 1), (0.0, 0)])
def test_a_judge_that_ppo_was_trained_on_is_named(run: Path, server: StandIn, weight: float, count: int) -> None:
    of_ppo = yaml.safe_load((run / "ppo/config.yaml").read_text())
    of_ppo["rewards"]["llm"] = {"openai": {"url": "http://localhost:1/v1", "model": MODEL}, "weight": weight}
    (run / "ppo/config.yaml").write_text(yaml.safe_dump(of_ppo))
    result = must_succeed(rlhf("check", run / "eval.yaml"))
    assert result.stderr.count("judges.llm: PPO was trained on the choices of this judge") == count


def test_a_conversation_is_shown_with_its_roles_and_a_single_question_as_it_is() -> None:
    question = {"role": "user", "content": "Why?"}
    asked = [question, {"role": "assistant", "content": "So."}, {"role": "user", "content": "How?"}]
    texts = [shown_prompt(text) for text in ("Why?", [question], asked)]
    assert texts == ["Why?", "Why?", "user: Why?\n\nassistant: So.\n\nuser: How?"]


def test_check_and_plan_say_the_cost_before(run: Path, server: StandIn) -> None:
    result = must_succeed(rlhf("check", run / "eval.yaml"))
    assert "judges.llm" in result.stdout and "at most 52 calls, about " in result.stdout
    plan = json.loads(must_succeed(rlhf("plan", run / "eval.yaml", "--json")).stdout)["stages"]["eval"]
    assert plan["judges"]["llm"]["calls"] == 52 and 52 * 200 < plan["judges"]["llm"]["tokens"] < 52 * 400
    assert "judge    llm: at most 52 calls, about" in must_succeed(rlhf("plan", run / "eval.yaml")).stdout
    assert server.requests == [] and not (run / "judges").exists()

    for command in ("check", "eval"):
        fails(rlhf(command, run / "eval.yaml", "-s", "judges.llm.openai.max_calls=51"), "C17", "are 52 calls", "is 51")
        fails(rlhf(command, run / "eval.yaml", "-s", "judges.llm.openai.key_env=NOT_SET"), "C17", "NOT_SET is not set")
    assert server.requests == []
