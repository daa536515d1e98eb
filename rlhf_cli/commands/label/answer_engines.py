"""The engines that draw the answers to label: of this process, one a policy, or servers that get each in turn."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_cli.commands.common.models import ChatModel
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.models import devices
from rlhf_cli.models.batch import Prompts, Rollout
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.stages.common import engines
from rlhf_cli.stages.common.engines import Drawing, Probe
from rlhf_cli.stages.common.served_policies import ServedPolicies, ServedPolicy


@dataclass
class LocalAnswers:
    """Answers drawn in this process."""

    drawing: Drawing
    engines: dict[str, HFEngine] = field(default_factory=dict)  # by the policy's name

    def draw(self, policy: ChatModel, prompts: Prompts) -> Rollout:
        """Return a policy's answers."""
        if policy.name not in self.engines:
            engine = engines.best_engine(policy.weights, self.drawing)
            engine.update_weights(0, policy.weights)
            self.engines[policy.name] = engine
        return self.engines[policy.name].generate(prompts)

    def close(self) -> None:
        """Do nothing: the process ends."""


@dataclass
class ServedAnswers:
    """Answers drawn by servers."""

    servers: ServedPolicies

    def draw(self, policy: ChatModel, prompts: Prompts) -> Rollout:
        """Return a policy's answers. Raises RLHFError R19, R20."""
        self.servers.use(_served(policy))
        answers = self.servers.engine.generate(prompts)
        self.servers.engine.release_memory()
        return answers.to(devices.device())

    def close(self) -> None:
        """Delete the weights that the servers have read."""
        self.servers.close()


AnswerEngines = LocalAnswers | ServedAnswers


def open_servers(
    config: PPOConfig,
    drawing: Drawing,
    policies: Sequence[ChatModel],
    base: ChatModel,
    *,
    prompts: Sequence[list[int]],
    folder: Path,
    tokenizer: Any,
) -> ServedAnswers:
    """Return the engine of the servers of models.engine in the run's ppo.yaml. Raises RLHFError C17.

    `base`: the SFT model, loaded, with which servers of adapters were started.
    """
    servers = ServedPolicies(
        config,
        drawing,
        {policy.name: policy.parent for policy in policies},
        base=_served(base),
        probe=Probe.of(config, base.weights, prompts),
        folder=folder,
        keep=len(policies),
        tokenizer=tokenizer,
    )
    return ServedAnswers(servers)


def _served(policy: ChatModel) -> ServedPolicy:
    return ServedPolicy(policy.name, policy.parent, policy.weights, lambda: policy.weights, policy.share)
