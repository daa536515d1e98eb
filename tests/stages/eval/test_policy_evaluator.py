"""Sampling and scoring of an evaluation: the limit of a run, and scores that are not finite."""

import math
from pathlib import Path
from typing import Any

import pytest
from ppo_folder import EVAL, PPO, evaluate, lines, rlhf, write
from report_run import text_of
from safetensors.torch import load_file, save_file

from rlhf_cli.config.loading import load
from rlhf_cli.evaluation import selection
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.stages.eval import evaluated_models, evaluation_inputs
from rlhf_cli.stages.eval import run as stage
from tests.stages.eval.test_run import QUICK

pytestmark = pytest.mark.full


SETTINGS = {**EVAL["eval"], "modes": ["sampled"], "interpolate": [0.5], "limit": {"samples": 6}}
LIMITED = {**EVAL, "policies": {"before": "sft_model"}, "eval": SETTINGS}


def test_the_limit_of_a_run(trained_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten prompts. Best of 3 has three of the six draws, and the judge `short` scores no others."""
    judged, rounds, given = [], [], {}
    plain, score_texts, build = HFEngine.generate, evaluated_models.score_texts, stage.build_limit

    def generate(engine: Any, prompts: Any) -> Any:
        rounds.append(prompts.seeds)
        return plain(engine, prompts)

    def score(name: str, function: Any, rows: Any) -> list[float]:
        judged.append(name)
        return score_texts(name, function, rows)

    def build_limit(draws: Any, evaluated: Any, *rest: Any) -> Any:
        given.update(draws=draws, penalty=rest[0], evaluated=evaluated)
        return build(draws, evaluated, *rest)

    write(trained_folder, "eval", {**LIMITED, "eval": {**LIMITED["eval"], "limit": None}})
    without, _ = evaluate(trained_folder)
    with monkeypatch.context() as patch:
        patch.setattr(HFEngine, "generate", generate)
        patch.setattr(evaluated_models, "score_texts", score)
        patch.setattr(stage, "build_limit", build_limit)
        write(trained_folder, "eval", LIMITED)
        report, result = evaluate(trained_folder, "--fresh")
    policies = 3 + len(report["frontier"])  # SFT, `before`, a share, PPO and its snapshots
    assert len(rounds) == policies + 6 and len(set(rounds[policies:])) == 6, "no draw is repeated"
    assert judged.count("short") == policies + 3
    assert "eval     limit: 6 SFT answers to each of 10 prompts, 30 more than" in result.stderr
    assert f"eval {policies + 6}/{policies + 6} round" in result.stderr
    by_token = [row for row in lines(trained_folder / "eval/samples.jsonl") if "tokens" in row]
    assert len(by_token) == 10 and {(row["model"], row["mode"]) for row in by_token} == {("ppo", "sampled")}
    for row in by_token:
        assert len(row["tokens"]["text"]) == len(row["tokens"]["kl"]) == row["length"]
        assert sum(row["tokens"]["kl"]) == pytest.approx(row["kl"])
    section = report.pop("limit")
    assert report == without, "nothing else changes"
    samples = lines(trained_folder / "eval/samples.jsonl")
    assert len(samples) == 10 * (policies + 2), "the draws are not written"
    assert section["samples"] == 6 and section["missing_eos_penalty"] == given["penalty"] == 1.0
    names = {f"ppo_step_{point['step']:06d}" for point in report["frontier"][:-1]}
    assert section["policies"].keys() == {"ppo", "before", "interpolated_0.5", "best_of_2", "best_of_3"} | names
    points = {**report["models"], "interpolated_0.5": report["interpolated"][0]}
    for name in ("ppo", "before", "interpolated_0.5"):
        policy, rows = section["policies"][name], [row for row in samples if row["model"] == name]
        assert policy["score"] == pytest.approx(sum(row["scores"]["reward"] - (not row["ended"]) for row in rows) / 10)
        assert policy["kl"] == pytest.approx(points[name]["kl"])
    best = max(range(3), key=lambda draw: given["draws"][draw].scores["reward"][0])
    (row,) = [row for row in samples if row["model"] == "best_of_3" and row["index"] == 0]
    assert row["response"] == given["draws"][best].responses[0], "best of n has the first draws"
    page = (trained_folder / "eval/report.html").read_text()
    for text in (text_of(page), " ".join(result.stdout.split())):
        assert "KL overhead" in text and "less 1 for an answer that does not end" in text and "PPO pays" in text
        assert "share 0.5" in text and "interpolated_" not in text


def test_a_policy_just_within_max_kl_is_evaluated_beside_the_default_shares(trained_folder: Path) -> None:
    """Only if PPO is beyond the limit and none of them is near it; its own share is like any other."""
    settings = {key: value for key, value in QUICK.items() if key != "interpolate"} | {"modes": ["sampled"]}
    write(trained_folder, "eval", {**EVAL, "eval": settings})
    report, _ = evaluate(trained_folder, "--fresh")
    points = {1.0: report["models"]["ppo"]["kl"]} | {each["share"]: each["kl"] for each in report["interpolated"]}
    assert sorted(points) == [0.3, 0.5, 0.7, 1.0] and points[1.0] < 10
    limit = points[1.0] / 2
    share = selection.share_at_limit(points, limit)
    assert share and 0.7 < share < 1

    write(trained_folder, "eval", {**EVAL, "eval": {**settings, "max_kl": limit}})
    limited, result = evaluate(trained_folder, "--fresh")
    assert [each["share"] for each in limited["interpolated"]] == [0.3, 0.5, 0.7, share]
    assert "eval 8/8 round" in result.stderr, "two policies, four shares, two draws"
    assert points[0.7] < limited["interpolated"][3]["kl"] < points[1.0]
    assert limited["interpolated"][:3] == report["interpolated"]

    write(trained_folder, "eval", {**EVAL, "eval": {**settings, "max_kl": limit, "interpolate": [0.7]}})
    given, _ = evaluate(trained_folder, "--fresh")
    assert [each["share"] for each in given["interpolated"]] == [0.7], "a list in eval.yaml is kept to"


def test_a_score_that_is_not_finite_is_named_and_no_report_is_written(trained_folder: Path) -> None:
    file = trained_folder / "reward_model/model.safetensors"
    weights = load_file(file)
    save_file({name: weight * (math.nan if name == "score.weight" else 1) for name, weight in weights.items()}, file)
    write(trained_folder, "eval", {**EVAL, "eval": QUICK})
    result = rlhf("eval", "--config", trained_folder / "eval.yaml", "--fresh")
    assert result.exit_code == 1 and "error[R01]: reward of the answer of" in result.stderr, result.stderr
    assert not (trained_folder / "eval/report.json").exists()


def test_an_endless_policy_has_no_penalty(trained_folder: Path) -> None:
    assert evaluation_inputs.missing_eos_penalty(None) == 0.0
    for changes, penalty in (({"stop_token": "none"}, 0.0), ({"missing_eos_penalty": None}, 0.0), ({}, 1.0)):
        write(trained_folder, "ppo", {**PPO, "ppo": {**PPO["ppo"], **changes}})
        settings = load("ppo", trained_folder / "ppo.yaml").ppo
        assert evaluation_inputs.missing_eos_penalty(settings) == penalty
