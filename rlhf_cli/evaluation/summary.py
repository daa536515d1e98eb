"""Scored responses, and report.json: means and win rates with 95 % intervals, best of n, frontier, reward model."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_cli import runs, statistics, terminal
from rlhf_cli.config.eval import EvalConfig, Select, judge_kind
from rlhf_cli.errors import shown
from rlhf_cli.evaluation.reward_card import missing_card_reason
from rlhf_cli.evaluation.reward_model import agreement
from rlhf_cli.models.batch import StopTokenId
from rlhf_cli.runs.parents import Parent

PAIRS = (("ppo", "sft"), ("sft", "base"), ("ppo", "base"))  # and of each policy of `policies` with SFT and PPO
Section = dict[str, Any]


# Responses


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of an evaluation: those of PPO's training unless eval.yaml overrides them."""

    temperature: float
    response_length: int  # maximum, in tokens
    stop_token_id: StopTokenId


@dataclass(frozen=True)
class SnapshotSeries:
    """Snapshots of a PPO run: the step of the final policy, and the folders of the others by step."""

    step: int | None = None
    snapshots: Mapping[int, Path] = field(default_factory=dict)
    missing: str | None = None  # reason why a requested series is not available


@dataclass(frozen=True)
class EvalResponses:
    """One policy's scored responses to all prompts in one mode."""

    model: str  # sft, ppo, base, a name of `policies`, best_of_N, ppo_step_NNNNNN for a snapshot, interpolated_SHARE
    mode: str  # sampled or greedy
    prompts: list[str]
    responses: list[str]
    ended: list[bool]
    lengths: list[int]
    scores: dict[str, list[float]]  # judge -> score of each row
    kl: list[float] | None  # nats, summed over the response; None for near-greedy responses
    step: int | None = None  # number of PPO updates, for a policy on the frontier
    share: float | None = None  # of the way from SFT to PPO, for an interpolation

    def rows(self, indices: Sequence[int]) -> "EvalResponses":
        """Return the responses to some of the prompts."""
        kl = None if self.kl is None else [self.kl[row] for row in indices]
        return replace(_merge([self], lambda columns: [columns[0][row] for row in indices]), kl=kl)


def concat_responses(parts: Sequence[EvalResponses]) -> EvalResponses:
    """Concatenate the rows of responses of one policy."""
    kl = None if parts[0].kl is None else [value for part in parts for value in part.kl or []]
    return replace(_merge(parts, lambda columns: [*chain.from_iterable(columns)]), kl=kl)


def select_best_of_n(draws: Sequence[EvalResponses]) -> EvalResponses:
    """Select each prompt's draw with the highest `reward` score; KL is None."""
    draw_scores = zip(*(draw.scores["reward"] for draw in draws), strict=True)
    best = [max(range(len(draws)), key=scores.__getitem__) for scores in draw_scores]
    merged = _merge(draws, lambda columns: [columns[draw][row] for row, draw in enumerate(best)])
    return replace(merged, model=f"best_of_{len(draws)}", mode="sampled", kl=None, step=None)


def _merge(parts: Sequence[EvalResponses], merge: Callable[[list[list]], list]) -> EvalResponses:
    """Merge each column of the parts, except KL."""
    names = ("prompts", "responses", "ended", "lengths")
    columns: dict[str, Any] = {name: merge([getattr(part, name) for part in parts]) for name in names}
    scores = {judge: merge([part.scores[judge] for part in parts]) for judge in parts[0].scores}
    return replace(parts[0], **columns, scores=scores)


def sample_rows(evaluated: Iterable[EvalResponses], columns: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of samples.jsonl, one per response; `columns`: of each prompt's row, those that are read."""
    for batch in evaluated:
        for row, response in enumerate(batch.responses):
            kl = {"kl": batch.kl[row]} if batch.kl is not None else {}
            yield {
                "index": row,
                "prompt": batch.prompts[row],
                **({"columns": columns[row]} if columns[row] else {}),
                "model": batch.model,
                "mode": batch.mode,
                "response": response,
                "ended": batch.ended[row],
                "length": batch.lengths[row],
                **kl,
                "scores": {judge: scores[row] for judge, scores in batch.scores.items()},
            }


# report.json


def build_report(
    config: EvalConfig,
    evaluated: Sequence[EvalResponses],
    columns: Sequence[Mapping[str, Any]],
    sampling: SamplingParams,
    parents: Mapping[str, Parent],
    series: SnapshotSeries,
) -> Section:
    """Return the contents of report.json; keys without a value are absent. Warns R10-R12 of the reward model.

    `columns`: of each prompt's row, among others that of `eval.by`.
    """
    keys = {*(key.removeprefix("models.") for key in parents), *config.policies}
    by_mode = {
        mode: {e.model: e for e in evaluated if e.mode == mode and e.model in keys} for mode in config.eval.modes
    }
    sampled = by_mode["sampled"]
    report: Section = {
        "n": len(columns),
        "temperature": sampling.temperature,
        "response_length": sampling.response_length,
        **_policies_section(sampled),
    }
    if "greedy" in by_mode:
        report["greedy"] = _policies_section(by_mode["greedy"])
    best_of_n = [e for e in evaluated if e.model in {f"best_of_{n}" for n in config.eval.best_of}]
    report |= _best_of_sections(best_of_n, sampled)
    report["judge_kinds"] = {name: judge_kind(judge) for name, judge in config.judges.items()}
    if config.eval.by:
        groups = group_rows(config.eval.by, columns)
        report["by"] = {"column": config.eval.by, "groups": _group_sections(groups, sampled, best_of_n)}
    if shares := [e for e in evaluated if e.share is not None]:
        report["interpolated"] = [{"share": e.share, **_point(e, sampled["sft"])} for e in shares]
    if series.missing:
        report["no_frontier"] = series.missing
    elif config.eval.frontier:
        policies = [e for e in evaluated if e.step is not None and e.mode == "sampled"]
        report |= frontier_section(policies, sampled["sft"], config.eval.selection)
    report |= reward_model_section(parents)
    return report | {"warnings": terminal.emitted_warnings()}


# Means and win rates


def _policies_section(policies: Mapping[str, EvalResponses]) -> Section:
    named = [name for name in policies if name not in ("base", "sft", "ppo")]
    pairs = [*PAIRS, *((name, "sft") for name in named), *(("ppo", name) for name in named)]
    pairs = [(policy, baseline) for policy, baseline in pairs if policy in policies and baseline in policies]
    return {
        "models": {name: _policy_means(evaluated) for name, evaluated in policies.items()},
        "win_rate": {
            f"{policy}_vs_{baseline}": win_rates(policies[policy], policies[baseline]) for policy, baseline in pairs
        },
    }


def group_rows(column: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return the indices of the rows with each value of a column, as text, in order of first occurrence."""
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        value = row.get(column)
        groups.setdefault(value if isinstance(value, str) else json.dumps(value), []).append(index)
    return groups


def _group_sections(
    groups: Mapping[str, Sequence[int]],
    sampled: Mapping[str, EvalResponses],
    best_of_n: Sequence[EvalResponses],
) -> list[Section]:
    """Return the sections of the report for the prompts of each group alone."""
    sections = []
    for value, rows in groups.items():
        policies = {name: evaluated.rows(rows) for name, evaluated in sampled.items()}
        best = _best_of_sections([each.rows(rows) for each in best_of_n], policies)
        sections.append({"value": value, "n": len(rows), **_policies_section(policies), **best})
    return sections


def _best_of_sections(best_of_n: Sequence[EvalResponses], sampled: Mapping[str, EvalResponses]) -> Section:
    return {"best_of": [_best_of_section(each, sampled) for each in best_of_n]} if best_of_n else {}


def _best_of_section(best_of_n: EvalResponses, sampled: Mapping[str, EvalResponses]) -> Section:
    n = int(best_of_n.model.removeprefix("best_of_"))
    section = {"n": n, "kl_bound": statistics.best_of_n_kl(n), **_policy_means(best_of_n)}
    if "sft" in sampled:
        section["win_rate_vs_sft"] = win_rates(best_of_n, sampled["sft"])
    if "ppo" in sampled:
        section["ppo_win_rate"] = win_rates(sampled["ppo"], best_of_n)
    return section


def _policy_means(evaluated: EvalResponses) -> Section:
    """Return the means over prompts of one policy, as in `models` of report.json."""
    count, means, prompts = len(evaluated.responses), Section(), evaluated.prompts
    judges = {judge: _mean(scores, prompts) for judge, scores in evaluated.scores.items()}
    if "reward" in judges:
        means |= _renamed(judges["reward"], mean="reward_mean", ci95="reward_ci95")
    if evaluated.kl is not None:
        interval = statistics.mean_interval(evaluated.kl, prompts)
        means |= {"kl": sum(evaluated.kl) / count} | ({"kl_ci95": list(interval)} if interval else {})
    return means | {
        "response_length_mean": sum(evaluated.lengths) / count,
        "eos_fraction": sum(evaluated.ended) / count,
        "distinct_fraction": len(set(evaluated.responses)) / count,
        "judges": judges,
    }


def _renamed(section: Section, **names: str) -> Section:
    return {names.get(key, key): value for key, value in section.items()}


def _mean(values: Sequence[float], prompts: Sequence[str]) -> Section:
    """Return {mean, ci95}, the latter if there is one.

    That of a judge that scores 0 or 1, such as a verifier, is Wilson's. Rows of one prompt depend on one another.
    """
    shares = set(values) <= {0.0, 1.0}
    interval = (statistics.share_interval if shares else statistics.mean_interval)(values, prompts)
    return {"mean": sum(values) / len(values)} | ({"ci95": list(interval)} if interval else {})


def win_rates(policy: EvalResponses, baseline: EvalResponses) -> Section:
    """Return per judge the fraction of prompts on which `policy` scores above `baseline`; a tie counts 0.5.

    Each with its length-controlled win rate if there is one, the mean difference of the scores, and its agreement with
    the reward model's preferences.
    """
    extra_lengths, prompts = [a - b for a, b in zip(policy.lengths, baseline.lengths, strict=True)], policy.prompts
    rates = {}
    for judge, scores in policy.scores.items():
        other = baseline.scores[judge]
        rates[judge] = statistics.win_rate(scores, other, prompts)
        if controlled := statistics.length_controlled(scores, other, extra_lengths, prompts):
            value, interval = controlled
            rates[judge] |= {"length_controlled": value, "length_controlled_ci95": list(interval)}
        else:
            rates[judge]["no_length_controlled"] = _one_sided(extra_lengths)
        rates[judge] |= statistics.paired_difference(scores, other, prompts)
        if judge != "reward" and "reward" in policy.scores:
            own = policy.scores["reward"], baseline.scores["reward"]
            rates[judge] |= agreement((scores, other), own, prompts)
    return rates


def _one_sided(extra_lengths: Sequence[int]) -> str:
    """Return on how many prompts one side's answers are longer, as text."""
    longer, shorter = (sum(side * extra > 0 for extra in extra_lengths) for side in (1, -1))
    word = "longer" if longer > shorter else "shorter"
    return f"the answers are {word} on {max(longer, shorter) / len(extra_lengths):.0%} of the prompts"


# The frontier: KL and judge scores of PPO's snapshots, and the selection of one of them


def frontier_section(policies: Sequence[EvalResponses], sft: EvalResponses, select: Select | None) -> Section:
    """Return {frontier: points by step}, and with `select` those of `select_point`. All respond to the same prompts."""
    by_step = {policy.step or 0: policy for policy in sorted(policies, key=lambda policy: policy.step or 0)}
    points = [{"step": policy.step, **_point(policy, sft)} for policy in by_step.values()]
    for judge in sft.scores:
        scores = {step: policy.scores[judge] for step, policy in by_step.items()}
        best = max(points, key=lambda point: point["judges"][judge]["mean"])["step"]
        tied = statistics.within_noise(scores, sft.prompts)
        for point in points:
            step = point["step"]
            gap = statistics.paired_difference(scores[step], scores[best], sft.prompts)
            columns = _renamed(gap, difference="from_best", difference_ci95="from_best_ci95")
            point["judges"][judge] |= {**columns, "within_noise": step in tied}
    if select is None:
        return {"frontier": points}
    return {"frontier": points, **select_point(points, by_step, sft, select)}


def _point(policy: EvalResponses, sft: EvalResponses) -> Section:
    """Return the means of a policy that is drawn over KL, and its win rate over SFT."""
    return {**_renamed(_policy_means(policy), reward_mean="reward"), "win_rate": win_rates(policy, sft)}


def select_point(
    points: list[Section], policies: Mapping[int, EvalResponses], sft: EvalResponses, select: Select
) -> Section:
    """Return {selected_step, selected}: the point with the highest mean of the judge within the bound on KL.

    Ties go to the smaller KL. `selected` also has the rule as text and the other steps within noise of the best (for
    all comparisons together). Its scores and win rates are without the bias of the selection, `optimism` of the mean.
    Without a point within the bound there is no `selected_step`. `policies`: by step.
    """
    judge, kl_max = select.judge, select.kl_max
    eligible = sorted((point for point in points if kl_max is None or point["kl"] <= kl_max), key=itemgetter("kl"))
    bound = "" if kl_max is None else f" with a KL of at most {kl_max:g}"
    rule = f"the highest mean of {judge} among {len(eligible)} of {len(points)} policies{bound}"
    if not eligible:
        return {"selected": {"judge": judge, "rule": rule}}
    best = max(eligible, key=lambda point: point["judges"][judge]["mean"])
    steps = [point["step"] for point in eligible]
    scores, step = {each: policies[each].scores[judge] for each in steps}, best["step"]
    tied = [other for other in statistics.within_noise(scores, sft.prompts) if other != step]
    unbiased, bias = _without_selection_bias(best, [policies[each] for each in steps], sft, scores)
    return {
        "selected_step": step,
        "selected": {"judge": judge, "rule": rule, "within_noise": tied, "optimism": bias[judge], **unbiased},
    }


def _without_selection_bias(
    best: Section, eligible: Sequence[EvalResponses], sft: EvalResponses, scores: Mapping[int, Sequence[float]]
) -> tuple[Section, dict[str, float]]:
    """Return the selected point with the scores and win rates of policies selected on other prompts, and the bias.

    The bias is that of the mean of each judge. Length-controlled rates are biased as the plain ones.
    """
    weights = statistics.selection_weights(scores, sft.prompts)
    chosen = [*scores].index(best["step"])

    def bias(table: Sequence[Sequence[float]]) -> float:
        """Return by how much the mean of the selected column is above that of columns selected on other prompts."""
        rows = np.array(table, dtype=np.float64).T
        return float((rows[:, chosen] - (weights * rows).sum(axis=1)).mean())

    point = {**best, "judges": {}, "win_rate": {}}
    biases = {}
    for judge, other in sft.scores.items():
        columns = [policy.scores[judge] for policy in eligible]
        biases[judge] = bias(columns)
        rate_bias = bias([statistics.win_points(column, other) for column in columns])
        point["judges"][judge] = _less(best["judges"][judge], "mean", "ci95", biases[judge])
        rate = _less(best["win_rate"][judge], "difference", "difference_ci95", biases[judge])
        for name, interval in (("value", "ci95"), ("length_controlled", "length_controlled_ci95")):
            rate = _less(rate, name, interval, rate_bias, share=True)
        point["win_rate"][judge] = rate
    if "reward" in point["judges"]:
        own = point["judges"]["reward"]
        point |= {"reward": own["mean"]} | ({"reward_ci95": own["ci95"]} if "ci95" in own else {})
    return point, biases


def _less(section: Section, name: str, interval: str, bias: float, *, share: bool = False) -> Section:
    """Return a section with a mean and its interval without their selection bias; a share stays within 0 and 1."""
    if name not in section:
        return section
    value, bounds = statistics.without_bias(section[name], section.get(interval), bias)
    numbers = [value, *(bounds or [])]
    if share:
        numbers = [min(1.0, max(0.0, number)) for number in numbers]
    return {**section, name: numbers[0]} | ({interval: numbers[1:]} if bounds else {})


# The reward model


def reward_model_section(parents: Mapping[str, Parent]) -> Section:
    """Return {reward_model: card} of models.reward, else of PPO's reward model; or {no_reward_card: reason}.

    The card's flags are repeated as warnings.
    """
    reward = parents.get("models.reward")
    if reward is not None:
        return _card_section(reward.path, reward.stage, reward.manifest)
    ppo = parents["models.ppo"]
    for key, entry in ppo.manifest.parents.items():
        if key.startswith("rewards.") and entry.stage == "reward":
            path = ppo.path / entry.path
            manifest, problem = runs.read_manifest(path)
            if not problem and manifest.model_sha256 == entry.sha256:  # not retrained since
                return _card_section(path, "reward", manifest)
    return {"no_reward_card": "models.reward is null, and PPO used no model of a reward stage that still exists"}


def _card_section(path: Path, stage: str, manifest: runs.Manifest) -> Section:
    metrics, card = manifest.metrics, manifest.card
    if reason := missing_card_reason(stage, manifest):
        return {"no_reward_card": f"{shown(path)}: {reason}"}
    for flag in card.get("flags", []):
        terminal.warn(flag["code"], flag["text"], where=shown(path))
    fields = {key: value for key, value in {**metrics, **card}.items() if key != "accuracy_ci95"}
    return {"reward_model": {**fields, "ci95": metrics["accuracy_ci95"]}}
