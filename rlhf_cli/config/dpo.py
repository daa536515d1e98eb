"""Config of dpo.yaml."""

from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from rlhf_cli.config.machinery.section import invalid
from rlhf_cli.config.sections import PairConfig, TrainerSettings


class DPOSettings(TrainerSettings):
    """Direct preference optimization by TRL's DPOTrainer."""

    learning_rate: NonNegativeFloat = 1e-6
    beta: PositiveFloat = 0.1
    loss_type: Literal["sigmoid", "ipo", "robust"] = "sigmoid"
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)

    @model_validator(mode="after")
    def _check_label_smoothing(self) -> Self:
        if (self.loss_type == "robust") != (self.label_smoothing > 0):
            text = f"label_smoothing {self.label_smoothing:g} does not go with loss_type: {self.loss_type}"
            raise invalid(text, "set loss_type: robust with a label_smoothing above 0, or neither", "label_smoothing")
        return self


class DPOConfig(PairConfig):
    """dpo.yaml: direct preference optimization, an optional stage."""

    stage: Literal["dpo"] = "dpo"
    dpo: DPOSettings = Field(default_factory=DPOSettings)
    trainer: dict[str, Any] = Field(default_factory=dict)

    @property
    def keeps_reference(self) -> bool:
        """Whether the reference model is in memory; adapters are turned off instead, or its log-probs computed once."""
        return self.model.adapters is None and not self.trainer.get("precompute_ref_log_probs")
