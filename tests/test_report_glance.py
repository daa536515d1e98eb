"""What the page of a run concludes: its badges, the stage to mend first, what to do; and from what it does not."""

import json
import re
from pathlib import Path

import pytest
from ppo_folder import lines
from report_run import CARD, begin, change, configs, finish, metrics, report, win, words, write_run

from rlhf_cli.commands.report import brief, compare
from rlhf_cli.commands.report.runs import read_run
from rlhf_cli.jsonl import write_jsonl


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "demo")


def test_stages_that_do_not_belong_together_are_said(run: Path) -> None:
    assert "was made from another" not in words(run)
    change(run / "ppo/manifest.json", model_sha256="trained again")
    since = "made from another ppo than the one that is there now (models.ppo)"
    said = words(run)
    assert f"eval out of date {since}" in said and said.count(since) == 2, "in its badge and in the headline"
    assert brief(run).headline == f"No stage looks bad. Out of date: eval, {since}." and brief(run).headline in said


def test_nothing_is_concluded_from_an_evaluation_that_is_out_of_date(run: Path) -> None:
    told = report(gold=0.3)
    told["models"]["sft"]["eos_fraction"] = 0.1
    (run / "eval/report.json").write_text(json.dumps(told))
    finish(run / "eval", parents=("sft", "reward", "ppo"))
    drawn = (
        "lost by gold",
        "sampled answers end by themselves",
        "PPO loses to SFT",
        "The policy to take is",
        "politeness wins",
    )
    now = words(run)
    assert all(part in now for part in drawn)
    change(run / "ppo/manifest.json", model_sha256="trained again")
    old = words(run)
    assert not any(part in old for part in drawn) and "What came out The evaluation is of what is no longer" in old
    assert old.count("Out of date: this is of other models") == 4 and "Out of date: this" not in now
    rows = {row.title: row for row in compare.numbers([read_run(run)])}
    assert "PPO over SFT, gold" not in rows and rows["PPO, KL from SFT in nats"].values == [None]


def test_a_win_by_the_reward_alone_is_not_called_good(run: Path) -> None:
    told = report()
    for section in (told, told["greedy"]):
        section["win_rate"]["ppo_vs_sft"].pop("gold", None)
    told["best_of"][0]["ppo_win_rate"] = {"reward": win(0.52)}
    (run / "eval/report.json").write_text(json.dumps(told))
    finish(run / "eval")
    said = words(run)
    assert "eval worth a look PPO beats SFT by the reward itself, which proves little" in said
    assert "eval (worth a look): name another judge in eval.yaml (judges:)" in said
    assert "held-out prompts by reward, at 12.3 nats from it: the reward itself, which proves little." in said
    assert "training, PPO wins 52 % [46, 58], undecided." in said


def test_the_watchdog_is_told(run: Path) -> None:
    row = {
        "step": 14,
        "signal": "kl",
        "source": None,
        "reading": 0.625,
        "reference": 0.0,
        "limit": 0.5,
        "action": "warn",
    }
    write_jsonl(run / "ppo/watchdog.jsonl", [row, row | {"step": 17}, {"step": 18, "signal": "<b>"}])
    said = words(run)
    assert "Update 14: KL to the SFT policy is 0.625 nats per token; limit: 0.5 (warn)." in said
    assert "limit: 0.5 (warn). After that 1 time more, up to update 17. Update 18: <b> (None)." in said
    assert "ppo : read the responses of update 14 and later ones in ppo/samples.jsonl" in said
    assert "the watchdog fired 3 times (kl, <b>)" in said and "The stage to mend first: ppo." in said


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        ("none", "No stage is bad. Worth a look first: reward."),  # one probe is beyond its limit, unflagged by hand
        ("sft", "The stage to mend first: sft. Its loss rose: 3 to 3.7."),
        ("flat", "Worth a look first: sft. Its loss did not fall by more than its noise: 3 to 3."),
        ("few losses", "No stage looks bad."),
        (
            "reward",
            "The stage to mend first: reward. Right on 52 % [45, 59] of the held-out pairs: that may be guessing",
        ),
        ("ppo", "The stage to mend first: ppo. How far an update goes (approximate KL): Outside the healthy range"),
        ("repeated", "Worth a look first: sft. 20 % of what its answers say in runs of three tokens they have said"),
        ("apart", "Worth a look first: sft. Its loss on held-out rows is 4.26, beside 2.12 in training: up to 2 times"),
        ("rose", "Worth a look first: sft. Its loss on held-out rows rose again from 2 to 2.3"),
        ("rose by little", "No stage looks bad."),
        ("few evaluations", "No stage looks bad."),
        ("undecided", "Worth a look first: eval. PPO and SFT cannot be told apart by gold."),
        ("hacked", "PPO raised the reward and lost by gold: it found what the reward model gets wrong."),
        ("stopped", "The stage to mend first: ppo. It was stopped: step 9: KL"),
    ],
)
def test_which_stage_is_bad(run: Path, fault: str, verdict: str) -> None:
    flag = {"code": "R11", "text": "an empty answer scores above the chosen answer"}
    change(run / "reward/manifest.json", card=CARD | {"flags": [flag] if fault == "none" else []})
    losses = {"sft": [3.0 + 0.1 * step for step in range(8)], "flat": [3.0, 3.1] * 4 + [3.0], "few losses": [3.0, 3.5]}
    if fault in losses:
        write_jsonl(run / "sft/metrics.jsonl", [{"step": i, "loss": loss} for i, loss in enumerate(losses[fault])])
    if fault == "reward":
        change(run / "reward/manifest.json", metrics={"accuracy": 0.52, "accuracy_ci95": [0.45, 0.59]})
    if fault == "ppo":
        write_jsonl(run / "ppo/metrics.jsonl", metrics(policy__approxkl_avg=[0.002] * 10 + [0.5] * 10))
    if fault == "repeated":
        write_jsonl(run / "ppo/metrics.jsonl", metrics(objective__repetition=[0.2] + [0.0] * 19))
    held_out = {
        "apart": [4.26],
        "rose": [2.3, 2.2, 2.1, 2.05, 2.0, 2.0, 2.0, 2.05, 2.1, 2.15, 2.2, 2.3],
        "rose by little": [2.6, 2.3, 2.1, 2.0, 2.0, 2.01, 2.02, 2.03],
        "few evaluations": [2.0, 2.2],
    }
    if fault in held_out:
        rows = [{"step": 40 + place, "eval_loss": loss} for place, loss in enumerate(held_out[fault])]
        write_jsonl(run / "sft/metrics.jsonl", [*lines(run / "sft/metrics.jsonl")[:-1], *rows])
    if fault == "hacked":
        (run / "eval/report.json").write_text(json.dumps(report(gold=0.3)))
        finish(run / "eval")
    if fault == "undecided":  # as `rlhf init ci X; rlhf run X -s '*.seed=1'` ends
        undecided = report(gold=0.484, reward=0.656)
        undecided["win_rate"]["ppo_vs_sft"]["gold"]["ci95"] = [0.322, 0.650]
        undecided["win_rate"]["ppo_vs_sft"]["reward"]["ci95"] = [0.483, 0.796]
        (run / "eval/report.json").write_text(json.dumps(undecided))
        finish(run / "eval")
        assert "lost by" not in words(run)
    if fault == "stopped":
        change(run / "ppo/manifest.json", stopped="step 9: KL")
    assert verdict in words(run)


def test_a_healthy_run_has_no_bad_stage(run: Path) -> None:
    assert "No stage looks bad." in words(run)
    told = report()
    told["win_rate"]["ppo_vs_sft"]["gold"] = win(0.51)
    (run / "eval/report.json").write_text(json.dumps(told))
    finish(run / "eval")
    said = words(run)
    assert "PPO and SFT cannot be told apart by gold" in said
    assert "No stage is bad. Worth a look first: eval. PPO and SFT" in said
    assert "What to do eval (worth a look): raise eval.n; more prompts tell smaller differences" in said


@pytest.mark.parametrize(
    ("ended", "greedy", "grade", "todo"),
    [
        # Wilson's interval of 23 in 256 answers less than all of them ends at 0.94, of 38 at 0.89; of 144 at 0.50.
        (233 / 256, None, "good", ""),
        (218 / 256, None, "worth a look", "raise sft.max_length (here 512) or ppo.response_length; under Samples"),
        (218 / 256, 1.0, "worth a look", "raise sft.num_train_epochs (here 1) or sft.learning_rate (here 0.001); it"),
        (112 / 256, 0.89, "bad", "raise sft.max_length (here 512) or ppo.response_length; under Samples"),
    ],
)
def test_the_badge_of_sft_goes_by_the_answers_that_end(
    run: Path, ended: float, greedy: float | None, grade: str, todo: str
) -> None:
    told, config = report(), configs()["sft"]
    config["sft"]["max_length"] = 512
    begin(run / "sft", config)
    told["models"]["sft"]["eos_fraction"] = ended
    told["greedy"]["models"]["sft"]["eos_fraction"] = 0.0 if greedy is None else greedy
    (run / "eval/report.json").write_text(json.dumps(told))
    finish(run / "eval")
    said = words(run)
    assert f" sft {grade} " in said and f"{100 * ended:.0f} % [" in said and "of its 256 sampled answers end by" in said
    assert ("90 % and more is healthy; the others are cut off at 53 tokens" in said) == (grade != "good")
    mark = " (worth a look)" if grade != "bad" else " "
    assert (f"sft{mark}: {todo}" in said) if todo else (f"sft{mark}:" not in said)


def test_answers_that_are_not_meant_to_end_are_not_held_against_sft(run: Path) -> None:
    told = report()
    told["models"]["sft"]["eos_fraction"] = 0.0
    (run / "eval/report.json").write_text(json.dumps(told))
    finish(run / "eval")
    assert "sft bad " in words(run)
    config = configs()["ppo"]
    config["ppo"]["stop_token"] = "none"
    begin(run / "ppo", config)
    assert "sft good " in words(run) and "answers end by themselves" not in words(run)


def test_what_to_do_is_one_thing_a_stage_in_the_order_of_the_stages(run: Path) -> None:
    flag = {"code": "R11", "text": "an empty answer scores above the chosen answer for 50% of 128 prompts"}
    change(run / "reward/manifest.json", card=CARD | {"flags": [flag]})
    log = metrics(policy__clipfrac_avg=[0.2] * 20, policy__entropy_avg=[1.0] + [0.01] * 19)
    write_jsonl(run / "ppo/metrics.jsonl", log)
    config = configs()["ppo"]
    config["ppo"]["learning_rate"] = 0.003
    begin(run / "ppo", config)
    said = words(run)
    todo = said[said.index("What to do, in this order") : said.index("One change at a time")]
    assert todo.endswith(
        "in this order reward (worth a look): add pairs in which an empty answer is rejected: PPO will find it "
        "ppo (worth a look): lower ppo.learning_rate (here 0.003) or ppo.num_ppo_epochs "
    )
    (run / "eval/report.json").write_text(json.dumps(report(gold=0.3)))
    finish(run / "eval")
    assert "in this order ppo : lower ppo.learning_rate" in words(run), "what lost comes first"


def test_what_to_do_begins_with_the_stage_of_the_headline(run: Path) -> None:
    """Bad stages before those worth a look, and the evaluation, which only tells of them, last."""
    told = report()
    told["models"]["sft"]["eos_fraction"] = 0.8
    told["win_rate"]["ppo_vs_sft"] = {"gold": win(0.3)}
    (run / "eval/report.json").write_text(json.dumps(told))
    finish(run / "eval")
    assert brief(run).headline.startswith(
        "The outcome is bad, no training stage is. Worth a look first: sft. Only 80 %"
    )
    write_jsonl(run / "ppo/metrics.jsonl", metrics(policy__approxkl_avg=[0.5] * 20))
    assert brief(run).headline.startswith("The stage to mend first: ppo.")
    said = words(run)
    todo = said[said.index("What to do, in this order") : said.index("One change at a time")]
    assert re.findall(r"(\w+) (?:\(worth a look\))?: ", todo)[:3] == ["ppo", "sft", "eval"], todo


def test_all_flagged_probes_stand_in_one_thing_to_do(run: Path) -> None:
    names = ("an empty answer", "the good answer three times over")
    flags = [{"code": "R11", "text": f"{name} scores above the chosen answer for 50% of 128 prompts"} for name in names]
    change(run / "reward/manifest.json", card=CARD | {"flags": flags})
    wanted = ", and ".join(f"pairs in which {name} is rejected" for name in names)
    assert f"reward (worth a look): add {wanted}: PPO will find each of them" in words(run)


@pytest.mark.parametrize(
    ("losses", "wanted"),
    [
        ([6.0, 5.0], "in training: up to 2 times is healthy"),
        ([6.0, 5.0], "give it more rows: these it knows by heart"),
        ([5.0, 5.1], "lower sft.num_train_epochs"),
        ([5.0], "lower sft.num_train_epochs"),  # nothing to compare it with
    ],
)
def test_no_fewer_passes_are_advised_while_the_held_out_loss_falls(run: Path, losses: list[float], wanted: str) -> None:
    rows = [{"step": 40 + place, "eval_loss": loss} for place, loss in enumerate(losses)]
    write_jsonl(run / "sft/metrics.jsonl", [*lines(run / "sft/metrics.jsonl")[:-1], *rows])
    said = words(run)
    assert wanted in said
    assert ("lower sft.num_train_epochs" in said) == (losses[0] <= losses[-1])


def test_the_held_out_loss_is_that_of_all_tokens(run: Path) -> None:
    change(run / "sft/manifest.json", metrics={"eval_loss": 1.875})
    said = words(run)
    assert "its loss on held-out rows is 1.88, beside 2.12 in training" in said
    assert "Held-out: 2. Over all held-out tokens, at the end: 1.88; the curve's is the mean of its batches." in said


def test_a_loss_by_a_better_judge_is_laid_to_ppo_where_ppo_is_ill(run: Path) -> None:
    (run / "eval/report.json").write_text(json.dumps(report(gold=0.3)))
    finish(run / "eval")
    healthy = words(run)
    assert "it found what the reward model gets wrong. The stage to mend first: reward." in healthy
    assert "reward bad PPO raised the reward and lost by gold" in healthy and "ppo good" in healthy
    assert "reward : add pairs that reject what paid" in healthy and "eval : read where PPO lost most" in healthy
    write_jsonl(run / "ppo/metrics.jsonl", metrics(objective__kl_k1=[0.0] + [30.0] * 19))
    ill = words(run)
    assert "it went farther than its reward model is right. The stage to mend first: ppo." in ill
    assert "ppo bad it raised the reward and lost by gold" in ill and "reward good" in ill
    assert "ppo : raise ppo.kl_coef (here 0.2), or lower" in ill and "add pairs that reject" not in ill


def test_few_updates_are_neither_good_nor_bad(run: Path) -> None:
    write_jsonl(run / "ppo/metrics.jsonl", metrics(7))
    said = words(run)
    assert "ppo too early to tell 7 updates: a trend can be told from 8 updates on" in said
    assert "No stage looks bad so far; of ppo it is too early to tell." in said
    write_jsonl(run / "ppo/metrics.jsonl", metrics(8))
    assert "ppo good" in words(run)


def test_what_a_badge_tells_is_not_noted_once_more(run: Path) -> None:
    text = "an empty answer scores above the chosen answer for 50% of 128 prompts, limit 25%"
    told = report() | {"warnings": [f"warning[R11]: /home/me/reward: {text}", "warning[R03]: few ended"]}
    (run / "eval/report.json").write_text(json.dumps(told))
    finish(run / "eval")
    assert "/home/me/reward" in words(run)
    change(run / "reward/manifest.json", card=CARD | {"flags": [{"code": "R11", "text": text}]})
    said = words(run)
    assert "/home/me/reward" not in said and "warning[R03]: few ended" in said and said.count(text[:40]) == 1
