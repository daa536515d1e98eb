"""The sections that the four configs are made of."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from rlhf_cli.config.adapters import Adapters
from rlhf_cli.config.base import DataPath, ModelPath, Section
from rlhf_cli.config.keys import PathKey
from rlhf_cli.config.sources import DataSource, HoldoutSplit
from rlhf_cli.ppo.settings.base import Range

MAX_DROPPED = 0.8  # of a data key's rows: the default share that may be left out
STAGE = (
    "The stage that the file is for; optional, must match the command. "
    "[`pytest tests/test_check.py::test_the_stage_of_a_file`]"
)
OWN_STAGES = "[`pytest tests/test_config.py::test_models_default_to_the_runs_own_stages`]"
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Columns = dict[str, str]
REVISION = (
    "Branch, tag or commit of a model from the hub; none: its main branch. "
    "[`pytest tests/test_checkpoints.py -k cached_hub_id`]"
)
DTYPE = (
    "Number format of the weights; auto: float32, also where a GPU computes in bfloat16 (see bf16): pure bfloat16 "
    "weights would lose small updates. [`pytest tests/test_models_loading.py -k dtype_auto`]"
)
ATTENTION = (
    "Attention code, such as sdpa, eager or flash_attention_2; none: what transformers picks for the model. "
    "[transformers 5.23, src/transformers/modeling_utils.py]"
)
COLUMNS = (
    "Our name of a column -> the file's name of it, e.g. {prompt: question}; columns not named here keep their name. "
    "[`pytest tests/test_data.py::test_columns_are_read_under_the_files_names`]"
)
ONE_START = "[`pytest tests/test_config_lines.py::test_where_sft_starts`]"
NAMES = (
    "a file (.jsonl, .json, .csv, .tsv, .parquet, .txt; .gz too), a folder of such, or a dataset of the hub, "
    "OWNER/NAME; [SPLIT] behind the name picks a split"
)
ON_LONG = (
    "Rows longer than the token limit: drop them with a warning, or error. "
    "[`pytest tests/test_data.py::test_long_rows_are_dropped_and_counted_or_refused`]"
)


class NewTokenizer(Section):
    """A byte-level BPE tokenizer trained on the spot."""

    train: DataPath = Field(
        description=(
            "Text to train the tokenizer on: all texts of any data that data.train could name; where it is the same, "
            "data.subset, data.revision and data.max_rows hold for it too."
        )
    )
    vocab_size: int = Field(gt=0, description="Most tokens of the vocabulary, special tokens included.")


class NewModel(Section):
    """A model from fresh weights. Every other key here is a field of the transformers config of `model_type`."""

    model_config = ConfigDict(extra="allow")

    model_type: str = Field(
        "llama",
        description=(
            "The transformers architecture, such as llama, qwen2 or gpt2. "
            "[`pytest tests/test_defaults.py::test_fresh_weights_are_a_llama`]"
        ),
    )
    tokenizer: NewTokenizer = Field(description="The tokenizer to train for it.")

    def config_fields(self) -> dict[str, Any]:
        """The fields of the transformers config, model_type among them."""
        return {"model_type": self.model_type, **(self.model_extra or {})}


class _ModelKeys(Section):
    revision: str | None = Field(None, description=REVISION)
    dtype: Dtype = Field("auto", description=DTYPE)
    attn_implementation: str | None = Field(None, description=ATTENTION)
    chat_template: Annotated[str, PathKey("template")] | None = Field(
        None,
        description=(
            "Chat template to use instead of the model's own: a jinja file, the template's text, or chatml; none: the "
            "model's own. [TRL 1.16, trl/trainer/sft_config.py; it is called chat_template_path there]"
        ),
    )
    adapters: Adapters | None = Field(
        None,
        description=(
            "Train adapters (LoRA) beside the model's frozen weights, and leave them alone on disk; none: the whole "
            "model is trained. docs/scaling.md tells more. [`pytest tests/test_adapters.py -k full_unless`]"
        ),
    )

    @model_validator(mode="after")
    def _template_is_one(self) -> Self:
        template = self.chat_template
        if template is None or template == "chatml" or "{{" in template or "{%" in template or os.path.isfile(template):
            return self
        raise PydanticCustomError(
            "C07",
            "chat_template {template} is no file, no template text and not chatml",
            {"template": template[:80], "key": "chat_template"},
        )


class SFTModel(_ModelKeys):
    """Where supervised fine-tuning starts."""

    path: ModelPath | None = Field(
        None, description=f"The model to start from: a folder or a hub id. Give this or new. {ONE_START}"
    )
    new: NewModel | None = Field(None, description=f"Start from fresh weights instead. Give this or path. {ONE_START}")

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        if (self.path is None) == (self.new is None):
            text = "give model.path or model.new, not both" if self.path else "give model.path or model.new"
            raise PydanticCustomError("C17", text, {"hint": "path: starts from a model, new: from fresh weights"})
        if self.new is not None and self.adapters is not None:
            text = "model.adapters needs trained weights to stand beside, and model.new draws fresh ones"
            raise PydanticCustomError("C17", text, {"hint": "take model.adapters out", "key": "adapters"})
        return self


class RewardModel(_ModelKeys):
    """Where reward training starts."""

    path: ModelPath = Field(
        "RUN/sft",
        description=(
            "The model to start from: a folder or a hub id; RUN/sft is the SFT stage's result, in the run's folder. "
            f"{OWN_STAGES}"
        ),
    )


class _Data(Section):
    """How rows are found and read; the keys that name them are the stages' own."""

    LEARNT: ClassVar[str | None] = "train"  # the key of what is trained on
    HELD_OUT: ClassVar[str] = "eval"  # the key of what never is

    columns: Columns = Field(default_factory=dict, description=COLUMNS)
    format: Literal["auto", "plain", "transcripts"] = Field(
        "auto",
        description=(
            "How texts are read. transcripts: dialogues of hh-rlhf's form, Human: and Assistant: in turn, become "
            "conversations; plain: as they stand; auto: transcripts where the first row looks like one. "
            "[`pytest tests/test_data_transcripts.py::test_format_says_how_texts_are_read`]"
        ),
    )
    subset: str | None = Field(
        None,
        description=(
            "Subset (config) of a dataset of the hub, or of a folder like one, that has several; none: its default. "
            "[`pytest tests/test_sources_folders.py::test_subsets_of_the_readme`]"
        ),
    )
    revision: str | None = Field(
        None,
        description=(
            "Branch, tag or commit of a dataset from the hub; none: its main branch. "
            "[huggingface_hub 2.4, src/huggingface_hub/_snapshot_download.py]"
        ),
    )
    max_rows: int | None = Field(
        None,
        gt=0,
        description=(
            "Most rows read, the first ones of each key's data; of a dataset that is not in the hub's cache only these "
            "are streamed; none: all. [`pytest tests/test_sources.py::test_only_max_rows_are_looked_at`]"
        ),
    )
    eval_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description=(
            "Share of the prompts that is held out, with all their rows: training never reads them, evaluation reads "
            "nothing else. The same share and seed hold out the same prompts in every stage; of a conversation its "
            "opening by the user counts, of {text} all of it, of {chosen, rejected} as texts what they share; "
            "none: files of their own are held out. "
            "[`pytest tests/test_config_data.py::test_a_fraction_is_held_out_of_one_file_in_every_stage`]"
        ),
    )
    split_seed: int | None = Field(
        None,
        ge=0,
        description=(
            "Another seed holds out other prompts; none: 0. Only with eval_fraction. "
            "[`pytest tests/test_data_transcripts.py -k another_seed`]"
        ),
    )
    on_bad: Literal["error", "drop"] = Field(
        "error",
        description=(
            "Rows that cannot be used: stop, or leave them out with a count of each fault. Long rows have on_long, "
            "identical answers on_identical; a file that cannot be parsed always stops. "
            "[`pytest tests/test_data_transcripts.py::test_odd_dialogues_have_a_code_or_are_left_out`]"
        ),
    )

    max_dropped: float = Field(
        MAX_DROPPED,
        ge=0,
        le=1,
        description=(
            "Largest share of a key's rows that may be left out, as too long, bad or identical: above it the stage "
            "stops (D16), above 0.2 it warns; 1 never stops. "
            "[`pytest tests/test_left_out.py::test_max_dropped_says_where_a_stage_stops`]"
        ),
    )

    @model_validator(mode="after")
    def _one_way_to_hold_out(self) -> Self:
        named = self.LEARNT and getattr(self, self.HELD_OUT) is not None
        if self.eval_fraction is not None and named:
            text = f"data.{self.HELD_OUT} and data.eval_fraction both say what is held out"
            raise PydanticCustomError("C17", text, {"hint": "keep one of the two", "key": "eval_fraction"})
        if self.split_seed is not None and self.eval_fraction is None:
            text = "data.split_seed has no effect without data.eval_fraction"
            raise PydanticCustomError("C17", text, {"hint": "add eval_fraction: 0.05", "key": "split_seed"})
        return self

    def sources(self, where: Callable[[str], str]) -> dict[str, DataSource]:
        """Key path -> source, of each key that names data, and of the share that eval_fraction holds out."""
        keys = [key for key in (self.LEARNT, self.HELD_OUT) if key]
        return {f"data.{key}": source for key in keys if (source := self._source(key, where))}

    def _source(self, key: str, where: Callable[[str], str]) -> DataSource | None:
        held_out, share = key == self.HELD_OUT, None
        name = getattr(self, key)
        if self.eval_fraction is not None:
            name = name or getattr(self, self.LEARNT or key)
            share = HoldoutSplit(self.eval_fraction, self.split_seed or 0, held_out)
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
            share=share,
            splits=("validation", "test") if held_out and share is None else ("train",),
        )


class SFTData(_Data):
    """Rows {prompt, completion}, {text} or {messages}."""

    train: DataPath = Field(description=f"Rows to train on: {NAMES}.")
    eval: DataPath | None = Field(
        None,
        description=(
            "Rows to evaluate on, never trained on: named like train; none: no evaluation. "
            "[TRL 1.16, trl/trainer/sft_trainer.py; its eval_dataset]"
        ),
    )
    on_long: Literal["drop", "error"] = Field("drop", description=ON_LONG)


class RewardData(_Data):
    """Preference pairs {prompt, chosen, rejected} or {chosen, rejected}."""

    train: DataPath = Field(description=f"Pairs to train on: {NAMES}.")
    eval: DataPath | None = Field(
        None,
        description=(
            "Pairs to measure the accuracy on, never trained on: named like train; none: no evaluation. "
            "[TRL 1.16, trl/trainer/reward_trainer.py; its eval_dataset]"
        ),
    )
    on_long: Literal["drop", "error"] = Field("drop", description=ON_LONG)
    on_identical: Literal["error", "drop"] = Field(
        "error",
        description=(
            "Pairs whose chosen answer equals the rejected one: stop, or drop them. "
            "[`pytest tests/test_stage_reward.py::test_d07_identical_pairs_are_refused_or_dropped`]"
        ),
    )


class WordRange(Range):
    """A number of words drawn anew for each text, uniform over min..max, both included."""

    min: int = Field(ge=1, description="Fewest words.")
    max: int = Field(ge=1, description="Most words.")


class _PromptData(_Data):
    """Prompts, whole or cut short."""

    first_words: Annotated[int, Field(ge=1)] | WordRange | None = Field(
        None,
        description=(
            "Prompts are cut to their first words, so that any texts give prompts: a number, or {min, max} drawn from "
            "a hash of the text; none: whole prompts. "
            "[`pytest tests/test_config.py::test_first_words_are_a_number_or_a_range`]"
        ),
    )

    def _source(self, key: str, where: Callable[[str], str]) -> DataSource | None:
        source, words = super()._source(key, where), self.first_words
        if source is None or words is None:
            return source
        return replace(source, first_words=(words, words) if isinstance(words, int) else (words.min, words.max))


class PPOData(_PromptData):
    """Prompts; pairs give their distinct prompts."""

    LEARNT = "prompts"
    HELD_OUT = "eval_prompts"

    prompts: DataPath = Field(description=f"Prompts to train on, or pairs: {NAMES}.")
    eval_prompts: DataPath | None = Field(
        None,
        description=(
            "Prompts for the sample tables during training, never trained on; none: the tables show the rollout. "
            "[`pytest tests/test_stage_ppo.py -k eval_prompts_are_shown`]"
        ),
    )
    ptx_data: DataPath | None = Field(
        None,
        description=(
            "Rows as SFT takes them, {prompt, completion}, {text} or {messages}, for the language-model loss of "
            "ppo.ptx_coef: named like prompts. [`pytest tests/test_stage_ppo_alarms.py -k ptx`]"
        ),
    )
    on_long: Literal["drop", "error"] = Field("drop", description=ON_LONG)

    def sources(self, where: Callable[[str], str]) -> dict[str, DataSource]:
        """Key path -> source, of each key that names data; ptx_data is read whole, first_words is for prompts."""
        found, ptx = super().sources(where), self.ptx_data and self._source("ptx_data", where)
        return found | ({"data.ptx_data": replace(ptx, first_words=None)} if ptx else {})


class EvalData(_PromptData):
    """Prompts; pairs give their distinct prompts."""

    LEARNT = None
    HELD_OUT = "prompts"

    prompts: DataPath = Field(description=f"Prompts to answer, best none of the training's, or pairs: {NAMES}.")
