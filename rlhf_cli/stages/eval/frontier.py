"""The policies along PPO's updates: how far each went, what its judges say of it, and which is picked."""

from collections.abc import Mapping
from typing import Any

from rlhf_cli import statistics
from rlhf_cli.config import Select
from rlhf_cli.stages.eval.answers import Answers
from rlhf_cli.stages.eval.numbers import describe, win_rates

Point = dict[str, Any]


def section(policies: list[Answers], sft: Answers, select: Select | None, seed: int) -> dict[str, Any]:
    """{frontier}, by step; with `select` also what `picked` gives. All answers are to the same prompts."""
    answers = {each.step: each for each in sorted(policies, key=lambda each: each.step or 0)}
    points = [_point(each, sft, seed) for each in answers.values()]

    for judge in sft.scores:
        best = max(points, key=lambda point: point["judges"][judge]["mean"])["step"]
        near = statistics.within_noise({step: each.scores[judge] for step, each in answers.items()}, seed=seed)
        for point in points:
            found = statistics.difference(answers[point["step"]].scores[judge], answers[best].scores[judge], seed=seed)
            told = {"from_best": found["difference"], "from_best_ci95": found["difference_ci95"]}
            point["judges"][judge] |= {**told, "within_noise": point["step"] in near}
    if select is None:
        return {"frontier": points}
    scores = {step: each.scores[select.judge] for step, each in answers.items()}
    return {"frontier": points, **_picked(points, scores, select, seed)}


def _point(answers: Answers, sft: Answers, seed: int) -> Point:
    told = describe(answers, seed)
    renamed = {"reward" if key == "reward_mean" else key: value for key, value in told.items()}
    return {"step": answers.step, **renamed, "win_rate": win_rates(answers, sft, seed)}


def _picked(points: list[Point], scores: Mapping[Any, list[float]], select: Select, seed: int) -> Point:
    """{selected_step, selected}: the point with the highest mean of the judge within the bound on KL.

    The smaller KL among equals. Beside it the rule in words, the others that cannot be told from the best with all of
    them searched, and how much its mean flatters itself for having been picked on these prompts. {selected} without a
    step where all went beyond the bound. `scores` are the judge's, by step.
    """
    judge, bound = select.judge, select.kl_max
    within = [point for point in points if bound is None or point["kl"] <= bound]
    limit = "" if bound is None else f" with a KL of at most {bound:g}"
    rule = f"the highest mean of {judge} among {len(within)} of {len(points)} policies{limit}"
    if not within:
        return {"selected": {"judge": judge, "rule": rule}}
    best = max(within, key=lambda point: (point["judges"][judge]["mean"], -point["kl"]))
    theirs, mine = {point["step"]: scores[point["step"]] for point in within}, best["step"]
    noise = [step for step in statistics.within_noise(theirs, seed=seed) if step != mine]
    told = {"judge": judge, "rule": rule, "within_noise": noise, "optimism": statistics.optimism(theirs, seed=seed)}
    return {"selected_step": mine, "selected": {**told, **best}}
