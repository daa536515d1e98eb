"""`rlhf eval`: sample responses of the policies to held-out prompts, score them, and write the report."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_cli import jsonl, runs
from rlhf_cli.config.base import Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.evaluation.limit import build_limit
from rlhf_cli.evaluation.summary import EvalResponses, build_report, sample_rows
from rlhf_cli.stages.common import lifecycle
from rlhf_cli.stages.eval.evaluation_inputs import EvaluationInputs, load_inputs
from rlhf_cli.stages.eval.policy_evaluator import evaluate_policies
from rlhf_cli.tracking.trackers import Trackers

MAX_TRACKED_PROMPTS = 32  # in trackers; samples.jsonl has all


def run(config: EvalConfig, options: Options) -> None:
    """Write RUN/eval with report.json and samples.jsonl. All ranks sample, the first rank writes.

    Raises RLHFError as `lifecycle.run_stage`.
    """
    lifecycle.run_stage(config, options, _evaluate)


def _evaluate(config: EvalConfig, stage: lifecycle.StageRun) -> None:
    inputs = load_inputs(config, stage)
    evaluated, draws = evaluate_policies(config, stage, inputs)
    runs.require_unchanged(stage.parents)
    report = stage.process_group.run_on_main(lambda: _write_report(config, stage, inputs, evaluated, draws))
    stage.complete({"metrics": {"win_rate": report["win_rate"], "models": report["models"]}})


def _write_report(
    config: EvalConfig,
    stage: lifecycle.StageRun,
    inputs: EvaluationInputs,
    evaluated: Sequence[EvalResponses],
    draws: Sequence[EvalResponses],
) -> dict[str, Any]:
    """Write samples.jsonl and report.json, and tell the trackers; return the report."""
    report = build_report(config, evaluated, inputs.columns, inputs.sampling, stage.parents, inputs.series)
    if config.eval.limit:
        report["limit"] = build_limit(draws, evaluated, inputs.missing_eos_penalty)

    samples = config.folder / "samples.jsonl"
    samples.unlink(missing_ok=True)  # of a killed process; a link may lead elsewhere
    jsonl.write_jsonl(samples, sample_rows(evaluated, inputs.columns))
    runs.write_json(config.folder / "report.json", report)
    track(config, report, evaluated, inputs.columns)  # last: a tracker's failure must not change the report
    return report


# Trackers


def track(
    config: EvalConfig,
    report: Mapping[str, Any],
    evaluated: Sequence[EvalResponses],
    columns: Sequence[Mapping[str, Any]],
) -> None:
    """Log `models`, `win_rate` and samples to the trackers at step 0, and each frontier point at its step."""
    with Trackers(config) as trackers:
        if not trackers:
            return
        trackers.metrics({"step": 0, **flatten_metrics(_headline(report))})

        sampled = [each for each in evaluated if each.mode == "sampled" and each.model in report["models"]]
        rows = [row for row in sample_rows(sampled, columns) if row["index"] < MAX_TRACKED_PROMPTS]
        trackers.table(0, "samples", rows)
        for point in report.get("frontier", []):
            fields = {key: value for key, value in point.items() if key != "step"}
            trackers.metrics({"step": point["step"], **flatten_metrics({"frontier": fields})})


def _headline(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of the report that are logged at step 0; the rows of its tables by what differs in them."""
    headline = {
        "models": report["models"],
        "win_rate": report["win_rate"],
        "best_of": {str(row["n"]): row for row in report.get("best_of", [])},
        "interpolated": {str(row["share"]): row for row in report.get("interpolated", [])},
    }
    if "selected_step" in report:
        headline["selected_step"] = report["selected_step"]
    return headline


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
