"""Simulated runs with a known truth: random numbers go through the functions of a real run, and each world yields all
that the report, the terminal and a comparison state about them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_cli import statistics
from rlhf_cli.evaluation import limit, reward_model, reward_probes, selection
from rlhf_cli.evaluation.report_text import overhead_sentence
from rlhf_cli.evaluation.responses import EvalResponses
from rlhf_cli.evaluation.reward_model import ScoredPair
from rlhf_cli.report import compare, diagnosis, figures, headline
from rlhf_cli.report.rules import RULES, BoundInputs, Rule, limit_of, readings
from rlhf_cli.runs.layout import STAGES
from rlhf_cli.runs.manifest import Manifest
from rlhf_cli.runs.read import Run, Stage
from rlhf_cli.runs.report import JudgeMean, Report

Rng = np.random.Generator
SIZES = (32, 64, 256)  # prompts of an evaluation, pairs of a card
UPDATES = (8, 12, 30, 100)
FAR = 3.0  # size of an effect in standard deviations of a metric's noise


def run(*stages: Stage, report: Mapping[str, Any] | None = None) -> Run:
    """A run of these stages; the others are finished and empty."""
    all_stages = {name: Stage(name, Path(name), "finished") for name in STAGES} | {
        stage.name: stage for stage in stages
    }
    parsed = None if report is None else Report.model_validate(report)
    return Run("run", Path("run"), all_stages, parsed, (), (), (), ())


def page(one: Run) -> Iterator[str]:
    """The statements of the page of a run."""
    found = diagnosis.diagnose(one)
    for badge in found.badges:
        yield from (*badge.reasons, badge.advice)
    yield found.conclusion()
    yield headline.verdict(one, found).sentence
    if one.report:
        yield from diagnosis.sentences(one)


def log(name: str, **series: Any) -> Stage:
    """A stage by its metrics.jsonl; `__` stands for the `/` of a metric's name."""
    rows = [{"step": step + 1} for step in range(max(map(len, series.values())))]
    for key, values in series.items():
        for row, value in zip(rows, values, strict=False):
            row[key.replace("__", "/")] = value
    return Stage(name, Path(name), "finished", metrics=tuple(rows))


def scores(rng: Rng, n: int, shift: float, *, whole: bool) -> list[float]:
    """A judge's scores of n answers; whole numbers have ties."""
    values = rng.normal(shift, 1.0, n)
    return (np.round(values) if whole else values).tolist()


def evaluation(
    rng: Rng,
    *,
    gold: float | None = 0.0,
    reward: float = 0.0,
    ended: float = 0.9,
    greedy: float = 0.9,
    ill: bool = False,
    best: float | None = None,
) -> Iterator[str]:
    """PPO's scores have SFT's distribution plus these shifts; `ended`, `greedy`: shares of SFT's answers that end.

    `ill`: PPO's log is unhealthy. `best`: PPO's shift by gold from SFT's best of 4, if there is one.
    """
    n, whole = int(rng.choice(SIZES)), bool(rng.integers(2))
    shifts = {"reward": reward} | ({} if gold is None else {"gold": gold})
    rates = {
        judge: statistics.win_rate(scores(rng, n, shift, whole=whole), scores(rng, n, 0.0, whole=whole))
        for judge, shift in shifts.items()
    }
    sft = {"judges": {judge: {"mean": 0.0} for judge in shifts}, "response_length_mean": 20.0}
    models = {"sft": sft | {"eos_fraction": rng.binomial(n, ended) / n}}
    models["ppo"] = {**models["sft"], "kl": 1.0}
    models["dpo"] = models["ppo"]  # answers as SFT does
    near_greedy = {"models": {"sft": sft | {"eos_fraction": rng.binomial(n, greedy) / n}}}
    report = {"n": n, "models": models, "greedy": near_greedy, "win_rate": {}}
    report["win_rate"] = dict.fromkeys(("ppo_vs_sft", "dpo_vs_sft", "ppo_vs_dpo"), rates)
    if best is not None:
        rate = statistics.win_rate(scores(rng, n, best, whole=whole), scores(rng, n, 0.0, whole=whole))
        baseline = {**models["sft"], "n": 4, "kl_bound": 0.64, "ppo_win_rate": {"gold": rate}}
        report["best_of"] = [baseline]
    ppo = log("ppo", policy__approxkl_avg=[0.5] * 8) if ill else Stage("ppo", Path("ppo"))
    yield from page(run(ppo, report=report))


def snapshots(rng: Rng, *, gain: float = 0.0) -> Iterator[str]:
    """Eight equal policies on the same prompts, except that the fourth is better by `gain`; the reward rises."""
    n, steps = int(rng.choice((32, 64, 128))), range(1, 9)
    difficulty = rng.normal(size=n)
    sft = _answers(difficulty + rng.normal(size=n), 0.0)
    policies = []
    for step in steps:
        answers = _answers(difficulty + rng.normal(gain * (step == 4), 1.0, n), 0.1 * step)
        policies.append(replace(answers, step=step))
    points = selection.frontier_points(policies, sft)
    found = selection.recommend(policies, sft, selection.Rule("gold", None))
    assert found
    points = [each.with_changes(judges=each.judges | {"reward": JudgeMean(mean=each.step)}) for each in points]
    report = Report(n=n, models={"sft": points[0]}, frontier=points, selected_step=found.step, selected=found)
    yield from page(run(report=report.to_json()))
    yield from (figure.sentence for figure in figures.frontiers(report))


def _answers(gold: Any, kl: float) -> EvalResponses:
    """Answers of equal length, one to each prompt, with their scores by gold."""
    n = len(gold)
    prompts, texts = [*map(str, range(n))], [""] * n
    return EvalResponses("", "sampled", prompts, texts, [True] * n, [1] * n, {"gold": gold.tolist()}, [kl] * n)


def limited(rng: Rng, *, gain: float = 0.0) -> Iterator[str]:
    """PPO's scores have SFT's distribution plus a gain."""
    n = int(rng.choice((32, 64)))
    policies = {"ppo": (rng.normal(gain, 1.0, n).tolist(), [1.0] * n)}
    found = limit.make_limit(rng.normal(size=(n, 8)), policies, [2, 4, 8])
    yield overhead_sentence(found.policies["ppo"])


def rewarded(
    rng: Rng, *, accuracy: float = 0.5, length: float = 0.3, probe: float = 0.0, sure: float = 0.1
) -> Iterator[str]:
    """A reward model with this accuracy. `length`: rank correlation with the length; `probe`: additional probe wins;
    `sure`: scale of the scores."""
    n = int(rng.choice(SIZES))
    tokens = rng.normal(size=(n, 2))
    pearson = 2 * np.sin(np.pi * length / 6)  # of normal variables with this rank correlation
    answers = sure * (pearson * tokens + np.sqrt(1 - pearson**2) * rng.normal(size=(n, 2)))
    right = rng.random(n) < accuracy
    rank, rows = np.argsort(np.argsort(tokens, axis=None)).reshape(n, 2), np.arange(n)
    chosen = np.where(right, answers.argmax(1), answers.argmin(1))
    columns = [table[rows, side].tolist() for table in (answers, rank) for side in (chosen, 1 - chosen)]
    pairs = [ScoredPair(*row) for row in zip(*columns, strict=True)]
    m = min(128, n)
    limits = dict.fromkeys(("empty", "repeated_token", "politeness"), max(0.1, 1 - accuracy))
    limits |= {"over_long": 0.5, "swapped_prompt": 0.25}
    wins = {name: (rng.random(m) < min(1.0, limit + probe)).astype(float).tolist() for name, limit in limits.items()}
    card = reward_model.make_card(pairs, reward_probes.score_probes(wins, [0.5] * m))
    card = reward_model.with_flags(card, reward_model.find_problems(card))
    manifest = Manifest(metrics=card.headline(), card=card)
    yield from page(run(Stage("reward", Path("reward"), "finished", manifest=manifest)))


def accurate(rng: Rng, *, accuracy: float) -> Iterator[str]:
    """A reward model with this accuracy and no card."""
    n = int(rng.choice(SIZES))
    right = rng.binomial(n, accuracy)
    metrics = {"accuracy": right / n, "accuracy_ci95": list(statistics.wilson(right, n))}
    yield from page(run(Stage("reward", Path("reward"), "finished", manifest=Manifest(metrics=metrics))))


def trained(
    rng: Rng, *, rises: float = 0.0, again: float = 0.0, falls: float = 0.0, apart: float = 1.0, repeated: float = 0.1
) -> Iterator[str]:
    """SFT with constant losses plus effects in standard deviations of their noise: `rises` in training, `again` and
    `falls` on held-out rows."""
    n = int(rng.choice(UPDATES))
    course = np.linspace(0.0, 1.0, n)
    loss = 2.0 + 0.1 * (rng.normal(size=n) + rises * course)
    held_out = apart * (2.0 + 0.1 * (rng.normal(size=n) + again * (2 * course - 1) ** 2 - falls * course))
    repetition = repeated + 0.02 * rng.normal(size=n) - np.where(np.arange(n) > 0, 0.05, 0.0)
    yield from page(run(log("sft", loss=loss, eval_loss=held_out), log("ppo", objective__repetition=repetition)))


def scored(rng: Rng, *, kl: float = 0.0, scores: float = 0.0) -> Iterator[str]:
    """PPO's log of constant scores that rise by `scores`, at `kl` nats from SFT."""
    n = int(rng.choice(UPDATES))
    trend, distance = scores * np.linspace(0.0, 1.0, n), kl + 0.02 * rng.normal(size=n)
    stage = log("ppo", objective__scores=rng.normal(size=n) + trend, objective__kl_k1=distance)
    yield from (f"{reading.title}: {reading.sentence}" for reading in readings(stage))


def updated(rng: Rng, *, beyond: float = 0.0) -> Iterator[str]:
    """PPO's log with each metric at an end of its range, or at the first value. `beyond`: outside at the end."""
    n = int(rng.choice(UPDATES))
    series = {rule.key.replace("NAME", "votes"): _at_the_bound(rng, rule, n, beyond) for rule in RULES}
    if not beyond:
        series["objective/kl_k1"] = 0.05 * rng.normal(size=n)
    stage = log("ppo", **{key.replace("/", "__"): values for key, values in series.items()})
    yield from page(run(stage))
    yield from (f"{reading.title}: {reading.sentence}" for reading in readings(stage))


def _at_the_bound(rng: Rng, rule: Rule, n: int, beyond: float) -> Any:
    """Values around the end of a metric's range, with noise that is far from the alarms."""
    if rule.exact or not rule.has_range:
        return np.full(n, 10.0 if beyond else 0.0)
    low, high = rule.bounds(BoundInputs(1.0, limit_of(rule, None), 40.0))
    upper = math.isfinite(high)
    if rule.bounds(BoundInputs(2.0, limit_of(rule, None), 40.0)) != (low, high):  # relative to the first value
        level, noise = 1.0, 0.002
        end = (4.0 if upper else 0.07) if beyond else level
    else:
        level = high if upper else low
        noise = 0.01 * max(abs(level), 0.1)
        end = level + (FAR if upper else -FAR) * noise * bool(beyond)
    return np.where(np.arange(n) < n // 3, level, end) + noise * rng.normal(size=n)


def compared(rng: Rng, *, gap: float = 0.0) -> Iterator[str]:
    """Two, four or ten runs whose PPO wins half; one wins by `gap` more."""
    n, count = int(rng.choice(SIZES)), int(rng.choice((2, 4, 10)))
    runs = []
    for index in range(count):
        won = rng.binomial(n, 0.5 + gap * (index == 0)) / n
        rate = {"value": won, "n": n, "ci95": list(statistics.wilson(won * n, n))}
        runs.append(run(report={"n": n, "win_rate": {"ppo_vs_sft": {"gold": rate}}}))
    yield from compare.win_rate_differences([f"run {index}" for index in range(count)], runs)
