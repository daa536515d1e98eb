"""Sections shared by the configs: models, new models and data."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from rlhf_cli.config.base import Config, DataPath, ModelPath, Range, Section, invalid
from rlhf_cli.config.fields import PathField, fields_of
from rlhf_cli.config.ppo_options import RECIPES
from rlhf_cli.config.sources import DataSource, HoldoutSplit

MAX_DROPPED = 0.8  # default share of the rows of a data source that may be dropped
STAGE = "Stage of this file; it must match the command. Default: the stage of the command. [project]"
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
REVISION = (
    "Branch, tag or commit of a model on the Hugging Face Hub. Default: the main branch. [huggingface_hub 2.4, "
    "src/huggingface_hub/_snapshot_download.py]"
)
DTYPE = (
    "Data type (dtype) of the weights. auto: float32, also if a GPU computes in bfloat16 (see bf16), because pure "
    "bfloat16 weights lose small updates; bfloat16 halves the memory of the weights. [Micikevicius et al. 2018, arXiv "
    "1710.03740, section 3.1]"
)
ATTENTION = (
    "Attention implementation, such as sdpa, eager or flash_attention_2. Default: the choice of transformers for the "
    "model. [transformers 5.23, src/transformers/modeling_utils.py]"
)
COLUMNS = (
    "Mapping from a column name of rlhf to the name in the file, for example {prompt: question}. Columns that are not "
    "listed keep their name. [project]"
)
NAMES = (
    "a file (.jsonl, .json, .csv, .tsv, .parquet, .txt; .gz too), a folder of such files, or a dataset of the Hugging "
    "Face Hub, OWNER/NAME; append [SPLIT] to choose a split"
)
ON_LONG = (
    "Handling of rows above the token limit: drop them with a warning, or stop with an error. The default drops them, "
    "so that a few long rows do not stop a run; data.max_dropped limits how many. [project]"
)
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
        rates = {"learning_rate": section.model_fields["learning_rate"].default, **_recipe_learning_rates(settings)}
        rates = {key: float(f"{LEARNING_RATE_FACTOR * rate:g}") for key, rate in rates.items()}
        return {**keys, stage: {**rates, **settings}}


def _recipe_learning_rates(settings: dict[str, Any]) -> dict[str, float]:
    """Return the learning rates of the PPO recipe in `settings`."""
    recipe = settings.get("recipe")
    defaults = RECIPES.get(recipe, {}) if isinstance(recipe, str) else {}
    return {key: value for key, (value, _) in defaults.items() if key.endswith("learning_rate")}


class LoRA(Section):
    """LoRA (Hu et al. 2021, arXiv 2106.09685): W stays frozen, the layer uses W + (lora_alpha / r) B A."""

    kind: Literal["lora", "qlora"]
    r: int = Field(16, gt=0)
    """Rank of the adapters. Higher values can learn more and need more memory. [TRL model; it is called lora_r
    there]"""
    lora_alpha: int = Field(32, gt=0)
    """Scale of the adapters; their output is multiplied by lora_alpha / r. Higher values act like a higher learning
    rate. [TRL model; the same name there]"""
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Layers that get adapters: all-linear (every linear layer except the head), or a list of module names, for
    example [q_proj, v_proj]. Fewer layers need less memory and learn less. [Dettmers et al. 2023, arXiv 2305.14314,
    section 4]"""
    use_rslora: bool = False
    """Rank-stabilised LoRA: scale by lora_alpha / sqrt(r) instead of lora_alpha / r, so that high ranks learn as fast
    as low ones. [PEFT]"""
    use_dora: bool = False
    """DoRA (arXiv 2402.09353): train magnitude and direction of each weight column separately. Slower. [PEFT]"""


class Adapters(LoRA):
    """Adapters of SFT and reward training."""

    kind: Literal["lora", "qlora"]
    """Kind of the adapters. lora: the frozen base weights keep their dtype. qlora: they are quantised to 4 bits during
    this stage (NF4 of bitsandbytes with double quantisation; Dettmers et al. 2023, arXiv 2305.14314): less memory,
    slower."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the input of the adapters. Higher values regularise more. Reward training turns all dropout off,
    unless trainer.disable_dropout is false. [PEFT]"""


class PPOAdapters(LoRA):
    """Adapters of PPO, without dropout, which PPO turns off."""

    kind: Literal["lora"]
    """Kind of the adapters. lora: the frozen weights of the SFT model are loaded once for all four models."""


class NewTokenizer(Section):
    """New byte-level BPE tokenizer."""

    train: DataPath
    """Data to train the tokenizer on: all texts of any data that data.train accepts. If it equals data.train, then
    data.subset, data.revision and data.max_rows apply to it too."""
    vocab_size: int = Field(gt=0)
    """Maximum vocabulary size in tokens, including special tokens. Larger vocabularies give shorter sequences and
    larger embeddings."""


class NewModel(Section):
    """New model. All other keys are fields of the transformers config of `model_type`."""

    model_config = ConfigDict(extra="allow")

    model_type: str = "llama"
    """Architecture of transformers, such as llama, qwen2 or gpt2. [project]"""
    tokenizer: NewTokenizer
    """Tokenizer to train for the new model."""

    def config_fields(self) -> dict[str, Any]:
        """Return the fields of the transformers config, including model_type."""
        return {"model_type": self.model_type, **(self.model_extra or {})}


class _ModelKeys(Section):
    revision: str | None = Field(None, description=REVISION)
    dtype: Dtype = Field("auto", description=DTYPE)
    attn_implementation: str | None = Field(None, description=ATTENTION)
    chat_template: Annotated[str, PathField("template")] | None = None
    """Chat template that replaces the model's own: a Jinja file, the text of a template, or chatml. Default: the
    model's own template. [TRL SFT; it is called chat_template_path there]"""
    adapters: Adapters | None = None
    """LoRA adapters to train instead of all weights: less memory and smaller checkpoints. The base weights stay frozen,
    and only the adapters are saved. Default: all weights are trained. [TRL model; use_peft is false there]"""

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
    """Model to start from: a folder or an id on the Hugging Face Hub. Set either this or new. [project]"""
    new: NewModel | None = None
    """Model with random weights to start from. Set either this or path. [project]"""

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
    """Model to start from: a folder or an id on the Hugging Face Hub. RUN/sft is the result of the SFT stage in the run
    folder. [project]"""


class _Data(Section):
    """Options for reading rows; the stages add the keys that name the data."""

    TRAIN_KEY: ClassVar[str | None] = "train"  # key of the training data
    EVAL_KEY: ClassVar[str] = "eval"  # key of the held-out data

    columns: dict[str, str] = Field(default_factory=dict, description=COLUMNS)
    format: Literal["auto", "plain", "transcripts"] = "auto"
    """Format of the texts. transcripts: dialogues in the format of hh-rlhf, with alternating Human: and Assistant:
    turns, become conversations. plain: texts are used unchanged. auto: transcripts if the first row looks like one,
    otherwise plain. [project]"""
    subset: str | None = None
    """Subset (config) of a dataset that has several, on the Hugging Face Hub or in a folder of the same layout.
    Default: the dataset's default subset. [datasets 5.2, src/datasets/load.py]"""
    revision: str | None = None
    """Branch, tag or commit of a dataset on the Hugging Face Hub. Default: the main branch. [huggingface_hub 2.4,
    src/huggingface_hub/_snapshot_download.py]"""
    max_rows: int | None = Field(None, gt=0)
    """Maximum number of rows to read from the start of each data source. A dataset that is not in the Hub cache is
    streamed up to this row instead of being downloaded. Default: all rows. [project]"""
    eval_fraction: float | None = Field(None, gt=0, lt=1)
    """Share of the prompts that is held out, with all their rows: training never reads them, and evaluation reads only
    them. The same share and split_seed hold out the same prompts in every stage. The prompt of a conversation is its
    first user message, of a {text} row the whole text, and of a {chosen, rejected} pair of texts their common prefix.
    Default: the held-out data is named in a separate key. [project]"""
    split_seed: int | None = Field(None, ge=0)
    """Seed that selects the held-out prompts; only with eval_fraction. Default: 0. [project]"""
    on_bad: Literal["error", "drop"] = "error"
    """Handling of unusable rows: stop with an error, or drop them and report a count per fault. on_long covers long
    rows and on_identical identical answers; a file that cannot be parsed is always an error. The default stops, because
    bad rows usually mean a wrong file or column. [project]"""

    max_dropped: float = Field(MAX_DROPPED, ge=0, le=1)
    """Maximum share of the rows of a data source that may be dropped as too long, bad or identical. The stage stops
    above it (D16) and warns above 0.2; 1 never stops. [project]"""

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
            subset=self.subset,
            revision=self.revision,
            max_rows=self.max_rows,
            columns=self.columns,
            format=self.format,
            on_bad=self.on_bad,
            share=split,
            splits=("validation", "test") if held_out and split is None else ("train",),
        )


class SFTData(_Data):
    """Rows {prompt, completion}, {text} or {messages}."""

    train: DataPath = Field(description=f"Rows to train on: {NAMES}.")
    eval: DataPath | None = None
    """Held-out rows for the evaluation loss, in the same forms as train. Default: no evaluation. [TRL 1.16,
    trl/trainer/sft_trainer.py; its eval_dataset]"""
    on_long: Literal["drop", "error"] = Field("drop", description=ON_LONG)


class RewardData(_Data):
    """Preference pairs {prompt, chosen, rejected} or {chosen, rejected}."""

    train: DataPath = Field(description=f"Pairs to train on: {NAMES}.")
    eval: DataPath | None = None
    """Held-out pairs for the accuracy, in the same forms as train. Default: no evaluation. [TRL 1.16,
    trl/trainer/reward_trainer.py; its eval_dataset]"""
    on_long: Literal["drop", "error"] = Field("drop", description=ON_LONG)
    on_identical: Literal["error", "drop"] = "error"
    """Handling of pairs whose chosen and rejected answers are equal: stop with an error, or drop them. The default
    stops, because such pairs usually mean a fault in the data. [project]"""


class WordRange(Range):
    """Number of words, sampled uniformly from min..max (inclusive) for each text."""

    min: int = Field(ge=1)
    """Minimum number of words."""
    max: int = Field(ge=1)
    """Maximum number of words."""


class _PromptData(_Data):
    """Prompts, optionally cut to their first words."""

    truncate_prompt_words: Annotated[int, Field(ge=1)] | WordRange | None = None
    """Number of words that each prompt is cut to, so that any text can serve as a prompt: a number, or {min, max},
    chosen per text by its hash. Default: prompts are not cut. [project]"""

    def _source(self, key: str, where: Callable[[str], str]) -> DataSource | None:
        source, words = super()._source(key, where), self.truncate_prompt_words
        if source is None or words is None:
            return source
        return replace(source, first_words=(words, words) if isinstance(words, int) else (words.min, words.max))


class PPOData(_PromptData):
    """Prompts; pairs give their distinct prompts."""

    TRAIN_KEY = "prompts"
    EVAL_KEY = "eval_prompts"

    prompts: DataPath = Field(description=f"Prompts to train on, or pairs, whose distinct prompts are used: {NAMES}.")
    eval_prompts: DataPath | None = None
    """Held-out prompts for the sample tables that are printed during training. Default: the tables show the prompts of
    the current rollout. [project]"""
    ptx_data: DataPath | None = None
    """Rows in the form that SFT reads, {prompt, completion}, {text} or {messages}, for the language-model loss of
    ppo.ptx_coef. Same sources as prompts. Default: no such loss. [TRL PPO; it has no such loss]"""
    on_long: Literal["drop", "error"] = Field("drop", description=ON_LONG)

    def sources(self, where: Callable[[str], str]) -> dict[str, DataSource]:
        """Return the data sources by key path; truncate_prompt_words does not apply to ptx_data."""
        sources, ptx = super().sources(where), self.ptx_data and self._source("ptx_data", where)
        return sources | ({"data.ptx_data": replace(ptx, first_words=None)} if ptx else {})


class EvalData(_PromptData):
    """Prompts; pairs give their distinct prompts."""

    TRAIN_KEY = None
    EVAL_KEY = "prompts"

    prompts: DataPath = Field(
        description=(
            f"Prompts to answer, preferably none of the training prompts; pairs give their distinct prompts: {NAMES}."
        )
    )
