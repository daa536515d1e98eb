"""Tables for the terminal and Markdown, and the figure."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.speed import cli_time, goals
from rlhf_cli import terminal

Parts = dict[str, Any]
SYSTEMS = {"ours": "rlhf", "peer": "TRL 1.12"}
PHASES = {"rollout": "rollout", "judge": "scoring", "update": "update"}  # key of a result -> its name in the report
COLORS = {"ours": "#1f5fa8", "peer": "#d1660a"}
OPACITY = {"rollout": 0.35, "judge": 0.6, "update": 1.0}
IDEAL = "#888888"


class Table(NamedTuple):
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def goals_table(parts: Parts) -> Table:
    rows = [[goal.name, goal.bound, f"{goal.value:.3g}", goal.holds] for goal in goals.verdicts(parts)]
    return Table("Goals", ("what", "goal", "measured", "holds"), rows)


def comparison_table(parts: Parts) -> Table:
    """Return seconds next to tokens: a ratio of seconds means nothing if the tokens differ."""
    columns = ("workload", "system", "real tokens", "padded", "CPU s", *PHASES.values(), "ms per real token",
               "peak MB", "above imports", "floor, s", "GFLOP/s")  # fmt: skip
    rows, notes = [], []
    for workload in ("ragged", "dense"):
        if workload not in parts:
            continue
        both = goals.compare(parts[workload])
        for key, system in SYSTEMS.items():
            result = both[key]
            cost = 1000 * result["cpu_s"] / result["real_tokens"]
            numbers = [result["cpu_s"], *(result["phases"][phase] for phase in PHASES), cost]
            rows.append(
                [workload, system, f"{result['real_tokens']:.0f}", f"{result['padded_tokens']:.0f}"]
                + [f"{number:.2f}" for number in numbers]
                + [f"{result['peak_mb']:.0f}", f"{result['own_mb']:.0f}"]
                + [f"{result['floor_s']:.2f}" if key == "ours" else "", f"{result['gflops']:.0f}"]
            )
        limit = 100 * goals.MAX_TOKEN_DIFFERENCE
        warning = "" if both["comparable"] else f": MORE THAN {limit:.0f} %, seconds are not comparable"
        notes.append(
            f"{workload}: the real tokens of the systems differ by {100 * both['token_difference']:.1f} %{warning}; "
            f"at the same rate of arithmetic TRL takes {both['cpu_at_one_rate']:.2f} times our CPU seconds"
        )
    return Table("An update of 64 episodes, medians over the rounds", columns, rows, notes)


def padding_table(parts: Parts) -> Table:
    points = parts["padding"]
    first = goals.per_token(points)[0][1]
    rows = [
        [f"{100 * share:.0f} %", str(point["real_tokens"]), str(point["padded_tokens"]), f"{cost:.2f}",
         f"{cost / first:.2f}", f"{1 / (1 - share):.2f}"]
        for point, (share, cost) in zip(points, goals.per_token(points), strict=True)
    ]  # fmt: skip
    columns = ("padding", "real tokens", "positions read", "ms per real token", "relative", "with padding")
    return Table("Scoring and update by share of padding", columns, rows)


def growth_table(parts: Parts) -> Table:
    growth, rows = parts["growth"], []
    for name, exponent in goals.exponents(growth).items():
        unit = "vocabulary" if name == "vocabulary" else "tokens"
        points = [f"{point[unit]}: {point['cpu_s']:.2f} s" for point in growth[name]]
        rows.append([name, unit, *points, f"{exponent:.3f}"])
    share = 100 * growth["attention_share_at_longest"]
    note = f"attention pairs are {share:.1f} % of the arithmetic at the longest response"
    return Table("Growth", ("varied", "unit", "1", "2", "3", "4", "exponent"), rows, [note])


def demo_table(parts: Parts) -> Table:
    demo = parts["demo"]
    columns = ("process", "CPU s", "share", "imports", "other start-up", "largest phases", "slowest imports")
    rows, notes = [], []
    for name, stage in demo["stages"].items():
        work = [
            f"{phase} {s:.1f}" for phase, s in stage["phases"].items() if phase not in cli_time.START_UP and s >= 0.1
        ]
        imports = stage["phases"].get("imports", 0.0)
        rows.append(
            [name, f"{stage['cpu_s']:.1f}", f"{100 * stage['cpu_s'] / demo['cpu_s']:.0f} %", f"{imports:.1f}",
             f"{cli_time.start_up_seconds(stage) - imports:.2f}", ", ".join(work[:3]),
             ", ".join(f"{package} {s:.1f}" for package, s in list(stage["imports"].items())[:3])]
        )  # fmt: skip
        notes += [f"repeated work: {name} {call}" for call in stage["doubles"]]
    return Table(f"The demo's chain: {demo['cpu_s']:.0f} CPU s", columns, rows, notes)


def tables(parts: Parts) -> Iterator[Table]:
    """Return the tables of the measured parts, goals first."""
    yield goals_table(parts)
    if "ragged" in parts or "dense" in parts:
        yield comparison_table(parts)
    for name, table in (("padding", padding_table), ("growth", growth_table), ("demo", demo_table)):
        if name in parts:
            yield table(parts)


def markdown(tables: Iterable[Table]) -> str:
    blocks = []
    for table in tables:
        lines = [f"**{table.title}**", ""]
        lines += [f"| {' | '.join(row)} |" for row in (table.columns, ["---"] * len(table.columns), *table.rows)]
        if table.notes:
            lines += ["", *(f"- {note}" for note in table.notes)]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def show(tables: Iterable[Table]) -> None:
    """Print the tables with their notes."""
    for table in tables:
        terminal.table(table.columns, table.rows, title=table.title)
        for note in table.notes:
            terminal.out(note)
        terminal.out()


def draw(parts: Parts, path: Path) -> None:
    """Draw seconds and memory of both systems, the cost of padding, and the growth of the cost."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "rlhf"  # makes the file reproducible
    import matplotlib.pyplot as plt

    figure, ((seconds, memory), (padding, growth)) = plt.subplots(2, 2, figsize=(10, 7.6), layout="constrained")
    if workloads := {name: goals.compare(parts[name]) for name in ("ragged", "dense") if name in parts}:
        _draw_comparison(seconds, memory, workloads)
    if "padding" in parts:
        _draw_padding(padding, parts["padding"])
    if "growth" in parts:
        _draw_growth(growth, parts["growth"])
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _draw_comparison(seconds: Any, memory: Any, workloads: Parts) -> None:
    """Draw bars for each system and workload; seconds are stacked by phase."""
    for number, both in enumerate(workloads.values()):
        first = number == 0  # only the bars of the first workload enter the legend
        for shift, (key, system) in enumerate(SYSTEMS.items()):
            x, bottom, result = number + 0.4 * shift, 0.0, both[key]
            for phase, name in PHASES.items():
                height, label = result["phases"][phase], f"{system}, {name}" if first else None
                seconds.bar(x, height, 0.36, bottom, color=COLORS[key], alpha=OPACITY[phase], label=label)
                bottom += height
            memory.bar(x, result["own_mb"], 0.36, color=COLORS[key], label=system if first else None)
            memory.text(x, result["own_mb"], f"{result['own_mb']:.0f}", ha="center", va="bottom", fontsize=8)
        ours = both["ours"]
        bound = ours["floor_s"] + ours["phases"]["rollout"] + ours["phases"]["judge"]
        label = "update at its floor" if first else None
        seconds.hlines(bound, number - 0.18, number + 0.18, color="black", linewidth=1.2, linestyle="--", label=label)
    for axis, ratio, text in ((seconds, "cpu", "CPU s per update"), (memory, "memory", "peak MB above the imports")):
        names = [f"{name}\nTRL takes {both[ratio]:.2f} times ours" for name, both in workloads.items()]
        axis.set_xticks([number + 0.2 for number in range(len(names))], names)
        axis.set_ylim(0, 1.4 * axis.get_ylim()[1])  # space for the legend
        axis.set_ylabel(text)
        axis.legend(fontsize=7, frameon=False, loc="upper left", ncols=2)


def _draw_padding(axis: Any, points: list[dict[str, Any]]) -> None:
    costs = goals.per_token(points)
    shares, first = [100 * share for share, _ in costs], costs[0][1]
    axis.plot(shares, [cost / first for _, cost in costs], "o-", color=COLORS["ours"], label="rlhf, scoring and update")
    steps = [step / 100 for step in range(81)]
    axis.plot([100 * s for s in steps], [1 / (1 - s) for s in steps], "--", color=IDEAL, label="with padding")
    axis.set(xlabel="share of padding in the batch, %", ylabel="relative CPU s per real token", ylim=(0, None))
    axis.legend(fontsize=8, frameon=False)


def _draw_growth(axis: Any, growth: dict[str, Any]) -> None:
    for (name, exponent), style in zip(goals.exponents(growth).items(), ("o-", "s-", "^-"), strict=True):
        unit = "vocabulary" if name == "vocabulary" else "tokens"
        first = growth[name][0]
        sizes = [point[unit] / first[unit] for point in growth[name]]
        axis.plot(sizes, [p["cpu_s"] / first["cpu_s"] for p in growth[name]], style, label=f"{name}: {exponent:.2f}")
    axis.plot([1, 8], [1, 8], "--", color=IDEAL, linewidth=1, label="proportional")
    axis.set(xscale="log", yscale="log", xlabel="relative tokens (or vocabulary)", ylabel="relative CPU s")
    ticks = [1, 2, 4, 8]
    axis.set_xticks(ticks, list(map(str, ticks)))
    axis.set_yticks(ticks, list(map(str, ticks)))
    axis.minorticks_off()
    axis.legend(fontsize=8, frameon=False, title="exponent", title_fontsize=8)
