"""The first screen: the verdict follows the intervals, and the figures are those of the evaluation or of the log.

Modules: `report/terms.py`.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from report_run import report, win, with_limit, words, write_report, write_run

from rlhf_cli.report import diagnosis, headline, terms
from rlhf_cli.runs.read import at_step, read_run

MINUS = "\N{MINUS SIGN}"


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
        (0.6, "Better, and worth its KL", "it is better than SFT's best of 4, chosen by the reward model."),
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
    assert "overhead" not in " ".join(headline.key_figures(read_run(run))[1].notes), "it is not known"
    for known, text in (
        ({"overhead": 2.5}, "at a KL of 12.3 nats, 2.5 times what its reward needs"),
        ({"overhead_at_least": 3.0, "needed_kl_at_most": 4.0}, "at least 3 times what its reward needs"),
    ):
        policies = evaluation["limit"]["policies"]
        policies["ppo"] = {key: value for key, value in policies["ppo"].items() if not key.startswith("no_")} | known
        assert text in verdict(run, evaluation).sentence
        del policies["ppo"][next(iter(known))]


def test_the_page_names_the_recommended_policy_unless_it_shows_it(run: Path) -> None:
    expected = (
        "The policy to take is update 10 (the highest mean of gold), not the last policy, whose figures and answers "
        "are below. Update 10 wins 60 % [54, 66] by gold, at 4.3 nats, on 128 prompts that had no part in the choice."
    )
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
    assert win_rate.notes[2] == "near-greedy 70 % [64, 76]"
    assert kl.notes[-2:] == [
        "worth it if better than SFT's best of 4: PPO wins 63 % [57, 69]",
        "best of 4 wins 63 % over SFT, at 0.64 nats or less",
    ]
    assert kl.term and "e^12.3 = 219,696 times likelier" in kl.term.answer
    assert length.notes[-1] == "97 % of them end, 97 % of SFT's"
    assert kl.spark and kl.over == "3 snapshots, from SFT's 0"
    assert all(f"update {step}, KL {kl}" in kl_text for step, kl, kl_text in [(5, 1.5, kl.spark), (20, 9.75, kl.spark)])
    shutil.rmtree(run / "eval")
    score, kl, _ = headline.key_figures(read_run(run))
    assert score.title == "Reward score in training" and score.value == "1.7" and (kl.value, kl.unit) == ("3.4", "nats")


def test_each_judge_is_explained_at_its_first_use(run: Path) -> None:
    """Its kind, its name, and the range of its scores; the one that decides comes first."""
    evaluation = report() | {"judge_kinds": {"gold": "function"}}
    config = yaml.safe_load((run / "eval/config.yaml").read_text())
    (run / "eval/config.yaml").write_text(yaml.safe_dump(config | {"judges": {"gold": "my.module:gold"}}))
    text = words(write_report(run, evaluation))
    assert (
        f"Judge gold : it decides; a function, my.module:gold; scores here: {MINUS}4 to 11. "
        f"Judge reward : a reward model, on which PPO was trained; scores here: {MINUS}2 to 5.5."
    ) in text
    own = report() | {"judge_kinds": {"reward": "verifier"}}
    own["win_rate"]["ppo_vs_sft"] = {"reward": win(0.9)}
    read = read_run(write_report(run, own))
    assert list(terms.judges(read, [])) == [("reward", "a function that knows the right answers")]


def test_requirements_are_met_or_not(run: Path) -> None:
    config = yaml.safe_load((run / "eval/config.yaml").read_text())
    require = {"models.ppo.kl": "<= 20", "win_rate.ppo_vs_sft.gold.value": ">= 0.75", "gone": "> 1"}
    (run / "eval/config.yaml").write_text(yaml.safe_dump(config | {"eval": {"require": require}}))
    text = words(run)
    assert "1 of 3 requirements of eval.yaml met" in text and "models.ppo.kl is 12.3, required <= 20: met" in text
    assert "win_rate.ppo_vs_sft.gold.value is 0.63, required >= 0.75: not met" in text
    assert "gone is not a number in report.json: not met" in text
