"""Policies kept along the way, Hugging Face folders as model/ is one: some evenly over the run, and the best."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf_cli import checkpoints
from rlhf_cli.config import PPOConfig
from rlhf_cli.models import publishing, saving
from rlhf_cli.ppo.experience import Experience
from rlhf_cli.ppo.metrics import Stats
from rlhf_cli.ppo.scores import unscaled_scores
from rlhf_cli.ppo.settings import PPOSettings
from rlhf_cli.stages.ppo.parts import Parts

# What PPO maximises, wherever the KL penalty goes. Where a judge is held out, the best policy is the judge's choice.
METRIC = "objective/scores - objective/kl_coef * objective/kl"
UNSCALED = "objective/scores before use_score_scaling"
POINTS = 20


@dataclass
class Best:
    """The step whose policy has the highest mean of a metric, over the responses up to its own since the point before.

    An update's numbers are of responses that the policy before it wrote: they tell nothing of the policy after it.
    """

    step: int | None = None
    value: float | None = None
    window: list[float] = field(default_factory=list)  # of the updates since the last point

    def beaten_by(self, step: int) -> bool:
        """Close the window, whose last responses the policy after `step` wrote: whether that one is the best so far."""
        value, self.window = fmean(self.window), []
        if self.value is not None and value <= self.value:
            return False
        self.step, self.value = step, value
        return True


class Snapshots:
    """RUN/ppo/snapshots: `count` of them spread over the updates, the last among them, and the best of some points."""

    def __init__(self, config: PPOConfig, parts: Parts, cost: checkpoints.Cost):
        self.folder, self.parts, self.best, self.cost = config.folder / checkpoints.SNAPSHOTS, parts, Best(), cost
        self.push_to, count = config.ppo.push_to_hub_if_best, config.output.snapshots
        self.settings, self.judge = config.ppo, next(iter(config.held_out), None)
        self.metric = f"objective/score/{self.judge}" if self.judge else _metric(config.ppo)
        self.even = spread(parts.updates, count)
        # The policies that may be the best, from the SFT policy on. Not by output.save_steps: what is best must not
        # depend on it.
        self.candidates = {0} | {step - 1 for step in spread(parts.updates, POINTS)}

    def keep(self, step: int) -> None:
        """Keep the policy after update `step`, 0 the SFT policy, where it is time to, or where it may be the best."""
        if step in self.even or step in self.candidates:
            self._save(step)

    def look(self, step: int, stats: Stats, experience: Experience) -> None:
        """By the numbers of update `step`: whether the policy before it is the best so far."""
        self.best.window.append(stats[self.metric] if self.judge else self._maximised(stats, experience))
        candidate = step - 1
        if candidate in self.candidates and self.best.beaten_by(candidate) and self.push_to:
            text = f"Policy after {candidate} PPO updates, {self.metric} {self.best.value:.4g}"
            publishing.push_best(self.path(candidate), self.push_to, text)

    def _maximised(self, stats: Stats, experience: Experience) -> float:
        """The objective in one unit for all updates: ppo.kl_coef as the run began with it, and scores before they are
        scaled. The coefficient and the running deviation of an update are those of that update alone.

        A run that began before this rule goes on by METRIC: its best value so far is in that unit.
        """
        if self.metric == METRIC:
            return stats["objective/scores"] - stats["objective/kl_coef"] * stats["objective/kl"]
        score = stats["objective/scores"]
        if self.settings.use_score_scaling:
            score = float(unscaled_scores(experience.score_result, self.settings).mean())
        return score - self.settings.kl_coef * stats["objective/kl"]

    def tidy(self, step: int, *, at_the_end: bool = False) -> None:
        """Now that a state after `step` knows the best one: drop those that nothing keeps, or that come later.

        Not before: a run that goes on from an older state may end with the best policy that this one knew.
        """
        for other in checkpoints.state_steps(self.folder):
            untold = other == step and other in self.candidates and not at_the_end  # the next numbers are of it
            if other > step or not (other in self.even or other == self.best.step or untold):
                checkpoints.drop_state(self.path(other))

    @property
    def best_step(self) -> int:
        assert self.best.step is not None, "the SFT policy is a candidate"
        return self.best.step

    def fields(self) -> dict[str, Any]:
        """What the manifest says of it."""
        return {"best": {"step": self.best.step, "metric": self.metric, "value": self.best.value}}

    def state_dict(self) -> dict[str, Any]:
        return {**asdict(self.best), "metric": self.metric}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        best = dict(state)
        metric = best.pop("metric", METRIC)  # older states do not name it
        self.metric = self.metric if self.judge else metric
        self.best = Best(**best)

    def _save(self, step: int) -> None:
        card = f"Policy after {step} of {self.parts.updates} PPO updates."
        policy, tokenizer = self.parts.policy, self.parts.tokenizer
        with self.cost.one():
            checkpoints.commit_state(
                self.folder,
                self.path(step).name,
                lambda path: saving.save_model(policy, tokenizer, path, card),
                keep=None,  # `tidy` drops them, never as the oldest
            )

    def path(self, step: int) -> Path:
        """The folder of the policy after `step`."""
        return self.folder / f"step_{step:06d}"


def _metric(settings: PPOSettings) -> str:
    """What `_maximised` computes, in words; as in the log where no update has a coefficient or a scale of its own."""
    watchdog = settings.watchdog
    acting = {watchdog.action, *watchdog.actions.values()} if watchdog else set()
    if not (settings.use_score_scaling or settings.adap_kl_ctrl or "raise_kl_coef" in acting):
        return METRIC
    return f"{UNSCALED if settings.use_score_scaling else 'objective/scores'} - {settings.kl_coef:g} * objective/kl"


def spread(updates: int, count: int) -> set[int]:
    """`count` steps spread evenly over the run, the last one among them."""
    return {round(updates * k / count) for k in range(1, count + 1)} - {0} if count else set()
