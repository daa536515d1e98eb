"""The figure: seconds and memory beside the peer's, what padding costs, and how cost grows."""

from pathlib import Path
from typing import Any

from benchmarks.speed import goals
from benchmarks.speed.tables import SYSTEMS

OURS, TRL, IDEAL = "#1f5fa8", "#d1660a", "#888888"
SHADES = {"rollout": 0.35, "judge": 0.6, "update": 1.0}


def draw(parts: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "rlhf"  # the same picture is the same file
    import matplotlib.pyplot as plt

    figure, ((seconds, memory), (padding, growth)) = plt.subplots(2, 2, figsize=(10, 7.6), layout="constrained")
    if workloads := {name: goals.compared(parts[name]) for name in ("ragged", "dense") if name in parts}:
        _sides(seconds, memory, workloads)
    if "padding" in parts:
        _padding(padding, parts["padding"])
    if "growth" in parts:
        _growth(growth, parts["growth"])
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _sides(seconds: Any, memory: Any, workloads: dict[str, Any]) -> None:
    """Bars: ours and the peer's for each workload, seconds in their phases."""
    for number, both in enumerate(workloads.values()):
        for shift, (key, color) in enumerate((("ours", OURS), ("peer", TRL))):
            place, bottom, one = number + 0.4 * shift, 0.0, both[key]
            for phase, shade in SHADES.items():
                label = f"{SYSTEMS[key]}, {phase}" if number == 0 else None
                height = one["phases"][phase]
                seconds.bar(place, height, 0.36, bottom, color=color, alpha=shade, label=label)
                bottom += height
            memory.bar(place, one["own_mb"], 0.36, color=color, label=SYSTEMS[key] if number == 0 else None)
            memory.text(place, one["own_mb"], f"{one['own_mb']:.0f}", ha="center", va="bottom", fontsize=8)
        least = both["ours"]["floor_s"] + both["ours"]["phases"]["rollout"] + both["ours"]["phases"]["judge"]
        label = "update at its floor" if number == 0 else None
        seconds.hlines(least, number - 0.18, number + 0.18, color="black", linewidth=1.2, linestyle="--", label=label)
    for axis, ratio, text in ((seconds, "cpu", "CPU s an update"), (memory, "memory", "peak MB above the imports")):
        told = [f"{name}\nTRL takes {both[ratio]:.2f} times ours" for name, both in workloads.items()]
        axis.set_xticks([number + 0.2 for number in range(len(told))], told)
        axis.set_ylim(0, 1.4 * axis.get_ylim()[1])  # room for the legend
        axis.set_ylabel(text)
        axis.legend(fontsize=7, frameon=False, loc="upper left", ncols=2)


def _padding(axis: Any, points: list[dict[str, Any]]) -> None:
    costs = goals.per_token(points)
    shares, first = [100 * share for share, _ in costs], costs[0][1]
    axis.plot(shares, [cost / first for _, cost in costs], "o-", color=OURS, label="rlhf, judge and update")
    steps = [step / 100 for step in range(81)]
    axis.plot([100 * s for s in steps], [1 / (1 - s) for s in steps], "--", color=IDEAL, label="a full rectangle")
    axis.set(xlabel="padding of the batch's rectangle, %", ylabel="CPU s a real token, to no padding", ylim=(0, None))
    axis.legend(fontsize=8, frameon=False)


def _growth(axis: Any, growth: dict[str, Any]) -> None:
    for (name, power), style in zip(goals.exponents(growth).items(), ("o-", "s-", "^-"), strict=True):
        size = "vocabulary" if name == "vocabulary" else "tokens"
        first = growth[name][0]
        grown = [point[size] / first[size] for point in growth[name]]
        axis.plot(grown, [p["cpu_s"] / first["cpu_s"] for p in growth[name]], style, label=f"{name}: {power:.2f}")
    axis.plot([1, 8], [1, 8], "--", color=IDEAL, linewidth=1, label="in proportion")
    axis.set(xscale="log", yscale="log", xlabel="times as many tokens (or vocabulary)", ylabel="times the CPU s")
    ticks = [1, 2, 4, 8]
    axis.set_xticks(ticks, list(map(str, ticks)))
    axis.set_yticks(ticks, list(map(str, ticks)))
    axis.minorticks_off()
    axis.legend(fontsize=8, frameon=False, title="exponent", title_fontsize=8)
