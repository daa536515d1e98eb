"""The form in which a data file writes prompts, and the format in which they reach a model."""

from typing import Any, Literal, cast

from rlhf_cli import config as configs
from rlhf_cli import data
from rlhf_cli.data.datasets import PromptForm
from rlhf_cli.data.sources import is_local
from rlhf_cli.errors import RLHFError
from rlhf_cli.runs.parents import Parent

PromptFormat = Literal["template", "transcript", "text"]  # how they are passed to a model

DATA_KEYS = {  # stage -> the key of the data that it trains on
    "sft": "data.train",
    "reward": "data.train",
    "dpo": "data.train",
    "ppo": "data.prompts",
}


def training_prompt_form(parent: Parent) -> PromptForm | None:
    """Return the form of the prompts a model was trained on.

    Of a stage whose manifest does not have it, that of its data; None if that is not local or not readable.
    """
    if parent.stage not in DATA_KEYS:
        return None
    form = parent.manifest.prompt_form
    if form in ("text", "conversation", "transcript"):
        return cast(PromptForm, form)
    try:
        config = configs.load(parent.stage, parent.path / "config.yaml")
        source = config.sources()[DATA_KEYS[parent.stage]]
        return data.prompt_form(source) if is_local(source) else None
    except RLHFError:
        return None


def prompt_format(form: PromptForm | None, tokenizer: Any) -> PromptFormat:
    """Return how prompts of this form are passed to the model; None: unknown form.

    A tokenizer may have a chat template that its training data did not use.
    """
    if tokenizer.chat_template and form != "text":
        return "template"
    return "transcript" if form == "transcript" else "text"
