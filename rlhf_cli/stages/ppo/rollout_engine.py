"""The rollout engine of a PPO run: one of this process, or servers that get the policy's weights."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli import data, system, terminal
from rlhf_cli.config.ppo import PPOConfig, PPOSettings
from rlhf_cli.models import lora, save
from rlhf_cli.models.batch import StopTokenId
from rlhf_cli.models.parallel import ProcessGroup
from rlhf_cli.planning import fits
from rlhf_cli.ppo.rollout import HFEngine, RolloutEngine
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages.common import engines
from rlhf_cli.stages.common.engines import Drawing


def drawing(settings: PPOSettings, tokenizer: Any, stop_token_id: StopTokenId) -> Drawing:
    """Return how a run draws its responses."""
    return Drawing(
        "ppo",
        stop_token_id,
        tokenizer.pad_token_id or 0,
        temperature=settings.temperature,
        bf16=settings.bf16,
        batch_size=settings.local_rollout_forward_batch_size,
    )


def local_engine(config: PPOConfig, policy: Any, how: Drawing, loading: ProcessGroup) -> HFEngine:
    """Return the engine of models.engine that samples from the policy in this process."""
    choice = config.models.engine
    sharded = bool(config.ppo.fsdp)
    kind = loading.run_on_main(lambda: engines.engine_class(choice, policy, "ppo", sharded=sharded))
    return engines.local_engine(kind, policy, how)


def set_rollout_rows(
    config: PPOConfig, parents: Mapping[str, Parent], trainer: PPOTrainer, prompts: Sequence[data.Prompt]
) -> None:
    """Choose how many responses are generated at a time on a GPU; no token depends on it. Logs the choice.

    By default they are as many as fit, once all models are loaded. `config` has the batch sizes of all ranks together.
    """
    world_size = trainer.process_group.world_size
    engine = trainer.engine
    if config.ppo.local_rollout_forward_batch_size or not hasattr(engine, "batch_size"):
        return

    longest = max(len(prompt.ids) for prompt in prompts)
    episodes = -(-config.ppo.episodes_per_update // world_size)
    fitting = fits.rollout_rows(config, parents, longest, episodes)
    if fitting is None:
        return

    engine.batch_size = fitting.rows
    size = system.format_bytes(fitting.usable)
    terminal.say(f"ppo      {fitting.rows} of {episodes} responses are generated at a time: what fits in {size}")


# Servers


@dataclass(frozen=True)
class PolicyWeights:
    """Writes the weights of the policy or the reference as servers load them."""

    config: PPOConfig
    policy: Any  # with adapters the peft model
    ref: Any
    tokenizer: Any

    def __call__(self, role: str, path: Path) -> None:
        """Write the weights of one role. All ranks call it."""
        if role != "policy":
            save.save_untied(self.ref, self.tokenizer, path)
        elif self.config.models.server_sync == "lora":
            save.save_model(self.policy, self.tokenizer, path, "Adapters for a rollout server.")
        elif lora.is_peft_model(self.policy):
            save.save_untied(lora.merge_and_unload(copy.deepcopy(self.policy)), self.tokenizer, path)
        else:
            save.save_untied(self.policy, self.tokenizer, path)


def server_engine(
    config: PPOConfig, write: PolicyWeights, prompts: Sequence[list[int]], how: Drawing, process_group: ProcessGroup
) -> RolloutEngine:
    """Return the engine of models.engine.vllm. Its probe are some of the run's prompts. Raises RLHFError C17."""
    return engines.server_engine(
        config,
        config.models.server_sync,
        how,
        weights=engines.ServerWeights(config.folder / engines.WEIGHTS, write),
        probe=engines.Probe.of(config, write.ref, prompts),
        process_group=process_group,
    )
