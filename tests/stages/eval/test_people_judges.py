"""`rlhf eval` and `check` with labels of people as judge.

Modules: `evaluation/people.py`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from label_run import label
from ppo_folder import EVAL, evaluate, fails, lines, must_succeed, rlhf, write
from report_run import text_of

from rlhf_cli import jsonl
from rlhf_cli.evaluation.report_text import pairwise_sentences, summary_sentence
from rlhf_cli.runs.report import PolicyScores, Report, WinRate

pytestmark = pytest.mark.full
QUICK = {"n": 6, "best_of": [], "frontier": False, "interpolate": [], "modes": ["sampled"]}
PEOPLE = {"people": {"labels": "labels/compare"}}


@pytest.fixture
def run(trained_folder: Path) -> Path:
    """A run with an evaluation, and five labels, of which one is a tie."""
    write(trained_folder, "eval", {**EVAL, "judges": {"short": "judges:short", **PEOPLE}, "eval": QUICK})
    result = must_succeed(
        label(trained_folder, "--compare", "sft,ppo", "--terminal", "--n", 8, typed="1\n1\n2\n0\n1\nq\n")
    )
    assert "judges: {people: {labels: labels/compare}}" in result.stderr.splitlines()[-1]
    return trained_folder


def compared(run: Path) -> list[dict[str, Any]]:
    return lines(run / "labels/compare/labels.jsonl")


def test_labels_of_people_are_a_judge_of_the_evaluation(run: Path) -> None:
    assert "5 labels of 5 held-out prompts" in must_succeed(rlhf("check", run / "eval.yaml")).stdout
    report, result = evaluate(run)
    rows = compared(run)
    rate = report["win_rate"]["ppo_vs_sft"]["people"]
    points = [{"first": 0.0, "second": 1.0}.get(row["choice"], 0.5) for row in rows]  # sources: sft, ppo
    assert (rate["value"], rate["n"], rate["ties"]) == (sum(points) / 5, 5, 1)
    assert rate["first_slot"] == 3 / 4 and "difference" not in rate

    gains = [len(row["answers"][0].strip()) - len(row["answers"][1].strip()) for row in rows]  # the judge `short`
    both = [(point > 0.5) == (gain > 0) for point, gain in zip(points, gains, strict=True) if point != 0.5 and gain]
    assert rate["agreement"].get("short", {}).get("value") == (sum(both) / len(both) if both else None)
    assert "reward" in rate["agreement"] and "people" not in report["models"]["ppo"]["judges"]
    assert report["judge_kinds"]["people"] == "people"
    said = "Judge people: 5 labels of other answers of these models; the answer shown first wins 0.750"
    assert said in result.stdout and said in text_of((run / "eval/report.html").read_text())

    assert json.loads((run / "eval/manifest.json").read_text())["data"]["judges.people.labels"]
    assert "finished already" in must_succeed(rlhf("eval", "-c", run / "eval.yaml")).stderr
    write(run, "eval", {**EVAL, "judges": {"short": "judges:short"}, "eval": QUICK})
    assert "judges.people.labels: no longer set" in must_succeed(rlhf("run", run, "--dry-run")).stdout
    must_succeed(rlhf("eval", "-c", run / "eval.yaml", "--fresh"))
    write(run, "eval", {**EVAL, "judges": {"short": "judges:short", **PEOPLE}, "eval": QUICK})
    assert "judges.people.labels: was not set" in must_succeed(rlhf("run", run, "--dry-run")).stdout


def test_more_labels_are_another_evaluation(run: Path) -> None:
    evaluate(run)
    must_succeed(label(run, "--compare", "sft,ppo", "--terminal", "--n", 8, typed="1\n"))
    assert "judges.people.labels: other content" in must_succeed(rlhf("run", run, "--dry-run")).stdout


@pytest.mark.parametrize("model", ["sft", "ppo"])
def test_labels_of_other_models_are_refused(run: Path, model: str) -> None:
    path = run / "labels/compare/settings.json"
    settings = json.loads(path.read_text())
    settings["policies"][model] = "0" * 64
    path.write_text(json.dumps(settings))
    for command in (("check", run / "eval.yaml"), ("eval", "-c", run / "eval.yaml")):
        fails(rlhf(*command), "C17", f"of another {model.upper()} model than models.{model}")


def test_labels_of_other_prompts_are_refused(run: Path) -> None:
    rows = [{**row, "prompt": "who is it?"} for row in compared(run)]
    jsonl.write_jsonl(run / "labels/compare/labels.jsonl", rows)
    fails(rlhf("eval", "-c", run / "eval.yaml"), "C17", "is of a prompt that is not in data.prompts")


def test_labels_that_do_not_exist_or_compare_nothing_are_refused(run: Path) -> None:
    write(run, "eval", {**EVAL, "judges": {"people": {"labels": "labels/nobody"}}, "eval": QUICK})
    fails(rlhf("check", run / "eval.yaml"), "D01", "labels/nobody")
    write(run, "eval", {**EVAL, "judges": {"people": {"labels": "."}}, "eval": QUICK})
    fails(
        rlhf("eval", "-c", run / "eval.yaml"), "C17", "judges.people.labels: ", "is no folder that `rlhf label` wrote"
    )
    write(run, "eval", {**EVAL, "judges": {"people": "labels/compare"}, "eval": QUICK})
    fails(rlhf("check", run / "eval.yaml"), "M01", "judges.people names a folder of labels", "{labels: labels/compare}")
    write(run, "eval", {**EVAL, "judges": PEOPLE, "eval": {**QUICK, "select": "people", "frontier": True}})
    fails(rlhf("check", run / "eval.yaml"), "C17", "people compares two answers")
    jsonl.write_jsonl(run / "labels/compare/labels.jsonl", [{**row, "choice": "skip"} for row in compared(run)])
    write(run, "eval", {**EVAL, "judges": PEOPLE, "eval": QUICK})
    fails(rlhf("eval", "-c", run / "eval.yaml"), "C17", "has no label that compares both models")


def test_the_result_counts_labels_and_not_prompts() -> None:
    scores = PolicyScores(response_length_mean=1.0, eos_fraction=1.0, judges={}, kl=1.0)
    report = Report(
        n=256,
        models={"sft": scores, "ppo": scores},
        win_rate={"ppo_vs_sft": {"people": WinRate(value=0.5, ci95=[0.4, 0.6], n=40, ties=2)}},
        judge_kinds={"people": "people"},
    )
    assert "on 40 labels of held-out prompts, judged by people" in (summary_sentence(report) or "")
    assert "label more pairs" in (summary_sentence(report) or "")
    assert list(pairwise_sentences(report)) == ["Judge people: 40 labels of other answers of these models"]
