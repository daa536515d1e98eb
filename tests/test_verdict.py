"""What an evaluation's files look like on a terminal, and the gate on them."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli import terminal
from rlhf_cli.errors import RLHFError
from rlhf_cli.evaluation import render
from rlhf_cli.evaluation.render import deciding_judge


def model(reward: float, gold: float, **more: Any) -> dict[str, Any]:
    judges = {"reward": {"mean": reward, "ci95": [reward - 0.1, reward + 0.1]}, "gold": {"mean": gold, "ci95": [0, 1]}}
    told = {"reward_mean": reward, "reward_ci95": [reward - 0.1, reward + 0.1], "response_length_mean": 20.25}
    return {**told, "eos_fraction": 0.995, "judges": judges, **more}


def rate(value: float, ties: int) -> dict[str, Any]:
    return {"value": value, "ci95": [value - 0.05, value + 0.05], "n": 100, "ties": ties}


REPORT = {
    "n": 100,
    "models": {"sft": model(0.1, 0.4, kl=0.0), "ppo": model(1.7, 0.85, kl=5.25)},
    "win_rate": {"ppo_vs_sft": {"reward": rate(0.95, 1), "gold": rate(0.875, 12)}},
    "greedy": {"models": {"sft": model(0.2, 0.5)}, "win_rate": {"ppo_vs_sft": {"gold": rate(0.7, 3)}}},
    "best_of": [{"n": 4, "kl_bound": 0.636, **model(0.9, 0.6), "ppo_win_rate": {"gold": rate(0.66, 7)}}],
    "warnings": ["warning[R03]: no response ends"],
}


def sample(index: int, model: str, gold: float, text: str, mode: str = "sampled") -> dict[str, Any]:
    scores = {"reward": -gold, "gold": gold}
    return {
        "index": index, "prompt": f"prompt {index}", "model": model, "mode": mode, "response": text, "scores": scores,
    }  # fmt: skip


def write(folder: Path, report: dict[str, Any], samples: list[dict[str, Any]]) -> Path:
    (folder / "report.json").write_text(json.dumps(report))
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    return folder


def lines(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The cells of each line; columns stand at least two blanks apart."""
    printed = capsys.readouterr()
    assert printed.err == ""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in printed.out.splitlines()]


def test_models_best_of_and_win_rates_are_told_with_intervals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    render.print_report(write(tmp_path, REPORT, []))
    told = lines(capsys)
    assert ["model", "reward", "KL", "length", "ended", "gold"] in told
    assert ["SFT", "0.100 [0.000, 0.200]", "0.00", "20.2", "100%", "0.400 [0.000, 1.000]"] in told
    assert ["PPO", "1.700 [1.600, 1.800]", "5.25", "20.2", "100%", "0.850 [0.000, 1.000]"] in told
    assert ["SFT, near-greedy", "0.200 [0.100, 0.300]", "-", "20.2", "100%", "0.500 [0.000, 1.000]"] in told
    assert ["SFT, best of 4", "0.900 [0.800, 1.000]", "<= 0.64", "20.2", "100%", "0.600 [0.000, 1.000]"] in told
    assert ["PPO over SFT", "reward", "0.950 [0.900, 1.000]", "-", "1"] in told
    assert ["PPO over SFT", "gold", "0.875 [0.825, 0.925]", "-", "12"] in told
    assert ["PPO over SFT, near-greedy", "gold", "0.700 [0.650, 0.750]", "-", "3"] in told
    assert ["PPO over SFT's best of 4", "gold", "0.660 [0.610, 0.710]", "-", "7"] in told
    assert ["noted: warning[R03]: no response ends"] in told
    assert told[-2] == [f"report: {tmp_path}/report.json"] and told[-1][0].startswith("verdict: PPO beats SFT: it wins")


def test_three_pairs_stand_at_the_quartiles_of_the_gain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = []
    for index in range(9):  # the gain of prompt i is (i - 2) / 10, by gold; by reward it is the other way round
        samples += [sample(index, "sft", 0.2, f"old {index}"), sample(index, "ppo", index / 10, f"new {index}")]
        samples += [sample(index, "ppo", 0, "near-greedy", mode="greedy"), sample(index, "best_of_4", 1, "best")]
    render.print_report(write(tmp_path, REPORT, samples))
    told = lines(capsys)
    start = told.index(["Before and after, at the quartiles of PPO's gain by gold"])
    assert told[start + 2 : start + 11] == [
        ["prompt", "prompt 2"],
        ["SFT", "reward -0.20, gold 0.20", "old 2"],
        ["PPO", "reward -0.20, gold 0.20", "new 2"],
        ["prompt", "prompt 4"],
        ["SFT", "reward -0.20, gold 0.20", "old 4"],
        ["PPO", "reward -0.40, gold 0.40", "new 4"],
        ["prompt", "prompt 6"],
        ["SFT", "reward -0.20, gold 0.20", "old 6"],
        ["PPO", "reward -0.60, gold 0.60", "new 6"],
    ]


@pytest.mark.parametrize(
    ("gains", "picked"),
    [
        ({0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, [1, 2, 3]),
        ({7: 4.0, 5: 0.0, 3: 2.0, 9: 1.0, 1: 3.0}, [9, 3, 1]),
        ({4: 1.0, 2: 1.0, 0: 1.0, 6: 1.0}, [0, 2, 4]),
        ({8: -1.0, 3: 1.0}, [8, 3]),
        ({8: 0.5}, [8]),
    ],
)
def test_pairs_are_picked_without_chance(gains: dict[int, float], picked: list[int]) -> None:
    assert render.quartile_examples(gains) == picked


@pytest.mark.parametrize(
    ("scores", "judge"),
    [
        ({"reward": 0, "helpful": 0, "gold": 0}, "gold"),
        ({"reward": 0, "helpful": 0}, "helpful"),
        ({"reward": 0}, "reward"),
    ],
)
def test_the_judge_that_ppo_was_not_trained_on_decides(scores: dict[str, float], judge: str) -> None:
    assert deciding_judge(scores) == judge


def test_an_evaluation_of_near_greedy_answers_alone_has_its_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [sample(0, "sft", 0.1, "old", mode="greedy"), sample(0, "ppo", 0.9, "new", mode="greedy")]
    render.print_report(write(tmp_path, {**REPORT, "greedy": {}, "best_of": []}, samples))
    assert ["PPO", "reward -0.90, gold 0.90", "new"] in lines(capsys)


def test_what_a_model_writes_cannot_move_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = [sample(0, "sft", 0.1, "\x1b[31m[link=file:///etc/passwd]red"), sample(0, "ppo", 0.9, "two\nlines")]
    render.print_report(write(tmp_path, REPORT, samples))
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "[link=file:///etc/passwd]red" in said and "two\\nlines" in said


def point(step: int, kl: float, gold: float, won: float) -> dict[str, Any]:
    judges = model(1.0 + step / 10, gold)["judges"]
    rates = {judge: {**rate(won, 0), "length_controlled": won - 0.1} for judge in judges}
    return {"step": step, "kl": kl, "judges": judges, "win_rate": rates}


def test_the_frontier_is_told_with_what_was_picked_and_how_sure_that_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = {**REPORT["best_of"][0], "win_rate_vs_sft": point(0, 0, 0, 0.6)["win_rate"]}
    frontier = [point(10, -0.001, 0.4, 0.5), point(25, 11.812, 0.6, 0.7)]
    chosen = {"judge": "gold", "rule": "the highest mean of gold among 2 of 2 policies", "optimism": 0.0042}
    picked = {"selected_step": 25, "selected": {**chosen, "within_noise": [10]}}
    render.print_report(write(tmp_path, {**REPORT, "best_of": [best], "frontier": frontier, **picked}, []))
    printed = capsys.readouterr().out
    told = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in printed.splitlines()]
    assert ["update", "KL", "reward", "gold", "win rate, gold", "at equal length"] in told
    assert ["10", "0.00", "2.000", "0.400 [0.000, 1.000]", "0.500 [0.450, 0.550]", "0.400"] in told
    assert ["25", "11.81", "3.500", "0.600 [0.000, 1.000]", "0.700 [0.650, 0.750]", "0.600", "*"] in told
    assert ["best of 4", "<= 0.64", "0.900", "0.600 [0.000, 1.000]", "0.600 [0.550, 0.650]", "0.500"] in told
    assert "selected: update 25, by the highest mean of gold among 2 of 2 policies\n" in printed
    assert "within noise of it: update 10 (paired" in printed and "too high by about 0.004\n" in printed
    start = printed.index("The frontier")
    assert max(map(len, printed[start : printed.index("too high")].splitlines())) <= 100


def test_a_damaged_report_is_told(tmp_path: Path) -> None:
    with pytest.raises(RLHFError, match="M05"):
        render.print_report(tmp_path)
    (tmp_path / "report.json").write_text('{"n": 1')
    with pytest.raises(RLHFError, match="M05"):
        render.print_report(tmp_path)


GOLD = "win_rate.ppo_vs_sft.gold.value"  # 0.875


@pytest.mark.parametrize("condition", [">= 0.875", "<=0.875", "> 0.87", "< 0.88", "== 0.875", " >= 8.7e-1 "])
def test_requirements_that_hold(condition: str) -> None:
    render.check_requirements(REPORT, {GOLD: condition}, where=lambda key: "eval.yaml:9")


@pytest.mark.parametrize("condition", [">= 0.876", "<= 0.874", "> 0.875", "< 0.875", "== 0.87"])
def test_requirements_that_do_not_hold(condition: str) -> None:
    with pytest.raises(RLHFError) as caught:
        render.check_requirements(REPORT, {GOLD: condition}, where=lambda key: "eval.yaml:9")
    assert str(caught.value) == f"error[R06]: eval.yaml:9: {GOLD} is 0.875, required {condition}"
    assert caught.value.exit_code == 1


def test_every_requirement_that_fails_has_its_line() -> None:
    require = {GOLD: ">= 0.9", "models.ppo.kl": "<= 6", "models.nobody.kl": "<= 6", "models.ppo": "> 0"}
    with pytest.raises(RLHFError) as caught:
        render.check_requirements(REPORT, require, where=lambda key: "eval.yaml:9")
    assert [problem.text for problem in caught.value.problems] == [
        f"{GOLD} is 0.875, required >= 0.9",
        "models.nobody.kl is no number of the report",
        "models.ppo is no number of the report",
    ]


def test_an_interval_that_holds_a_half_is_undecided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = {
        name: {**rate(value, 0), "ci95": ci} for name, value, ci in (("a", 0.6, [0.5, 0.7]), ("b", 0.6, [0.51, 0.7]))
    }
    render.print_report(write(tmp_path, {**REPORT, "win_rate": {"ppo_vs_sft": rates}, "greedy": {}}, []))
    told = capsys.readouterr().out
    assert "0.600 [0.500, 0.700], undecided" in told and "0.600 [0.510, 0.700]  " in told


def test_a_warning_that_the_command_said_is_not_noted_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.warn("R03", "no response ends")
    capsys.readouterr()
    more = [*REPORT["warnings"], "warning[D13]: eval.yaml:3: shared"]
    render.print_report(write(tmp_path, {**REPORT, "warnings": more}, []))
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("noted")]
    assert told == [f"noted: {more[1]}", "noted: of the warnings above report.json has R03"]


BETTER, OPEN, WORSE = ({"value": value, "ci95": [value - 0.1, value + 0.1], "n": 200} for value in (0.8, 0.5, 0.2))
ITSELF = "; by the reward itself it wins"


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        (
            {"gold": BETTER, "reward": {**BETTER, "value": 0.93}},
            "PPO beats SFT: it wins 0.800 [0.700, 0.900] of 200 held-out prompts, judged by gold, at a KL of 5.25"
            f"{ITSELF} 0.930 [0.700, 0.900]",
        ),
        ({"gold": BETTER, "reward": WORSE}, f" judged by gold, at a KL of 5.25{ITSELF} 0.200 [0.100, 0.300]"),
        (
            {"gold": OPEN, "reward": BETTER},
            "undecided: PPO wins 0.500 [0.400, 0.600] of 200 held-out prompts, judged by gold, at a KL of 5.25 "
            f"(more prompts, eval.n, would tell more){ITSELF} 0.800 [0.700, 0.900], and gold does not confirm it",
        ),
        ({"gold": OPEN, "reward": OPEN}, f"would tell more){ITSELF} 0.500 [0.400, 0.600]"),
        (
            {"gold": WORSE, "reward": BETTER},
            "PPO is worse than SFT: it wins 0.200 [0.100, 0.300] of 200 held-out prompts, judged by gold, at a KL of "
            f"5.25{ITSELF} 0.800 [0.700, 0.900]: PPO found what the reward gets wrong (docs/reward-hacking.md)",
        ),
        ({"gold": WORSE, "reward": WORSE}, f"5.25{ITSELF} 0.200 [0.100, 0.300]"),
        (
            {"reward": BETTER},
            "5.25: the reward itself, which proves little; name another judge in eval.yaml",
        ),
        ({"helpful": BETTER}, " judged by helpful, at a KL of 5.25"),
        (
            {"helpful": {**BETTER, "length_controlled": 0.55, "length_controlled_ci95": [0.45, 0.65]}},
            "5.25; at equal length 0.550 [0.450, 0.650], undecided",
        ),
        ({"helpful": {**BETTER, "length_controlled": 0.7, "length_controlled_ci95": [0.6, 0.8]}}, "KL of 5.25"),
    ],
)
def test_the_verdict_is_one_sentence_with_its_caveat(rates: dict[str, Any], said: str) -> None:
    told = render.summary_sentence({**REPORT, "win_rate": {"ppo_vs_sft": rates}})
    assert told and told.endswith(said), told


def test_without_a_comparison_there_is_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    render.print_report(write(tmp_path, {**REPORT, "win_rate": {}}, []))
    assert "verdict" not in capsys.readouterr().out


@pytest.mark.parametrize(("low", "guessing"), [(0.51, False), (0.5, True), (0.45, True)])
def test_the_reward_model_is_told_with_what_it_is_worth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], low: float, guessing: bool
) -> None:
    judged = {**REPORT, "reward_model": {"accuracy": 0.6, "ci95": [low, 0.7]}}
    render.print_report(write(tmp_path, judged, []))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("reward model")]
    assert line.startswith(f"reward model: right on 0.600 [{low:.3f}, 0.700] of the held-out pairs")
    assert ("guessing" in line) == guessing
