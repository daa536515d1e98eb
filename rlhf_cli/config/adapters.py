"""`model.adapters`, and `models.adapters` of PPO: small matrices that learn beside frozen weights.

Options of peft's have peft's names.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf_cli.config.base import Config, Section
from rlhf_cli.config.keys import field_at
from rlhf_cli.ppo.settings import RECIPES

TRL = "TRL 1.16, trl/trainer/model_config.py"
PEFT = "[peft 0.21.2, src/peft/tuners/lora/config.py]"
# Adapters learn at so many times the rate of whole weights: they start at zero and have fewer numbers to move.
TIMES = 10


class LoRA(Section):
    """LoRA (Hu et al. 2021, arXiv 2106.09685): each layer's weight W stays, W + (lora_alpha / r) B A is used."""

    kind: Literal["lora", "qlora"]
    r: int = Field(
        16, gt=0, description=f"Rank: the columns of B, and the rows of A. [{TRL}; it is called lora_r there]"
    )
    lora_alpha: int = Field(
        32, gt=0, description=f"Scale of what is learnt: lora_alpha / r is its factor. [{TRL}; the same there]"
    )
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = Field(
        "all-linear",
        description=(
            "The layers that get adapters: all-linear, which is each linear layer but the head, or a list of last "
            "names, e.g. [q_proj, v_proj]. [Dettmers et al. 2023, arXiv 2305.14314, section 4]"
        ),
    )
    use_rslora: bool = Field(
        False, description=f"Scale by lora_alpha / sqrt(r), so that large ranks learn as fast. {PEFT}"
    )
    use_dora: bool = Field(
        False,
        description=f"DoRA (arXiv 2402.09353): each column's length learns apart from its direction; slower. {PEFT}",
    )


class Adapters(LoRA):
    """What SFT and reward training put beside a model's weights."""

    kind: Literal["lora", "qlora"] = Field(
        description=(
            "lora: the frozen weights stay as they are; qlora: while this stage trains they are held in 4 bits "
            "(bitsandbytes' NF4, its scales quantised too; Dettmers et al. 2023, arXiv 2305.14314)."
        )
    )
    lora_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Dropout of what A reads. Reward training turns all dropout off, unless trainer.disable_dropout is false. "
            f"{PEFT}"
        ),
    )


class PPOAdapters(LoRA):
    """What PPO puts beside the SFT model's weights: without dropout, which PPO turns off."""

    kind: Literal["lora"] = Field(
        description="lora: the SFT model's weights stay as they are, and are there once for all four models."
    )


class TrainingConfig(Config):
    """The config of a stage that trains, with the learning rates that adapters want where none are told."""

    @model_validator(mode="before")
    @classmethod
    def _adapters_learn_faster(cls, keys: Any) -> Any:
        stage = cls.model_fields["stage"].default
        models = keys.get("models" if "models" in cls.model_fields else "model") if isinstance(keys, dict) else None
        if not isinstance(models, dict) or not models.get("adapters"):
            return keys
        settings = keys.get(stage) or {}
        default = field_at(cls, (stage, "learning_rate"))
        if not isinstance(settings, dict) or default is None:
            return keys
        rates = {"learning_rate": default.default, **_of_recipe(settings)}
        return {**keys, stage: {**{key: float(f"{TIMES * rate:g}") for key, rate in rates.items()}, **settings}}


def _of_recipe(settings: dict[str, Any]) -> dict[str, float]:
    """The learning rates of a recipe of PPO's."""
    recipe = settings.get("recipe")
    defaults = RECIPES.get(recipe, {}) if isinstance(recipe, str) else {}
    return {key: value for key, (value, _) in defaults.items() if key.endswith("learning_rate")}
