"""Contents of report.json: means and win rates with 95 % intervals, best of n, frontier and reward model."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_cli import statistics, terminal
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.evaluation.aggregate import policy_means, win_rates
from rlhf_cli.evaluation.frontier import frontier_section
from rlhf_cli.evaluation.responses import EvalResponses, SamplingParams, SnapshotSeries
from rlhf_cli.evaluation.reward_cards import reward_model_section
from rlhf_cli.runs.parents import Parent

PAIRS = (("ppo", "sft"), ("sft", "base"), ("ppo", "base"))


def build_report(
    config: EvalConfig,
    evaluated: Sequence[EvalResponses],
    num_prompts: int,
    sampling: SamplingParams,
    parents: Mapping[str, Parent],
    series: SnapshotSeries,
) -> dict[str, Any]:
    """Return the contents of report.json; keys without a value are absent. Warns R10-R12 of the reward model."""
    by_mode = {
        mode: {e.model: e for e in evaluated if e.mode == mode and f"models.{e.model}" in parents}
        for mode in config.eval.modes
    }
    best_of_n = [e for e in evaluated if e.model.startswith("best_of")]
    report: dict[str, Any] = {
        "n": num_prompts,
        "temperature": sampling.temperature,
        "response_length": sampling.response_length,
    }
    report |= _policies_section(by_mode["sampled"], config.seed)
    if "greedy" in by_mode:
        report["greedy"] = _policies_section(by_mode["greedy"], config.seed)
    if best_of_n:
        report["best_of"] = [_best_of_section(e, by_mode["sampled"], config.seed) for e in best_of_n]
    if series.missing:
        report["no_frontier"] = series.missing
    elif config.eval.frontier:
        policies = [e for e in evaluated if e.step is not None and e.mode == "sampled"]
        report |= frontier_section(policies, by_mode["sampled"]["sft"], config.eval.selection, config.seed)
    report |= reward_model_section(parents)
    return report | {"warnings": terminal.emitted_warnings()}


def _policies_section(policies: Mapping[str, EvalResponses], seed: int) -> dict[str, Any]:
    pairs = [(policy, baseline) for policy, baseline in PAIRS if policy in policies and baseline in policies]
    return {
        "models": {name: policy_means(evaluated, seed) for name, evaluated in policies.items()},
        "win_rate": {
            f"{policy}_vs_{baseline}": win_rates(policies[policy], policies[baseline], seed)
            for policy, baseline in pairs
        },
    }


def _best_of_section(best_of_n: EvalResponses, sampled: Mapping[str, EvalResponses], seed: int) -> dict[str, Any]:
    n = int(best_of_n.model.removeprefix("best_of_"))
    section = {"n": n, "kl_bound": statistics.best_of_n_kl(n), **policy_means(best_of_n, seed)}
    if "sft" in sampled:
        section["win_rate_vs_sft"] = win_rates(best_of_n, sampled["sft"], seed)
    if "ppo" in sampled:
        section["ppo_win_rate"] = win_rates(sampled["ppo"], best_of_n, seed)
    return section
