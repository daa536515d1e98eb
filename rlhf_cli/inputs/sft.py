"""What `rlhf sft` starts from."""

from functools import partial
from typing import Any

from rlhf_cli import data, terminal
from rlhf_cli.config import SFTConfig
from rlhf_cli.errors import all_of, placed
from rlhf_cli.inputs import limits
from rlhf_cli.models import build, lora, tokenizers

TRAINED_ON = "model.new.tokenizer.train"
CUT = ("wrapped", "bfd_split")  # packing strategies that cut long rows, so that none is too long
IGNORED = -100  # label of a token that is not trained


def tokenizer(config: SFTConfig, given: Any) -> Any:
    """The tokenizer as training has it: `given`, that of model.path, or for None a new one; with a pad of its own.

    Raises RLHFError C06, C07, C17, D01-D05.
    """
    if given is None:
        assert config.model.new is not None
        with placed(config.where("model.new.tokenizer")):
            given = tokenizers.train_tokenizer(config.sources()[TRAINED_ON], config.model.new.tokenizer.vocab_size)
    before = len(given)
    if config.model.chat_template is not None:
        tokenizers.set_chat_template(given, config.model.chat_template)
    lora.refuse_new_tokens(config, given, before)
    tokenizers.ensure_pad_token(given, stop_token_id=data.stop_token_id(given))
    return given


def new_body(config: SFTConfig, vocab_size: int) -> Any:
    """The transformers config of model.new, special tokens left out. Raises RLHFError C01, C07, C13, C17."""
    assert config.model.new is not None
    with placed(config.where("model.new")):
        unknown = dict.fromkeys(f"{name}_token_id" for name in ("pad", "bos", "eos"))
        body = build.new_config(config.model.new.config_fields(), vocab_size=vocab_size, **unknown)
    limits.check_context(config, body, 0, strict=True)
    return body


def packing_strategy(config: SFTConfig, *, say: bool = True) -> str | None:
    """How rows are packed into sequences of max_length; None where they are not.

    `bfd` keeps whole rows apart, by flash attention or by a mask as large as the batch's tokens squared. `wrapped` cuts
    one long text, in which neighbours see each other: the usual way for plain text, and about twice as fast on a CPU.
    """
    if not config.sft.packing:
        return None
    plain = data.is_plain_text(config.sources()["data.train"])
    strategy = config.trainer.get("packing_strategy", "wrapped" if plain else "bfd")
    apart = "cut out of one long text, neighbours see each other" if strategy == "wrapped" else "rows stay apart"
    if say:
        terminal.say(f"sft      packing: {strategy} ({apart}; trainer.packing_strategy changes it)")
    return strategy


def read(
    config: SFTConfig, key: str, tokenizer: Any, strategy: str | None, body: Any = None, *, sample: int | None = None
) -> data.Rows[Any]:
    """Rows of data.train or data.eval for a model `body`, within max_length unless packing cuts them.

    Of more rows than `sample` a sample. Warns D16. Raises RLHFError D01-D10, D12, D14, D16.
    """
    read = partial(
        data.sft_rows,
        config.sources()[f"data.{key}"],
        tokenizer,
        max_length=None if strategy in CUT else config.sft.max_length,
        on_long=config.data.on_long,
        sample=sample,
    )
    return limits.read_usable(config, f"data.{key}", limits.longer_rows(config, body), read)


def check_rows(
    config: SFTConfig, rows: data.Rows[Any], held_out: data.Rows[Any] | None, body: Any, strategy: str | None
) -> None:
    """Warns D13. Raises RLHFError C13 (`body` None: the context is not known), D11."""
    if held_out is not None:
        data.warn_shared(rows, held_out, where=config.where("data.eval"))
    longest, strict = max(rows.longest, held_out.longest if held_out else 0), config.model.new is not None
    all_of(
        lambda: limits.check_context(config, body, longest, strict=strict or strategy in CUT),
        lambda: _check_batch(config, rows, strategy),
    )


def _check_batch(config: SFTConfig, rows: data.Rows[Any], strategy: str | None) -> None:
    if strategy not in CUT:
        limits.check_batch(config, rows, len(rows))
    elif rows.longest:
        limits.check_batch(config, rows, sequences(config, rows), "packed sequences")


def sequences(config: SFTConfig, rows: data.Rows[Any]) -> int:
    """How many sequences of max_length the rows fill: with packing there are about so many, or some more."""
    return -(-sum(len(row["input_ids"]) for row in rows) // config.sft.max_length)


def labelled(config: SFTConfig, rows: data.Rows[Any]) -> data.Rows[dict[str, list[int]]]:
    """{input_ids, labels} of each row."""
    only = config.sft.completion_only_loss
    return rows.holding(
        {
            "input_ids": row["input_ids"],
            "labels": [
                token if wanted or not only else IGNORED
                for token, wanted in zip(row["input_ids"], row["completion_mask"], strict=True)
            ],
        }
        for row in rows
    )
