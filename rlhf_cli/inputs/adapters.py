"""What `model.adapters` and `models.adapters` ask of the model that a stage starts from."""

from typing import Any

from rlhf_cli.checkpoints import Parent
from rlhf_cli.config import PPOConfig, RewardConfig, SFTConfig
from rlhf_cli.errors import RLHFError, placed
from rlhf_cli.models import adapters, devices, embeddings, shapes

KEY = "model.adapters.target_modules"


def to_train(config: SFTConfig | RewardConfig, parent: Parent | None, model: Any, tokenizer: Any) -> Any:
    """A model ready for training: with embeddings for all tokens, and with the adapters that the config asks for.

    `parent` is what it was loaded from. Raises RLHFError C07 for layers that it does not have, C17 where it cannot
    be held in 4 bits.
    """
    ours = config.model.adapters
    if ours is None:
        embeddings.fit_embeddings(model, tokenizer)
        return model
    assert parent is not None, "model.new takes no adapters"
    base, device = parent.hub or parent.model, devices.device()
    settings = config.sft if isinstance(config, SFTConfig) else config.reward
    bf16, rows = devices.computes_in_bf16(settings.bf16), len(tokenizer)
    with placed(config.where(KEY)):
        return adapters.put_on(model, ours, rows=rows, base=base, revision=parent.revision, device=device, bf16=bf16)


def check_targets(config: SFTConfig | RewardConfig | PPOConfig, body: Any) -> None:
    """Raises RLHFError C07 where a model of config `body` has no layers called as in target_modules."""
    key = "models.adapters" if isinstance(config, PPOConfig) else "model.adapters"
    ours = config.models.adapters if isinstance(config, PPOConfig) else config.model.adapters
    if ours is not None and ours.target_modules != "all-linear":
        with placed(config.where(f"{key}.target_modules")):
            adapters.targets_of(shapes.causal(body), ours, key)


def refuse_new_tokens(config: SFTConfig | RewardConfig, tokenizer: Any, before: int) -> None:
    """Raises RLHFError C17 where a template added tokens to a tokenizer of `before`: adapters would not train them."""
    if config.model.adapters is not None and len(tokenizer) > before:
        names = tokenizer.convert_ids_to_tokens(list(range(before, len(tokenizer))))
        text = f"model.chat_template adds {' and '.join(names)}, whose embeddings adapters do not train"
        hint = "take a template of tokens that the model knows, or leave model.adapters out"
        raise RLHFError("C17", text, where=config.where("model.chat_template"), hint=hint)
