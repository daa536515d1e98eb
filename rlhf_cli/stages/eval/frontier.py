"""The policies along PPO's updates: how far each went, what its judges say of it, and which is picked."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from rlhf_cli import statistics
from rlhf_cli.config import Select
from rlhf_cli.stages.eval.answers import Answers
from rlhf_cli.stages.eval.numbers import describe, win_rates

Point = dict[str, Any]
Apart = Callable[[int, int], dict[str, Any]]


def section(policies: list[Answers], sft: Answers, select: Select | None, seed: int) -> dict[str, Any]:
    """{frontier}, by step; with `select` also what `picked` gives. All answers are to the same prompts."""
    answers = {each.step: each for each in sorted(policies, key=lambda each: each.step or 0)}
    points = [_point(each, sft, seed) for each in answers.values()]

    @cache
    def apart(judge: str, step: int, other: int) -> dict[str, Any]:
        return statistics.difference(answers[step].scores[judge], answers[other].scores[judge], seed=seed)

    for judge in sft.scores:
        best = max(points, key=lambda point: point["judges"][judge]["mean"])["step"]
        for point in points:
            found = apart(judge, point["step"], best)
            point["judges"][judge] |= {"from_best": found["difference"], "from_best_ci95": found["difference_ci95"]}
    if select is None:
        return {"frontier": points}
    scores = {step: each.scores[select.judge] for step, each in answers.items()}
    return {"frontier": points, **_picked(points, scores, select, partial(apart, select.judge), seed)}


def _point(answers: Answers, sft: Answers, seed: int) -> Point:
    told = describe(answers, seed)
    renamed = {"reward" if key == "reward_mean" else key: value for key, value in told.items()}
    return {"step": answers.step, **renamed, "win_rate": win_rates(answers, sft, seed)}


def _picked(points: list[Point], scores: Mapping[Any, list[float]], select: Select, apart: Apart, seed: int) -> Point:
    """{selected_step, selected}: the point with the highest mean of the judge within the bound on KL.

    The smaller KL among equals. Beside it the rule in words, the others that the paired interval does not tell apart
    from it, and how much its mean flatters itself for having been picked on these prompts. {selected} without a step
    where all went beyond the bound. `scores` are the judge's, by step; `apart` tells of the difference of two steps.
    """
    judge, bound = select.judge, select.kl_max
    within = [point for point in points if bound is None or point["kl"] <= bound]
    limit = "" if bound is None else f" with a KL of at most {bound:g}"
    rule = f"the highest mean of {judge} among {len(within)} of {len(points)} policies{limit}"
    if not within:
        return {"selected": {"judge": judge, "rule": rule}}
    best = max(within, key=lambda point: (point["judges"][judge]["mean"], -point["kl"]))
    theirs, mine = {point["step"]: scores[point["step"]] for point in within}, best["step"]
    noise = [step for step in theirs if step != mine and apart(step, mine)["difference_ci95"][1] >= 0]
    told = {"judge": judge, "rule": rule, "within_noise": noise, "optimism": statistics.optimism(theirs, seed=seed)}
    return {"selected_step": mine, "selected": {**told, **best}}
