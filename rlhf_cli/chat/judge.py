"""The numbers below a reply: what PPO's sources of reward say of it, and how far it is from the SFT model."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from rlhf_cli.chat.cast import Cast
from rlhf_cli.chat.turns import Numbers
from rlhf_cli.config import Options
from rlhf_cli.data.tokens import Conversation
from rlhf_cli.errors import RLHFError
from rlhf_cli.inputs import models
from rlhf_cli.models.batch import EnsembleScores, Rollout
from rlhf_cli.ppo.scores import weighted_sum
from rlhf_cli.rewards import EnsembleReward, RetokenizingReward, RewardFn, RewardSource
from rlhf_cli.stages import ppo_setup
from rlhf_cli.stages.eval import sequence_kl


class Judge:
    """Scores replies as PPO and the evaluation do. `sft` is the loaded SFT model; None: no KL is measured.

    Raises RLHFError as the stages do for reward models that cannot be loaded.
    """

    def __init__(self, cast: Cast, options: Options, tokenizer: Any, stop_token_id: int | None, sft: Any) -> None:
        self.config, self.sft, self.stop_token_id, self.missing = cast.config, sft, stop_token_id, [*cast.missing]
        texts, rewards = self._texts(cast, options)
        config = cast.config.model_copy(update={"rewards": rewards})
        writing = models.Writing(cast.roles[0].model, tokenizer, stop_token_id, [])
        cache = ppo_setup.RewardModelCache(config, options, cast.parents, writing)
        self.sources: dict[str, RewardSource] = ppo_setup.build_reward_sources(config, texts, cache)

    def _texts(self, cast: Cast, options: Options) -> tuple[dict[str, RewardFn], dict[str, Any]]:
        """The sources that read text, and the config's sections of all that can be asked."""
        texts: dict[str, RewardFn] = {}
        rewards: dict[str, Any] = {}
        for name in cast.rewards:
            alone = {name: cast.config.rewards[name]}
            try:
                texts |= ppo_setup.build_reward_fns(
                    cast.config.model_copy(update={"rewards": alone}), options, cast.parents
                )
            except RLHFError as error:
                self.missing.append(f"no {name}: {error.problems[0].text}")
            else:
                rewards |= alone
        return texts, rewards

    def numbers(self, policy: Any, prompt: str | Conversation, ids: list[int], response: list[int]) -> Numbers:
        """Of one reply of `policy` to a prompt, both as token ids. KL is read at the temperature of the training.

        Raises RLHFError R05 where a source fails or gives no finite number, R01 where KL is none.
        """
        for source in self.sources.values():
            for model in source.members.values() if isinstance(source, EnsembleReward) else [source]:
                if isinstance(model, RetokenizingReward):
                    model.add_prompt(ids, prompt)
        rollout = Rollout.from_lists([ids], [response], stop_token_id=self.stop_token_id).to(policy.device)
        scores = {name: self._score(name, source, rollout) for name, source in self.sources.items()}
        kl = None
        if self.sft is not None and policy is not self.sft:
            (kl,) = sequence_kl(policy, self.sft, rollout, self.config.ppo.temperature, max_rows=1)
            if not math.isfinite(kl):
                raise RLHFError("R01", f"the KL of the reply is {kl}: a model gives no finite logits for it")
        return Numbers(scores, self._total(scores), kl)

    def _score(self, name: str, source: RewardSource, rollout: Rollout) -> float:
        said = source(rollout)
        score = float(said.score if isinstance(said, EnsembleScores) else said)
        if not math.isfinite(score):
            raise RLHFError("R05", f"reward `{name}` gave {score}", hint="return a finite number")
        return score

    def _total(self, scores: Mapping[str, float]) -> float | None:
        """The sum that PPO maximises; None where it is the only score that counts, or one of its parts is missing."""
        parts_of_it = {name: source for name, source in self.config.rewards.items() if source.weight}
        alone = len(parts_of_it) == 1 and all(each.weight == 1 and not each.clip for each in parts_of_it.values())
        if alone or not parts_of_it.keys() <= scores.keys():
            return None
        raw = {name: torch.tensor([scores[name]]) for name in parts_of_it}
        weights = {name: source.weight for name, source in parts_of_it.items()}
        clips = {name: source.clip for name, source in parts_of_it.items() if source.clip is not None}
        return float(weighted_sum(raw, weights, clips))
