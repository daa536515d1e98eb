"""Tables of measured memory and of the estimates of `rlhf plan`, at most 100 columns wide."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.memory import cases
from benchmarks.memory.cases import Case
from benchmarks.speed.goals import Verdict
from benchmarks.speed.report import Table

Results = dict[str, Any]
PEER = "peer-lora"
BOUND = 1.15  # times the weights of one model, for four models on a shared base


def mb(count: float) -> str:
    return f"{count / 1e6:.0f}"


def with_plan(measured: float, planned: float | None) -> str:
    """Format measured MB, the estimate of `rlhf plan`, and their ratio."""
    return mb(measured) if planned is None else f"{mb(measured)} / {mb(planned)} ({measured / planned:.2f})"


def row(title: str, result: Results, malloc: str) -> list[str]:
    """Return the cells of a case. The result of TRL has no plan."""
    plan = result.get("plan", {})
    not_returned = plan["holes"] if plan and malloc == "keeps" else 0
    return [
        title,
        with_plan(result["weights"], plan.get("weights")),
        with_plan(result["gradients"] + result["optimizer"], plan.get("learning")),
        with_plan(result["peak"], plan["peak"] + not_returned if plan else None),
        mb(result["training"]),
    ]


def case_table(title: str, cases: Sequence[Case], results: Results, malloc: str) -> Table:
    columns = ("MB / plan (ratio)", "weights", "learning", "peak", "training")
    return Table(title, columns, [row(case.title, results[case.name], malloc) for case in cases])


def ppo_table(results: Results, malloc: str) -> Table:
    table = case_table("PPO: policy, reference, reward and value model", cases.PPO, results, malloc)
    ours, peer = results["ppo-one-base"], results[PEER]
    weights, peak = (peer[kind] / ours[kind] for kind in ("weights", "peak"))
    notes = [
        f"TRL 1.12's LoRA PPO takes {weights:.2f} times the weights of our shared base, {peak:.2f} times its peak",
        "PPO does not support models.adapters.kind: qlora; SFT and the reward model do",
    ]
    return table._replace(rows=[*table.rows, row("TRL 1.12, peft_config", peer, malloc)], notes=notes)


def stage_table(results: Results, malloc: str) -> Table:
    table = case_table("SFT and reward model", cases.STAGES, results, malloc)
    mapped = mb(max(results[f"{stage}-qlora"]["mapped"] for stage in ("sft", "reward")))
    note = f"qlora: {mapped} MB of the peak are pages of the base's file, which the kernel may reclaim"
    return table._replace(notes=[note])


def tables(results: Results, malloc: str) -> Iterator[Table]:
    """Return all tables, the goal last."""
    yield ppo_table(results, malloc)
    yield stage_table(results, malloc)
    shared = results["ppo-one-base"]
    ratio = shared["weights"] / shared["one"]
    goal = Verdict("weights of four models on a shared base / of one model", ratio, BOUND, below=True)
    libraries = sorted((mb(result["libraries"]) for result in results.values()), key=int)
    span = f"{libraries[0]} to {libraries[-1]} MB" if libraries[0] != libraries[-1] else f"{libraries[0]} MB"
    notes = [
        "learning: gradients and optimizer moments after a step (`rlhf plan` estimates them for PPO only).",
        f"peak: of the whole process, training: of its updates; both without {span} of libraries.",
        f"malloc {malloc} freed memory",
    ]
    cells = [goal.name, goal.bound, f"{ratio:.3f}", goal.holds]
    yield Table("Goal", ("what", "goal", "measured", "holds"), [cells], notes)
