"""Diagnosis of the report: badges, the stage to fix first, advice, and what an outdated evaluation does not decide."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ppo_folder import lines
from report_run import CARD, begin, change, configs, metrics, report, win, words, write_report, write_run

from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.report import compare, diagnosis
from rlhf_cli.report.rules import key_changes
from rlhf_cli.report.show import brief
from rlhf_cli.runs.read import read_run

FLAG = {"code": "R11", "text": "an empty answer scores above the chosen answer for 50% of 128 prompts"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "demo")


def log_ppo(run: Path, **series: list[float]) -> None:
    write_jsonl(run / "ppo/metrics.jsonl", metrics(**series))


def log_sft(run: Path, *, loss: list[float] | None = None, held_out: list[float] | None = None) -> None:
    rows = lines(run / "sft/metrics.jsonl")[:-1]
    rows = rows if loss is None else [{"step": step, "loss": value} for step, value in enumerate(loss)]
    rows += [{"step": 40 + index, "eval_loss": value} for index, value in enumerate(held_out or [])]
    write_jsonl(run / "sft/metrics.jsonl", rows)


def flag_card(run: Path, *flags: dict[str, str]) -> None:
    change(run / "reward/manifest.json", card=CARD | {"flags": list(flags)})


def undecided(gold: float, reward: float, *, half: float) -> dict[str, Any]:
    evaluation = report(gold, reward)
    for rate in evaluation["win_rate"]["ppo_vs_sft"].values():
        rate["ci95"] = [rate["value"] - half, rate["value"] + half]
    return evaluation


def todo(run: Path) -> str:
    text = words(run)
    return text[text.index("What to do") : text.index("Make one change")]


CHANCE = {"accuracy": 0.52, "accuracy_ci95": [0.45, 0.59]}
FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "healthy": (lambda run: None, "No stage is bad."),
    "flagged card": (lambda run: flag_card(run, FLAG), "No stage is bad. Worth a look first: reward. An empty answer"),
    "rising loss": (
        lambda run: log_sft(run, loss=[3.0 + 0.1 * step for step in range(8)]),
        "Stage to fix first: sft. The training loss rose: 3 to 3.7.",
    ),
    "flat loss": (
        lambda run: log_sft(run, loss=[3.0, 3.1] * 4 + [3.0]),
        "Worth a look first: sft. The training loss did not fall by more than noise: 3 to 3.",
    ),
    "guessing": (
        lambda run: change(run / "reward/manifest.json", metrics=CHANCE),
        "Stage to fix first: reward. Accuracy 52 % [45, 59] on the held-out pairs: it may be no better than chance",
    ),
    "large updates": (
        lambda run: log_ppo(run, policy__approxkl_avg=[0.002] * 10 + [0.5] * 10),
        "Stage to fix first: ppo. Approximate KL of an update: Outside the healthy range",
    ),
    "undecided": (
        lambda run: write_report(run, undecided(0.484, 0.656, half=0.165)),
        "Worth a look first: eval. PPO and SFT are not distinguishable by gold.",
    ),
    "reward hacking": (
        lambda run: write_report(run, report(gold=0.3)),
        "PPO raised the reward and lost by gold: it exploited errors of the reward model. Stage to fix first: reward.",
    ),
    "stopped": (
        lambda run: change(run / "ppo/manifest.json", stopped="step 9: KL"),
        "Stage to fix first: ppo. It was stopped: step 9: KL",
    ),
    "few updates": (
        lambda run: write_jsonl(run / "ppo/metrics.jsonl", metrics(7)),
        "No stage is bad so far; too early to tell for ppo.",
    ),
}


def past_its_best(*, by_chance: bool = False, reward: float = 2.0) -> dict[str, Any]:
    """An evaluation whose judge prefers update 10 to the last one, of which the reward model thinks more, or less."""
    evaluation = report()
    for point in evaluation["frontier"]:
        point["judges"]["gold"]["within_noise"] = by_chance or point["step"] == 10
    evaluation["frontier"][-1]["judges"]["reward"]["mean"] = reward
    return evaluation


def test_a_policy_past_its_best_is_a_finding_of_ppo(run: Path) -> None:
    """The judge that decides falls beyond chance while the reward rises: otherwise nothing is said."""
    write_report(run, past_its_best())
    text = words(run)
    found = (
        "over-optimized after update 10: gold falls from 0.8 to 0.6, by more than noise, "
        "while the reward rises from 1 to 2"
    )
    assert f"ppo worth a look {found}" in text and f"No stage is bad. Worth a look first: ppo. O{found[1:]}." in text
    assert "ppo (worth a look): raise ppo.kl_coef" in todo(run)
    for other in (past_its_best(by_chance=True), past_its_best(reward=0.5), report()):
        write_report(run, other)
        assert "over-optimized" not in words(run)


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_the_headline_names_the_stage_to_fix_first(run: Path, fault: str) -> None:
    damage, headline = FAULTS[fault]
    damage(run)
    text = words(run)
    assert headline in text
    assert ("lost by" in text) == (fault == "reward hacking")
    assert ("ppo too early to tell 7 updates: a trend needs 8" in text) == (fault == "few updates")


# Outdated evaluations, and evaluations by the reward model only


def test_an_outdated_stage_is_in_its_badge_and_in_the_headline(run: Path) -> None:
    assert "out of date" not in words(run)
    change(run / "ppo/manifest.json", model_sha256="trained again")
    text, headline = words(run), brief(run)[0]
    assert headline.startswith("No stage is bad. Out of date: eval, made from ") and headline in text
    reason = headline.partition("eval, ")[2].rstrip(".")
    assert f"eval out of date {reason}" in text and "ppo" in reason


def test_nothing_is_concluded_from_an_outdated_evaluation(run: Path) -> None:
    evaluation = report(gold=0.3)
    evaluation["models"]["sft"]["eos_fraction"] = 0.1
    write_report(run, evaluation)
    conclusions = (
        "lost by gold", "of its 256 sampled answers end", "PPO loses to SFT", "Recommended policy:", "politeness wins",
    )  # fmt: skip
    now = words(run)
    assert all(part in now for part in conclusions) and "Out of date: evaluated" not in now
    change(run / "ppo/manifest.json", model_sha256="trained again")
    old = words(run)
    assert not any(part in old for part in conclusions) and "Out of date. The evaluation used models" in old
    assert old.count("Out of date: evaluated with models that have changed") == 3
    rows = {title: cells for title, *cells in compare.results([read_run(run)])}
    assert "PPO over SFT, gold" not in rows and rows["PPO, KL from SFT in nats"][0] == "-"


def test_a_win_by_the_reward_model_only_is_not_good(run: Path) -> None:
    evaluation = report()
    for section in (evaluation, evaluation["greedy"]):
        section["win_rate"]["ppo_vs_sft"] = {"reward": win(0.95)}
    evaluation["best_of"][0]["ppo_win_rate"] = {"reward": win(0.52)}
    text = words(write_report(run, evaluation))
    proves_little = "the reward that PPO was trained on, which proves little"
    assert f"eval worth a look PPO beats SFT by {proves_little}" in text
    assert "eval (worth a look): add another judge in eval.yaml (judges:)" in text
    assert f"judged by reward, at a KL of 12.30: {proves_little}; add a judge in eval.yaml." in text
    assert "(chosen by the reward model), judged by reward: win rate 0.520 [0.460, 0.580], undecided." in text
    text = words(write_report(run, {**evaluation, "judge_kinds": {"reward": "verifier"}}))
    assert proves_little not in text and "PPO beats SFT by reward" in text
    text = words(write_report(run, {**evaluation, "judge_kinds": {"reward": "function"}}))
    assert proves_little in text and "SFT's best of 4 (chosen by the judge reward)" in text


def test_watchdog_alarms(run: Path) -> None:
    row = {"step": 14, "signal": "kl", "source": None, "reading": 0.625, "reference": 0.0, "limit": 0.5}
    row |= {"action": "warn"}
    write_jsonl(run / "ppo/watchdog.jsonl", [row, row | {"step": 17}, {"step": 18, "signal": "<b>"}])
    text = words(run)
    assert "Update 14: KL to the SFT policy is 0.625 nats per token; limit: 0.5 (warn)." in text
    assert "(warn). It fired 1 more time, up to update 17. Update 18: <b> (None)." in text
    assert "ppo : read the responses of update 14 and later in ppo/samples.jsonl" in text
    assert "the watchdog fired 3 times (kl, <b>)" in text and "Stage to fix first: ppo." in text


# SFT


@pytest.mark.parametrize(
    ("ended", "greedy", "grade", "advice"),
    [
        # Wilson's interval of 23 in 256 answers less than all of them ends at 0.94, of 38 at 0.89; of 144 at 0.50.
        (233 / 256, 0.0, "good", ""),
        (218 / 256, 0.0, "worth a look", "raise sft.max_length (here 512) or ppo.response_length; see Answers"),
        (218 / 256, 1.0, "worth a look", "raise sft.num_train_epochs (here 1) or sft.learning_rate (here 0.001); it"),
        (112 / 256, 0.89, "bad", "raise sft.max_length (here 512) or ppo.response_length; see Answers"),
    ],
)
def test_the_badge_of_sft_depends_on_the_answers_that_end(
    run: Path, ended: float, greedy: float, grade: str, advice: str
) -> None:
    evaluation, config = report(), configs()["sft"]
    config["sft"]["max_length"] = 512
    begin(run / "sft", config)
    evaluation["models"]["sft"]["eos_fraction"] = ended
    evaluation["greedy"]["models"]["sft"]["eos_fraction"] = greedy
    text = words(write_report(run, evaluation))
    share = f"{100 * ended:.1f}".removesuffix(".0")
    assert f" sft {grade} " in text and re.search(rf"{share} % \[.*?\] of its 256 sampled answers end", text)
    assert ("(healthy: at least 90 %); the others are cut off at 53 tokens" in text) == (grade != "good")
    mark = " (worth a look)" if grade != "bad" else " "
    assert (f"sft{mark}: {advice}" in text) if advice else (f"sft{mark}:" not in text)


def test_a_loss_that_did_not_fall_is_no_overfitting(run: Path) -> None:
    log_sft(run, loss=[3.0, 3.01] * 6)
    evaluation = report()
    evaluation["models"]["sft"]["eos_fraction"] = 218 / 256
    evaluation["greedy"]["models"]["sft"]["eos_fraction"] = 1.0
    text = words(write_report(run, evaluation))
    assert "the training loss did not fall by more than noise" in text and "(100 % end near-greedy)" in text


def test_answers_without_a_stop_token_need_not_end(run: Path) -> None:
    evaluation = report()
    evaluation["models"]["sft"]["eos_fraction"] = 0.0
    assert "sft bad " in words(write_report(run, evaluation))
    config = configs()["ppo"]
    config["ppo"]["stop_token"] = "none"
    begin(run / "ppo", config)
    assert "sft good " in words(run) and "sampled answers end" not in words(run)


@pytest.mark.parametrize(
    ("losses", "advice"),
    [
        ([6.0, 5.0], "add rows: it memorizes the ones it has"),
        ([5.0, 5.1], "lower sft.num_train_epochs"),
        ([5.0], "lower sft.num_train_epochs"),  # there is nothing to compare it with
    ],
)
def test_fewer_epochs_are_not_advised_while_the_held_out_loss_falls(
    run: Path, losses: list[float], advice: str
) -> None:
    log_sft(run, held_out=losses)
    text = words(run)
    assert advice in text and ("lower sft.num_train_epochs" in text) == (losses[0] <= losses[-1])


def test_the_held_out_loss_is_that_of_all_tokens(run: Path) -> None:
    change(run / "sft/manifest.json", metrics={"eval_loss": 1.875})
    text = words(run)
    assert "held-out loss 1.88, training loss 2.12" in text
    assert "Held-out: 2. At the end, over all held-out tokens: 1.88; the curve averages batches." in text


# Advice


def test_one_advice_per_stage_in_the_order_of_the_stages(run: Path) -> None:
    flag_card(run, FLAG, {"code": "R11", "text": "the good answer three times scores above the chosen answer for 50%"})
    log_ppo(run, policy__clipfrac_avg=[0.2] * 20, policy__entropy_avg=[1.0] + [0.01] * 19)
    config = configs()["ppo"]
    config["ppo"]["learning_rate"] = 0.003
    begin(run / "ppo", config)
    assert todo(run) == (
        "What to do first No stage is bad. Worth a look first: reward. An empty answer scores above the chosen answer "
        "for 50% of 128 prompts. reward (worth a look): add pairs in which an empty answer is rejected, and pairs in "
        "which the good answer three times is rejected: PPO will exploit each of them "
        "ppo (worth a look): lower ppo.learning_rate (here 0.003) or ppo.num_ppo_epochs "
    )
    write_report(run, report(gold=0.3))
    assert "Stage to fix first: ppo. ppo : lower ppo.learning_rate" in words(run), (
        "the cause of reward hacking is first"
    )


def test_bad_stages_come_first_and_the_evaluation_last(run: Path) -> None:
    evaluation = report()
    evaluation["models"]["sft"]["eos_fraction"] = 0.8
    evaluation["win_rate"]["ppo_vs_sft"] = {"gold": win(0.3)}
    write_report(run, evaluation)
    assert brief(run)[0].startswith("The outcome is bad, but no training stage is. Worth a look first: sft. Only")
    log_ppo(run, policy__approxkl_avg=[0.5] * 20)
    assert brief(run)[0].startswith("Stage to fix first: ppo.")
    assert re.findall(r"(\w+) (?:\(worth a look\))?: ", todo(run))[:3] == ["ppo", "sft", "eval"]


def test_reward_hacking_is_attributed_to_ppo_if_its_metrics_are_unhealthy(run: Path) -> None:
    healthy = words(write_report(run, report(gold=0.3)))
    assert "reward bad PPO raised the reward and lost by gold" in healthy and "ppo good" in healthy
    assert "reward : add pairs that reject what PPO exploits" in healthy
    assert "eval : read the largest losses of PPO under Answers" in healthy
    log_ppo(run, objective__kl_k1=[0.0] + [30.0] * 19)
    unhealthy = words(run)
    assert "it over-optimized its reward. Stage to fix first: ppo." in unhealthy
    assert "ppo bad it raised the reward and lost by gold" in unhealthy and "reward good" in unhealthy
    assert "ppo : raise ppo.kl_coef (here 0.2), or lower" in unhealthy and "add pairs that reject" not in unhealthy
    log_ppo(run, objective__kl_k1=[0.0] + [5.0] * 19)
    shutil.rmtree(run / "reward")
    assert "it over-optimized its reward. Stage to fix first: ppo." in words(run), "of a function"


def test_a_warning_in_a_badge_is_not_repeated(run: Path) -> None:
    text = f"{FLAG['text']}, limit 25%"
    write_report(run, report() | {"warnings": [f"warning[R11]: /home/me/reward: {text}", "warning[R03]: few ended"]})
    assert "/home/me/reward" in words(run)
    flag_card(run, {"code": "R11", "text": text})
    now = words(run)
    assert "/home/me/reward" not in now and "warning[R03]: few ended" in now and now.count(text[:40]) == 1


def test_a_finding_that_changes_a_key_has_a_name() -> None:
    """Another advice may have to wait for it: fix NAME first."""
    tables = diagnosis._TABLE.items()
    keys = {name: re.sub(r"\{(stage|duration)\}", "sft.max_steps", table.get("advice", "")) for name, table in tables}
    changing = {name for name, advice in keys.items() if key_changes(advice)}
    assert len(changing) > 5 and {name for name in changing if not diagnosis._TABLE[name].get("name")} == set()
