"""LoRA options: `model.adapters` of SFT and reward, `models.adapters` of PPO. Names follow peft."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf_cli.config.base import Config, Section
from rlhf_cli.config.paths import field_at
from rlhf_cli.config.ppo_options import RECIPES

TRL = "TRL 1.16, trl/trainer/model_config.py"
PEFT = "[peft 0.21.2, src/peft/tuners/lora/config.py]"
# Learning-rate factor of adapters over full training: they start at zero and have fewer parameters.
LEARNING_RATE_FACTOR = 10


class LoRA(Section):
    """LoRA (Hu et al. 2021, arXiv 2106.09685): W stays frozen, the layer uses W + (lora_alpha / r) B A."""

    kind: Literal["lora", "qlora"]
    r: int = Field(
        16,
        gt=0,
        description=(
            f"Rank of the adapters. Higher values can learn more and need more memory. [{TRL}; it is called lora_r "
            "there]"
        ),
    )
    lora_alpha: int = Field(
        32,
        gt=0,
        description=(
            "Scale of the adapters; their output is multiplied by lora_alpha / r. Higher values act like a higher "
            f"learning rate. [{TRL}; the same name there]"
        ),
    )
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = Field(
        "all-linear",
        description=(
            "Layers that get adapters: all-linear (every linear layer except the head), or a list of module names, "
            "for example [q_proj, v_proj]. Fewer layers need less memory and learn less. [Dettmers et al. 2023, arXiv "
            "2305.14314, section 4]"
        ),
    )
    use_rslora: bool = Field(
        False,
        description=(
            "Rank-stabilised LoRA: scale by lora_alpha / sqrt(r) instead of lora_alpha / r, so that high ranks learn "
            f"as fast as low ones. {PEFT}"
        ),
    )
    use_dora: bool = Field(
        False,
        description=(
            f"DoRA (arXiv 2402.09353): train magnitude and direction of each weight column separately. Slower. {PEFT}"
        ),
    )


class Adapters(LoRA):
    """Adapters of SFT and reward training."""

    kind: Literal["lora", "qlora"] = Field(
        description=(
            "Kind of the adapters. lora: the frozen base weights keep their dtype. qlora: they are quantised to 4 "
            "bits during this stage (NF4 of bitsandbytes with double quantisation; Dettmers et al. 2023, arXiv "
            "2305.14314): less memory, slower."
        )
    )
    lora_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Dropout on the input of the adapters. Higher values regularise more. Reward training turns all dropout "
            f"off, unless trainer.disable_dropout is false. {PEFT}"
        ),
    )


class PPOAdapters(LoRA):
    """Adapters of PPO, without dropout, which PPO turns off."""

    kind: Literal["lora"] = Field(
        description=(
            "Kind of the adapters. lora: the frozen weights of the SFT model are loaded once for all four models."
        )
    )


class TrainingConfig(Config):
    """Config of a training stage; with adapters the default learning rates are higher."""

    @model_validator(mode="before")
    @classmethod
    def _raise_learning_rates(cls, keys: Any) -> Any:
        """Multiply the default learning rates if the config has adapters."""
        stage = cls.model_fields["stage"].default
        models = keys.get("models" if "models" in cls.model_fields else "model") if isinstance(keys, dict) else None
        if not isinstance(models, dict) or not models.get("adapters"):
            return keys
        settings = keys.get(stage) or {}
        default = field_at(cls, (stage, "learning_rate"))
        if not isinstance(settings, dict) or default is None:
            return keys
        rates = {"learning_rate": default.default, **_recipe_learning_rates(settings)}
        rates = {key: float(f"{LEARNING_RATE_FACTOR * rate:g}") for key, rate in rates.items()}
        return {**keys, stage: {**rates, **settings}}


def _recipe_learning_rates(settings: dict[str, Any]) -> dict[str, float]:
    """Return the learning rates of the PPO recipe in `settings`."""
    recipe = settings.get("recipe")
    defaults = RECIPES.get(recipe, {}) if isinstance(recipe, str) else {}
    return {key: value for key, (value, _) in defaults.items() if key.endswith("learning_rate")}
