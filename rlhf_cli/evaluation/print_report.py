"""Print the result of an evaluation. Torch-free: `rlhf run` prints it."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rlhf_cli import terminal
from rlhf_cli.errors import shown
from rlhf_cli.evaluation import report_text, sample_pairs
from rlhf_cli.evaluation.reward_card import print_card
from rlhf_cli.evaluation.sample_pairs import Sample
from rlhf_cli.jsonl import read_jsonl
from rlhf_cli.runs.layout import REPORT, REPORT_PAGE
from rlhf_cli.runs.report import Report, read_report


def print_report(eval_folder: Path) -> None:
    """Print an eval folder: policies, win rates, frontier, sample responses, reward model, warnings and a summary."""
    report = read_report(eval_folder)
    _print_policies(report)
    _print_frontier(report)
    _print_limit(report)
    samples = eval_folder / "samples.jsonl"
    if samples.is_file():
        _print_samples([row for _, row in read_jsonl(samples)])
    _print_reward_model(report)
    _print_warnings(report.warnings or [])
    for sentence in report_text.worth_sentences(report):
        terminal.out(sentence)

    terminal.out(f"report: {shown(eval_folder / REPORT)}")
    page = eval_folder / REPORT_PAGE
    if page.is_file():
        terminal.out(f"page: {shown(page)} (open it in a browser)")
    if summary := report_text.summary_sentence(report):
        terminal.out(f"result: {summary}")


def _print_policies(report: Report) -> None:
    """Print the means and win rates of the policies, also by groups of prompts."""
    title = f"{report.n} {report_text.HELD_OUT}, 95 % intervals in brackets; the reward is {report_text.UNPENALISED}"
    terminal.table(*report_text.policies_table(report), title=title)
    columns, rates = report_text.win_rate_table(report)
    if rates:
        terminal.out()
        terminal.table(columns, rates)
    for sentence in report_text.pairwise_sentences(report):
        terminal.out(sentence)
    if report.by:
        terminal.out()
        terminal.table(*report_text.groups_table(report.by), title=report_text.groups_title(report.by))


def _print_frontier(report: Report) -> None:
    """Print the frontier, SFT's best of n and the recommended policy; or the reason why there is no frontier."""
    if report.no_frontier:
        terminal.out(f"no frontier: {report.no_frontier}")
    if not report_text.has_frontier(report):
        return

    title = "Policies by their KL from SFT"
    if report.frontier:
        legend = " (*: recommended)" if report.selected_step is not None else ""
        best_of_n = ", and SFT's best of n" if report.best_of else ""
        title = f"Frontier: snapshots of the PPO run{legend}{best_of_n}"
    terminal.out()
    terminal.table(*report_text.frontier_table(report), title=title)
    for line in report_text.recommendation_lines(report):
        terminal.out(line)


def _print_limit(report: Report) -> None:
    if report.limit:
        terminal.out()
        terminal.table(*report_text.limit_table(report), title=f"KL overhead: {report_text.limit_score(report)}")
        for line in report_text.limit_lines(report):
            terminal.out(line)


def _print_samples(samples: Sequence[Sample]) -> None:
    """Print both policies' responses to three prompts, at the quartiles of the gain."""
    rows = []
    for pair in sample_pairs.quartile_examples(sample_pairs.response_pairs(samples)):
        rows.append(["prompt", "", str(pair.prompt)])
        if columns := sample_pairs.columns_text(pair.sft):
            rows.append(["data", "", columns])
        for name, row in (("SFT", pair.sft), ("PPO", pair.ppo)):
            scores = ", ".join(f"{key} {value:.2f}" for key, value in row["scores"].items())
            rows.append([name, scores, str(row["response"])])
    if rows:
        judge = sample_pairs.deciding_judge_of(samples)
        terminal.out()
        title = f"Sample responses at the quartiles of PPO's gain by {judge}"
        terminal.table(["", "scores", "text"], rows, title=title)


def _print_reward_model(report: Report) -> None:
    if report.reward_model:
        terminal.out()
        print_card(report.reward_model)
    elif report.no_reward_card is not None:
        terminal.out(f"reward model: no report card: {report.no_reward_card}")


def _print_warnings(warnings: Sequence[str]) -> None:
    """Print the report's warnings; those already printed by this command are listed by code only."""
    repeated: Counter[str] = Counter()
    for warning in warnings:
        if terminal.is_first_time(warning):
            terminal.out(f"in report.json: {warning}")
        else:
            repeated[warning.partition("]")[0].removeprefix("warning[")] += 1
    if repeated:
        counts = [f"{code} ({count} times)" if count > 1 else code for code, count in repeated.items()]
        terminal.out(f"in report.json, printed above: {', '.join(counts)}")
