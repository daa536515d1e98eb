"""Tokenizers: load, train, add a pad token, resize embeddings, and compare by hash."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlhf_cli import runs, terminal
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.sources import read_rows
from rlhf_cli.errors import Problem, RLHFError, shown, translate_rust_panics
from rlhf_cli.files import read_json_object
from rlhf_cli.models import tokenizer_diff
from rlhf_cli.runs.parents import Parent

PAD = "[PAD]"
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def load_tokenizer(folder: Path | str, *, chat_template: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load a folder's tokenizer with left padding; `chat_template` (see `set_chat_template`) replaces the stored one.

    Raises RLHFError M01 if the folder has no readable tokenizer, M08 if it needs custom Python code.
    """
    refuse_code(folder, trust_remote_code)
    try:
        with translate_rust_panics("M01", f"{shown(folder)} holds no tokenizer that can be read"):
            tokenizer = AutoTokenizer.from_pretrained(
                folder, padding_side="left", trust_remote_code=trust_remote_code, local_files_only=True
            )
            plain_ids = set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)
            # Some invalid settings raise only when a text is encoded.
            tokenizer(tokenizer.decode([min(plain_ids)]) if plain_ids else "")
    except (RLHFError, MemoryError):
        raise
    except Exception as error:  # the files may contain anything
        if "trust_remote_code" in str(error):
            raise remote_code_error(folder) from error
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise RLHFError("M01", f"{shown(folder)} holds no tokenizer that can be read: {reason}") from error
    if chat_template is not None:
        set_chat_template(tokenizer, chat_template)
    return tokenizer


def refuse_code(folder: Path | str, trusted: bool) -> None:
    """Raise RLHFError M08 if the config or tokenizer names Python code in the folder, unless `trusted`.

    This holds even if transformers has a built-in class: it may compute something else than the authors' code.
    """
    paths = (Path(folder) / name for name in ("config.json", "tokenizer_config.json"))
    settings = (read_json_object(path) or {} for path in paths if path.is_file())  # a named pipe may never end
    if not trusted and any(Path(folder).glob("*.py")) and any("auto_map" in config for config in settings):
        raise remote_code_error(folder)


def remote_code_error(folder: Path | str) -> RLHFError:
    """Return the error for a model that needs custom Python code."""
    return RLHFError(
        "M08",
        f"{shown(folder)} wants to run Python code that comes with the model",
        hint="read that code, then add --trust-remote-code; or remove it where transformers has a class of its own",
    )


def set_chat_template(tokenizer: Any, template: str) -> None:
    """Set the chat template from a Jinja file, from a template's text, or to `chatml` (which adds its two tokens).

    Raises RLHFError C07 for any other value.
    """
    if template == "chatml":
        tokenizer.add_tokens([AddedToken(token, special=True) for token in CHATML_TOKENS], special_tokens=True)
        tokenizer.chat_template = CHATML
    elif "{" in template:
        tokenizer.chat_template = template
    elif Path(template).is_file():
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    else:
        text = f"{template!r} is neither a Jinja file, nor a template's text, nor chatml"
        raise RLHFError("C07", f"model.chat_template: {text}")


def ensure_pad_token(tokenizer: Any, *, stop_token_id: int) -> str | None:
    """Add `[PAD]` and return it if the pad token is missing, or is also the EOS or stop token.

    Warns T02 or T01. The model's embeddings must be resized afterwards (`resize_to_tokenizer`).
    """
    if tokenizer.pad_token_id is None:
        terminal.warn("T02", f"the tokenizer has no pad token: {PAD} is added, and saved with the model")
    elif tokenizer.pad_token_id in (tokenizer.eos_token_id, stop_token_id):
        text = f"the pad token {tokenizer.pad_token!r} also ends a text: {PAD} is added for padding"
        terminal.warn("T01", f"{text}, so that the end stays trained")
    else:
        return None
    tokenizer.add_special_tokens({"pad_token": PAD})
    return PAD


def check_vocabulary(model: Any, tokenizer: Any, where: str | None = None) -> None:
    """Raise RLHFError M06 if the tokenizer has ids for which the model has no embedding."""
    check_vocabulary_size(model.get_input_embeddings().weight.shape[0], tokenizer, where)


def check_vocabulary_size(num_embeddings: int, tokenizer: Any, where: str | None) -> None:
    """Raise RLHFError M06 if the tokenizer has ids beyond `num_embeddings`."""
    if (largest := max(tokenizer.get_vocab().values())) >= num_embeddings:
        raise RLHFError(
            "M06",
            f"the tokenizer has ids up to {largest}, the model {num_embeddings} embeddings",
            where=where,
            hint="use the tokenizer that belongs to the model",
        )


def resize_to_tokenizer(model: Any, tokenizer: Any) -> None:
    """Grow the embeddings to added tokens; new rows start near the mean row, so that no new logit stands out."""
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))


def train_tokenizer(source: DataSource | Path | str, vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer of at most `vocab_size` tokens on all texts of a source.

    Ids 0 and 1 are `<pad>` and `<eos>`. Raises RLHFError D01-D05 (D05: no text), C06 for fewer than 258 tokens.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<eos>"]
    if vocab_size < (minimum := len(alphabet) + len(special)):
        text = f"model.new.tokenizer.vocab_size is {vocab_size}; {minimum} is the least (every byte, and two of ours)"
        raise RLHFError("C06", text)
    source = DataSource.of(source)
    texts = [text for _, row in read_rows(source) for text in _strings(row.values())]
    if not texts:
        raise RLHFError("D05", f"no text to train a tokenizer on in {source.shown()}", where=source.where)
    backend = Tokenizer(tokenizer_models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=sorted(alphabet), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def tokenizer_sha256(tokenizer: Any) -> str:
    """Return the SHA-256 of vocabulary, merges, BOS and EOS id. `tokenizer_diff` compares all other settings.

    An added `[PAD]` is left out, since no text contains it: `ensure_pad_token` does not change the hash.
    """
    vocabulary = tokenizer.get_vocab()
    if tokenizer.pad_token == PAD:
        del vocabulary[PAD]
    special = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    content: dict[str, Any] = {"vocabulary": sorted(vocabulary.items()), "special": special}
    if tokenizer.is_fast:
        content["merges"] = json.loads(tokenizer.backend_tokenizer.to_str())["model"].get("merges")
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def template_sha256(tokenizer: Any) -> str | None:
    """Return the SHA-256 of the chat template's text; None without a template."""
    template = tokenizer.chat_template
    return hashlib.sha256(template.encode()).hexdigest() if template else None


def check_same_tokenization(
    parents: Mapping[str, Parent], where: Callable[[str], str], *, trust_remote_code: bool
) -> None:
    """Raise RLHFError T04 or T05 if a parent's token ids differ from those of `models.sft`.

    `where(key)` is the location of a config key.
    """
    foreign = {}
    for key, parent in parents.items():
        if parent.stage == runs.FOREIGN:
            tokenizer = load_tokenizer(parent.model, trust_remote_code=trust_remote_code)
            hashes = {"tokenizer_sha256": tokenizer_sha256(tokenizer), "template_sha256": template_sha256(tokenizer)}
            foreign[key] = hashes
    sft = parents["models.sft"]
    problems: list[Problem] = []

    def difference(first: Parent, second: Parent) -> str | None:
        complete = all(parent.sha256 or parent.stage == runs.FOREIGN for parent in (first, second))
        folders = first.model, first.sha256, second.model, second.sha256
        return _difference(*folders, trust_remote_code) if complete else None

    for key, parent in parents.items():
        try:
            runs.check_same_tokenizer(sft, parent, where=where(key), foreign=foreign, difference=difference)
        except RLHFError as error:
            problems += error.problems
    if problems:
        raise RLHFError.from_problems(problems)


@lru_cache(maxsize=64)
def _difference(first: Path, first_sha: str, second: Path, second_sha: str, trust_remote_code: bool) -> str | None:
    """Return `tokenizer_diff.first_difference` of the tokenizers in two folders, cached by folder and hash."""
    if first == second:
        return None
    pair = [load_tokenizer(folder, trust_remote_code=trust_remote_code) for folder in (first, second)]
    return tokenizer_diff.first_difference(pair[0], pair[1], PAD)


def same_tokenization(first: Parent, second: Parent, *, trust_remote_code: bool) -> bool:
    """Return True if two models' tokenizers give the same token ids. Raises RLHFError M01, M08."""
    try:
        parents = {"models.sft": first, second.key: second}
        check_same_tokenization(parents, str, trust_remote_code=trust_remote_code)
    except RLHFError as error:
        if error.problems[0].code not in ("T04", "T05"):
            raise
        return False
    return True


def manifest_fields(tokenizer: Any, stop_token_id: int | None) -> dict[str, Any]:
    """Return the manifest's fields about the tokenizer; the id of a missing special token is None."""
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    return {
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "template_sha256": template_sha256(tokenizer),
        "special_tokens": {**ids, "stop": stop_token_id},
    }


def _strings(values: Iterable[Any]) -> Iterator[str]:
    """Yield all texts in the values of a row; of messages only the content."""
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from _strings(item.get("content") if isinstance(item, dict) else item for item in value)
