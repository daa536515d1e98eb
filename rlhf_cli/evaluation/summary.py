"""Scored responses, and report.json: means and win rates with 95 % intervals, best of n, frontier, reward model."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

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
    seed = config.seed
    keys = {*(key.removeprefix("models.") for key in parents), *config.policies}
    by_mode = {
        mode: {e.model: e for e in evaluated if e.mode == mode and e.model in keys} for mode in config.eval.modes
    }
    sampled = by_mode["sampled"]
    report: Section = {
        "n": len(columns),
        "temperature": sampling.temperature,
        "response_length": sampling.response_length,
        **_policies_section(sampled, seed),
    }
    if "greedy" in by_mode:
        report["greedy"] = _policies_section(by_mode["greedy"], seed)
    best_of_n = [e for e in evaluated if e.model in {f"best_of_{n}" for n in config.eval.best_of}]
    report |= _best_of_sections(best_of_n, sampled, seed)
    report["judge_kinds"] = {name: judge_kind(judge) for name, judge in config.judges.items()}
    if config.eval.by:
        groups = group_rows(config.eval.by, columns)
        report["by"] = {"column": config.eval.by, "groups": _group_sections(groups, sampled, best_of_n, seed)}
    if shares := [e for e in evaluated if e.share is not None]:
        report["interpolated"] = [{"share": e.share, **_point(e, sampled["sft"], seed)} for e in shares]
    if series.missing:
        report["no_frontier"] = series.missing
    elif config.eval.frontier:
        policies = [e for e in evaluated if e.step is not None and e.mode == "sampled"]
        report |= frontier_section(policies, sampled["sft"], config.eval.selection, seed)
    report |= reward_model_section(parents)
    return report | {"warnings": terminal.emitted_warnings()}


# Means and win rates


def _policies_section(policies: Mapping[str, EvalResponses], seed: int) -> Section:
    named = [name for name in policies if name not in ("base", "sft", "ppo")]
    pairs = [*PAIRS, *((name, "sft") for name in named), *(("ppo", name) for name in named)]
    pairs = [(policy, baseline) for policy, baseline in pairs if policy in policies and baseline in policies]
    return {
        "models": {name: _policy_means(evaluated, seed) for name, evaluated in policies.items()},
        "win_rate": {
            f"{policy}_vs_{baseline}": win_rates(policies[policy], policies[baseline], seed)
            for policy, baseline in pairs
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
    seed: int,
) -> list[Section]:
    """Return the sections of the report for the prompts of each group alone."""
    sections = []
    for value, rows in groups.items():
        policies = {name: evaluated.rows(rows) for name, evaluated in sampled.items()}
        best = _best_of_sections([each.rows(rows) for each in best_of_n], policies, seed)
        sections.append({"value": value, "n": len(rows), **_policies_section(policies, seed), **best})
    return sections


def _best_of_sections(best_of_n: Sequence[EvalResponses], sampled: Mapping[str, EvalResponses], seed: int) -> Section:
    return {"best_of": [_best_of_section(each, sampled, seed) for each in best_of_n]} if best_of_n else {}


def _best_of_section(best_of_n: EvalResponses, sampled: Mapping[str, EvalResponses], seed: int) -> Section:
    n = int(best_of_n.model.removeprefix("best_of_"))
    section = {"n": n, "kl_bound": statistics.best_of_n_kl(n), **_policy_means(best_of_n, seed)}
    if "sft" in sampled:
        section["win_rate_vs_sft"] = win_rates(best_of_n, sampled["sft"], seed)
    if "ppo" in sampled:
        section["ppo_win_rate"] = win_rates(sampled["ppo"], best_of_n, seed)
    return section


def _policy_means(evaluated: EvalResponses, seed: int) -> Section:
    """Return the means over prompts of one policy, as in `models` of report.json."""
    count, means = len(evaluated.responses), Section()
    judges = {judge: _mean(scores, seed) for judge, scores in evaluated.scores.items()}
    if "reward" in judges:
        means |= {"reward_mean": judges["reward"]["mean"], "reward_ci95": judges["reward"]["ci95"]}
    if evaluated.kl is not None:
        kl = _mean(evaluated.kl, seed)
        means |= {"kl": kl["mean"], "kl_ci95": kl["ci95"]}
    return means | {
        "response_length_mean": sum(evaluated.lengths) / count,
        "eos_fraction": sum(evaluated.ended) / count,
        "distinct_fraction": len(set(evaluated.responses)) / count,
        "judges": judges,
    }


def _mean(values: Sequence[float], seed: int) -> Section:
    """Return {mean, ci95}. The interval of a judge that scores 0 or 1, such as a verifier, is Wilson's."""
    total, n = sum(values), len(values)
    shares = set(values) <= {0.0, 1.0}
    interval = statistics.wilson(total, n) if shares else statistics.bootstrap_mean(values, seed=seed)
    return {"mean": total / n, "ci95": list(interval)}


def win_rates(policy: EvalResponses, baseline: EvalResponses, seed: int) -> Section:
    """Return per judge the fraction of prompts on which `policy` scores above `baseline`; a tie counts 0.5.

    Each with its length-controlled win rate, the mean difference of the scores, and its agreement with the reward
    model's preferences.
    """
    extra_lengths = [a - b for a, b in zip(policy.lengths, baseline.lengths, strict=True)]
    rates = {}
    for judge, scores in policy.scores.items():
        other = baseline.scores[judge]
        controlled, interval = statistics.length_controlled(scores, other, extra_lengths, seed=seed)
        rates[judge] = {
            **statistics.win_rate(scores, other),
            "length_controlled": controlled,
            "length_controlled_ci95": list(interval),
            **statistics.paired_difference(scores, other, seed=seed),
        }
        if judge != "reward" and "reward" in policy.scores:
            rates[judge] |= agreement((scores, other), (policy.scores["reward"], baseline.scores["reward"]))
    return rates


# The frontier: KL and judge scores of PPO's snapshots, and the selection of one of them


def frontier_section(
    policies: Sequence[EvalResponses], sft: EvalResponses, select: Select | None, seed: int
) -> Section:
    """Return {frontier: points by step}, and with `select` those of `select_point`. All respond to the same prompts."""
    by_step = {policy.step: policy for policy in sorted(policies, key=lambda policy: policy.step or 0)}
    points = [{"step": policy.step, **_point(policy, sft, seed)} for policy in by_step.values()]
    for judge in sft.scores:
        scores = {step: policy.scores[judge] for step, policy in by_step.items()}
        best = max(points, key=lambda point: point["judges"][judge]["mean"])["step"]
        tied = statistics.within_noise(scores, seed=seed)
        for point in points:
            step = point["step"]
            diff = statistics.paired_difference(scores[step], scores[best], seed=seed)
            columns = {"from_best": diff["difference"], "from_best_ci95": diff["difference_ci95"]}
            point["judges"][judge] |= {**columns, "within_noise": step in tied}
    if select is None:
        return {"frontier": points}
    scores = {step: policy.scores[select.judge] for step, policy in by_step.items()}
    return {"frontier": points, **select_point(points, scores, select, seed)}


def _point(policy: EvalResponses, sft: EvalResponses, seed: int) -> Section:
    """Return the means of a policy that is drawn over KL, and its win rate over SFT."""
    renamed = {"reward" if key == "reward_mean" else key: value for key, value in _policy_means(policy, seed).items()}
    return {**renamed, "win_rate": win_rates(policy, sft, seed)}


def select_point(points: list[Section], scores: Mapping[Any, list[float]], select: Select, seed: int) -> Section:
    """Return {selected_step, selected}: the point with the highest mean of the judge within the bound on KL.

    Ties go to the smaller KL. `selected` also has the rule as text, the other steps within noise of the best (for all
    comparisons together), and the selection bias of its mean. Without a point within the bound there is no
    `selected_step`. `scores` are the judge's, by step.
    """
    judge, kl_max = select.judge, select.kl_max
    eligible = [point for point in points if kl_max is None or point["kl"] <= kl_max]
    bound = "" if kl_max is None else f" with a KL of at most {kl_max:g}"
    rule = f"the highest mean of {judge} among {len(eligible)} of {len(points)} policies{bound}"
    if not eligible:
        return {"selected": {"judge": judge, "rule": rule}}
    best = max(eligible, key=lambda point: (point["judges"][judge]["mean"], -point["kl"]))
    eligible_scores, step = {point["step"]: scores[point["step"]] for point in eligible}, best["step"]
    tied = [other for other in statistics.within_noise(eligible_scores, seed=seed) if other != step]
    bias = statistics.selection_bias(eligible_scores, seed=seed)
    return {
        "selected_step": step,
        "selected": {"judge": judge, "rule": rule, "within_noise": tied, "optimism": bias, **best},
    }


# The reward model


def reward_model_section(parents: Mapping[str, Parent]) -> Section:
    """Return {reward_model: card} of models.reward, else of PPO's reward model; or {no_reward_card: reason}.

    The card's flags are repeated as warnings.
    """
    reward = parents.get("models.reward")
    if reward is not None:
        return _card_section(reward.path, reward.stage, reward.manifest)
    ppo = parents["models.ppo"]
    for key, entry in ppo.manifest.get("parents", {}).items():
        if key.startswith("rewards.") and entry["stage"] == "reward":
            path = ppo.path / entry["path"]
            manifest, problem = runs.read_manifest(path)
            if not problem and manifest.get("model_sha256") == entry["sha256"]:  # not retrained since
                return _card_section(path, "reward", manifest)
    return {"no_reward_card": "models.reward is null, and PPO used no model of a reward stage that still exists"}


def _card_section(path: Path, stage: str, manifest: Mapping[str, Any]) -> Section:
    metrics, card = manifest.get("metrics", {}), manifest.get("card", {})
    if reason := missing_card_reason(stage, manifest):
        return {"no_reward_card": f"{shown(path)}: {reason}"}
    for flag in card.get("flags", []):
        terminal.warn(flag["code"], flag["text"], where=shown(path))
    fields = {key: value for key, value in {**metrics, **card}.items() if key != "accuracy_ci95"}
    return {"reward_model": {**fields, "ci95": metrics["accuracy_ci95"]}}
