"""Models that share the SFT model's weights: only their adapters and heads differ.

They are separate models with their own modules over the same tensors. No adapter is switched on or off, so a layer
recomputed in the backward pass uses the same adapter as in the forward pass.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlhf_cli import runs, system, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft import SFTConfig
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.errors import RLHFError, at_location
from rlhf_cli.models import devices, load, lora, row_trial, sharding, tokenizers
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages.common import model_loading


@dataclass(frozen=True)
class SharedBaseModels:
    """The SFT model, which is also PPO's reference, and constructors of the models that share its weights.

    They return peft models, for `save.save_model`; PPO works with the plain model inside, `get_base_model()`.
    """

    config: PPOConfig | EvalConfig | SFTConfig
    options: Options
    sft: Parent
    model: Any

    def own_weights_reason(self, parent: Parent, tokenizer: Any) -> str | None:
        """Return why a reward or value model needs its own weights, None if it can share these.

        `tokenizer` is the one it reads. A pad token added by its training is no reason: no text contains it.
        """
        if parent.base is None:
            return "a full model"
        if not runs.is_adapter_of(parent, self.sft):
            return "an adapter of other weights than models.sft's"
        try:
            tokenizers.check_vocabulary(self.model, tokenizer)
        except RLHFError:
            return "an adapter with additional tokens"
        return None

    def load_frozen_scorer(self, parent: Parent, tokenizer: Any, *, bf16: bool) -> Any:
        """Return a frozen reward model that reads the tokens of `tokenizer`, on the shared weights if it can.

        PPO prints why it needs its own weights. Raises RLHFError M01-M03, M06-M08.
        """
        reason = self.own_weights_reason(parent, tokenizer)
        if reason is None:
            return self.load_scorer(parent).get_base_model().requires_grad_(False).eval()

        model = model_loading.load_model(
            load.load_reward_model,
            self.config,
            self.options,
            parent,
            tokenizer,
            bf16_matrices=bf16,
        )
        row_trial.require_rows_alone(model, self.config.where(parent.key))
        if self.config.stage == "ppo":
            size = system.format_bytes(sum(weight.nbytes for weight in model.parameters()))
            hint = "an adapter of models.sft (reward.yaml: model.adapters) would need next to nothing"
            terminal.say(f"ppo      {parent.key} is {reason}: {size} of additional memory; {hint}")
        return model_loading.place_frozen(model, bf16=bf16)

    def load_policy(self, parent: Parent) -> Any:
        """Load a policy's adapter onto the shared weights; return the plain model. Raises RLHFError M01."""
        with at_location(self.config.where(parent.key)):
            model_config = load.read_config(parent.model, self.options.trust_remote_code)
            model = sharding.clone_sharing_weights(self.model)
            return self._load_adapter(model, parent, model_config).get_base_model()

    def load_scorer(self, parent: Parent) -> Any:
        """Load a reward or value model's adapter and head onto the shared weights. Raises RLHFError M01-M03."""
        with at_location(self.config.where(parent.key)):
            model_config = load.read_reward_model_config(parent.model, self.options.trust_remote_code)
            # Float32, since bfloat16 loses small updates. No random numbers are drawn for it.
            width = self.model.get_output_embeddings().weight.shape[1]
            head = nn.utils.skip_init(nn.Linear, width, 1, bias=False, dtype=torch.float32)
            nn.init.zeros_(head.weight)
            model = load.reward_model_from_backbone(sharding.clone_sharing_weights(self.model), head)
            return self._load_adapter(model, parent, model_config)

    def _load_adapter(self, model: Any, parent: Parent, model_config: Any) -> Any:
        base = self.sft.hub or self.sft.model
        return lora.load_adapter(model, parent.model, model_config, base, self.sft.revision).to(devices.device())

    def value_from_head(self, policy: Any, head: nn.Linear) -> Any:
        """Return the policy's value head as a separate model with the policy's adapters, for saving."""
        model = load.reward_model_from_backbone(sharding.clone_sharing_weights(self.model), head)
        value = self.add_adapters(model, self.sft, "value")
        lora.copy_adapter_weights(policy, value)
        return value

    def add_adapters(self, model: Any, base: Parent, role: str) -> Any:
        """Return a model that shares the weights of `model`, loaded from `base`, with new trainable adapters.

        They initially change nothing, and their values depend only on the seed and the role. Raises RLHFError C07.
        """
        assert isinstance(self.config, PPOConfig) and self.config.models.adapters
        if role == "policy":
            lora.check_adapters(self.config, model.config)
        seed = derive_seed(self.config.seed, f"adapters of the {role}")
        where = self.config.where("models.adapters.target_modules")
        with at_location(where), torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(seed)
            adapted = lora.add_adapters(
                sharding.clone_sharing_weights(model),
                self.config.models.adapters,
                vocab_size=0,
                base=base.hub or base.model,
                revision=base.revision,
                device=devices.device(),
                bf16=False,
                key="models.adapters",
            )
        return adapted.to(devices.device())
