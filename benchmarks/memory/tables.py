"""What was measured, beside what `rlhf plan` says, in tables of at most 100 columns."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.memory import world
from benchmarks.memory.world import Case
from benchmarks.speed.goals import Verdict
from benchmarks.speed.tables import Table

Found = dict[str, Any]
PEER = "peer-lora"
BOUND = 1.15  # times the weights of one model, for the four on one base


def mb(count: float) -> str:
    return f"{count / 1e6:.0f}"


def beside(measured: float, planned: float | None) -> str:
    """A measured number of MB, what `rlhf plan` says, and their ratio."""
    return mb(measured) if planned is None else f"{mb(measured)} / {mb(planned)} ({measured / planned:.2f})"


def row(title: str, one: Found, malloc: str) -> list[str]:
    """Weights, what learning takes, the peak, and that of the training by itself. The peer has no plan."""
    plan = one.get("plan", {})
    holes = plan["holes"] if plan and malloc == "keeps" else 0
    learning = one["gradients"] + one["optimizer"]
    return [
        title,
        beside(one["weights"], plan.get("weights")),
        beside(learning, plan.get("learning")),
        beside(one["peak"], plan["peak"] + holes if plan else None),
        mb(one["training"]),
    ]


def of_cases(title: str, cases: Sequence[Case], parts: Found, malloc: str) -> Table:
    columns = ("MB / plan (ratio)", "weights", "learning", "peak", "training")
    return Table(title, columns, [row(case.title, parts[case.name], malloc) for case in cases])


def of_ppo(parts: Found, malloc: str) -> Table:
    """PPO: four models."""
    table = of_cases("PPO: policy, reference, reward and value model", world.PPO, parts, malloc)
    ours, peer = parts["ppo-one-base"], parts[PEER]
    weights, peak = (peer[kind] / ours[kind] for kind in ("weights", "peak"))
    notes = [
        f"TRL 1.12's LoRA PPO takes {weights:.2f} times the weights of our one base, {peak:.2f} times its peak",
        "PPO has no qlora: ppo.yaml refuses models.adapters.kind: qlora; the stages before it have it",
    ]
    return table._replace(rows=[*table.rows, row("TRL 1.12, peft_config", peer, malloc)], notes=notes)


def of_stages(parts: Found, malloc: str) -> Table:
    table = of_cases("SFT and reward model, which qlora is for", world.STAGES, parts, malloc)
    mapped = mb(max(parts[f"{stage}-qlora"]["mapped"] for stage in ("sft", "reward")))
    note = f"qlora: {mapped} MB of the peak are pages of the base's file, which the kernel may take back"
    return table._replace(notes=[note])


def verdict(parts: Found) -> Verdict:
    one = parts["ppo-one-base"]
    return Verdict("weights of the four on one base / of one model", one["weights"] / one["one"], BOUND, below=True)


def tables(parts: Found, malloc: str) -> Iterator[Table]:
    """All of them; the last one says whether the goal is met."""
    yield of_ppo(parts, malloc)
    yield of_stages(parts, malloc)
    goal = verdict(parts)
    libraries = sorted((mb(each["libraries"]) for each in parts.values()), key=int)
    span = f"{libraries[0]} to {libraries[-1]} MB" if libraries[0] != libraries[-1] else f"{libraries[0]} MB"
    notes = [
        "learning: gradients and the optimizer's averages, after a step; the plans of SFT and reward tell",
        "their fullest moment alone. peak: of the whole process, training: of its updates; both above the",
        f"{span} of libraries. malloc {malloc} what is freed",
    ]
    cells = [goal.name, goal.wanted, f"{goal.found:.3f}", goal.holds]
    yield Table("Goal", ("what", "goal", "found", "holds"), [cells], notes)
