"""Set-up of `rlhf sft`: tokenizer, model config, packing and rows; `rlhf check` and `plan` use it without TRL."""

from functools import partial
from typing import Any

from rlhf_cli import data, terminal
from rlhf_cli.config.training import SFTConfig
from rlhf_cli.errors import at_location, collect_errors
from rlhf_cli.models import build, lora, tokenizers
from rlhf_cli.stages import setup

TOKENIZER_DATA_KEY = "model.new.tokenizer.train"
SPLITTING_STRATEGIES = ("wrapped", "bfd_split")  # packing strategies that split long rows
IGNORE_INDEX = -100  # label of a token that is not trained


def prepare_tokenizer(config: SFTConfig, tokenizer: Any) -> Any:
    """Return the tokenizer for training: model.path's, or a newly trained one if None, with its own pad token.

    Raises RLHFError C06, C07, C17, D01-D05.
    """
    if tokenizer is None:
        assert config.model.new is not None
        with at_location(config.where("model.new.tokenizer")):
            corpus, vocab_size = config.sources()[TOKENIZER_DATA_KEY], config.model.new.tokenizer.vocab_size
            tokenizer = tokenizers.train_tokenizer(corpus, vocab_size)
    original_size = len(tokenizer)
    if config.model.chat_template is not None:
        tokenizers.set_chat_template(tokenizer, config.model.chat_template)
    lora.refuse_new_tokens(config, tokenizer, original_size)
    tokenizers.ensure_pad_token(tokenizer, stop_token_id=data.stop_token_id(tokenizer))
    return tokenizer


def new_model_config(config: SFTConfig, vocab_size: int) -> Any:
    """Return the transformers config of model.new without special tokens. Raises RLHFError C01, C07, C13, C17."""
    assert config.model.new is not None
    with at_location(config.where("model.new")):
        no_special_tokens = dict.fromkeys(f"{name}_token_id" for name in ("pad", "bos", "eos"))
        model_config = build.new_config(config.model.new.config_fields(), vocab_size=vocab_size, **no_special_tokens)
    setup.check_context_length(config, model_config, 0, strict=True)
    return model_config


def packing_strategy(config: SFTConfig, *, log: bool = True) -> str | None:
    """Return how rows are packed into sequences of max_length, None without packing.

    `bfd` keeps rows separate, by flash attention or a mask of (tokens of the batch)^2. `wrapped` splits one long text
    whose neighbouring rows attend to each other: usual for plain text, and about twice as fast on a CPU.
    """
    if not config.sft.packing:
        return None
    plain = data.is_plain_text(config.sources()["data.train"])
    strategy = config.trainer.get("packing_strategy", "wrapped" if plain else "bfd")
    effect = "cut out of one long text, neighbours see each other" if strategy == "wrapped" else "rows stay apart"
    if log:
        terminal.say(f"sft      packing: {strategy} ({effect}; trainer.packing_strategy changes it)")
    return strategy


def read_data(
    config: SFTConfig,
    key: str,
    tokenizer: Any,
    strategy: str | None,
    model_config: Any = None,
    *,
    sample: int | None = None,
) -> data.Rows[Any]:
    """Read data.train or data.eval, up to max_length unless packing splits long rows.

    Of more than `sample` rows only a sample is read. Warns D16. Raises RLHFError D01-D10, D12, D14, D16.
    """
    read = partial(
        data.sft_rows,
        config.sources()[f"data.{key}"],
        tokenizer,
        max_length=None if strategy in SPLITTING_STRATEGIES else config.sft.max_length,
        on_long=config.data.on_long,
        sample=sample,
    )
    return setup.read_rows(config, f"data.{key}", setup.longer_rows_hint(config, model_config), read)


def check_rows(
    config: SFTConfig, rows: data.Rows[Any], eval_rows: data.Rows[Any] | None, model_config: Any, strategy: str | None
) -> None:
    """Raise RLHFError C13 or D11 if rows are too long or too few; `model_config` None: unknown context. Warns D13."""
    if eval_rows is not None:
        data.warn_shared(rows, eval_rows, where=config.where("data.eval"))
    longest = max(rows.longest, eval_rows.longest if eval_rows else 0)
    strict = config.model.new is not None or strategy in SPLITTING_STRATEGIES
    collect_errors(
        lambda: setup.check_context_length(config, model_config, longest, strict=strict),
        lambda: _check_batch_size(config, rows, strategy),
    )


def _check_batch_size(config: SFTConfig, rows: data.Rows[Any], strategy: str | None) -> None:
    if strategy not in SPLITTING_STRATEGIES:
        setup.check_batch_size(config, rows, len(rows))
    elif rows.longest:
        setup.check_batch_size(config, rows, num_sequences(config, rows), "packed sequences")


def num_sequences(config: SFTConfig, rows: data.Rows[Any]) -> int:
    """Return the least number of sequences of max_length that hold all tokens; packing may make a few more."""
    return -(-sum(len(row["input_ids"]) for row in rows) // config.sft.max_length)


def add_labels(config: SFTConfig, rows: data.Rows[Any]) -> data.Rows[dict[str, list[int]]]:
    """Return {input_ids, labels} per row; completion_only_loss ignores the prompt tokens."""
    completion_only = config.sft.completion_only_loss
    return rows.with_rows(
        {
            "input_ids": row["input_ids"],
            "labels": [
                token if in_completion or not completion_only else IGNORE_INDEX
                for token, in_completion in zip(row["input_ids"], row["completion_mask"], strict=True)
            ],
        }
        for row in rows
    )
