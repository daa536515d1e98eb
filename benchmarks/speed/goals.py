"""Compare the measurements with the goals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression, mean, median
from typing import Any

MAX_TOKEN_DIFFERENCE = 0.05  # of the real tokens of both systems, relative
Result = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """A measured value and its goal: a lower bound, or an upper bound if `below`."""

    name: str
    value: float
    goal: float
    stretch: float | None = None
    below: bool = False

    def meets(self, limit: float) -> bool:
        return self.value <= limit if self.below else self.value >= limit

    @property
    def bound(self) -> str:
        sign = "<=" if self.below else ">="
        return f"{sign} {self.goal:g}" + (f" (stretch {self.stretch:g})" if self.stretch is not None else "")

    @property
    def holds(self) -> str:
        if self.stretch is not None and self.meets(self.stretch):
            return "yes, stretch too"
        return "yes" if self.meets(self.goal) else "no"


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Return the exponent of a power law, fitted by least squares to the logarithms of (size, seconds)."""
    sizes, seconds = zip(*points, strict=True)
    return linear_regression([math.log(x) for x in sizes], [math.log(y) for y in seconds]).slope


def merge_rounds(rounds: Sequence[Result]) -> Result:
    """Return medians over the rounds of one system, and means of the tokens."""
    merged = {key: median(each[key] for each in rounds) for key in ("cpu_s", "imports_mb", "peak_mb")}
    merged["own_mb"] = median(each["peak_mb"] - each["imports_mb"] for each in rounds)
    merged |= {key: mean(each[key] for each in rounds) for key in ("real_tokens", "padded_tokens")}
    merged["gflops"] = median(max(each["gflops"].values()) for each in rounds)
    merged["phases"] = {name: median(each["phases"][name] for each in rounds) for name in rounds[0]["phases"]}
    if "over_floor" in rounds[0]:
        merged |= {key: median(each[key] for each in rounds) for key in ("floor_s", "over_floor")}
    return merged


def compare(workload: Result) -> Result:
    """Return the merged rounds of both systems and their ratios."""
    ours, peer = merge_rounds(workload["ours"]), merge_rounds(workload["peer"])
    difference = abs(ours["real_tokens"] - peer["real_tokens"]) / peer["real_tokens"]
    ratios = {"cpu": peer["cpu_s"] / ours["cpu_s"], "memory": peer["own_mb"] / ours["own_mb"]}
    # A CPU second does less on a busy machine: correct for the rate that each process measured.
    ratios["cpu_at_one_rate"] = ratios["cpu"] * peer["gflops"] / ours["gflops"]
    comparable = difference <= MAX_TOKEN_DIFFERENCE
    return {"ours": ours, "peer": peer, **ratios, "token_difference": difference, "comparable": comparable}


def per_token(padding: Sequence[Result]) -> list[tuple[float, float]]:
    """Return (padding share, CPU milliseconds per real token) of each point."""
    return [(point["share"], 1000 * point["cpu_s"] / point["real_tokens"]) for point in padding]


def exponents(growth: Result) -> dict[str, float]:
    """Return the exponents for length and batch (in tokens) and vocabulary."""
    axes = {"length": "tokens", "batch": "tokens", "vocabulary": "vocabulary"}
    return {name: exponent([(point[axis], point["cpu_s"]) for point in growth[name]]) for name, axis in axes.items()}


def verdicts(parts: Result) -> list[Verdict]:
    """Return a verdict for each goal whose part was measured."""
    rows: list[Verdict] = []
    for workload, goal, stretch in (("ragged", 2.7, 3.0), ("dense", 1.3, 1.5)):
        if workload in parts:
            both = compare(parts[workload])
            rows += [
                Verdict(f"{workload}: CPU s per update, TRL / ours", both["cpu"], goal, stretch),
                Verdict(f"{workload}: peak memory above imports, TRL / ours", both["memory"], 2.5),
                Verdict(f"{workload}: update phase / its floor", both["ours"]["over_floor"], 1.5, below=True),
            ]
    if "padding" in parts:
        costs = [cost for _, cost in per_token(parts["padding"])]
        name = "cost per real token, padding 0 to 80 %: max / min"
        rows.append(Verdict(name, max(costs) / min(costs), 1.1, below=True))
    if "growth" in parts:
        names = {"length": "response length, in tokens", "batch": "batch, in tokens", "vocabulary": "vocabulary"}
        for name, power in exponents(parts["growth"]).items():
            rows.append(Verdict(f"exponent of growth: {names[name]}", power, 1.05, below=True))
    if "start" in parts:
        start = parts["start"]
        loads = f" (loads {', '.join(start['heavy'])}!)" if start["heavy"] else ", no torch"
        seconds = math.inf if start["heavy"] else start["cpu_s"]
        rows.append(Verdict(f"rlhf --help: CPU s{loads}", seconds, 0.2, below=True))
    if "demo" in parts:
        count = sum(len(stage["doubles"]) for stage in parts["demo"]["stages"].values())
        rows.append(Verdict("demo: repeated work in a process", count, 0, below=True))
    return rows
