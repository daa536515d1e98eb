"""What an update's numbers say about the run: R02 rewards all equal, R03 responses without end, R04 KL out of bounds.

Reads only; nothing here changes training.
"""

from dataclasses import asdict, dataclass, field

import torch

from rlhf_cli.errors import Problem, RLHFError
from rlhf_cli.ppo.metrics import Stats
from rlhf_cli.ppo.records import Experience
from rlhf_cli.ppo.settings import PPOSettings

EQUAL_UPDATES = 10  # in a row that end a run
FEW = 0.05  # share of responses that end: fewer are no learning signal for the stop token
NOISE = 4.0  # standard errors that an estimate of KL may lie below 0


class RunStop(RLHFError):
    """The run ends here, and keeps its best policy. `key` is the setting that asks for it."""

    def __init__(self, code: str, text: str, *, key: str, hint: str) -> None:
        super().__init__(code, text, hint=hint)
        self.key = key


@dataclass
class Alarms:
    """Watches a run. What was told once is not told again, also after a resume."""

    equal: int = 0  # updates in a row whose rewards were all equal
    told: list[str] = field(default_factory=list)

    def look(self, step: int, experience: Experience, stats: Stats, settings: PPOSettings) -> list[Problem]:
        """Warnings about update `step`. Raises RLHFError R02 after ten updates of equal rewards, RunStop R04."""
        kl = stats["objective/kl_k1"]
        if settings.kl_stop is not None and kl > settings.kl_stop:
            text = (
                f"step {step}: KL to the SFT policy is {kl:.4g} nats a response, over ppo.kl_stop {settings.kl_stop:g}"
            )
            raise RunStop("R04", text, key="ppo.kl_stop", hint="raise ppo.kl_coef, or lower ppo.learning_rate")
        found = {
            "equal": self._equal(step, experience),
            "endless": self._endless(step, experience, settings),
            "empty": self._empty(step, experience),
            "negative": self._negative(step, experience),
            "skipped": self._skipped(step, stats, settings),
        }
        fresh = {name: problem for name, problem in found.items() if problem and name not in self.told}
        self.told += fresh
        return list(fresh.values())

    def _equal(self, step: int, experience: Experience) -> Problem | None:
        scores = experience.scored.summed
        if len(scores) < 2 or not bool((scores == scores[0]).all()):
            self.equal = 0
            return None
        self.equal += 1
        text = f"step {step}: all {len(scores)} rewards are {float(scores[0]):.6g}"
        hint = "the reward does not tell responses apart: look at them in samples.jsonl, and at the reward model"
        if self.equal >= EQUAL_UPDATES:
            raise RLHFError("R02", f"{text}, for {self.equal} updates in a row", hint=hint)
        return Problem("R02", text, hint=f"{hint}; {EQUAL_UPDATES} such updates in a row end the run")

    def _endless(self, step: int, experience: Experience, settings: PPOSettings) -> Problem | None:
        ended, count = int(experience.rollout.ended.sum()), len(experience.rollout)
        if settings.stop_token == "none" or ended >= FEW * count:
            return None
        text = f"step {step}: {ended} of {count} responses end with the stop token ({ended / count:.0%})"
        hint = "raise ppo.response_length; check ppo.stop_token, and that SFT's rows end with it (rlhf explain T06)"
        return Problem("R03", text, hint=hint)

    def _empty(self, step: int, experience: Experience) -> Problem | None:
        rollout = experience.rollout
        empty, count = int((rollout.ended & (rollout.response_lengths == 1)).sum()), len(rollout)
        if empty < (1 - FEW) * count:
            return None
        text = f"step {step}: {empty} of {count} responses are empty, the stop token alone ({empty / count:.0%})"
        return Problem("R03", text, hint="check that prompts end as those of SFT's rows do, and its chat template")

    def _negative(self, step: int, experience: Experience) -> Problem | None:
        rows = torch.where(experience.mask, experience.logprobs - experience.ref_logprobs, 0).double().sum(1)
        kl = float(rows.mean())
        error = float(rows.std() / len(rows) ** 0.5) if len(rows) > 1 else float("inf")
        if kl >= -NOISE * error:
            return None
        text = (
            f"step {step}: KL to the SFT policy is {kl:.4g} nats a response, below 0 by more than noise ({error:.2g})"
        )
        return Problem("R04", text, hint="responses are not drawn from the distribution that log-probs are read from")

    def _skipped(self, step: int, stats: Stats, settings: PPOSettings) -> Problem | None:
        if not stats["policy/skipped_minibatches"]:
            return None
        text = f"step {step}: the mean ratio of a minibatch passed ppo.ratio_threshold {settings.ratio_threshold:g}"
        hint = "it made no optimizer step; policy/skipped_minibatches counts them; lower ppo.learning_rate"
        return Problem("R08", text, hint=hint)

    def state_dict(self) -> dict[str, object]:
        return asdict(self)
