"""The frontier as a table: what each policy along PPO's updates cost in KL, and what it gained."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.statistics import with_interval


def deciding_judge(judges: Iterable[str]) -> str:
    """`gold` where there is one, else a judge that PPO was not trained on, else the reward model."""
    return min(judges, key=lambda name: (name != "gold", name == "reward"))


def print_frontier(report: Mapping[str, Any]) -> None:
    """Print a report's frontier, SFT's best of n beside it, and what `eval.select` picked; or why there is none."""
    if why := report.get("no_frontier"):
        terminal.out(f"no frontier: {why}")
    if not report.get("frontier"):
        return
    names = list(report["frontier"][0]["judges"])
    judge = report["selected"]["judge"] if "selected" in report else deciding_judge(names)
    others = [name for name in names if name != judge]
    picked = report.get("selected_step")
    cells = [_row(f"{row['step']}", row, f"{row['kl']:z.2f}", judge, others, "win_rate") for row in report["frontier"]]
    for point, row in zip(report["frontier"], cells, strict=True):
        row.append("*" if point["step"] == picked else "")
    for row in report.get("best_of", []):
        told = _row(f"best of {row['n']}", row, f"<= {row['kl_bound']:.2f}", judge, others, "win_rate_vs_sft")
        cells.append([*told, ""])
    terminal.out()
    columns = ["update", "KL", *others, judge, f"win rate, {judge}", "at equal length", ""]
    mark = "" if picked is None else " (*: selected)"
    beside = ", and SFT's best of n" if report.get("best_of") else ""
    terminal.table(columns, cells, title=f"The frontier: PPO's policies along the way{mark}{beside}")
    for line in choice(report):
        terminal.out(line)


def _row(name: str, row: Mapping[str, Any], kl: str, judge: str, others: list[str], against_sft: str) -> list[str]:
    means, decisive = [f"{row['judges'][other]['mean']:.3f}" for other in others], row["judges"][judge]
    rate = row[against_sft][judge]
    rates = [with_interval(rate["value"], rate["ci95"]), f"{rate['length_controlled']:.3f}"]
    return [name, kl, *means, with_interval(decisive["mean"], decisive["ci95"]), *rates]


def choice(report: Mapping[str, Any]) -> Iterator[str]:
    """What was picked, by which rule, and how sure that is."""
    chosen = report.get("selected")
    if chosen is None:
        return
    step = report.get("selected_step")
    yield f"selected: {'none' if step is None else f'update {step}'}, by {chosen['rule']}"
    if step is None:
        return
    near = ", ".join(map(str, chosen["within_noise"]))
    yield f"          within noise of it: {f'update {near}' if near else 'no other'} (paired, 95 % for all together)"
    yield f"          picked on these prompts, its mean is too high by about {chosen['optimism']:.3f}"
