"""Snapshots of the policy during a PPO run, and the choice of the best one."""

import math
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf_cli import runs
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.models import hub, save
from rlhf_cli.ppo.experience import Experience, Stats
from rlhf_cli.ppo.scores import unscaled_scores
from rlhf_cli.stages.ppo.setup import PPOComponents

NUM_CANDIDATES = 20


class Snapshots:
    """RUN/ppo/snapshots: the best policy, and `output.snapshots` evenly spaced ones with the last among them.

    With ppo.average they are averaged policies, and the metrics are still those of the trained policies, which sampled.

    The best is the candidate step with the highest mean of a metric over its window. The metrics of an update describe
    the policy before it, which sampled the responses. A candidate's window therefore ends with the update after it, and
    starts after the previous candidate's.
    """

    def __init__(self, config: PPOConfig, components: PPOComponents, cost: runs.CheckpointTimer):
        self.folder = config.folder / runs.SNAPSHOTS
        self.components = components
        self.cost = cost
        self.settings = config.ppo
        self.best_step = 0
        self.best_value = -math.inf
        self.window: list[float] = []  # metric of the updates since the previous candidate
        self.judge = next(iter(config.held_out), None)
        self.metric = f"objective/score/{self.judge}" if self.judge else self._objective_name()

        num_updates = components.num_updates
        self.schedule = evenly_spaced_steps(num_updates, config.output.snapshots)
        # Steps that may become the best, from the initial policy (0) on. Independent of output.save_steps, so that the
        # choice of the best policy is.
        self.candidates = {step - 1 for step in evenly_spaced_steps(num_updates, NUM_CANDIDATES)}
        self.candidates.add(0)

    def _objective_name(self) -> str:
        scores = "objective/scores"
        if self.settings.use_score_scaling:
            scores += " before use_score_scaling"
        return f"{scores} - {self.settings.kl_coef:g} * objective/kl"

    def save_if_due(self, step: int) -> None:
        """Save the policy after update `step` (0: the initial policy) if it is scheduled or a candidate."""
        if step not in self.schedule and step not in self.candidates:
            return
        components = self.components
        card = f"Policy after {step} of {components.num_updates} PPO updates."

        def write(path: Path) -> None:
            save.save_model(components.policy, components.tokenizer, path, card)

        with self.cost.measure(), components.trainer.averaged_policy():
            runs.commit_state(self.folder, runs.step_name(step), write, keep=None)  # `prune` deletes them

    def record_metrics(self, step: int, stats: Stats, experience: Experience) -> None:
        """Add the metrics of update `step` to the window of the policy before it, and push a new best to the Hub."""
        if not self.judge:
            self.window.append(self._objective(stats, experience))
        elif self.metric in stats:  # a judge may score no response of an update
            self.window.append(stats[self.metric])
        candidate = step - 1
        if candidate not in self.candidates or not self.window:
            return
        value = fmean(self.window)
        self.window = []
        if value > self.best_value:
            self.best_step = candidate
            self.best_value = value
            self._push_best()

    def _push_best(self) -> None:
        repo = self.settings.push_to_hub_if_best
        if repo:
            text = f"Policy after {self.best_step} PPO updates, {self.metric} {self.best_value:.4g}"
            hub.push_best(self.path(self.best_step), repo, text)

    def _objective(self, stats: Stats, experience: Experience) -> float:
        """Return PPO's objective, for any kl_in, in units that are the same for all updates.

        The coefficient and the score deviation of an update differ between updates: the initial kl_coef counts, and
        the scores before scaling.
        """
        score = stats["objective/scores"]
        if self.settings.use_score_scaling:
            score = float(unscaled_scores(experience.score_result, self.settings).mean())
        return score - self.settings.kl_coef * stats["objective/kl"]

    def prune(self, step: int, *, finished: bool = False) -> None:
        """Delete snapshots that are neither scheduled nor the best, and those after `step`.

        Call it only after a checkpoint of `step`: a run resumed from an older one may end with the best policy of that
        one.
        """
        for saved in runs.state_steps(self.folder):
            undecided = saved == step and saved in self.candidates and not finished  # the next update measures it
            wanted = saved in self.schedule or saved == self.best_step or undecided
            if saved > step or not wanted:
                runs.delete_state(self.path(saved))

    def manifest_fields(self) -> dict[str, Any]:
        """Return the manifest's fields about the best policy."""
        value = self.best_value if math.isfinite(self.best_value) else None  # the judge scored no response
        return {"best": {"step": self.best_step, "metric": self.metric, "value": value}}

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.best_step, "value": self.best_value, "window": self.window}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best_step = state["step"]
        self.best_value = state["value"]
        self.window = state["window"]

    def path(self, step: int) -> Path:
        """Return the folder of the policy after `step`."""
        return self.folder / runs.step_name(step)


def evenly_spaced_steps(num_updates: int, count: int) -> set[int]:
    """Return `count` evenly spaced steps, the last update among them."""
    steps = {round(num_updates * k / count) for k in range(1, count + 1)}
    return steps - {0}
