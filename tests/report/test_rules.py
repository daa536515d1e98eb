"""Readings of PPO metrics on series with a known course, and their advice."""

import itertools
import math
import re
from pathlib import Path

import pytest
from doc_tables import DOCS, METRICS, cells, section
from report_run import UPDATES, metrics

from rlhf_cli.config.machinery.fields import key_at
from rlhf_cli.config.stages import CONFIGS
from rlhf_cli.ppo.monitor import MIN_EOS_FRACTION
from rlhf_cli.report.rules import (
    CAUSES,
    IF_FAR,
    IF_NEAR,
    RULES,
    Reading,
    by_cause,
    key_changes,
    limit_of,
    readings,
    reconcile,
    with_values,
)
from rlhf_cli.runs.read import Stage
from rlhf_cli.stages.ppo.runner import RATIO_TOLERANCE

ADVICE = [(rule.key, advice) for rule in RULES for advice in (rule.if_low, rule.if_high) if advice]
ADVICE += [("objective/scores", IF_NEAR), ("objective/scores", IF_FAR)]
TOO_FAR = "lower ppo.learning_rate or ppo.num_ppo_epochs"


def read(updates: int = UPDATES, config: dict | None = None, **series: list[float]) -> dict[str, Reading]:
    """The readings of a log that is healthy except for these series."""
    log = metrics(updates, **series)
    return {each.key: each for each in readings(Stage("ppo", Path(), metrics=tuple(log), config=config))}


def read_one(key: str, values: list[float], config: dict | None = None, **series: list[float]) -> Reading:
    return read(len(values), config, **{key.replace("/", "__"): values}, **series)[key]


def test_the_report_has_the_limits_at_which_training_warns() -> None:
    rules = {rule.key: rule for rule in RULES}
    assert rules["policy/first_ratio_error"].high == RATIO_TOLERANCE
    assert rules["objective/eos_fraction"].alarm_low == MIN_EOS_FRACTION


def test_a_healthy_run_is_inside_every_range() -> None:
    found = read()
    assert {each.verdict for each in found.values()} == {"good"} and not any(each.advice for each in found.values())
    assert "objective/kl_coef" not in found and len(found) == 7, "the metrics that have a rule"


@pytest.mark.parametrize(
    ("values", "verdict", "sentence"),
    [
        (
            [0.0, 0.01, 0.08, 0.02, 0.02, 0.02, 0.01, 0.03],
            "good",
            "Starts at 0, ends at 0.02 (mean of the last 2); maximum 0.08 at update 3, minimum 0 at update 1. "
            "Outside the healthy range (0 to 0.03) in 1 of 8 updates, inside it at the end.",
        ),
        ([0.01] * 4 + [0.05] * 12, "look", " (0 to 0.03) in 12 of 16 updates, and still outside at the end."),
        ([0.01, 0.05] * 7 + [0.01, 0.06], "good", "in 8 of 16 updates, within noise at the end."),
        ([0.01] + [0.05] * 6, "none", "in 6 of 7 updates. Too early to judge: 8 updates are needed."),
        ([0.01, 0.01, 0.31, 0.4, 0.01, 0, 0, 0], "bad", ", and beyond the alarm limit at update 3."),
        ([0.01, 0.3, 0.01, 0.01, 0, 0, 0, 0], "good", "inside it at the end."),
        ([0.0] * 5, "good", "0 in all 5 updates. Inside the healthy range (0 to 0.03) in all 5 updates."),
        ([0.01], "good", "One update so far: 0.01. Inside the healthy range (0 to 0.03) in 1 update."),
    ],
)
def test_a_reading_describes_the_course_and_the_range(values: list[float], verdict: str, sentence: str) -> None:
    reading = read_one("policy/approxkl_avg", values)
    assert reading.verdict == verdict and reading.sentence.endswith(sentence)
    assert reading.advice == (TOO_FAR if verdict in ("look", "bad") else "")
    assert reading.points == list(enumerate(values, start=1))


def test_a_range_relative_to_the_first_value_includes_its_noise() -> None:
    """The loss of the value model is constant; its first value is a little low by chance."""
    reading = read_one("loss/value_avg", [0.9] + [1.0, 0.95, 1.05, 0.9] * 5)
    assert reading.sentence.endswith("within noise at the end.") and reading.verdict == "good"
    assert read_one("loss/value_avg", [0.9] + [3.0, 2.9, 3.1, 3.0] * 5).verdict == "look"
    for updates in (1, 2, 3):  # too few for their noise
        assert read_one("rollout/logprob_gap", [0.05] * updates).verdict != "look"


def test_the_kl_range_is_the_watchdog_limit_times_the_length() -> None:
    lengths = {"objective__response_length": [10.0, 20.0, 20.0] + [40.0] * 9}
    kl = [0.0, 9.9, 10.1] + [19.9] * 9
    reading = read_one("objective/kl_k1", kl, **lengths)
    assert reading.band == ([0.0] * 12, [5.0, 10.0, 10.0] + [20.0] * 9)
    limit = "(0 to 0.5 nats per token, at the end up to 20 nats per response)"
    assert f"{limit} in 1 of 12 updates, inside it at the end." in reading.sentence
    tight = read_one("objective/kl_k1", kl, {"ppo": {"watchdog": {"kl": 0.25}}}, **lengths)
    assert "up to 10 nats per response) in 11 of 12 updates" in tight.sentence and tight.verdict == "look"
    assert with_values(tight.advice, {"ppo": {"kl_coef": 0.2}}).startswith(
        "raise ppo.kl_coef (here 0.2), or lower ppo.learning_rate, or set ppo.kl_stop; read ppo/samples.jsonl"
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
def test_the_bounds_of_each_range(key: str, first: float, inside: list[float], below: float, above: float) -> None:
    config = {"ppo": {"max_grad_norm": 1.0, "response_length": 53}}
    for value in inside:
        assert read_one(key, [first] + [value] * 11, config).verdict == "good", value
    for value in (below, above):
        if value is not None:
            reading = read_one(key, [first] + [value] * 11, config)
            assert reading.verdict == "look" and reading.advice, value


def test_exceptions_to_the_eight_updates() -> None:
    early = read_one("val/explained_variance", [-1.0] * 19)
    assert early.verdict == "none" and "Too early to judge" in early.sentence and not early.advice
    assert read_one("val/explained_variance", [-1.0] * 20).verdict == "look"
    assert read_one("val/explained_variance", [-1.0] * 15 + [0.5] * 5).verdict == "good"
    assert read_one("policy/skipped_minibatches", [0.0, 1.0]).verdict == "look", "counts have no noise"
    low = read_one("objective/eos_fraction", [1.0, 0.9, 0.04, 0.9, 1.0, 1.0, 1.0, 1.0])
    assert low.verdict == "bad" and low.advice.startswith("raise ppo.response_length or "), "a single update"
    config = {"ppo": {"response_length": {"min": 4, "max": 99}}}
    sampled = read_one("objective/response_length", [20.0, 90.0, 5.0, 5.0], config)
    assert (sampled.band, sampled.verdict) == (None, "none"), "lengths that are sampled from a range"


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0], "good"),
        ([8.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0], "bad"),
        ([0.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0], "look"),
        ([0.5] * 8, "look"),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "none"),
    ],
)
def test_a_score_must_rise_by_more_than_its_noise(values: list[float], verdict: str) -> None:
    reading = read_one("objective/scores", values)
    assert reading.verdict == verdict and bool(reading.advice) == (verdict in ("look", "bad"))


def test_the_ranges_are_those_of_the_documentation() -> None:
    rows = {row[0].strip("`"): row[1:] for row in cells(section(METRICS, "Healthy ranges"))}
    assert rows.keys() == {rule.key for rule in RULES}
    for rule in RULES:
        healthy, alarm = rows[rule.key][:2]
        alarms = [bound for bound in (rule.alarm_low, rule.alarm_high) if math.isfinite(bound)]
        assert [float(each) for each in re.findall(r"\d[\d.]*", alarm)] == alarms, rule.key
        numbers = {float(each) for each in re.findall(r"\d[\d.]*\d|\d", healthy)}
        words = rule.words.format(limit=limit_of(rule, None))
        assert {float(each) for each in re.findall(r"\d[\d.]*\d|\d", words)} == numbers - {rule.min_updates}, rule.key
        assert not rule.watchdog or f"`watchdog.{rule.watchdog}`" in healthy


# Advice


FLAT, CLIPPED, STILL = [0.5] * UPDATES, [0.2] * UPDATES, [0.01] * UPDATES


def test_the_advice_on_a_flat_score_depends_on_the_kl() -> None:
    near = read(objective__scores=FLAT, objective__kl_k1=STILL)["objective/scores"]
    assert near.sentence.endswith("noise. The policy has hardly moved: KL 0.01 nats from SFT.")
    assert key_changes(near.advice) == {"ppo.learning_rate": "raise", "ppo.kl_coef": "lower"}
    bounds = [math.log(2) - 0.5 + shift for shift in (-0.001, 0.001)]  # best of 2, by its formula
    for kl, advice in zip(bounds, (IF_NEAR, IF_FAR), strict=True):
        assert read(objective__scores=FLAT, objective__kl_k1=[kl] * UPDATES)["objective/scores"].advice == advice
    falling = read(objective__scores=[-0.1 * step for step in range(UPDATES)], objective__kl_k1=STILL)
    assert key_changes(falling["objective/scores"].advice) == {"ppo.learning_rate": "lower"}


def test_contradicting_advice_waits_for_the_cause() -> None:
    found = read(objective__scores=FLAT, objective__kl_k1=STILL, policy__clipfrac_avg=CLIPPED)
    assert found["policy/clipfrac_avg"].advice == TOO_FAR
    text = with_values(found["objective/scores"].advice, {"ppo": {"learning_rate": 0.003}})
    assert text == "fix “Tokens with a clipped ratio” first: lower ppo.learning_rate (here 0.003)"
    found = read(loss__value_avg=[1.0] + [2.0] * 19, val__explained_variance=[-1.0] * UPDATES)
    text = found["val/explained_variance"].advice
    assert text == "fix “Loss of the value model” first: lower ppo.value_learning_rate"
    falling = [-0.1 * step for step in range(UPDATES)]
    found = read(objective__scores=falling, policy__clipfrac_avg=CLIPPED)
    assert [each.key for each in by_cause(list(found.values()))][:2] == ["objective/scores", "policy/clipfrac_avg"]


def test_no_two_advices_move_a_key_in_two_directions() -> None:
    """For any two advices, and for all of them together."""
    for wishes in [ADVICE, ADVICE[::-1], *itertools.permutations(ADVICE, 2)]:
        ways: dict[str, set[str]] = {}
        for advice in reconcile(wishes):
            for key, way in key_changes(advice).items():
                ways.setdefault(key, set()).add(way)
        assert all(len(way) == 1 for way in ways.values()), ways


def test_advised_keys_exist_and_are_on_the_pages() -> None:
    assert sorted(CAUSES) == sorted(rule.key for rule in RULES)
    text = METRICS + (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    for key in {key for _, advice in ADVICE for key in key_changes(advice)}:
        stage = "reward" if key.startswith("reward.") else "ppo"
        assert key_at(CONFIGS[stage], key.split(".")) is not None, key
        assert re.search(rf"`(?:[\w.]+\.)?{key.rpartition('.')[2]}\b", text), key
    assert with_values("set ppo.bf16: false or ppo.gamma", {"ppo": {"bf16": True, "gamma": 1}}) == (
        "set ppo.bf16: false or ppo.gamma (here 1)"
    )
