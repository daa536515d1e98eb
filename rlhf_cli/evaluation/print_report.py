"""Print the result of an evaluation. Torch-free: `rlhf run` prints it."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rlhf_cli import terminal
from rlhf_cli.errors import shown
from rlhf_cli.evaluation import render
from rlhf_cli.evaluation.render import HELD_OUT, UNPENALISED, Row
from rlhf_cli.evaluation.reward_card import print_card
from rlhf_cli.jsonl import read_jsonl
from rlhf_cli.runs.layout import REPORT
from rlhf_cli.runs.read import read_report


def print_report(eval_folder: Path) -> None:
    """Print an eval folder: policies, win rates, frontier, sample responses, reward model, warnings and a summary."""
    report = read_report(eval_folder)
    title = f"{report['n']} {HELD_OUT}, 95 % intervals in brackets; the reward is {UNPENALISED}"
    terminal.table(*render.policies_table(report), title=title)
    columns, rates = render.win_rate_table(report)
    if rates:
        terminal.out()
        terminal.table(columns, rates)
    if report.get("by"):
        terminal.out()
        terminal.table(*render.groups_table(report), title=render.groups_title(report))
    _print_frontier(report)
    if report.get("limit"):
        terminal.out()
        terminal.table(*render.limit_table(report), title=f"KL overhead: {render.limit_score(report)}")
        for line in render.limit_lines(report):
            terminal.out(line)
    if (eval_folder / "samples.jsonl").is_file():
        _print_samples([row for _, row in read_jsonl(eval_folder / "samples.jsonl")])
    if "reward_model" in report:
        terminal.out()
        print_card(report["reward_model"])
    elif "no_reward_card" in report:
        terminal.out(f"reward model: no report card: {report['no_reward_card']}")
    _print_warnings(report.get("warnings", []))
    for sentence in render.worth_sentences(report):
        terminal.out(sentence)
    terminal.out(f"report: {shown(eval_folder / 'report.json')}")
    if (eval_folder / REPORT).is_file():
        terminal.out(f"page: {shown(eval_folder / REPORT)} (open it in a browser)")
    if summary := render.summary_sentence(report):
        terminal.out(f"result: {summary}")


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


def _print_frontier(report: Row) -> None:
    """Print the frontier, SFT's best of n and the selected step; or the reason why there is no frontier."""
    if reason := report.get("no_frontier"):
        terminal.out(f"no frontier: {reason}")
    if render.has_frontier(report):
        terminal.out()
        legend = "" if report.get("selected_step") is None else " (*: selected)"
        best_of_n = ", and SFT's best of n" if report.get("best_of") else ""
        snapshots = f"Frontier: snapshots of the PPO run{legend}{best_of_n}"
        title = snapshots if report.get("frontier") else "Policies by their KL from SFT"
        terminal.table(*render.frontier_table(report), title=title)
        for line in render.selection_lines(report):
            terminal.out(line)


def _print_samples(samples: Sequence[Row]) -> None:
    """Print both policies' responses to three prompts, at the quartiles of the gain."""
    rows = []
    for pair in render.quartile_examples(render.response_pairs(samples)):
        rows.append(["prompt", "", str(pair.prompt)])
        if columns := render.columns_text(pair.sft):
            rows.append(["data", "", columns])
        for name, row in (("SFT", pair.sft), ("PPO", pair.ppo)):
            scores = ", ".join(f"{key} {value:.2f}" for key, value in row["scores"].items())
            rows.append([name, scores, str(row["response"])])
    if rows:
        terminal.out()
        title = f"Sample responses at the quartiles of PPO's gain by {render.deciding_judge_of(samples)}"
        terminal.table(["", "scores", "text"], rows, title=title)
