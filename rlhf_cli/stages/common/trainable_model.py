"""The tokenizer and the model that SFT, the reward model and DPO train."""

from collections.abc import Mapping
from typing import Any

from rlhf_cli import data
from rlhf_cli.config.base import Options
from rlhf_cli.config.dpo import DPOConfig
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.config.sft import SFTConfig
from rlhf_cli.config.stages import TRLConfig, settings_of
from rlhf_cli.errors import RLHFError, at_location
from rlhf_cli.models import build, devices, load, lora, row_trial, tokenizers
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages.common import model_loading, training_rows

TOKENIZER_DATA_KEY = "model.new.tokenizer.train"


def load_tokenizer_and_model(
    config: SFTConfig | DPOConfig, options: Options, parents: Mapping[str, Parent]
) -> tuple[Any, Any]:
    """Load or create the tokenizer and the model to train; the pad token is used for nothing else.

    Raises RLHFError C01, C06, C07, C13 and C17 for model.new, M01, M06-M08 and T05 for model.path, C07 and C17 for
    model.adapters.
    """
    parent = parents.get("model.path")
    if isinstance(config, SFTConfig) and config.model.new is not None:
        tokenizer, model = _create(config)
        key = "model.new"
    else:
        assert parent is not None
        tokenizer, model = _load(config, options, parent)
        key = "model.path"
    row_trial.require_rows_alone(model, config.where(key))
    return tokenizer, lora.prepare_for_training(config, parent, model, tokenizer)


def _create(config: SFTConfig) -> tuple[Any, Any]:
    """Train the tokenizer and initialise the model of model.new."""
    from transformers import set_seed  # imports peft

    new = config.model.new
    assert new is not None
    new_model_config(config)
    tokenizer = prepare_tokenizer(config, train_tokenizer(config))
    set_seed(config.seed)
    with at_location(config.where("model.new")):
        model = build.new_causal_lm(
            new.config_fields(), tokenizer, attn_implementation=config.model.attn_implementation
        )
    return tokenizer, model


def _load(config: SFTConfig | DPOConfig, options: Options, parent: Parent) -> tuple[Any, Any]:
    """Load model.path with its tokenizer."""
    from transformers import set_seed  # imports peft

    tokenizer = model_loading.load_tokenizer(config, options, parent)
    model = model_loading.load_model(
        load.load_causal_lm,
        config,
        options,
        parent,
        tokenizer,
        bf16_matrices=lora.trains_on_bf16(config),
    )
    tokenizer = prepare_tokenizer(config, tokenizer, parent.stage)
    set_seed(config.seed)
    return tokenizer, model


def train_tokenizer(config: SFTConfig) -> Any:
    """Train the tokenizer of model.new. Raises RLHFError C06, C07, D01-D05."""
    assert config.model.new is not None
    with at_location(config.where("model.new.tokenizer")):
        corpus = config.sources()[TOKENIZER_DATA_KEY]
        return tokenizers.train_tokenizer(corpus, config.model.new.tokenizer.vocab_size)


def new_model_config(config: SFTConfig) -> Any:
    """Return the transformers config of model.new without special tokens. Raises RLHFError C01, C07, C13, C17."""
    new = config.model.new
    assert new is not None
    with at_location(config.where("model.new")):
        model_config = build.new_config(
            new.config_fields(),
            vocab_size=new.tokenizer.vocab_size,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    training_rows.check_context_length(config, model_config, 0, strict=True)
    return model_config


def prepare_tokenizer(config: TRLConfig, tokenizer: Any, parent_stage: str = "") -> Any:
    """Return a tokenizer for training, with its own pad token and `model.chat_template`. Raises RLHFError C17, T05.

    The reward and DPO stages must keep the template of their parent if that is an SFT stage.
    """
    original_size = len(tokenizer)
    if config.model.chat_template is not None:
        template = tokenizers.template_sha256(tokenizer)
        tokenizers.set_chat_template(tokenizer, config.model.chat_template)
        changed = tokenizers.template_sha256(tokenizer) != template
        if changed and parent_stage == "sft" and not isinstance(config, SFTConfig):
            text = f"model.chat_template is not that of the SFT stage ({(template or 'none')[:12]} there)"
            hint = "remove it: the template comes with the SFT model"
            raise RLHFError("T05", text, where=config.where("model.chat_template"), hint=hint)

    lora.refuse_new_tokens(config, tokenizer, original_size)
    model_loading.set_template_variables(config, tokenizer, parent_stage)
    tokenizers.ensure_pad_token(tokenizer, stop_token_id=data.stop_token_id(tokenizer))
    return tokenizer


def load_sft_model(config: TRLConfig, options: Options, parent: Parent, tokenizer: Any) -> Any:
    """Load model.path as a language model."""
    bf16 = devices.use_bf16(settings_of(config).bf16)
    kwargs = load.load_kwargs(config.model, options.trust_remote_code, bf16_matrices=bf16)
    return grow_embeddings(load.load_causal_lm(parent.model, **kwargs), tokenizer)


def grow_embeddings(model: Any, tokenizer: Any) -> Any:
    """Return the language model with an embedding for each token, which draws no random number."""
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    lora.grow_embeddings(model, tokenizers.vocabulary_size(tokenizer, num_embeddings))
    return model


def check_can_sample(config: RewardConfig, model_config: Any) -> None:
    """Raise RLHFError C17 if reward.normalize samples from model.path and it is not a causal model."""
    if config.reward.normalize == "sft" and build.is_classifier(model_config):
        text = "reward.normalize: sft samples from model.path, which is not a causal model"
        raise RLHFError("C17", text, where=config.where("reward.normalize"), hint="set reward.normalize: none")
