"""What `rlhf reward` starts from."""

from functools import partial
from typing import Any

from rlhf_cli import data
from rlhf_cli.config import RewardConfig
from rlhf_cli.errors import RLHFError, all_of
from rlhf_cli.inputs import limits
from rlhf_cli.models import lora, tokenizers, weights


def tokenizer(config: RewardConfig, given: Any, parent_stage: str) -> Any:
    """The tokenizer as training has it: `given`, that of model.path, with a pad of its own.

    Raises RLHFError C17, T05.
    """
    template, before = tokenizers.template_sha256(given), len(given)
    if config.model.chat_template is not None:
        tokenizers.set_chat_template(given, config.model.chat_template)
        if parent_stage == "sft" and tokenizers.template_sha256(given) != template:
            text = f"model.chat_template is not that of the SFT stage ({(template or 'none')[:12]} there)"
            hint = "take it out: the template comes with the SFT model"
            raise RLHFError("T05", text, where=config.where("model.chat_template"), hint=hint)
    lora.refuse_new_tokens(config, given, before)
    tokenizers.ensure_pad_token(given, stop_token_id=data.stop_token_id(given))
    return given


def check_body(config: RewardConfig, body: Any) -> None:
    """Raises RLHFError C17 where no answers could be sampled from model.path."""
    if config.reward.normalize == "sft" and weights.is_classifier(body):
        text = "reward.normalize: sft samples from model.path, which is no causal model"
        raise RLHFError("C17", text, where=config.where("reward.normalize"), hint="set reward.normalize: none")


def read(
    config: RewardConfig, key: str, tokenizer: Any, body: Any = None, *, sample: int | None = None
) -> data.Rows[Any]:
    """Pairs of data.train or data.eval, for a model `body`; of more than `sample` a sample.

    Warns D16. Raises RLHFError D01-D10, D12, D14, D16.
    """
    read = partial(
        data.preference_rows,
        config.sources()[f"data.{key}"],
        tokenizer,
        max_length=config.reward.max_length,
        on_long=config.data.on_long,
        on_identical=config.data.on_identical,
        sample=sample,
    )
    return limits.read_usable(config, f"data.{key}", limits.longer_rows(config, body), read)


def check_rows(config: RewardConfig, rows: data.Rows[Any], held_out: data.Rows[Any] | None, body: Any) -> None:
    """Warns D13. Raises RLHFError C13 (`body` None: the context is not known), D11."""
    if held_out is not None:
        data.warn_shared(rows, held_out, where=config.where("data.eval"))
    longest = max(rows.longest, held_out.longest if held_out else 0)
    all_of(
        lambda: limits.check_context(config, body, longest),
        lambda: limits.check_batch(config, rows, len(rows)),
    )
