"""What an evaluation found, printed from the files that it left. Torch-free: `rlhf run` shows it too."""

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_cli import terminal, told
from rlhf_cli.checkpoints.files import read_object
from rlhf_cli.checkpoints.outputs import REPORT
from rlhf_cli.checkpoints.shapes import oddity
from rlhf_cli.config.eval import COMPARISON
from rlhf_cli.errors import Problem, RLHFError, shown
from rlhf_cli.reward_card import print_card
from rlhf_cli.rows import read_jsonl
from rlhf_cli.statistics import with_interval
from rlhf_cli.verdict.frontier import print_frontier
from rlhf_cli.verdict.pairs import judge_of, pairs
from rlhf_cli.verdict.rewards import HELD_OUT, UNPENALISED
from rlhf_cli.verdict.sentence import sentence, standing

QUANTILES = (0.25, 0.5, 0.75)
HOLDS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq}
LABELS = {"sft": "SFT", "ppo": "PPO"}


def read_report(folder: Path) -> dict[str, Any]:
    """The report.json of an eval folder. Raises M05 where it is missing or damaged, E08 where it cannot be read now."""
    report = read_object(folder / "report.json")
    problem = "is missing or not readable" if report is None else oddity("report.json", report)
    if report is None or problem:
        text = f"{shown(folder / 'report.json')} {problem if report is None else f'is damaged: {problem}'}"
        raise RLHFError("M05", text, hint="make it again: rlhf eval --fresh --config FILE")
    return report


def print_verdict(eval_folder: Path) -> None:
    """Print an eval folder: models and best-of-n, win rates, the frontier and what was picked of it, three pairs of
    answers before and after, warnings, and all in one sentence."""
    report = read_report(eval_folder)
    _print_models(report)
    _print_win_rates(report)
    print_frontier(report)
    if (eval_folder / "samples.jsonl").is_file():
        _print_pairs([row for _, row in read_jsonl(eval_folder / "samples.jsonl")])
    if "reward_model" in report:
        terminal.out()
        print_card(report["reward_model"])
    elif "no_reward_card" in report:
        terminal.out(f"reward model: no report card: {report['no_reward_card']}")
    _print_warnings(report.get("warnings", []))
    terminal.out(f"report: {shown(eval_folder / 'report.json')}")
    if (eval_folder / REPORT).is_file():
        terminal.out(f"page: {shown(eval_folder / REPORT)} (open it in a browser)")
    if said := sentence(report):
        terminal.out(f"verdict: {said}")


def _print_warnings(warnings: Sequence[str]) -> None:
    """Those that this command told before are named by their codes: other stages told more, which no report has."""
    before = []
    for warning in warnings:
        if told.is_new(warning):
            terminal.out(f"noted: {warning}")
        else:
            before.append(warning.partition("]")[0].removeprefix("warning["))
    if before:
        counts = [f"{code} ({count} times)" if count > 1 else code for code, count in Counter(before).items()]
        terminal.out(f"noted: of the warnings above report.json has {', '.join(counts)}")


def check_requirements(report: Mapping[str, Any], require: Mapping[str, str], *, where: Callable[[str], str]) -> None:
    """Hold a report against `eval.require`: {dotted key of the report: comparison with a number, as ">= 0.6"}.

    Raises R06 with a problem for each line that does not hold, or whose key is no number of the report; and where
    `eval.select` found no policy within its bound. `where` gives the place of a key of the config.
    """
    problems = []
    if "selected" in report and "selected_step" not in report:
        nearest = min(point["kl"] for point in report["frontier"])
        text = f"eval.select finds nothing: {report['selected']['rule']}, the nearest has {nearest:.4g} nats"
        hint = "raise kl_max, keep more snapshots (output.snapshots in ppo.yaml), or raise ppo.kl_coef"
        problems.append(Problem("R06", text, where("eval.select"), hint))
    place = where("eval.require")
    for key, condition in require.items():
        match = COMPARISON.fullmatch(condition.strip())
        assert match, "the config checks the form of a requirement"
        value: Any = report
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if not isinstance(value, int | float) or isinstance(value, bool):
            hint = f"report.json holds {', '.join(report)}"
            problems.append(Problem("R06", f"{key} is no number of the report", place, hint))
        elif not HOLDS[match[1]](value, float(match[2])):
            problems.append(Problem("R06", f"{key} is {value:.4g}, required {condition.strip()}", place))
    if problems:
        raise RLHFError.of(problems)


def _print_models(report: Mapping[str, Any]) -> None:
    """A row for each policy, and one for each best of n: what the SFT policy reaches by trying n times."""
    rows = dict(report["models"])
    near_greedy = report.get("greedy", {}).get("models", {})
    judges = [name for name in next(iter(rows.values()))["judges"] if name != "reward"]
    cells = [_model_row(label(name), row, judges) for name, row in rows.items()]
    cells += [_model_row(f"{label(name)}, near-greedy", row, judges) for name, row in near_greedy.items()]
    cells += [
        _model_row(f"SFT, best of {row['n']}", {**row, "kl": row.get("kl_bound")}, judges, kl="<= {:.2f}")
        for row in report.get("best_of", [])
    ]
    columns = ["model", "reward", "KL", "length", "ended", *judges]
    title = f"{report['n']} {HELD_OUT}, 95 % intervals in brackets; the reward is {UNPENALISED}"
    terminal.table(columns, cells, title=title)


def label(model: str) -> str:
    """A policy of the report as people call it."""
    return LABELS.get(model, model)


def versus(pair: str) -> str:
    """Two policies that were compared, `ppo_vs_sft` of the report: `PPO over SFT`."""
    one, _, other = pair.partition("_vs_")
    return f"{label(one)} over {label(other)}"


def _model_row(name: str, row: Mapping[str, Any], judges: Sequence[str], kl: str = "{:.2f}") -> list[str]:
    distance = kl.format(row["kl"]) if row.get("kl") is not None else "-"
    told = [with_interval(row["judges"][judge]["mean"], row["judges"][judge].get("ci95")) for judge in judges]
    reward = with_interval(row["reward_mean"], row.get("reward_ci95")) if "reward_mean" in row else "-"
    return [name, reward, distance, f"{row['response_length_mean']:.1f}", f"{row['eos_fraction']:.0%}", *told]


def _print_win_rates(report: Mapping[str, Any]) -> None:
    rows = [
        [
            pair + how,
            judge,
            with_interval(rate["value"], rate.get("ci95")) + (", undecided" if standing(rate) == "undecided" else ""),
            controlled(rate),
            f"{rate['ties']}",
        ]
        for pair, how, judge, rate in win_rates(report)
    ]
    if rows:
        terminal.out()
        terminal.table(["win rate", "judge", "value", "at equal length", "ties"], rows)


def controlled(rate: Mapping[str, Any]) -> str:
    """A win rate at equal length."""
    return f"{rate['length_controlled']:.3f}" if "length_controlled" in rate else "-"


def win_rates(report: Mapping[str, Any]) -> list[tuple[str, str, str, Mapping[str, Any]]]:
    """(what is compared, `, near-greedy` where it is, the judge, the numbers) of every win rate, sampled ones first."""
    found = []
    for how, section in (("", report), (", near-greedy", report.get("greedy") or {})):
        for pair, judges in (section.get("win_rate") or {}).items():
            found += [(versus(pair), how, *item) for item in judges.items()]
    for row in report.get("best_of", []):
        pair = f"PPO over SFT's best of {row['n']}"
        found += [(pair, "", *item) for item in (row.get("ppo_win_rate") or {}).items()]
    return found


def _print_pairs(samples: Sequence[Mapping[str, Any]]) -> None:
    """Three prompts with both policies' answers: a usual loss, the middle, and a usual win, never the best ones."""
    both = {pair.index: pair for pair in pairs(samples)}
    if not both:
        return
    rows = []
    for index in pick({index: pair.gain for index, pair in both.items()}):
        rows.append(["prompt", "", str(both[index].prompt)])
        for name, row in (("sft", both[index].sft), ("ppo", both[index].ppo)):
            scores = ", ".join(f"{key} {value:.2f}" for key, value in row["scores"].items())
            rows.append([label(name), scores, str(row["response"])])
    terminal.out()
    title = f"Before and after, at the quartiles of PPO's gain by {judge_of(samples)}"
    terminal.table(["", "scores", "text"], rows, title=title)


def pick(gains: Mapping[int, float]) -> list[int]:
    """The rows whose gain is nearest to the quartiles, a row once, the lower index where two are as near."""
    ordered = sorted(gains.values())
    picked: list[int] = []
    for quantile in QUANTILES:
        middle = ordered[round(quantile * (len(ordered) - 1))]
        left = [index for index in gains if index not in picked]
        if left:
            picked.append(min(left, key=lambda index: (abs(gains[index] - middle), index)))
    return picked
