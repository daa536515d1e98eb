"""Runs whose truth is known: their numbers are drawn, go through the functions that make them in a real run, and come
out as all that the page, the terminal and a comparison say of them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlhf_cli import statistics
from rlhf_cli.commands.report import charts, compare, summary
from rlhf_cli.commands.report.health import readings
from rlhf_cli.commands.report.rules import RULES, Rule
from rlhf_cli.commands.report.runs import STAGES, Run, Stage
from rlhf_cli.evaluation import frontier, reward_model
from rlhf_cli.evaluation.render import summary_sentence
from rlhf_cli.evaluation.reward_model import ScoredPair

Draw = np.random.Generator
SIZES = (32, 64, 256)  # prompts of an evaluation, pairs of a card
UPDATES = (8, 12, 30, 100)
FAR = 3.0  # standard deviations of a metric's noise, where an effect is meant


def run(*stages: Stage, report: Mapping[str, Any] | None = None) -> Run:
    """A run of these stages; of the others nothing is known but that they are finished."""
    there = {name: Stage(name, Path(name), "finished") for name in STAGES} | {stage.name: stage for stage in stages}
    return Run("run", Path("run"), there, report, (), (), (), ())


def page(one: Run) -> Iterator[str]:
    """What the page concludes of a run."""
    badges = summary.badges(one)
    for badge in badges:
        yield from (*badge.reasons, badge.todo)
    yield summary.suspect(one, badges)
    if one.report:
        yield from summary.sentences(one)
        yield summary_sentence(one.report) or ""


def log(name: str, **series: Any) -> Stage:
    """A stage by its metrics.jsonl; `__` stands for the `/` of a metric's name."""
    length = max(map(len, series.values()))
    rows = [
        {"step": step + 1}
        | {key.replace("__", "/"): values[step] for key, values in series.items() if step < len(values)}
        for step in range(length)
    ]
    return Stage(name, Path(name), "finished", metrics=tuple(rows))


def scores(draw: Draw, n: int, shift: float, *, whole: bool) -> list[float]:
    """What a judge says of n answers: any number, or one of few, so that there are ties."""
    found = draw.normal(shift, 1.0, n)
    return (np.round(found) if whole else found).tolist()


def evaluation(
    draw: Draw,
    *,
    gold: float | None = 0.0,
    reward: float = 0.0,
    ended: float = 0.9,
    greedy: float = 0.9,
    ill: bool = False,
) -> Iterator[str]:
    """PPO's answers are of SFT's distribution but for these shifts; SFT's end with these chances. `ill`: PPO's log."""
    n, whole = int(draw.choice(SIZES)), bool(draw.integers(2))
    shifts = {"reward": reward} | ({} if gold is None else {"gold": gold})
    rates = {
        judge: statistics.win_rate(scores(draw, n, shift, whole=whole), scores(draw, n, 0.0, whole=whole))
        for judge, shift in shifts.items()
    }
    sft = {"judges": {judge: {"mean": 0.0} for judge in shifts}, "response_length_mean": 20.0}
    models = {"sft": sft | {"eos_fraction": draw.binomial(n, ended) / n}, "ppo": {**sft, "kl": 1.0}}
    near_greedy = {"models": {"sft": {"eos_fraction": draw.binomial(n, greedy) / n}}}
    told = {"n": n, "models": models, "greedy": near_greedy, "win_rate": {"ppo_vs_sft": rates}}
    ppo = log("ppo", policy__approxkl_avg=[0.5] * 8) if ill else Stage("ppo", Path("ppo"))
    yield from page(run(ppo, report=told))


def along(draw: Draw, *, gain: float = 0.0) -> Iterator[str]:
    """Eight policies of like worth, but that the fourth is better by `gain`, judged on the same prompts."""
    n, steps = int(draw.choice((32, 64, 128))), range(1, 9)
    hard = draw.normal(size=n)
    told = {step: (hard + draw.normal(gain * (step == 4), 1.0, n)).tolist() for step in steps}
    points = [
        {"step": step, "kl": 0.1 * step, "judges": {"gold": {"mean": float(np.mean(told[step]))}}} for step in steps
    ]
    picked = frontier._select(points, told, SimpleNamespace(judge="gold", kl_max=None), 0)
    near = {picked["selected_step"], *picked["selected"]["within_noise"]}
    for point in points:
        point["judges"]["gold"]["within_noise"] = point["step"] in near
    report = {"n": n, "models": {"sft": points[0]}, "frontier": points, **picked}
    yield from page(run(report=report))
    yield from (figure.sentence for figure in charts.frontiers(report))


def rewarded(
    draw: Draw, *, accuracy: float = 0.5, length: float = 0.3, probe: float = 0.0, sure: float = 0.1
) -> Iterator[str]:
    """A reward model at chance that says so. `length`: rank correlation; `probe`: how much more the probes win."""
    n = int(draw.choice(SIZES))
    tokens = draw.normal(size=(n, 2))
    mixed = 2 * np.sin(np.pi * length / 6)  # Pearson's of normal numbers whose ranks correlate so
    said = sure * (mixed * tokens + np.sqrt(1 - mixed**2) * draw.normal(size=(n, 2)))
    right = draw.random(n) < accuracy
    rank, rows = np.argsort(np.argsort(tokens, axis=None)).reshape(n, 2), np.arange(n)
    chosen = np.where(right, said.argmax(1), said.argmin(1))
    columns = [table[rows, side].tolist() for table in (said, rank) for side in (chosen, 1 - chosen)]
    pairs = [ScoredPair(*row) for row in zip(*columns, strict=True)]
    found = reward_model.evaluate_pairs(pairs)
    m = min(128, n)
    limits = {"empty": 1 - accuracy, "repeated_token": 1 - accuracy, "politeness": 1 - accuracy}
    limits = {name: max(0.1, share) for name, share in limits.items()} | {"over_long": 0.5, "swapped_prompt": 0.25}
    won = {name: (draw.random(m) < min(1.0, share + probe)).astype(float) for name, share in limits.items()}
    found["adversarial"] = reward_model.score_probes({name: wins.tolist() for name, wins in won.items()}, [0.5] * m)
    flags = [{"code": problem.code, "text": problem.text} for problem in reward_model.flags(found)]
    card = found | {"flags": flags}
    stage = Stage(
        "reward", Path("reward"), "finished",
        manifest={"metrics": {"accuracy": found["accuracy"], "accuracy_ci95": found["accuracy_ci95"]}, "card": card},
    )  # fmt: skip
    yield from page(run(stage))


def accurate(draw: Draw, *, accuracy: float) -> Iterator[str]:
    """A reward model that is right on this share of pairs."""
    n = int(draw.choice(SIZES))
    right = draw.binomial(n, accuracy)
    metrics = {"accuracy": right / n, "accuracy_ci95": list(statistics.wilson(right, n))}
    yield from page(run(Stage("reward", Path("reward"), "finished", manifest={"metrics": metrics})))


def trained(
    draw: Draw, *, rises: float = 0.0, again: float = 0.0, falls: float = 0.0, apart: float = 1.0, repeated: float = 0.1
) -> Iterator[str]:
    """SFT whose losses stand still, but for what is given, in standard deviations of their noise: `rises` in training,
    `again` and `falls` on held-out rows."""
    n = int(draw.choice(UPDATES))
    course = np.linspace(0.0, 1.0, n)
    loss = 2.0 + 0.1 * (draw.normal(size=n) + rises * course)
    held_out = apart * (2.0 + 0.1 * (draw.normal(size=n) + again * (2 * course - 1) ** 2 - falls * course))
    first = repeated + 0.02 * draw.normal(size=n) - np.where(np.arange(n) > 0, 0.05, 0.0)
    yield from page(run(log("sft", loss=loss, eval_loss=held_out), log("ppo", objective__repetition=first)))


def scored(draw: Draw, *, kl: float = 0.0, scores: float = 0.0) -> Iterator[str]:
    """PPO's log: scores that stand still, `kl` nats from SFT, and nothing else."""
    n = int(draw.choice(UPDATES))
    rises, walked = scores * np.linspace(0.0, 1.0, n), kl + 0.02 * draw.normal(size=n)
    stage = log("ppo", objective__scores=draw.normal(size=n) + rises, objective__kl_k1=walked)
    yield from (f"{reading.title}: {reading.sentence}" for reading in readings(stage))


def updated(draw: Draw, *, beyond: float = 0.0) -> Iterator[str]:
    """PPO's log: a KL of 0 nats, which is the lower end of its range, and each other metric at an end of its range, or,
    where the range is one of the first value, at that value. `beyond`: all are outside of it in the end."""
    n = int(draw.choice(UPDATES))
    series = {rule.key.replace("NAME", "votes"): at_the_bound(draw, rule, n, beyond) for rule in RULES}
    if not beyond:
        series["objective/kl_k1"] = 0.05 * draw.normal(size=n)
    stage = log("ppo", **{key.replace("/", "__"): values for key, values in series.items()})
    yield from page(run(stage))
    yield from (f"{reading.title}: {reading.sentence}" for reading in readings(stage))


def at_the_bound(draw: Draw, rule: Rule, n: int, beyond: float) -> Any:
    """Values of one metric around the end of its range, with noise that no alarm is near."""
    if rule.exact:
        return np.full(n, 10.0 if beyond else 0.0)
    high = rule.watchdog != "eos" and (rule.high is not None or rule.watchdog is not None)
    of_the_first = rule.of in ("first times", "first plus")
    if of_the_first:
        level, noise = 1.0, 0.002
        end = level + (FAR if high else -0.93) * bool(beyond)  # 4 times it, or little of it
    else:
        end = rule.high if high else rule.low
        level = end = 20.0 if rule.of == "tokens" else 2.0 if rule.of == "max_grad_norm" else end or 0.0
        noise = 0.01 * max(abs(end), 0.1)
        end = end + (1 if high else -1) * FAR * noise * bool(beyond) * (3.0 if rule.of == "tokens" else 1.0)
    return np.where(np.arange(n) < n // 3, level, end) + noise * draw.normal(size=n)


def compared(draw: Draw, *, gap: float = 0.0) -> Iterator[str]:
    """Two, four or ten runs whose PPO wins half, but that one wins by `gap` more."""
    n, count = int(draw.choice(SIZES)), int(draw.choice((2, 4, 10)))
    runs = []
    for place in range(count):
        won = draw.binomial(n, 0.5 + gap * (place == 0)) / n
        rate = {"value": won, "n": n, "ci95": list(statistics.wilson(won * n, n))}
        runs.append(run(report={"n": n, "win_rate": {"ppo_vs_sft": {"gold": rate}}}))
    yield from compare.apart([f"run {place}" for place in range(count)], runs)
