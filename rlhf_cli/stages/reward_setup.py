"""Set-up of `rlhf reward`: tokenizer and rows; `rlhf check` and `plan` use it without TRL."""

from functools import partial
from typing import Any

from rlhf_cli import data
from rlhf_cli.config.training import RewardConfig
from rlhf_cli.errors import RLHFError, collect_errors
from rlhf_cli.models import lora, tokenizers, weights
from rlhf_cli.stages import setup


def prepare_tokenizer(config: RewardConfig, tokenizer: Any, parent_stage: str) -> Any:
    """Return model.path's tokenizer for training, with its own pad token. Raises RLHFError C17, T05."""
    template, original_size = tokenizers.template_sha256(tokenizer), len(tokenizer)
    if config.model.chat_template is not None:
        tokenizers.set_chat_template(tokenizer, config.model.chat_template)
        if parent_stage == "sft" and tokenizers.template_sha256(tokenizer) != template:
            text = f"model.chat_template is not that of the SFT stage ({(template or 'none')[:12]} there)"
            hint = "take it out: the template comes with the SFT model"
            raise RLHFError("T05", text, where=config.where("model.chat_template"), hint=hint)
    lora.refuse_new_tokens(config, tokenizer, original_size)
    tokenizers.ensure_pad_token(tokenizer, stop_token_id=data.stop_token_id(tokenizer))
    return tokenizer


def check_can_sample(config: RewardConfig, model_config: Any) -> None:
    """Raise RLHFError C17 if reward.normalize samples from model.path and it is not a causal model."""
    if config.reward.normalize == "sft" and weights.is_classifier(model_config):
        text = "reward.normalize: sft samples from model.path, which is not a causal model"
        raise RLHFError("C17", text, where=config.where("reward.normalize"), hint="set reward.normalize: none")


def read_data(
    config: RewardConfig, key: str, tokenizer: Any, model_config: Any = None, *, sample: int | None = None
) -> data.Rows[Any]:
    """Read the pairs of data.train or data.eval; of more than `sample` only a sample is read.

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
    return setup.read_rows(config, f"data.{key}", setup.longer_rows_hint(config, model_config), read)


def check_rows(config: RewardConfig, rows: data.Rows[Any], eval_rows: data.Rows[Any] | None, model_config: Any) -> None:
    """Raise RLHFError C13 or D11 if rows are too long or too few; `model_config` None: unknown context. Warns D13."""
    if eval_rows is not None:
        data.warn_shared(rows, eval_rows, where=config.where("data.eval"))
    longest = max(rows.longest, eval_rows.longest if eval_rows else 0)
    collect_errors(
        lambda: setup.check_context_length(config, model_config, longest),
        lambda: setup.check_batch_size(config, rows, len(rows)),
    )
