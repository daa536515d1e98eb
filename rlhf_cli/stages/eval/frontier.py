"""The policies along PPO's updates: how far each went, what its judges say of it, and which is picked."""

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
        for point in points:
            found = statistics.difference(answers[point["step"]].scores[judge], answers[best].scores[judge], seed=seed)
            point["judges"][judge] |= {"from_best": found["difference"], "from_best_ci95": found["difference_ci95"]}
    chosen = _picked(points, {step: each.scores for step, each in answers.items()}, select, seed) if select else {}
    return {"frontier": points, **chosen}


def _point(answers: Answers, sft: Answers, seed: int) -> Point:
    told = describe(answers, seed)
    renamed = {"reward" if key == "reward_mean" else key: value for key, value in told.items()}
    return {"step": answers.step, **renamed, "win_rate": win_rates(answers, sft, seed)}


def _picked(points: list[Point], scores: dict[Any, dict[str, list[float]]], select: Select, seed: int) -> Point:
    """{selected_step, selected}: the point with the highest mean of the judge within the bound on KL.

    The smaller KL among equals. Beside it the rule in words, the others that the paired interval does not tell apart
    from it, and how much its mean flatters itself for having been picked on these prompts. {selected} without a step
    where all went beyond the bound.
    """
    judge, bound = select.judge, select.kl_max
    within = [point for point in points if bound is None or point["kl"] <= bound]
    limit = "" if bound is None else f" with a KL of at most {bound:g}"
    rule = f"the highest mean of {judge} among {len(within)} of {len(points)} policies{limit}"
    if not within:
        return {"selected": {"judge": judge, "rule": rule}}
    best = max(within, key=lambda point: (point["judges"][judge]["mean"], -point["kl"]))
    theirs = {point["step"]: scores[point["step"]][judge] for point in within}
    mine = theirs[best["step"]]
    apart = {step: statistics.difference(each, mine, seed=seed)["difference_ci95"] for step, each in theirs.items()}
    noise = [step for step, (_, high) in apart.items() if step != best["step"] and high >= 0]
    told = {"judge": judge, "rule": rule, "within_noise": noise, "optimism": statistics.optimism(theirs, seed=seed)}
    return {"selected_step": best["step"], "selected": {**told, **best}}
