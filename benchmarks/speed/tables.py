"""The tables, for the terminal and as Markdown."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.speed import demo, goals
from rlhf_cli import terminal


class Table(NamedTuple):
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


SYSTEMS = {"ours": "rlhf", "peer": "TRL 1.12"}


def of_goals(parts: dict[str, Any]) -> Table:
    rows = [[one.name, one.wanted, f"{one.found:.3g}", one.holds] for one in goals.verdicts(parts)]
    return Table("Goals", ("what", "goal", "found", "holds"), rows)


def side_by_side(parts: dict[str, Any]) -> Table:
    """Tokens beside seconds: a ratio of seconds says nothing where the tokens differ."""
    columns = ("workload", "system", "real tokens", "padded", "CPU s", "rollout", "judge", "update", "ms a real token",
               "peak MB", "above imports", "floor, s", "GFLOP/s")  # fmt: skip
    rows, notes = [], []
    for workload in ("ragged", "dense"):
        if workload not in parts:
            continue
        both = goals.compared(parts[workload])
        for key, system in SYSTEMS.items():
            one = both[key]
            numbers = [one["cpu_s"], *(one["phases"][phase] for phase in ("rollout", "judge", "update"))]
            cost = 1000 * one["cpu_s"] / one["real_tokens"]
            rows.append(
                [workload, system, f"{one['real_tokens']:.0f}", f"{one['padded_tokens']:.0f}"]
                + [f"{number:.2f}" for number in [*numbers, cost]]
                + [f"{one['peak_mb']:.0f}", f"{one['own_mb']:.0f}", f"{one['floor_s']:.2f}" if key == "ours" else ""]
                + [f"{one['gflops']:.0f}"]
            )
        apart = f"{workload}: the sides' real tokens are {100 * both['tokens_apart']:.1f} % apart"
        warning = f": MORE THAN {100 * goals.ALIKE:.0f} %, seconds do not compare"
        rated = f"; at one rate of arithmetic TRL takes {both['cpu_at_one_rate']:.2f} times our CPU seconds"
        notes.append(apart + ("" if both["alike"] else warning) + rated)
    return Table("An update of 64 episodes, medians over the rounds", columns, rows, notes)


def of_padding(parts: dict[str, Any]) -> Table:
    points = parts["padding"]
    first = goals.per_token(points)[0][1]
    rows = [
        [f"{100 * share:.0f} %", str(point["real_tokens"]), str(point["padded_tokens"]), f"{cost:.2f}",
         f"{cost / first:.2f}", f"{1 / (1 - share):.2f}"]
        for point, (share, cost) in zip(points, goals.per_token(points), strict=True)
    ]  # fmt: skip
    columns = ("padding", "real tokens", "positions read", "ms a real token", "to none", "a full rectangle")
    return Table("Judge and update, as padding grows", columns, rows)


def of_growth(parts: dict[str, Any]) -> Table:
    growth, powers = parts["growth"], goals.exponents(parts["growth"])
    rows = []
    for name, power in powers.items():
        axis = "vocabulary" if name == "vocabulary" else "tokens"
        rows.append([name, axis, *(f"{point[axis]}: {point['cpu_s']:.2f} s" for point in growth[name]), f"{power:.3f}"])
    note = f"attention's pairs are {100 * growth['attention_share_at_longest']:.1f} % of the arithmetic at the longest"
    return Table("Growth", ("what grows", "counted in", "1", "2", "3", "4", "exponent"), rows, [note])


def of_demo(parts: dict[str, Any]) -> Table:
    found = parts["demo"]
    columns = ("process", "CPU s", "of all", "imports", "rest of start-up", "its largest phases", "slowest imports")
    rows, notes = [], []
    for name, stage in found["stages"].items():
        work = [(phase, s) for phase, s in stage["phases"].items() if phase not in demo.START_UP and s >= 0.1][:3]
        imports = stage["phases"].get("imports", 0.0)
        rows.append(
            [name, f"{stage['cpu_s']:.1f}", f"{100 * stage['cpu_s'] / found['cpu_s']:.0f} %", f"{imports:.1f}",
             f"{demo.start_up(stage) - imports:.2f}", ", ".join(f"{phase} {s:.1f}" for phase, s in work),
             ", ".join(f"{package} {s:.1f}" for package, s in list(stage["imports"].items())[:3])]
        )  # fmt: skip
        notes += [f"twice: {name} {double}" for double in stage["doubles"]]
    return Table(f"The demo's chain: {found['cpu_s']:.0f} CPU s", columns, rows, notes)


MAKERS = {"padding": of_padding, "growth": of_growth, "demo": of_demo}


def tables(parts: dict[str, Any]) -> Iterator[Table]:
    """All that can be made of the parts that were measured, the goals first."""
    yield of_goals(parts)
    if "ragged" in parts or "dense" in parts:
        yield side_by_side(parts)
    yield from (make(parts) for name, make in MAKERS.items() if name in parts)


def markdown(made: Sequence[Table]) -> str:
    """For docs/results/performance.md."""
    blocks = []
    for table in made:
        lines = [f"**{table.title}**", ""]
        lines += [f"| {' | '.join(row)} |" for row in (table.columns, ["---"] * len(table.columns), *table.rows)]
        if table.notes:
            lines += ["", *(f"- {note}" for note in table.notes)]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def show(tables: Iterable[Table]) -> None:
    """Print them, each with its notes."""
    for table in tables:
        terminal.table(table.columns, table.rows, title=table.title)
        for note in table.notes:
            terminal.out(note)
        terminal.out()
