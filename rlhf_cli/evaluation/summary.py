"""The Report of an evaluation, of scored responses: all of report.json but the limit."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_cli import runs, statistics, terminal
from rlhf_cli.config.eval import EvalConfig, judge_kind
from rlhf_cli.errors import shown
from rlhf_cli.evaluation.comparison import policy_means, sampled_results, win_rates
from rlhf_cli.evaluation.responses import EvalResponses, EvalSampling, SnapshotSeries, group_rows
from rlhf_cli.evaluation.reward_card import missing_card_reason
from rlhf_cli.evaluation.sample_pairs import deciding_judge
from rlhf_cli.evaluation.selection import Rule, frontier_points, recommend
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.report import (
    BestOfN,
    InterpolatedPolicy,
    PromptGroup,
    PromptGroups,
    Report,
    RewardModelCard,
)
from rlhf_cli.runs.resolve import started_from


def build_report(
    config: EvalConfig,
    evaluated: Sequence[EvalResponses],
    columns: Sequence[Mapping[str, Any]],
    sampling: EvalSampling,
    parents: Mapping[str, Parent],
    series: SnapshotSeries,
) -> Report:
    """Return the report. Warns R10-R12 of the reward model.

    `columns`: of each prompt's row, among others that of `eval.by`.
    """
    names = {*(key.removeprefix("models.") for key in parents), *config.policies}
    policies = [each for each in evaluated if each.model in names]
    sampled = {each.model: each for each in policies if each.mode == "sampled"}
    greedy = {each.model: each for each in policies if each.mode == "greedy"}
    results = sampled_results(sampled)

    best_of_names = {f"best_of_{n}" for n in config.eval.best_of}
    best_of_n = [each for each in evaluated if each.model in best_of_names]

    report = Report(
        n=len(columns),
        temperature=sampling.temperature,
        response_length=sampling.response_length,
        models=results.models,
        win_rate=results.win_rate,
        greedy=sampled_results(greedy) if "greedy" in config.eval.modes else None,
        best_of=_best_of(best_of_n, sampled),
        judge_kinds={name: judge_kind(judge) for name, judge in config.judges.items()},
        by=_groups(config.eval.by, columns, sampled, best_of_n),
        interpolated=_interpolated(evaluated, sampled["sft"]),
    )
    report = _with_frontier(report, config, evaluated, sampled["sft"], series)
    report = _with_recommendation(report, config, evaluated, sampled, parents)
    report = _with_reward_model(report, parents)
    return report.with_changes(warnings=terminal.emitted_warnings())


def _best_of(best_of_n: Sequence[EvalResponses], sampled: Mapping[str, EvalResponses]) -> list[BestOfN] | None:
    sft = sampled.get("sft")
    ppo = sampled.get("ppo")
    found = []
    for each in best_of_n:
        n = int(each.model.removeprefix("best_of_"))
        scores = BestOfN(
            n=n,
            kl_bound=statistics.best_of_n_kl(n),
            **policy_means(each),
            win_rate_vs_sft=win_rates(each, sft) if sft else None,
            ppo_win_rate=win_rates(ppo, each) if ppo else None,
        )
        found.append(scores)
    return found or None


def _groups(
    column: str | None,
    columns: Sequence[Mapping[str, Any]],
    sampled: Mapping[str, EvalResponses],
    best_of_n: Sequence[EvalResponses],
) -> PromptGroups | None:
    """Return the results for the prompts of each group alone."""
    if not column:
        return None
    groups = []
    for value, rows in group_rows(column, columns).items():
        policies = {name: evaluated.rows(rows) for name, evaluated in sampled.items()}
        results = sampled_results(policies)
        best_of = _best_of([each.rows(rows) for each in best_of_n], policies)
        groups.append(
            PromptGroup(value=value, n=len(rows), models=results.models, win_rate=results.win_rate, best_of=best_of)
        )
    return PromptGroups(column=column, groups=groups)


def _interpolated(evaluated: Sequence[EvalResponses], sft: EvalResponses) -> list[InterpolatedPolicy] | None:
    points = [
        InterpolatedPolicy(share=each.share, **policy_means(each), win_rate=win_rates(each, sft))
        for each in evaluated
        if each.share is not None
    ]
    return sorted(points, key=lambda point: point.share) or None


def _with_frontier(
    report: Report,
    config: EvalConfig,
    evaluated: Sequence[EvalResponses],
    sft: EvalResponses,
    series: SnapshotSeries,
) -> Report:
    """Add the frontier, or the reason why there is none."""
    if series.missing:
        return report.with_changes(no_frontier=series.missing)
    if not config.eval.frontier:
        return report
    snapshots = [each for each in evaluated if each.step is not None and each.mode == "sampled"]
    return report.with_changes(frontier=frontier_points(snapshots, sft))


def _with_recommendation(
    report: Report,
    config: EvalConfig,
    evaluated: Sequence[EvalResponses],
    sampled: Mapping[str, EvalResponses],
    parents: Mapping[str, Parent],
) -> Report:
    """Add the policy to take, of those that PPO's stage made: the last one, its snapshots, and shares of the last.

    None if the SFT model that is evaluated is not the one that PPO started from, which its policies are made with.
    """
    ppo = parents["models.ppo"]
    if not started_from(ppo, parents["models.sft"]):
        return report
    last = sampled["ppo"]
    others = [each for each in evaluated if each.model != "ppo" and (each.step is not None or each.share is not None)]
    made = [replace(each, step=ppo.manifest.step if each.step is None else each.step) for each in (last, *others)]

    selection = config.eval.selection
    judge = selection.judge if selection else deciding_judge(last.scores)
    chosen = recommend(made, sampled["sft"], Rule(judge, config.eval.kl_limit))
    return report.with_changes(selected_step=chosen.step, selected=chosen) if chosen else report


# The reward model


def _with_reward_model(report: Report, parents: Mapping[str, Parent]) -> Report:
    """Add the card of models.reward, else of PPO's reward model; or the reason why there is none.

    The card's flags are repeated as warnings.
    """
    reward = parents.get("models.reward")
    if reward is not None:
        return _with_card(report, reward.path, reward.stage, reward.manifest)

    ppo = parents["models.ppo"]
    for key, entry in ppo.manifest.parents.items():
        if key.startswith("rewards.") and entry.stage == "reward":
            path = ppo.path / entry.path
            manifest, problem = runs.read_manifest(path)
            is_unchanged = manifest.model_sha256 == entry.sha256
            if not problem and is_unchanged:
                return _with_card(report, path, "reward", manifest)
    reason = "models.reward is null, and PPO used no model of a reward stage that still exists"
    return report.with_changes(no_reward_card=reason)


def _with_card(report: Report, path: Path, stage: str, manifest: runs.Manifest) -> Report:
    result = manifest.reward_model
    if result is None:
        return report.with_changes(no_reward_card=f"{shown(path)}: {missing_card_reason(stage)}")
    if isinstance(result, RewardModelCard):
        for flag in result.flags or []:
            terminal.warn(flag.code, flag.text, where=shown(path))
    return report.with_changes(reward_model=result)
