"""PPO with `models.adapters`: policy, reference, reward and value model share the SFT model's weights.

They are four separate models with their own modules over the same tensors; only adapters and heads differ. No adapter
is switched on or off, so a layer recomputed in the backward pass uses the same adapter as in the forward pass.
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
class SharedBaseModels:
    """The SFT model, which is also the reference, and constructors of the models that share its weights.

    They return peft models, for `save.save_model`; PPO works with the plain model inside, `get_base_model()`.
    """

    config: PPOConfig
    options: Options
    sft: Parent
    model: Any

    def make_policy(self) -> Any:
        """Return the SFT model with new trainable adapters that initially change nothing. Raises RLHFError C07."""
        return self._add_adapters(sharding.clone_sharing_weights(self.model), self.sft, "policy")

    def own_weights_reason(self, parent: Parent, tokenizer: Any) -> str | None:
        """Return why a reward or value model needs its own weights, None if it can share these.

        `tokenizer` is the one it reads. A pad token added by its training is no reason: no text contains it.
        """
        if parent.base is None:
            return "a whole model"
        if not runs.is_adapter_of(parent, self.sft):
            return "an adapter of other weights than models.sft's"
        rows = self.model.get_input_embeddings().weight.shape[0]
        return "an adapter with tokens of its own" if max(tokenizer.get_vocab().values()) >= rows else None

    def load_scorer(self, parent: Parent) -> Any:
        """Load a reward or value model's adapter and head onto the shared weights. Raises RLHFError M01-M03."""
        with at_location(self.config.where(parent.key)):
            model_config = load.read_reward_model_config(parent.model, self.options.trust_remote_code)
            model = load.reward_model_from_backbone(sharding.clone_sharing_weights(self.model), self._empty_head())
            base = self.sft.hub or self.sft.model
            return lora.load_adapter(model, parent.model, model_config, base, self.sft.revision).to(devices.device())

    def value_from_reward_model(self, reward_model: Any, parent: Parent) -> Any:
        """Return a value model with new adapters on the weights of a reward model that does not share these."""
        return self._add_adapters(sharding.clone_sharing_weights(reward_model), parent, "value")

    def value_from_head(self, policy: Any, head: nn.Linear) -> Any:
        """Return the policy's value head as a separate model with the policy's adapters, for saving."""
        model = load.reward_model_from_backbone(sharding.clone_sharing_weights(self.model), head)
        value = self._add_adapters(model, self.sft, "value")
        lora.copy_adapter_weights(policy, value)
        return value

    def log_own_weights(self, parent: Parent, reason: str, model: Any) -> None:
        """Log that a model has its own weights, and their size."""
        size = system.format_bytes(sum(weight.nbytes for weight in model.parameters()))
        hint = "trained as an adapter beside models.sft (reward.yaml: model.adapters), it would take next to nothing"
        terminal.say(f"ppo      {parent.key} is {reason}: {size} of memory more; {hint}")

    def _add_adapters(self, model: Any, base: Parent, role: str) -> Any:
        """Add adapters to a model with the weights of `base`; their values depend only on the seed and the role."""
        adapters = self.config.models.adapters
        assert adapters is not None
        with at_location(self.config.where(f"{KEY}.target_modules")), torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(derive_seed(self.config.seed, f"adapters of the {role}"))
            adapted = lora.add_adapters(
                model, adapters, vocab_size=0, base=base.hub or base.model, revision=base.revision,
                device=devices.device(), bf16=False, key=KEY,
            )  # fmt: skip
        return adapted.to(devices.device())

    def _empty_head(self) -> nn.Linear:
        """Return a zero head without drawing random numbers; float32, since bfloat16 loses small updates."""
        width = self.model.get_output_embeddings().weight.shape[1]
        head = nn.utils.skip_init(nn.Linear, width, 1, bias=False, dtype=torch.float32)
        nn.init.zeros_(head.weight)
        return head


def build_shared_base(config: PPOConfig, options: Options, sft: Parent, model: Any) -> SharedBaseModels | None:
    """Return the shared base that `models.adapters` asks for, None if full models are trained."""
    return SharedBaseModels(config, options, sft, model) if config.models.adapters else None


def load_reward_model(base: SharedBaseModels, parent: Parent, tokenizer: Any) -> Any:
    """Load a reward model, on the shared weights if it is an adapter of them, else with its own weights.

    Raises RLHFError M01-M03, M06-M08.
    """
    reason = base.own_weights_reason(parent, tokenizer)
    if reason is None:
        return base.load_scorer(parent).get_base_model()
    model = setup.load_reward_model(base.config, base.options, parent, tokenizer)
    base.log_own_weights(parent, reason, model)
    return model.to(devices.device())
