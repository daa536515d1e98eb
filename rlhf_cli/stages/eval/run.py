"""`rlhf eval`: sample responses of the policies to held-out prompts, score them, and write the report."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_cli import data, jsonl, runs
from rlhf_cli.config.base import Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.evaluation.limit import build_limit
from rlhf_cli.evaluation.responses import EvalResponses, largest_changes, sample_rows
from rlhf_cli.evaluation.summary import build_report
from rlhf_cli.judges.pairwise import PairwiseJudge
from rlhf_cli.runs.layout import RECOMMENDED, REPORT
from rlhf_cli.runs.report import FrontierPoint, Report
from rlhf_cli.stages.common import lifecycle
from rlhf_cli.stages.eval.evaluation_inputs import EvaluationInputs, load_inputs
from rlhf_cli.stages.eval.pairwise_judges import add_win_rates, open_judges
from rlhf_cli.stages.eval.people_judges import add_people
from rlhf_cli.stages.eval.policy_evaluator import Evaluated, evaluate_policies
from rlhf_cli.tracking.trackers import Trackers

MAX_TRACKED_PROMPTS = 32  # in trackers; samples.jsonl has all


def run(config: EvalConfig, options: Options) -> None:
    """Write RUN/eval with report.json and samples.jsonl. All ranks sample, the first rank writes.

    Raises RLHFError as `lifecycle.run_stage`.
    """
    lifecycle.run_stage(config, options, _evaluate)


def _evaluate(config: EvalConfig, stage: lifecycle.StageRun) -> None:
    inputs = load_inputs(config, stage)
    judges = stage.process_group.run_on_main(lambda: open_judges(config, len(inputs.prompts)))
    evaluated = evaluate_policies(config, stage, inputs)
    runs.require_unchanged(stage.parents)
    report = stage.process_group.run_on_main(lambda: _write_report(config, stage, inputs, judges, evaluated))
    contents = report.to_json()
    metrics = {name: contents[name] for name in ("win_rate", "models")}
    if report.recommended:
        metrics["recommended"] = report.recommended.to_json(include={"policy", "step", "share", "judge", "kl"})
    stage.complete({"metrics": metrics})


def _write_report(
    config: EvalConfig,
    stage: lifecycle.StageRun,
    inputs: EvaluationInputs,
    judges: Mapping[str, PairwiseJudge],
    evaluated: Evaluated,
) -> Report:
    """Write samples.jsonl and report.json, and tell the trackers; return the report."""
    responses = evaluated.responses
    report = build_report(config, responses, inputs.columns, inputs.sampling, stage.parents, inputs.series)
    report = add_win_rates(report, judges, inputs.prompts, responses)
    report = add_people(report, inputs.people, evaluated.labelled)
    if config.eval.limit:
        limit = build_limit(evaluated.draws, responses, inputs.missing_eos_penalty)
        report = report.with_changes(limit=limit)

    samples = config.folder / "samples.jsonl"
    samples.unlink(missing_ok=True)  # of a killed process; a link may lead elsewhere
    jsonl.write_jsonl(samples, sample_rows(responses, inputs.columns, _token_values(inputs.tokenizer, responses)))
    runs.write_json(config.folder / REPORT, report.to_json())
    if report.recommended:
        runs.write_json(config.folder / RECOMMENDED, _recommended(config, stage, report))
    track(config, report, responses, inputs.columns)  # last: a tracker's failure must not change the report
    return report


def _recommended(config: EvalConfig, stage: lifecycle.StageRun, report: Report) -> dict[str, Any]:
    """Return recommended.json: the models that make the recommended policy, and what report.json has of it."""
    models = {name: runs.parent_entry(stage.parents[f"models.{name}"], config.folder) for name in ("sft", "ppo")}
    made_of = {name: entry.to_json() for name, entry in models.items()}
    return {"models": made_of, "why": report.recommendation, **report.to_json()["selected"]}


def _token_values(tokenizer: Any, responses: Sequence[EvalResponses]) -> dict[int, dict[str, list[Any]]]:
    """Return text and KL of each token of the responses with the largest gains and losses, as the page shows them."""
    return {
        row: {"text": data.token_texts(tokenizer, tokens.ids), "kl": tokens.kl}
        for row, tokens in largest_changes(responses).items()
    }


# Trackers


def track(
    config: EvalConfig,
    report: Report,
    evaluated: Sequence[EvalResponses],
    columns: Sequence[Mapping[str, Any]],
) -> None:
    """Log `models`, `win_rate` and samples to the trackers at step 0, and each frontier point at its step."""
    with Trackers(config) as trackers:
        if not trackers:
            return
        trackers.metrics({"step": 0, **headline_metrics(report)})

        sampled = [each for each in evaluated if each.mode == "sampled" and each.model in report.models]
        rows = [row for row in sample_rows(sampled, columns) if row["index"] < MAX_TRACKED_PROMPTS]
        trackers.table(0, "samples", rows)
        for point in report.frontier or []:
            trackers.metrics({"step": point.step, **frontier_metrics(point)})


def headline_metrics(report: Report) -> dict[str, float]:
    """Return the numbers of a report's policies, win rates, best of n and policies between SFT and PPO."""
    return flatten_metrics(
        {
            "models": {name: scores.to_json() for name, scores in report.models.items()},
            "win_rate": {
                pair: {judge: rate.to_json() for judge, rate in rates.items()}
                for pair, rates in report.win_rate.items()
            },
            "selected_step": report.selected_step,
            "best_of": {str(each.n): each.to_json() for each in report.best_of or []},
            "interpolated": {str(each.share): each.to_json() for each in report.interpolated or []},
        }
    )


def frontier_metrics(point: FrontierPoint) -> dict[str, float]:
    """Return the numbers of a point of the frontier."""
    return flatten_metrics({"frontier": point.to_json(exclude={"step"})})


def flatten_metrics(tree: Any, name: str = "") -> dict[str, float]:
    """Return the numbers of a part of the report with keys joined by `/`; intervals get `low` and `high`."""
    if isinstance(tree, int | float) and not isinstance(tree, bool):
        return {name: tree}
    if isinstance(tree, list) and len(tree) == 2:
        low, high = tree
        tree = {"low": low, "high": high}
    metrics: dict[str, float] = {}
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            metrics |= flatten_metrics(value, f"{name}/{key}" if name else key)
    return metrics
