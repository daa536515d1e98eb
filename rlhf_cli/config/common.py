"""Sections shared by the configs: models, new models and data."""

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from rlhf_cli.config.base import Config, DataPath, ModelPath, Range, Section, invalid
from rlhf_cli.config.fields import PathField, fields_of
from rlhf_cli.config.ppo_options import recipe_defaults
from rlhf_cli.config.sources import DataSource, HoldoutSplit

MAX_DROPPED = 0.8  # default share of the rows of a data source that may be dropped
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
# Learning-rate factor of adapters over full training: they start at zero and have fewer parameters.
LEARNING_RATE_FACTOR = 10


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
        section = fields_of(cls)[stage].section
        if not isinstance(settings, dict) or section is None:
            return keys
        defaults = {"learning_rate": section.model_fields["learning_rate"].default} | recipe_defaults(settings)
        rates = {
            key: float(f"{LEARNING_RATE_FACTOR * rate:g}")
            for key, rate in defaults.items()
            if key.endswith("learning_rate") and isinstance(rate, float)
        }
        return {**keys, stage: {**rates, **settings}}

    @model_validator(mode="after")
    def _check_trained_dtype(self) -> Self:
        """Refuse to train whole weights in bfloat16 (Micikevicius et al. 2018, arXiv 1710.03740, section 3.1)."""
        name = "models" if "models" in type(self).model_fields else "model"
        section = getattr(self, name)
        if section.dtype == "bfloat16" and not section.adapters:
            text = f"{name}.dtype bfloat16 loses most updates of whole weights: they are smaller than its rounding"
            hint = f"remove it ({self.stage}.bf16 computes in bfloat16 with float32 weights), or set {name}.adapters"
            raise invalid(text, hint, f"{name}.dtype")
        return self


class LoRA(Section):
    """LoRA (Hu et al. 2021, arXiv 2106.09685): W stays frozen, the layer uses W + (lora_alpha / r) B A.

    The adapters of PPO, without dropout, which PPO turns off.
    """

    kind: Literal["lora", "qlora"]
    r: int = Field(16, gt=0)
    lora_alpha: int = Field(32, gt=0)
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    use_rslora: bool = False
    use_dora: bool = False


class Adapters(LoRA):
    """Adapters of SFT and reward training."""

    lora_dropout: float = Field(0.0, ge=0, lt=1)


class NewTokenizer(Section):
    """New byte-level BPE tokenizer."""

    train: DataPath
    vocab_size: int = Field(gt=0)


class NewModel(Section):
    """New model. All other keys are fields of the transformers config of `model_type`."""

    model_config = ConfigDict(extra="allow")

    model_type: str = "llama"
    tokenizer: NewTokenizer

    def config_fields(self) -> dict[str, Any]:
        """Return the fields of the transformers config, including model_type."""
        return {"model_type": self.model_type, **(self.model_extra or {})}


class _ModelKeys(Section):
    revision: str | None = None
    dtype: Dtype = "auto"
    attn_implementation: str | None = None
    chat_template: Annotated[str, PathField("template")] | None = None
    adapters: Adapters | None = None

    @model_validator(mode="after")
    def _check_chat_template(self) -> Self:
        template = self.chat_template
        if template is None or template == "chatml" or "{{" in template or "{%" in template or os.path.isfile(template):
            return self
        text = f"chat_template `{template[:80]}` is not a file, the text of a template, or chatml"
        raise invalid(text, key="chat_template", code="C07")


class SFTModel(_ModelKeys):
    """Initial model of supervised fine-tuning."""

    path: ModelPath | None = None
    new: NewModel | None = None

    @model_validator(mode="after")
    def _check_initial_model(self) -> Self:
        if (self.path is None) == (self.new is None):
            text = "set model.path or model.new, not both" if self.path else "set model.path or model.new"
            raise invalid(text, "path starts from an existing model, new from random weights")
        if self.new is not None and self.adapters is not None:
            text = "model.adapters needs a trained model, but model.new creates random weights"
            raise invalid(text, "remove model.adapters", "adapters")
        return self


class RewardModel(_ModelKeys):
    """Initial model of reward training."""

    path: ModelPath = "RUN/sft"


RESERVED_TEMPLATE_NAMES = ("messages", "add_generation_prompt")


class _Data(Section):
    """Options for reading rows; the stages add the keys that name the data."""

    TRAIN_KEY: ClassVar[str | None] = "train"  # key of the training data
    EVAL_KEY: ClassVar[str] = "eval"  # key of the held-out data

    columns: dict[str, str] = Field(default_factory=dict)
    format: Literal["auto", "plain", "transcripts", "turns"] = "auto"
    subset: str | None = None
    revision: str | None = None
    max_rows: int | None = Field(None, gt=0)
    eval_fraction: float | None = Field(None, gt=0, lt=1)
    split_seed: int | None = Field(None, ge=0)
    on_bad: Literal["error", "drop"] = "error"
    max_dropped: float = Field(MAX_DROPPED, ge=0, le=1)
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_chat_template_kwargs(cls, values: dict[str, Any] | None) -> dict[str, Any] | None:
        for name, value in (values or {}).items():
            if not name.isidentifier() or name in RESERVED_TEMPLATE_NAMES:
                text = f"`{name}` is not a variable that a chat template's user sets"
                raise invalid(text, key="chat_template_kwargs")
            if name == "generation_prompt" and not (isinstance(value, str) and value):
                raise invalid("generation_prompt is the text that stands before an answer", key="chat_template_kwargs")
            try:
                if name == "date":
                    date.fromisoformat(value)
            except (TypeError, ValueError):
                text = f"date `{value}` is not a date as 2024-07-26"
                raise invalid(text, key="chat_template_kwargs") from None
        return values

    @model_validator(mode="after")
    def _check_holdout(self) -> Self:
        has_eval_data = self.TRAIN_KEY and getattr(self, self.EVAL_KEY) is not None
        if self.eval_fraction is not None and has_eval_data:
            text = f"data.{self.EVAL_KEY} and data.eval_fraction both define the held-out data"
            raise invalid(text, "remove one of them", "eval_fraction")
        if self.split_seed is not None and self.eval_fraction is None:
            text = "data.split_seed has no effect without data.eval_fraction"
            raise invalid(text, "add eval_fraction: 0.05", "split_seed")
        return self

    def sources(self, where: Callable[[str], str]) -> dict[str, DataSource]:
        """Return the data sources by key path, including the split of eval_fraction."""
        keys = [key for key in (self.TRAIN_KEY, self.EVAL_KEY) if key]
        return {f"data.{key}": source for key in keys if (source := self._source(key, where))}

    def _source(self, key: str, where: Callable[[str], str]) -> DataSource | None:
        held_out, split = key == self.EVAL_KEY, None
        name = getattr(self, key)
        if self.eval_fraction is not None:
            name = name or getattr(self, self.TRAIN_KEY or key)
            split = HoldoutSplit(self.eval_fraction, self.split_seed or 0, held_out)
        if name is None:
            return None
        return DataSource(
            name,
            where(f"data.{key}"),
            share=split,
            splits=("validation", "test") if held_out and split is None else ("train",),
            **self.model_dump(include={"subset", "revision", "max_rows", "columns", "format", "on_bad"}),
        )


class SFTData(_Data):
    """Rows {prompt, completion}, {text} or {messages}; with best_of prompts, as in PPOData."""

    train: DataPath
    eval: DataPath | None = None
    on_long: Literal["drop", "error"] = "drop"


class RewardData(SFTData):
    """Preference pairs {prompt, chosen, rejected} or {chosen, rejected}."""

    on_identical: Literal["error", "drop"] = "error"


class WordRange(Range):
    """Number of words, sampled uniformly from min..max (inclusive) for each text."""


WordCount = Annotated[int, Field(ge=1)] | WordRange


def cut_prompts(source: DataSource, words: int | WordRange) -> DataSource:
    """Return the source with prompts that are cut to their first words."""
    return replace(source, first_words=(words, words) if isinstance(words, int) else (words.min, words.max))


class _PromptData(_Data):
    """Prompts, optionally cut to their first words."""

    truncate_prompt_words: WordCount | None = None

    def _source(self, key: str, where: Callable[[str], str]) -> DataSource | None:
        source, words = super()._source(key, where), self.truncate_prompt_words
        return source if source is None or words is None else cut_prompts(source, words)


class PPOData(_PromptData):
    """Prompts; pairs give their distinct prompts."""

    TRAIN_KEY = "prompts"
    EVAL_KEY = "eval_prompts"

    prompts: DataPath
    eval_prompts: DataPath | None = None
    ptx_data: DataPath | None = None
    on_long: Literal["drop", "error"] = "drop"

    def sources(self, where: Callable[[str], str]) -> dict[str, DataSource]:
        """Return the data sources by key path; truncate_prompt_words does not apply to ptx_data."""
        sources, ptx = super().sources(where), self.ptx_data and self._source("ptx_data", where)
        return sources | ({"data.ptx_data": replace(ptx, first_words=None)} if ptx else {})


class EvalData(_PromptData):
    """Prompts; pairs give their distinct prompts."""

    TRAIN_KEY = None
    EVAL_KEY = "prompts"

    prompts: DataPath
