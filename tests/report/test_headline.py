"""The first screen: the verdict follows the intervals, and the figures are those of the evaluation or of the log."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from report_run import report, win, with_limit, words, write_report, write_run

from rlhf_cli.report import diagnosis, headline
from rlhf_cli.runs.read import at_step, read_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "demo")


def verdict(run: Path, evaluation: dict[str, Any] | None = None) -> headline.Verdict:
    read = read_run(run if evaluation is None else write_report(run, evaluation))
    return headline.verdict(read, diagnosis.diagnose(read))


def against_best_of(rate: float) -> dict[str, Any]:
    evaluation = report()
    evaluation["best_of"][0]["ppo_win_rate"] = {"gold": win(rate)}
    return evaluation


@pytest.mark.parametrize(
    ("rate", "lead", "words"),
    [
        (0.6, "Better, and worth its KL", "it is better than SFT's best of 4, which needs no training."),
        (0.5, "Better, but not clearly worth its KL", "it is not distinguishable from SFT's best of 4"),
        (0.4, "Better, but not worth its KL", "it is worse than SFT's best of 4"),
    ],
)
def test_ppo_is_worth_its_kl_if_it_beats_best_of_n(run: Path, rate: float, lead: str, words: str) -> None:
    found = verdict(run, against_best_of(rate))
    assert found.lead == lead and words in found.sentence
    assert found.sentence.startswith(
        "PPO is better than SFT, judged by gold, also at equal length, at a KL of 12.3 nats; "
    )


def test_the_verdict_follows_the_intervals(run: Path) -> None:
    assert verdict(run, report(gold=0.52)).lead.startswith("Undecided")
    assert verdict(run, report(gold=0.3, reward=0.4)).lead.startswith("Worse, so not worth")
    assert verdict(run, report(gold=0.3)).lead == "Worse, while the reward rose: reward hacking"
    longer = report(gold=0.58)  # at equal length 0.56 [0.50, 0.62]
    longer["best_of"] = []
    assert verdict(run, longer).lead == "Better, but perhaps only longer"
    assert verdict(run, longer).sentence.startswith(
        "PPO is better than SFT, judged by gold, but not clearly at equal length"
    )
    own = report()
    own["win_rate"]["ppo_vs_sft"] = {"reward": win(0.9)}
    assert verdict(run, own).lead == "Better by its own reward, which proves little"
    shutil.rmtree(run / "eval")
    assert verdict(run).lead == "Not known yet"


def test_the_overhead_is_told_where_it_is_known(run: Path) -> None:
    evaluation = with_limit(report())
    assert "overhead unknown without eval.limit" in words(run)
    for known, text in (
        ({"overhead": 2.5}, "at a KL of 12.3 nats, 2.5 times what its reward needs"),
        ({"overhead_at_least": 3.0, "needed_kl_at_most": 4.0}, "at least 3 times what its reward needs"),
    ):
        policies = evaluation["limit"]["policies"]
        policies["ppo"] = {key: value for key, value in policies["ppo"].items() if not key.startswith("no_")} | known
        assert text in verdict(run, evaluation).sentence
        del policies["ppo"][next(iter(known))]


def test_the_page_names_the_recommended_policy_unless_it_shows_it(run: Path) -> None:
    expected = "The policy to take is update 10 (the highest mean of gold), not the last policy."
    assert headline.recommendation(read_run(run)) == expected and expected in words(run)
    assert headline.recommendation(at_step(read_run(run), "recommended")) == ""
    evaluation = report()
    evaluation["selected"] |= {"policy": "ppo", "step": 20}
    write_report(run, {**evaluation, "selected_step": 20})
    assert headline.recommendation(read_run(run)) == ""
    del evaluation["selected_step"], evaluation["selected"]["step"]
    evaluation["selected"] |= {"policy": "sft", "rule": "none of 9 policies"}
    assert "take is the SFT model (none of 9 policies), not the last" in words(write_report(run, evaluation))


def test_an_evaluation_of_an_older_version_has_its_selected_step(run: Path) -> None:
    evaluation = report() | {"selected": {"judge": "gold", "rule": "the highest mean", "optimism": 0.01}}
    write_report(run, evaluation)
    assert "take is update 10 (the highest mean), not the last" in headline.recommendation(read_run(run))
    write_report(run, {**evaluation, "selected_step": 20})
    assert headline.recommendation(read_run(run)) == "", "the last of the frontier"
    del evaluation["selected_step"]
    assert headline.recommendation(read_run(write_report(run, evaluation))) == "", "none was selected"


def test_the_large_figures(run: Path) -> None:
    win_rate, kl, length = headline.key_figures(read_run(run))
    assert (win_rate.value, kl.value, kl.unit, length.value, length.unit) == ("63 %", "12.3", "nats", "21.5", "tokens")
    assert win_rate.notes[:2] == ["95 % interval [57, 69]", "at equal length 61 % [55, 67]"]
    assert kl.notes[-1] == "SFT's best of 4 pays at most 0.64" and length.notes[-1] == "97 % of them end, 97 % of SFT's"
    assert kl.spark and kl.over == "3 snapshots, from SFT's 0"
    assert all(f"update {step}, KL {kl}" in kl_text for step, kl, kl_text in [(5, 1.5, kl.spark), (20, 9.75, kl.spark)])
    shutil.rmtree(run / "eval")
    score, kl, _ = headline.key_figures(read_run(run))
    assert score.title == "Reward score in training" and score.value == "1.7" and (kl.value, kl.unit) == ("3.4", "nats")
