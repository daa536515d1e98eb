"""Policies kept along the way, plain Hugging Face folders: some evenly over the run, and the best."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf_cli import checkpoints
from rlhf_cli.config import PPOConfig
from rlhf_cli.models import loading, publishing
from rlhf_cli.ppo.metrics import Stats
from rlhf_cli.stages.ppo.parts import Parts

# What PPO maximises, wherever the KL penalty goes. Where a judge is held out, the best policy is the judge's choice.
METRIC = "objective/scores - objective/kl_coef * objective/kl"
POINTS = 20


@dataclass
class Best:
    """The step with the highest mean of a metric since the point before it."""

    step: int | None = None
    value: float | None = None
    window: list[float] = field(default_factory=list)  # of the updates since the last point

    def beaten_at(self, step: int) -> bool:
        """Close the window at `step`: whether that is the best so far."""
        value, self.window = fmean(self.window), []
        if self.value is not None and value <= self.value:
            return False
        self.step, self.value = step, value
        return True


class Snapshots:
    """RUN/ppo/snapshots: `count` of them spread over the updates, the last among them, and the best of some points."""

    def __init__(self, config: PPOConfig, parts: Parts, cost: checkpoints.Cost):
        self.folder, self.parts, self.best, self.cost = config.folder / "snapshots", parts, Best(), cost
        self.push_to, count = config.ppo.push_to_hub_if_best, config.output.snapshots
        self.metric = f"objective/score/{config.held_out[0]}" if config.held_out else METRIC
        self.even = spread(parts.updates, count)
        # Not output.save_steps: what is best must not depend on it. A run may be stopped in its first tenth.
        self.points = {1} | spread(parts.updates, POINTS)

    def look(self, step: int, stats: Stats) -> None:
        """After update `step`: keep the policy where it is time to, or where it is the best so far."""
        maximised = stats["objective/scores"] - stats["objective/kl_coef"] * stats["objective/kl"]
        self.best.window.append(maximised if self.metric == METRIC else stats[self.metric])
        better = step in self.points and self.best.beaten_at(step)
        if better or step in self.even:
            self._save(step)
        if better and self.push_to:
            publishing.push(
                self.path(step), self.push_to, f"Policy after {step} PPO updates, {self.metric} {self.best.value:.4g}"
            )

    def tidy(self, step: int) -> None:
        """Now that a state after `step` knows the best one: drop those that are neither even nor best, or come later.

        Not before: a run that goes on from an older state may end with the best policy that this one knew.
        """
        for other in checkpoints.state_steps(self.folder):
            if other > step or (other not in self.even and other != self.best.step):
                checkpoints.drop_state(self.path(other))

    @property
    def best_step(self) -> int:
        assert self.best.step is not None, "the first update is a point"
        return self.best.step

    def fields(self) -> dict[str, Any]:
        """What the manifest says of it."""
        return {"best": {"step": self.best.step, "metric": self.metric, "value": self.best.value}}

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.best)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = Best(**state)

    def _save(self, step: int) -> None:
        card = f"Policy after {step} of {self.parts.updates} PPO updates."
        trainer, tokenizer = self.parts.trainer, self.parts.tokenizer
        with self.cost.one():
            checkpoints.commit_state(
                self.folder,
                self.path(step).name,
                lambda path: loading.save_model(trainer.policy, tokenizer, path, card),
                keep=None,  # `tidy` drops them, never as the oldest
            )

    def path(self, step: int) -> Path:
        """The folder of the policy after `step`."""
        return self.folder / f"step_{step:06d}"


def spread(updates: int, count: int) -> set[int]:
    """`count` steps spread evenly over the run, the last one among them."""
    return {round(updates * k / count) for k in range(1, count + 1)} - {0} if count else set()
