"""How prompts go to a model: as its own stage's data writes them."""

from typing import Any, Literal

from rlhf_cli import config as configs
from rlhf_cli import data
from rlhf_cli.checkpoints import Parent
from rlhf_cli.errors import RLHFError
from rlhf_cli.sources import is_local

Written = Literal["text", "conversation", "transcript"]
Kind = Literal["template", "transcript", "text"]
KEYS = {"ppo": "data.prompts", "sft": "data.train", "reward": "data.train"}


def written(model: Parent) -> Written | None:
    """How the data of a stage's model writes prompts; None where that is not here, or cannot be read."""
    try:
        source = configs.load(model.stage, model.path / "config.yaml").sources()[KEYS[model.stage]]
        return data.prompt_form(source) if is_local(source) else None
    except RLHFError:
        return None


def kind(how: Written | None, tokenizer: Any) -> Kind:
    """What becomes of prompts that are written so, None: unknown. A tokenizer may bring a chat template that its data
    had no use for.
    """
    if tokenizer.chat_template and how != "text":
        return "template"
    return "transcript" if how == "transcript" else "text"
