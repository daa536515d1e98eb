"""PPO with `models.adapters`: policy, reference, reward and value model on one copy of the SFT model's weights.

Four models of their own, each with modules of its own, over the same tensors; only their adapters and heads differ.
Nothing is switched on and off: a layer that is computed again in the backward pass finds the adapter that it had.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlhf_cli import runs, system, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.errors import at_location
from rlhf_cli.models import devices, load, lora, sharding
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages import setup

KEY = "models.adapters"


@dataclass(frozen=True)
class OneBase:
    """The SFT model, which is the reference, and whose weights stand below the adapters of the others.

    What `policy`, `scorer` and `value` return are peft's models, for `save.save_model`; what PPO works with is the
    plain model inside, `get_base_model()`.
    """

    config: PPOConfig
    options: Options
    sft: Parent
    model: Any

    def policy(self) -> Any:
        """The SFT model with adapters that learn and change nothing yet. Raises RLHFError C07."""
        return self._fresh(sharding.clone_sharing_weights(self.model), self.sft, "policy")

    def apart(self, parent: Parent, tokenizer: Any) -> str | None:
        """Why a reward or value model, which reads a tokenizer's tokens, needs weights of its own; None: it does not.

        A pad token that its training added is no reason: no text holds it.
        """
        if parent.base is None:
            return "a whole model"
        if not runs.is_adapter_of(parent, self.sft):
            return "an adapter of other weights than models.sft's"
        rows = self.model.get_input_embeddings().weight.shape[0]
        return "an adapter with tokens of its own" if max(tokenizer.get_vocab().values()) >= rows else None

    def scorer(self, parent: Parent) -> Any:
        """The reward or value model whose adapter these weights bear, with its head. Raises RLHFError M01-M03."""
        with at_location(self.config.where(parent.key)):
            config = load.read_reward_model_config(parent.model, self.options.trust_remote_code)
            body = load.reward_model_from_backbone(sharding.clone_sharing_weights(self.model), self._head())
            return self._there(
                lora.load_adapter(body, parent.model, config, self.sft.hub or self.sft.model, self.sft.revision)
            )

    def beside(self, whole: Any, parent: Parent) -> Any:
        """A value model where the weights of `whole`, a reward model, are others: adapters beside these."""
        return self._fresh(sharding.clone_sharing_weights(whole), parent, "value")

    def with_head(self, policy: Any, head: nn.Linear) -> Any:
        """The value model that a head on the policy amounts to: the policy's adapters with that head, to be saved."""
        made = self._fresh(
            load.reward_model_from_backbone(sharding.clone_sharing_weights(self.model), head), self.sft, "value"
        )
        lora.copy_adapter_weights(policy, made)
        return made

    def tell(self, parent: Parent, why: str, whole: Any) -> None:
        """Say that a model has weights of its own, and what they take."""
        takes = system.format_bytes(sum(weight.nbytes for weight in whole.parameters()))
        hint = "trained as an adapter beside models.sft (reward.yaml: model.adapters), it would take next to nothing"
        terminal.say(f"ppo      {parent.key} is {why}: {takes} of memory more; {hint}")

    def _fresh(self, model: Any, below: Parent, role: str) -> Any:
        """Adapters beside the weights in a parent's folder; their numbers depend on the seed and the role alone."""
        ours = self.config.models.adapters
        assert ours is not None
        with at_location(self.config.where(f"{KEY}.target_modules")), torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(derive_seed(self.config.seed, f"adapters of the {role}"))
            made = lora.add_adapters(
                model, ours, vocab_size=0, base=below.hub or below.model, revision=below.revision,
                device=devices.device(), bf16=False, key=KEY,
            )  # fmt: skip
        return self._there(made)

    def _head(self) -> nn.Linear:
        """Room for a head, without numbers drawn; float32, as adapters are: bfloat16 would lose small updates."""
        width = self.model.get_output_embeddings().weight.shape[1]
        head = nn.utils.skip_init(nn.Linear, width, 1, bias=False, dtype=torch.float32)
        nn.init.zeros_(head.weight)
        return head

    def _there(self, made: Any) -> Any:
        return made.to(devices.device())


def of(config: PPOConfig, options: Options, sft: Parent, model: Any) -> OneBase | None:
    """What `models.adapters` asks for; None where whole models are trained."""
    return OneBase(config, options, sft, model) if config.models.adapters else None


def reward(base: OneBase, parent: Parent, tokenizer: Any) -> Any:
    """A reward model, on the base's weights where it is an adapter of theirs, else with weights of its own.

    Raises RLHFError M01-M03, M06-M08.
    """
    why = base.apart(parent, tokenizer)
    if why is None:
        return base.scorer(parent).get_base_model()
    model = setup.scorer(base.config, base.options, parent, tokenizer)
    base.tell(parent, why, model)
    return model.to(devices.device())
