"""Sections of the configs that several stages have: models, adapters, data and trainer settings."""

import math
import os
from dataclasses import replace
from datetime import date
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from rlhf_cli.config.base import Config, DataPath, ModelPath
from rlhf_cli.config.machinery.fields import PathField, fields_of
from rlhf_cli.config.machinery.section import (
    AtLeastOne,
    BelowOne,
    InsideUnitInterval,
    Section,
    UnitInterval,
    Where,
    invalid,
)
from rlhf_cli.config.sources import DataSource, HoldoutSplit

MAX_DROPPED = 0.8  # default share of the rows of a data source that may be dropped
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
# Learning-rate factor of adapters over full training: they start at zero and have fewer parameters.
LEARNING_RATE_FACTOR = 10


def scaled_rate(rate: float, factor: float) -> float:
    """Return a learning rate times a factor, without the last digits of binary fractions."""
    return float(f"{rate * factor:g}")


class Range(Section):
    """Integer that is sampled uniformly from min..max (inclusive) on each use."""

    min: AtLeastOne
    max: AtLeastOne

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise invalid("min is greater than max", "swap them", code="C06")
        return self


class TrainingConfig(Config):
    """Config of a training stage; with adapters the default learning rates are higher."""

    @classmethod
    def chosen_defaults(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the defaults that other options of the stage's section replace: those of PPO's recipes."""
        return {}

    @model_validator(mode="before")
    @classmethod
    def _raise_learning_rates(cls, keys: Any) -> Any:
        """Multiply the default learning rates if the config has adapters."""
        models = keys.get("models" if "models" in cls.model_fields else "model")
        if not isinstance(models, dict) or not models.get("adapters"):
            return keys

        stage = cls.model_fields["stage"].default
        settings = keys.get(stage) or {}
        section = fields_of(cls)[stage].section
        if not isinstance(settings, dict) or section is None:
            return keys

        defaults = {"learning_rate": section.model_fields["learning_rate"].default}
        defaults |= cls.chosen_defaults(settings)
        rates = {
            key: scaled_rate(rate, LEARNING_RATE_FACTOR)
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
    r: PositiveInt = 16
    lora_alpha: PositiveInt = 32
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    use_rslora: bool = False
    use_dora: bool = False


class Adapters(LoRA):
    """Adapters of SFT and reward training."""

    lora_dropout: BelowOne = 0.0


class NewTokenizer(Section):
    """New byte-level BPE tokenizer."""

    train: DataPath
    vocab_size: PositiveInt


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
        if template is None or template == "chatml":
            return self
        if "{{" in template or "{%" in template or os.path.isfile(template):
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
    """Initial model of reward training and DPO."""

    path: ModelPath = "RUN/sft"


READING_OPTIONS = {
    "subset", "revision", "max_rows", "columns", "format", "on_bad", "pairs_per_prompt", "min_rating_gap",
    "margin_per_point",
}  # fmt: skip
RESERVED_TEMPLATE_NAMES = ("messages", "add_generation_prompt")


def _is_date(value: Any) -> bool:
    try:
        date.fromisoformat(value)
    except (TypeError, ValueError):
        return False
    return True


RowFormat = Literal["auto", "plain", "transcripts", "turns"]
OnLong = Literal["drop", "error"]


class MixedSource(Section):
    """One of several sources of training data, and how often its rows are used."""

    path: DataPath
    weight: PositiveFloat = 1.0
    columns: dict[str, str] | None = None
    format: RowFormat | None = None


class MixedPairs(MixedSource):
    """One of several sources of pairs, and how they are made of its ratings."""

    pairs_per_prompt: Literal["one", "all"] | None = None
    min_rating_gap: NonNegativeFloat | None = None
    margin_per_point: NonNegativeFloat | None = None


class _Data(Section):
    """Options for reading rows; the stages add the keys that name the data."""

    TRAIN_KEY: ClassVar[str | None] = "train"  # key of the training data
    EVAL_KEY: ClassVar[str] = "eval"  # key of the held-out data

    columns: dict[str, str] = Field(default_factory=dict)
    format: RowFormat = "auto"
    subset: str | None = None
    revision: str | None = None
    max_rows: PositiveInt | None = None
    eval_fraction: InsideUnitInterval | None = None
    split_seed: NonNegativeInt | None = None
    on_bad: Literal["error", "drop"] = "error"
    max_dropped: UnitInterval = MAX_DROPPED
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
            if name == "date" and not _is_date(value):
                raise invalid(f"date `{value}` is not a date as 2024-07-26", key="chat_template_kwargs")
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

    def sources(self, where: Where) -> dict[str, DataSource]:
        """Return the data sources by key path, including the split of eval_fraction."""
        sources = {}
        for key in (self.TRAIN_KEY, self.EVAL_KEY):
            source = self._source(key, where) if key else None
            if source:
                sources[f"data.{key}"] = source
        return sources

    def _source(self, key: str, where: Where) -> DataSource | None:
        is_held_out = key == self.EVAL_KEY
        name = getattr(self, key)
        share = None
        splits = ("validation", "test") if is_held_out else ("train",)
        if self.eval_fraction is not None:
            name = name or getattr(self, self.TRAIN_KEY or key)
            share = HoldoutSplit(self.eval_fraction, self.split_seed or 0, is_held_out)
            splits = ("train",)
        if name is None:
            return None
        options = {"share": share, "splits": splits, **self.model_dump(include=READING_OPTIONS)}
        if isinstance(name, str):
            return DataSource(name, where(f"data.{key}"), **options)

        parts = []
        for number, entry in enumerate(name):
            section = f"data.{self.TRAIN_KEY}.{number}"
            own = entry.model_dump(exclude={"path"}, exclude_none=True)
            part = DataSource(entry.path, where(section), **{**options, **own, "section": section})
            parts.append(replace(part, weight=1.0) if is_held_out else part)
        return replace(parts[0], where=where(f"data.{key}"), parts=tuple(parts))


class SFTData(_Data):
    """Rows {prompt, completion}, {text} or {messages}; with best_of prompts, as in PPOData."""

    train: DataPath | Annotated[list[MixedSource], Field(min_length=1)]
    eval: DataPath | None = None
    on_long: OnLong = "drop"


class RewardData(_Data):
    """Preference pairs {prompt, chosen, rejected} or {chosen, rejected}, or rated answers."""

    train: DataPath | Annotated[list[MixedPairs], Field(min_length=1)]
    eval: DataPath | None = None
    on_long: OnLong = "drop"
    on_identical: Literal["error", "drop"] = "error"
    pairs_per_prompt: Literal["one", "all"] = "one"
    min_rating_gap: NonNegativeFloat = 0.0
    margin_per_point: NonNegativeFloat | None = None


class WordRange(Range):
    """Number of words, sampled uniformly from min..max (inclusive) for each text."""


WordCount = AtLeastOne | WordRange


def cut_prompts(source: DataSource, words: int | WordRange) -> DataSource:
    """Return the source with prompts that are cut to their first words."""
    bounds = (words, words) if isinstance(words, int) else (words.min, words.max)
    return replace(source, first_words=bounds)


class _PromptData(_Data):
    """Prompts, optionally cut to their first words."""

    truncate_prompt_words: WordCount | None = None

    def _source(self, key: str, where: Where) -> DataSource | None:
        source = super()._source(key, where)
        if source is None or self.truncate_prompt_words is None:
            return source
        return cut_prompts(source, self.truncate_prompt_words)


class PPOData(_PromptData):
    """Prompts; pairs give their distinct prompts."""

    TRAIN_KEY = "prompts"
    EVAL_KEY = "eval_prompts"

    prompts: DataPath
    eval_prompts: DataPath | None = None
    ptx_data: DataPath | None = None
    on_long: Literal["drop", "error"] = "drop"

    def sources(self, where: Where) -> dict[str, DataSource]:
        """Return the data sources by key path; truncate_prompt_words does not apply to ptx_data."""
        sources = super().sources(where)
        ptx = self._source("ptx_data", where) if self.ptx_data else None
        if ptx:
            sources["data.ptx_data"] = replace(ptx, first_words=None)
        return sources


class EvalData(_PromptData):
    """Prompts; pairs give their distinct prompts."""

    TRAIN_KEY = None
    EVAL_KEY = "prompts"

    prompts: DataPath


SCHEDULERS = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
]  # fmt: skip


class TrainerSettings(Section):
    """Options shared by SFT, reward and DPO training, under TRL's names."""

    num_train_epochs: PositiveFloat = 1.0
    max_steps: PositiveInt | None = None
    per_device_train_batch_size: PositiveInt = 8
    per_device_eval_batch_size: PositiveInt = 8
    gradient_accumulation_steps: PositiveInt = 1
    max_length: int = Field(1024, gt=1)
    lr_scheduler_type: SCHEDULERS = "cosine"
    warmup_steps: NonNegativeInt | None = None
    warmup_ratio: BelowOne = 0.03
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    adam_beta1: BelowOne = 0.9
    adam_beta2: BelowOne = 0.999
    adam_epsilon: PositiveFloat = 1e-8
    gradient_checkpointing: bool = False
    bf16: bool | None = None
    logging_steps: PositiveInt = 10
    eval_steps: PositiveInt | None = None
    group_by_length: bool = True

    def steps(self, rows: int, processes: int = 1) -> int:
        """Return the optimizer steps of a training on `rows` rows in `processes` processes, as transformers counts."""
        if self.max_steps is not None:
            return self.max_steps
        batches = math.ceil(rows / (self.per_device_train_batch_size * processes))
        steps = math.ceil(batches / self.gradient_accumulation_steps)
        return math.ceil(self.num_train_epochs * max(1, steps))

    @model_validator(mode="before")
    @classmethod
    def _warmup_steps_replace_ratio(cls, keys: Any) -> Any:
        if isinstance(keys, dict) and keys.get("warmup_steps") is not None and "warmup_ratio" not in keys:
            return {**keys, "warmup_ratio": 0.0}
        return keys

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        if self.warmup_steps is not None and self.warmup_ratio > 0:
            raise invalid("warmup_steps and warmup_ratio cannot be combined", "remove one of them", "warmup_ratio")
        return self


class PairConfig(TrainingConfig):
    """Config of a stage that trains on preference pairs."""

    model: RewardModel = Field(default_factory=RewardModel)
    data: RewardData

    @model_validator(mode="after")
    def _check_lora_dropout(self) -> Self:
        adapters = self.model.adapters
        trainer = getattr(self, "trainer", {})
        if adapters and adapters.lora_dropout and trainer.get("disable_dropout") is not False:
            text = f"model.adapters.lora_dropout has no effect: {self.stage} training turns dropout off"
            hint = "set trainer.disable_dropout: false, or remove lora_dropout"
            raise invalid(text, hint, "model.adapters.lora_dropout")
        return self
