"""What was measured, held against the goals. Pure arithmetic."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression, mean, median
from typing import Any

ALIKE = 0.05  # how far the two sides' tokens may be apart
Found = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """A goal: at least (or, with `below`, at most) so much."""

    name: str
    found: float
    goal: float
    stretch: float | None = None
    below: bool = False

    def meets(self, bound: float) -> bool:
        return self.found <= bound if self.below else self.found >= bound

    @property
    def wanted(self) -> str:
        sign = "<=" if self.below else ">="
        return f"{sign} {self.goal:g}" + (f" (stretch {self.stretch:g})" if self.stretch is not None else "")

    @property
    def holds(self) -> str:
        if self.stretch is not None and self.meets(self.stretch):
            return "yes, stretch too"
        return "yes" if self.meets(self.goal) else "no"


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The power that seconds grow with, fitted by least squares on logarithms of (size, seconds)."""
    sizes, seconds = zip(*points, strict=True)
    return linear_regression([math.log(x) for x in sizes], [math.log(y) for y in seconds]).slope


def side(rounds: Sequence[Found]) -> Found:
    """One system's rounds as one: medians, and the mean of the tokens."""
    merged = {key: median(each[key] for each in rounds) for key in ("cpu_s", "imports_mb", "peak_mb")}
    merged["own_mb"] = median(each["peak_mb"] - each["imports_mb"] for each in rounds)
    merged |= {key: mean(each[key] for each in rounds) for key in ("real_tokens", "padded_tokens")}
    merged["gflops"] = median(max(each["gflops"].values()) for each in rounds)
    merged["phases"] = {name: median(each["phases"][name] for each in rounds) for name in rounds[0]["phases"]}
    if "over_floor" in rounds[0]:
        merged |= {key: median(each[key] for each in rounds) for key in ("floor_s", "over_floor")}
    return merged


def compared(workload: Found) -> Found:
    """{ours, peer, and how they stand to one another} of the rounds of a workload."""
    ours, peer = side(workload["ours"]), side(workload["peer"])
    apart = abs(ours["real_tokens"] - peer["real_tokens"]) / peer["real_tokens"]
    ratios = {"cpu": peer["cpu_s"] / ours["cpu_s"], "memory": peer["own_mb"] / ours["own_mb"]}
    # On a busy machine a CPU second does less: then the sides compare at the rate that each of them found.
    ratios["cpu_at_one_rate"] = ratios["cpu"] * peer["gflops"] / ours["gflops"]
    return {"ours": ours, "peer": peer, **ratios, "tokens_apart": apart, "alike": apart <= ALIKE}


def per_token(padding: Sequence[Found]) -> list[tuple[float, float]]:
    """(padding share, CPU milliseconds a real token)."""
    return [(point["share"], 1000 * point["cpu_s"] / point["real_tokens"]) for point in padding]


def exponents(growth: Found) -> dict[str, float]:
    """By what grows: length and batch in tokens, the vocabulary in its own size."""
    axes = {"length": "tokens", "batch": "tokens", "vocabulary": "vocabulary"}
    return {name: exponent([(point[axis], point["cpu_s"]) for point in growth[name]]) for name, axis in axes.items()}


def verdicts(parts: Found) -> list[Verdict]:
    """A verdict for each goal whose part was measured."""
    found: list[Verdict] = []
    for workload, goal, stretch in (("ragged", 2.7, 3.0), ("dense", 1.3, 1.5)):
        if workload in parts:
            both = compared(parts[workload])
            found += [
                Verdict(f"{workload}: CPU s an update, TRL / ours", both["cpu"], goal, stretch),
                Verdict(f"{workload}: peak memory above imports, TRL / ours", both["memory"], 2.5),
                Verdict(f"{workload}: update phase / its floor", both["ours"]["over_floor"], 1.5, below=True),
            ]
    if "padding" in parts:
        costs = [cost for _, cost in per_token(parts["padding"])]
        found.append(
            Verdict("cost a real token, padding 0 to 80 %: max / min", max(costs) / min(costs), 1.1, below=True)
        )
    if "growth" in parts:
        names = {"length": "response length, in tokens", "batch": "batch, in tokens", "vocabulary": "vocabulary"}
        for name, power in exponents(parts["growth"]).items():
            found.append(Verdict(f"exponent of growth: {names[name]}", power, 1.05, below=True))
    if "start" in parts:
        start = parts["start"]
        loads = f" (loads {', '.join(start['heavy'])}!)" if start["heavy"] else ", no torch"
        seconds = math.inf if start["heavy"] else start["cpu_s"]
        found.append(Verdict(f"rlhf --help: CPU s{loads}", seconds, 0.2, below=True))
    if "demo" in parts:
        count = sum(len(stage["doubles"]) for stage in parts["demo"]["stages"].values())
        found.append(Verdict("demo: things that a process does twice", count, 0, below=True))
    return found
