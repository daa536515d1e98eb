"""What is said of a PPO run, on series whose course is known; which pairs of answers are shown; the heat map."""

import itertools
import math
import re
from pathlib import Path

import pytest
from report_run import UPDATES, answers, metrics
from test_docs_metrics import METRICS, cells, section

from rlhf_cli.commands.report import tables
from rlhf_cli.commands.report.health import Reading, by_cause, readings, trend
from rlhf_cli.commands.report.rules import CAUSES, RULES, TOO_FAR, Move, limit_of, one_voice
from rlhf_cli.commands.report.runs import Stage
from rlhf_cli.commands.report.tables import last_heat_map
from rlhf_cli.config.paths import field_at
from rlhf_cli.config.ppo_algorithm import WatchdogSettings
from rlhf_cli.config.training import CONFIGS
from rlhf_cli.evaluation import render


def read(key: str, values: list[float], config: dict | None = None, **others: list[float]) -> Reading:
    """The reading of one metric in a log that is healthy elsewhere."""
    log = metrics(len(values), **{key.replace("/", "__"): values}, **others)
    (found,) = [each for each in readings(Stage("ppo", Path(), metrics=tuple(log), config=config)) if each.key == key]
    return found


def test_a_healthy_run_is_inside_every_range() -> None:
    found = {each.key: each for each in readings(Stage("ppo", Path(), metrics=tuple(metrics(UPDATES))))}
    assert {each.verdict for each in found.values()} == {"good"}
    assert not any(each.advice for each in found.values())
    assert "objective/kl_coef" not in found and len(found) == 7, "those that the log has and a rule is of"


def test_a_sentence_tells_first_last_extremes_and_the_range() -> None:
    values = [0.0, 0.01, 0.08, 0.02, 0.02, 0.02, 0.01, 0.03]
    found = read("policy/approxkl_avg", values)
    assert found.sentence == (
        "Begins at 0, ends at 0.02 (mean of the last 2); highest 0.08 at update 3, lowest 0 at update 1. "
        "Outside the healthy range (0 to 0.03) in 1 of 8 updates, inside of it at the end."
    )
    assert (found.verdict, found.advice.text(None)) == ("good", "")
    assert found.points == list(enumerate(values, start=1))


def test_outside_at_the_end_is_worth_a_look_and_says_what_to_do() -> None:
    found = read("policy/approxkl_avg", [0.01] * 4 + [0.05] * 12)
    assert found.sentence.endswith("Outside the healthy range (0 to 0.03) in 12 of 16 updates, at the end too.")
    assert (found.verdict, found.advice.text(None)) == ("look", "lower ppo.learning_rate or ppo.num_ppo_epochs")


def test_outside_at_the_end_by_chance_is_no_finding() -> None:
    found = read("policy/approxkl_avg", [0.01, 0.05] * 7 + [0.01, 0.06])
    assert found.sentence.endswith("in 8 of 16 updates, at the end by no more than its noise.")
    assert (found.verdict, found.advice.text(None)) == ("good", "")
    early = read("policy/approxkl_avg", [0.01] + [0.05] * 6)
    assert early.verdict == "none" and early.sentence.endswith(
        "in 6 of 7 updates. Too early to judge: that is for 8 updates and more."
    )


def test_a_range_of_the_first_value_has_the_noise_of_that_value() -> None:
    """The value model's loss stands still: its first value was a little low by chance."""
    found = read("loss/value_avg", [0.9] + [1.0, 0.95, 1.05, 0.9] * 5)
    assert found.sentence.endswith("at the end by no more than its noise.") and found.verdict == "good"
    assert read("loss/value_avg", [0.9] + [3.0, 2.9, 3.1, 3.0] * 5).verdict == "look"


def test_one_update_beyond_the_alarm_is_bad_wherever_it_ends() -> None:
    found = read("policy/approxkl_avg", [0.01, 0.01, 0.31, 0.4, 0.01, 0.0, 0.0, 0.0])
    assert found.verdict == "bad" and "at update 3 so far outside that the run may be broken" in found.sentence
    assert read("policy/approxkl_avg", [0.01, 0.3, 0.01, 0.01, 0.0, 0.0, 0.0, 0.0]).verdict == "good"
    low = read("objective/eos_fraction", [1.0, 0.9, 0.04, 0.9, 1.0, 1.0, 1.0, 1.0])
    assert low.verdict == "bad" and low.advice.text(None).startswith("raise ppo.response_length or ")


def test_kl_is_held_against_the_watchdogs_limit_for_as_many_tokens() -> None:
    lengths = {"objective__response_length": [10.0, 20.0, 20.0] + [40.0] * 9}
    kl = [0.0, 9.9, 10.1] + [19.9] * 9
    found = read("objective/kl_k1", kl, **lengths)
    assert found.band is not None and found.band.high == [5.0, 10.0, 10.0] + [20.0] * 9
    assert found.band.low == [0.0] * 12
    assert "(up to 0.5 nats a token) in 1 of 12 updates, inside of it at the end." in found.sentence
    tight = read("objective/kl_k1", kl, {"ppo": {"watchdog": {"kl": 0.25}}}, **lengths)
    assert "(up to 0.25 nats a token) in 11 of 12 updates, at the end too." in tight.sentence
    assert tight.verdict == "look" and tight.advice.text({"ppo": {"kl_coef": 0.2}}).startswith(
        "raise ppo.kl_coef (here 0.2), or lower ppo.learning_rate, or set ppo.kl_stop; read samples.jsonl"
    )


@pytest.mark.parametrize(
    ("key", "first", "inside", "below", "above"),
    [
        ("objective/response_length", 20.0, [10.0, 40.0], 9.9, 40.1),
        ("objective/eos_fraction", 0.9, [0.7, 1.0], 0.69, None),
        ("objective/repetition", 0.1, [0.0, 0.2], None, 0.21),
        ("objective/disagreement/votes", 0.5, [0.0, 1.0], None, 1.01),
        ("policy/entropy_avg", 2.0, [0.2, 9.0], 0.19, None),
        ("loss/value_avg", 2.0, [0.0, 2.0], None, 2.1),
        ("policy/clipfrac_avg", 0.0, [0.0, 0.04], None, 0.041),
        ("val/ratio", 1.0, [0.9, 1.1], 0.89, 1.11),
        ("policy/first_ratio_error", 0.0, [0.001], None, 0.0011),
        ("policy/grad_norm", 0.5, [0.0, 2.0], None, 2.1),
        ("value/grad_norm", 0.5, [0.0, 2.0], None, 2.1),
        ("policy/skipped_minibatches", 0.0, [0.0], None, 1.0),
    ],
)
def test_each_range_is_where_it_is(key: str, first: float, inside: list[float], below: float, above: float) -> None:
    config = {"ppo": {"max_grad_norm": 1.0, "response_length": 53}}
    for value in inside:
        assert read(key, [first] + [value] * 11, config).verdict == "good", value
    for value in (below, above):
        if value is not None:
            found = read(key, [first] + [value] * 11, config)
            assert found.verdict == "look" and found.advice, value


def test_explained_variance_has_time_to_become_good() -> None:
    early = read("val/explained_variance", [-1.0] * 19)
    assert early.verdict == "none" and "Too early to judge" in early.sentence and not early.advice
    assert read("val/explained_variance", [-1.0] * 20).verdict == "look"
    assert read("val/explained_variance", [-1.0] * 15 + [0.5] * 5).verdict == "good"
    assert read("policy/skipped_minibatches", [0.0, 1.0]).verdict == "look", "what is counted has no noise"


def test_lengths_that_are_drawn_from_a_range_have_no_range_of_their_own() -> None:
    found = read("objective/response_length", [20.0, 90.0, 5.0, 5.0], {"ppo": {"response_length": [4, 99]}})
    assert (found.band, found.verdict) == (None, "none")


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0], "good"),
        ([8.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0], "bad"),
        ([0.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0], "look"),
        ([0.5] * 8, "look"),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "none"),
        ([0.0, 1.0, 2.0], "none"),
    ],
)
def test_a_score_must_rise_by_more_than_its_noise(values: list[float], verdict: str) -> None:
    assert trend(values)[0] == verdict
    found = read("objective/scores", values)
    assert found.verdict == verdict and bool(found.advice) == (verdict in ("look", "bad"))


def test_a_metric_that_never_moves_has_no_figure() -> None:
    assert not read("policy/first_ratio_error", [0.0] * 5).moves
    assert read("policy/first_ratio_error", [0.0] * 5).sentence.startswith("0 in all 5 updates.")
    assert (
        read("val/ratio", [1.0]).sentence == "One update so far: 1. Inside the healthy range (0.9 to 1.1) in 1 update."
    )


# docs/tuning.md has the same ranges


def test_the_ranges_are_those_of_the_documentation() -> None:
    rows = {row[0].strip("`"): row[1:] for row in cells(section(METRICS, "Healthy ranges"))}
    assert rows.keys() == {rule.key for rule in RULES}
    stage = Stage("ppo", Path(), metrics=tuple(metrics(UPDATES)))
    for rule in RULES:
        told, alarm = rows[rule.key][0], rows[rule.key][1]
        bounds = [each for each in (rule.alarm_low, rule.alarm_high) if each is not None]
        assert [float(each) for each in re.findall(r"\d[\d.]*", alarm)] == bounds, rule.key
        numbers = {float(each) for each in re.findall(r"\d[\d.]*\d|\d", told)}
        if rule.watchdog:
            assert f"`watchdog.{rule.watchdog}`" in told and limit_of(rule, stage.config) in numbers
            assert limit_of(rule, None) == WatchdogSettings.model_fields[rule.watchdog].default
        else:
            wanted = {
                each for each in (rule.low, rule.high) if each is not None and (rule.of, each) != ("first times", 1)
            }
            assert wanted == numbers - ({float(rule.early)} if rule.early else set()), rule.key


# One voice


def advised(**given: list[float]) -> dict[str, Reading]:
    """The readings of a log of 20 updates that is healthy but for `given`."""
    log = metrics(UPDATES, **given)
    return {each.key: each for each in readings(Stage("ppo", Path(), metrics=tuple(log)))}


FLAT, CLIPPED, STILL = [0.5] * UPDATES, [0.2] * UPDATES, [0.01] * UPDATES


def test_a_score_that_stands_still_is_told_apart_by_how_far_the_policy_went() -> None:
    near = advised(objective__scores=FLAT, objective__kl_k1=STILL)["objective/scores"]
    assert near.sentence.endswith("noise. The policy has hardly moved, 0.01 nats from SFT.")
    assert near.advice.moves == (Move("raise", "ppo.learning_rate"), Move("lower", "ppo.kl_coef"))
    bounds = [math.log(2) - 0.5 + shift for shift in (-0.001, 0.001)]  # best of 2, by its own formula
    for kl, key in zip(bounds, ("ppo.learning_rate", "ppo.gradient_accumulation_steps"), strict=True):
        found = advised(objective__scores=FLAT, objective__kl_k1=[kl] * UPDATES)["objective/scores"]
        assert found.advice.moves[0] == Move("raise", key), kl
    falls = advised(objective__scores=[-0.1 * step for step in range(UPDATES)], objective__kl_k1=STILL)
    assert falls["objective/scores"].advice.moves == (Move("lower", "ppo.learning_rate"),)


def test_clipping_is_heard_before_a_score_that_stands_still() -> None:
    found = advised(objective__scores=FLAT, objective__kl_k1=STILL, policy__clipfrac_avg=CLIPPED)
    assert found["policy/clipfrac_avg"].advice == TOO_FAR
    told = found["objective/scores"].advice.text({"ppo": {"learning_rate": 0.003}})
    assert told == "“Tokens whose ratio is clipped” comes first: lower ppo.learning_rate (here 0.003)"


def test_a_value_loss_that_grows_is_heard_before_a_value_model_that_explains_nothing() -> None:
    found = advised(loss__value_avg=[1.0] + [2.0] * 19, val__explained_variance=[-1.0] * UPDATES)
    assert found["loss/value_avg"].advice.moves[0] == Move("lower", "ppo.value_learning_rate")
    waits = found["val/explained_variance"].advice
    assert (waits.after, waits.moves) == ("Loss of the value model", (Move("lower", "ppo.value_learning_rate"),))


def test_what_is_graver_is_heard_first() -> None:
    """A score that falls is bad, clipping worth a look; both want one thing."""
    falling = [-0.1 * step for step in range(UPDATES)]
    found = advised(objective__scores=falling, policy__clipfrac_avg=CLIPPED)
    assert [each.key for each in by_cause(list(found.values()))][:2] == ["objective/scores", "policy/clipfrac_avg"]


def test_no_page_pulls_a_key_in_two_directions() -> None:
    """Whatever is found together: every rule, each of its advices, in any two and in all of them."""
    told = [(rule.key, each) for rule in RULES for each in (rule.if_low, rule.if_high, rule.if_near, rule.if_far)]
    for wishes in [told, told[::-1], *itertools.permutations(told, 2)]:
        ways: dict[str, set[str]] = {}
        for advice in one_voice(wishes):
            for move in advice.moves:
                ways.setdefault(move.key, set()).add(move.way)
        assert all(len(way) == 1 for way in ways.values()), ways


def test_every_metric_has_its_place_among_the_causes() -> None:
    assert sorted(CAUSES) == sorted(rule.key for rule in RULES)


def test_what_is_advised_are_keys_that_exist_and_that_the_guide_knows() -> None:
    guide = (Path(__file__).parent.parent / "docs/tuning.md").read_text(encoding="utf-8")
    for rule in RULES:
        for move in (move for each in (rule.if_low, rule.if_high, rule.if_near, rule.if_far) for move in each.moves):
            stage = "reward" if move.key.startswith("reward.") else "ppo"
            field = field_at(CONFIGS[stage], tuple(move.key.split(".")))
            assert field is not None, move
            assert re.search(rf"`(?:[\w.]+\.)?{move.key.rpartition('.')[2]}\b", guide), f"{move}: docs/tuning.md"


# Pairs of answers


def test_pairs_are_picked_by_brute_force() -> None:
    found = render.response_pairs(answers(16))
    assert [pair.gain for pair in found] == [index - 4.0 for index in range(16)], "by gold, not by the reward"
    best, worst, middle, moved = tables.chosen(found)
    assert [pair.index for pair in best.pairs] == [15, 14, 13]
    assert [pair.index for pair in worst.pairs] == [0, 1, 2]
    assert [pair.index for pair in middle.pairs] == [8, 7, 9], "the upper median is 4"
    left = {3, 4, 5, 6, 10, 11, 12}  # KL is index % 5, the lengths differ by index - 2
    by_change = sorted(left, key=lambda index: (-(index % 5), -abs(index - 2), index))
    assert [pair.index for pair in moved.pairs] == by_change[:3] == [4, 3, 12]


def test_a_prompt_on_which_ppo_gained_is_not_called_a_loss() -> None:
    found = render.response_pairs(answers(16))
    titles = [[each.title for each in tables.chosen(some)][1] for some in (found[3:], found[4:])]
    assert titles == ["Where PPO lost most", "Where PPO gained least"], "the gains begin at -1, and at 0"
    assert [pair.index for pair in tables.chosen(found[3:])[1].pairs] == [3]


def test_a_pair_is_shown_once_and_few_pairs_are_all() -> None:
    for n in range(12):
        shown = [pair.index for group in tables.chosen(render.response_pairs(answers(n))) for pair in group.pairs]
        assert sorted(shown) == list(range(n))


def test_pairs_are_of_prompts_that_both_answered_in_one_mode() -> None:
    rows = answers(4)
    greedy = [row | {"mode": "greedy", "response": "greedy"} for row in rows]
    kept = [row for row in rows if (row["model"], row["index"]) != ("sft", 2)]
    found = render.response_pairs([*greedy, *kept])
    assert [pair.index for pair in found] == [0, 1, 3] and found[0].ppo["response"] == "ppo says 0"
    assert len(render.response_pairs(greedy)) == 4, "where there are no others"
    assert render.response_pairs(rows[:4]) == [] and tables.lengths(rows[:4]) == {}
    assert tables.lengths(rows) == {"SFT": [12] * 4, "PPO": [10, 11, 12, 13]}


# The heat map


def test_the_heat_map_is_of_the_last_row_that_tells_its_tokens() -> None:
    told = {
        "text": ["a", "\n", ""],
        "reward": [0.5, -2.0, 0.0],
        "kl": [0.0, 0.0, 0.0],
        "value": [1.0, 2.0],
        "advantage": 3,
    }
    rows = [
        {"step": 1, "prompt": "old", "tokens": told | {"text": ["x"] * 3}},
        {"step": 2, "prompt": "p", "tokens": told},
    ]
    found = last_heat_map([*rows, {"step": 3, "prompt": "without"}])
    assert found is not None and (found.step, found.prompt) == (2, "p")
    assert [strip.name for strip in found.strips] == ["reward", "kl"], "what does not fit the tokens is left out"
    reward, kl = found.strips
    assert [token.shade for token in reward.tokens] == [0.25, -1.0, 0.0] and reward.most == "2"
    assert [token.text for token in reward.tokens] == [
        "a",
        "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}",
        "\N{MIDDLE DOT}",
    ]
    assert [token.value for token in reward.tokens] == ["0.5", "\N{MINUS SIGN}2", "0"]
    assert {token.shade for token in kl.tokens} == {0.0}
    assert last_heat_map([{"step": 3}, {"step": 4, "tokens": {"text": ["a"]}}]) is None
