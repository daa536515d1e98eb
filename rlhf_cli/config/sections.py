"""The sections that sft.yaml and reward.yaml are made of."""

import os
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from rlhf_cli.config.base import FilePath, ModelPath, Section
from rlhf_cli.config.keys import PathKey

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Columns = dict[str, str]
REVISION = "Branch, tag or commit of a model from the hub; none: its main branch. [transformers]"
DTYPE = (
    "Number format of the weights; auto: float32, also where a GPU computes in bfloat16 (see bf16). [ours: pure "
    "bfloat16 weights lose small updates]"
)
ATTENTION = (
    "Attention code, such as sdpa, eager or flash_attention_2; none: what transformers picks for the model. "
    "[transformers]"
)
COLUMNS = (
    "Our name of a column -> the file's name of it, e.g. {prompt: question}; columns not named here keep their name. "
    "[none]"
)
ON_LONG = "Rows longer than the token limit: drop them with a warning, or error. [ours]"


class NewTokenizer(Section):
    """A byte-level BPE tokenizer trained on the spot."""

    train: FilePath = Field(
        description="Text to train the tokenizer on: JSON lines in any of the row forms that data.train takes."
    )
    vocab_size: int = Field(gt=0, description="Most tokens of the vocabulary, special tokens included.")


class NewModel(Section):
    """A model from fresh weights. Every other key here is a field of the transformers config of `model_type`."""

    model_config = ConfigDict(extra="allow")

    model_type: str = Field("llama", description="The transformers architecture, such as llama, qwen2 or gpt2. [ours]")
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
            "Chat template to use instead of the model's own: a jinja file, the template's text, or chatml. [none: "
            "the model's own]"
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

    path: ModelPath | None = Field(None, description="The model to start from: a folder or a hub id. Give this or new.")
    new: NewModel | None = Field(None, description="Start from fresh weights instead. Give this or path.")

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        if (self.path is None) == (self.new is None):
            text = "give model.path or model.new, not both" if self.path else "give model.path or model.new"
            raise PydanticCustomError("C17", text, {"hint": "path: starts from a model, new: from fresh weights"})
        return self


class RewardModel(_ModelKeys):
    """Where reward training starts."""

    path: ModelPath = Field(
        "RUN/sft",
        description="The model to start from: a folder or a hub id. RUN is the run's folder. [the SFT stage's result]",
    )


class SFTData(Section):
    """Rows {prompt, completion}, {text} or {messages}, as JSON lines."""

    train: FilePath = Field(description="Rows to train on: a JSON lines file.")
    eval: FilePath | None = Field(None, description="Rows to evaluate on, never trained on. [none]")
    columns: Columns = Field(default_factory=dict, description=COLUMNS)
    on_long: Literal["drop", "error"] = Field("drop", description=ON_LONG)


class RewardData(Section):
    """Preference pairs {prompt, chosen, rejected} or {chosen, rejected}, as JSON lines."""

    train: FilePath = Field(description="Pairs to train on: a JSON lines file.")
    eval: FilePath | None = Field(None, description="Pairs to measure the accuracy on, never trained on. [none]")
    columns: Columns = Field(default_factory=dict, description=COLUMNS)
    on_long: Literal["drop", "error"] = Field("drop", description=ON_LONG)
    on_identical: Literal["error", "drop"] = Field(
        "error", description="Pairs whose chosen answer equals the rejected one: stop, or drop them. [ours]"
    )
