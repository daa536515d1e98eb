"""How the numbers of a report are told."""

from collections.abc import Iterable, Sequence


def interval(value: float, bounds: Sequence[float] | None) -> str:
    """A value, with its 95 % interval where it has one."""
    return f"{value:.3f} [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else f"{value:.3f}"


def deciding_judge(judges: Iterable[str]) -> str:
    """`gold` where there is one, else a judge that PPO was not trained on, else the reward model."""
    return min(judges, key=lambda name: (name != "gold", name == "reward"))
