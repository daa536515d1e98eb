"""Tokenizers: loaded, trained from a file, given a pad token where they lack one, and told apart by hash."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlhf_cli import checkpoints, terminal
from rlhf_cli.checkpoints import Parent
from rlhf_cli.checkpoints.files import read_object
from rlhf_cli.config.sources import DataSource
from rlhf_cli.errors import Problem, RLHFError, panics_as, shown
from rlhf_cli.models import spelling
from rlhf_cli.sources import read_rows

PAD = "[PAD]"
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def load_tokenizer(folder: Path | str, *, chat_template: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder, padding on the left; `chat_template` (see `set_chat_template`) replaces its own.

    Raises RLHFError M01 where the folder holds no tokenizer, M08 where it needs code of its own.
    """
    refuse_code(folder, trust_remote_code)
    try:
        with panics_as("M01", f"{shown(folder)} holds no tokenizer that can be read"):
            tokenizer = AutoTokenizer.from_pretrained(
                folder, padding_side="left", trust_remote_code=trust_remote_code, local_files_only=True
            )
            known = set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)
            # Some settings that make no sense show themselves only here.
            tokenizer(tokenizer.decode([min(known)]) if known else "")
    except (RLHFError, MemoryError):
        raise
    except Exception as error:  # whatever stands in these files
        if "trust_remote_code" in str(error):
            raise needs_code(folder) from error
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise RLHFError("M01", f"{shown(folder)} holds no tokenizer that can be read: {reason}") from error
    if chat_template is not None:
        set_chat_template(tokenizer, chat_template)
    return tokenizer


def refuse_code(folder: Path | str, trusted: bool) -> None:
    """Raises RLHFError M08 for a folder with Python code that its config or its tokenizer names, unless `trusted`.

    Even where transformers has a class of its own: that one may compute something else than the authors' code did.
    """
    paths = (Path(folder) / name for name in ("config.json", "tokenizer_config.json"))
    settings = (read_object(path) or {} for path in paths if path.is_file())  # a named pipe may never end
    if not trusted and any(Path(folder).glob("*.py")) and any("auto_map" in each for each in settings):
        raise needs_code(folder)


def needs_code(folder: Path | str) -> RLHFError:
    """The refusal of a model that brings Python code of its own."""
    return RLHFError(
        "M08",
        f"{shown(folder)} wants to run Python code that comes with the model",
        hint="read that code, then add --trust-remote-code; or remove it where transformers has a class of its own",
    )


def set_chat_template(tokenizer: Any, template: str) -> None:
    """Give the tokenizer the template of a Jinja file, a template's text, or `chatml` (whose two tokens are added).

    Raises RLHFError C07 for a name that is none of them.
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


def prepare_padding(tokenizer: Any, *, stop_token_id: int) -> str | None:
    """Make sure that padding looks like nothing else: adds `[PAD]`, and returns it, where it is missing or ends a text.

    Warns T02 or T01. The embeddings of the model have to grow with it (`embeddings.fit_embeddings`).
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


def train_tokenizer(source: DataSource | Path | str, vocab_size: int) -> Any:
    """A byte-level BPE of at most `vocab_size` tokens, trained on all texts of a source.

    Ids 0 and 1 are `<pad>` and `<eos>`. Raises RLHFError D01-D04, D05 for no text, C06 for fewer than 258 tokens.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<eos>"]
    if vocab_size < len(alphabet) + len(special):
        least = len(alphabet) + len(special)
        text = f"model.new.tokenizer.vocab_size is {vocab_size}; {least} is the least (every byte, and two of ours)"
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
    """A hash of vocabulary, merges, start and end token. What else makes ids, `spelling` compares.

    Padding does not count, which no text holds: a model is read like the one that `prepare_padding` made of it.
    """
    vocabulary = tokenizer.get_vocab()
    if tokenizer.pad_token == PAD:
        del vocabulary[PAD]
    special = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    parts: dict[str, Any] = {"vocabulary": sorted(vocabulary.items()), "special": special}
    if tokenizer.is_fast:
        parts["merges"] = json.loads(tokenizer.backend_tokenizer.to_str())["model"].get("merges")
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def template_sha256(tokenizer: Any) -> str | None:
    """A hash of the chat template's text; None without one."""
    template = tokenizer.chat_template
    return hashlib.sha256(template.encode()).hexdigest() if template else None


def check_alike(parents: Mapping[str, Parent], where: Callable[[str], str], *, trust_remote_code: bool) -> None:
    """Refuse parents that read text in another way than `models.sft` (T04, T05); `where(key)` is the place of a key."""
    foreign = {}
    for key, parent in parents.items():
        if parent.stage == checkpoints.FOREIGN:
            tokenizer = load_tokenizer(parent.model, trust_remote_code=trust_remote_code)
            hashes = {"tokenizer_sha256": tokenizer_sha256(tokenizer), "template_sha256": template_sha256(tokenizer)}
            foreign[key] = hashes
    first = parents["models.sft"]
    problems: list[Problem] = []

    def difference(one: Parent, other: Parent) -> str | None:
        made = all(parent.sha256 or parent.stage == checkpoints.FOREIGN for parent in (one, other))
        return _difference(one.model, one.sha256, other.model, other.sha256, trust_remote_code) if made else None

    for key, parent in parents.items():
        try:
            checkpoints.check_same_tokenizer(first, parent, where=where(key), foreign=foreign, difference=difference)
        except RLHFError as error:
            problems += error.problems
    if problems:
        raise RLHFError.of(problems)


@lru_cache(maxsize=64)
def _difference(first: Path, first_sha: str, other: Path, other_sha: str, trust_remote_code: bool) -> str | None:
    """`spelling.difference` of the tokenizers in two folders, once in a process while their hashes stay."""
    if first == other:
        return None
    one, two = (load_tokenizer(folder, trust_remote_code=trust_remote_code) for folder in (first, other))
    return spelling.difference(one, two, PAD)


def read_alike(first: Parent, other: Parent, *, trust_remote_code: bool) -> bool:
    """Whether two models read text alike: one's tokens are the other's. Raises RLHFError M01, M08."""
    try:
        check_alike({"models.sft": first, other.key: other}, str, trust_remote_code=trust_remote_code)
    except RLHFError as error:
        if error.problems[0].code not in ("T04", "T05"):
            raise
        return False
    return True


def special_ids(tokenizer: Any) -> dict[str, int | None]:
    """{pad, bos, eos}: ids, None where the tokenizer has no such token."""
    return {name: getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}


def special_tokens(tokenizer: Any, stop_token_id: int | None) -> dict[str, int | None]:
    """{pad, bos, eos, stop}: ids, as a manifest tells them."""
    return {**special_ids(tokenizer), "stop": stop_token_id}


def token_fields(tokenizer: Any, stop: int | None) -> dict[str, Any]:
    """What the manifest tells of the tokens."""
    return {
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "template_sha256": template_sha256(tokenizer),
        "special_tokens": special_tokens(tokenizer, stop),
    }


def _strings(values: Iterable[Any]) -> Iterator[str]:
    """All texts in the values of a row; of messages the content alone."""
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from _strings(item.get("content") if isinstance(item, dict) else item for item in value)
