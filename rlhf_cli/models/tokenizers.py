"""Tokenizers: load, train, add a pad token, resize embeddings, and compare by hash and by token ids."""

import hashlib
import json
import math
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlhf_cli import runs, terminal
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.sources import raw_rows
from rlhf_cli.data.tokens import WITHOUT_EMBEDDING, ids_without_embedding, tokenize
from rlhf_cli.errors import RLHFError, collect_errors, first_names, short_reason, shown, translate_rust_panics
from rlhf_cli.files import read_json_object
from rlhf_cli.models import chat_templates
from rlhf_cli.models.batch import StopTokenId
from rlhf_cli.runs.model_files import is_model_file
from rlhf_cli.runs.parents import Parent

PAD = "[PAD]"
# Special tokens of common families, for padding or for nothing, that become the pad token of a tokenizer without one.
RESERVED = ("<|finetune_right_pad_id|>", "<pad>", "<|padding|>", "<|reserved_special_token_0|>")
ALIGNMENT = 64  # embedding rows; products with a matrix of an odd number of rows are slower on a GPU
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# Texts of several characters in which normalizers are known to differ.
TEXTS = (
    "Tell me about the Sun.", "don't DON'T we'll I'M it\u2019s", " leading", "  two leading", "trailing ", "trailing  ",
    "two  spaces   three", "  ", " " * 50, "\t", "a\tb", "\n", "\n\n", "\n\n\n", "a\nb", "a \n b", " \n \n", "a\r\nb",
    "1234567890123", "1,000,000", "a1b2", "----", "https://a.org/b?c=d&e=f", "<b>x</b>", "cafe\u0301 nai\u0308ve",
    "\u212b A\u030a", "i\u0307 I\u0131", "\u03a3\u03a3 \u03c3\u03c2", "\u0645\u064f\u0631\u062d\u0628\u0627",
    "\u05e9\u05b8\u05dc\u05d5\u05b9\u05dd", "\u0939\u093f\u0928\u094d\u0926\u0940", "\u1112\u1161\u11ab",
    "a\U0001f642b", "\U0001f469\u200d\U0001f4bb", "\U0001f1e9\U0001f1ea", "\u2764\ufe0f", "ab" * 150, "9" * 60,
)  # fmt: skip
# Code points to test: a sample of the large uniform blocks (Han, Hangul); of the higher planes only the tags.
CODE_POINTS = (
    range(0x3400), range(0x3400, 0xA000, 101), range(0xA000, 0xAC00), range(0xAC00, 0xD7A4, 101),
    range(0xD7A4, 0x20000), range(0x20000, 0x32400, 101), range(0xE0000, 0xE0200),
)  # fmt: skip
SKIPPED_CATEGORIES = ("Cs", "Cn", "Co")  # surrogates, unassigned, private use


def load_tokenizer(folder: Path | str, *, trust_remote_code: bool = False) -> Any:
    """Load a folder's tokenizer with left padding. Raises RLHFError M01, M08 (custom code), M15 (files elsewhere)."""
    refuse_code(folder, trust_remote_code)
    _refuse_other_files(Path(folder))
    try:
        with translate_rust_panics(f"{shown(folder)} has no readable tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(
                folder, padding_side="left", trust_remote_code=trust_remote_code, local_files_only=True
            )
            if isinstance(tokenizer.chat_template, dict):  # several by name: `default` is for chats without tools
                tokenizer.chat_template = tokenizer.chat_template.get("default")
            plain_ids = set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)
            # Some invalid settings raise only when a text is encoded.
            tokenizer(tokenizer.decode([min(plain_ids)]) if plain_ids else "")
    except (RLHFError, MemoryError):
        raise
    except Exception as error:  # the files may contain anything
        if "trust_remote_code" in str(error):
            raise remote_code_error(folder) from error
        raise RLHFError("M01", f"{shown(folder)} has no readable tokenizer: {short_reason(error)}") from error
    return tokenizer


def _refuse_other_files(folder: Path) -> None:
    """Raise RLHFError M15 if transformers would read a tokenizer or template that the folder's hash does not cover."""
    config_file = folder / "tokenizer_config.json"
    names = (read_json_object(config_file) or {}).get("fast_tokenizer_files")
    for name in names if isinstance(names, list) else ():
        if not is_model_file(str(name)):
            text = f'fast_tokenizer_files names "{name}", which is not a JSON file of the folder'
            hint = "remove the key: tokenizer.json is read then"
            raise RLHFError("M15", text, where=shown(config_file), hint=hint)
    template = folder / "additional_chat_templates/default.jinja"
    if template.exists():
        text = "transformers would read it instead of the folder's own chat template"
        raise RLHFError("M15", text, where=shown(template), hint="move it to chat_template.jinja, or away")


def refuse_code(folder: Path | str, trusted: bool) -> None:
    """Raise RLHFError M08 if the model comes with Python code, unless `trusted`; a built-in class may differ."""
    folder = Path(folder)
    if trusted or not any(folder.glob("*.py")):
        return
    for name in ("config.json", "tokenizer_config.json"):
        if "auto_map" in (read_json_object(folder / name) or {}):
            raise remote_code_error(folder)


def remote_code_error(folder: Path | str) -> RLHFError:
    """Return the error for a model that needs custom Python code."""
    text = f"{shown(folder)} needs Python code that comes with the model"
    hint = "read that code, then add --trust-remote-code; or remove it if transformers has a class for this model"
    return RLHFError("M08", text, hint=hint)


def set_chat_template(tokenizer: Any, template: str) -> None:
    """Set the chat template: a Jinja file, a text, or `chatml` (which adds its two tokens)."""
    if template == "chatml":
        tokenizer.add_tokens([AddedToken(token, special=True) for token in CHATML_TOKENS], special_tokens=True)
        tokenizer.chat_template = CHATML
    elif "{" in template:
        tokenizer.chat_template = template
    else:  # the config has checked that it is a file
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")


def ensure_pad_token(tokenizer: Any, *, stop_token_id: int) -> str | None:
    """Set and return a pad token if it is missing, or is also the EOS or stop token: a reserved one, or a new `[PAD]`.

    Warns T02 or T01. The model's embeddings must be resized afterwards (`resize_to_tokenizer`).
    """
    if tokenizer.pad_token_id not in (None, tokenizer.eos_token_id, stop_token_id):
        return None
    pad = _unused_reserved_token(tokenizer, stop_token_id) or PAD
    change = "is added" if pad == PAD else "is used"
    if tokenizer.pad_token_id is None:
        terminal.warn("T02", f"the tokenizer has no pad token: {pad} {change}, and saved with the model")
    else:
        text = f"the pad token {tokenizer.pad_token!r} also ends a text: {pad} {change} for padding"
        terminal.warn("T01", f"{text}, so that the end stays trained")
    if pad == PAD:
        tokenizer.add_special_tokens({"pad_token": PAD})
    tokenizer.pad_token = pad
    return pad


def _unused_reserved_token(tokenizer: Any, stop_token_id: int) -> str | None:
    """Return a special token of RESERVED that has no role, an embedding, and no place in the chat template."""
    unused = _special_ids_without_role(tokenizer) - {stop_token_id} - (ids_without_embedding(tokenizer) or set())
    names = tokenizer.convert_ids_to_tokens(sorted(unused))
    template = str(tokenizer.chat_template)
    for name in RESERVED:
        if name in names and name not in template:
            return name
    return None


def _special_ids_without_role(tokenizer: Any) -> set[int]:
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    roles = {getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "unk", "pad")}
    return special - roles


def check_vocabulary(model: Any, tokenizer: Any, where: str | None = None, *, guarded: bool = True) -> None:
    """Raise as `check_vocabulary_size` does for the embeddings of a model."""
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    check_vocabulary_size(num_embeddings, tokenizer, where, guarded=guarded)


def check_vocabulary_size(num_embeddings: int, tokenizer: Any, where: str | None, *, guarded: bool = True) -> None:
    """Raise RLHFError M06 if the tokenizer has ids beyond `num_embeddings` that can occur.

    Special tokens without a role, such as Gemma's <image_soft_token>, do not occur if `data.tokens` is the only one to
    use the tokenizer (`guarded`): from now on it raises M06 for a text that contains one. Warns M06 of them. Any model
    checked later with the same tokenizer needs an embedding for all other ids: its policy may generate them.
    """
    beyond = {i for i in tokenizer.get_vocab().values() if i >= num_embeddings}
    excepted = ids_without_embedding(tokenizer) if guarded else frozenset()
    if beyond - (_special_ids_without_role(tokenizer) if excepted is None else excepted):
        text = f"the tokenizer has ids up to {max(beyond)}, the model {num_embeddings} embeddings"
        raise RLHFError("M06", text, where=where, hint="use the tokenizer that belongs to the model")
    if excepted is None:
        setattr(tokenizer, WITHOUT_EMBEDDING, frozenset(beyond))
        if beyond:
            names = first_names(tokenizer.convert_ids_to_tokens(sorted(beyond)))
            text = f"the model has no embedding for special tokens of its tokenizer ({names})"
            hint = "no action is needed unless a text contains one: an error then"
            terminal.warn("M06", text, where=where, hint=hint)


def vocabulary_size(tokenizer: Any, num_embeddings: int) -> int:
    """Return the number of embeddings for the tokenizer's ids, at least the present one.

    An aligned number stays aligned. Ids without embedding get none.
    """
    ids = set(tokenizer.get_vocab().values()) - (ids_without_embedding(tokenizer) or set())
    size = 1 + max(ids)
    if size <= num_embeddings:
        return num_embeddings
    if num_embeddings % ALIGNMENT == 0:
        size = math.ceil(size / ALIGNMENT) * ALIGNMENT
    return size


def resize_to_tokenizer(model: Any, tokenizer: Any) -> None:
    """Grow the embeddings to added tokens; new rows start near the mean row, so that no new logit stands out."""
    before = model.get_input_embeddings().weight.shape[0]
    size = vocabulary_size(tokenizer, before)
    if size > before:
        model.resize_token_embeddings(size)


def train_tokenizer(source: DataSource | Path | str, vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer of at most `vocab_size` tokens on all texts of a source.

    Ids 0 and 1 are `<pad>` and `<eos>`. Raises RLHFError D01-D05 (D05: no text), C06 for fewer than 258 tokens.
    """
    special = ["<pad>", "<eos>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    minimum = len(alphabet) + len(special)
    if vocab_size < minimum:
        text = f"model.new.tokenizer.vocab_size is {vocab_size}; the minimum is {minimum}: bytes and two special tokens"
        raise RLHFError("C06", text)

    source = DataSource.of(source)
    texts: list[str] = []
    for _, row in raw_rows(source):
        texts += _strings(row.values())
    if not texts:
        raise RLHFError("D05", f"no text to train a tokenizer on in {source.shown()}", where=source.where)

    backend = Tokenizer(tokenizer_models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def tokenizer_sha256(tokenizer: Any) -> str:
    """Return the SHA-256 of vocabulary, merges, BOS and EOS id. `first_difference` compares all other settings.

    An added `[PAD]` is ignored, since no text contains it: `ensure_pad_token` does not change the hash.
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
    parents: Mapping[str, Parent],
    where: Callable[[str], str],
    *,
    first: str = "models.sft",
    trust_remote_code: bool,
    template_variables: Mapping[str, Any] | None = None,
) -> None:
    """Raise RLHFError T04 or T05 at `where(key)` if a parent's token ids differ from those of the one at `first`.

    `template_variables` are written into the templates of models that were not trained here.
    """
    foreign = {}
    for key, parent in parents.items():
        if parent.stage == runs.FOREIGN:
            tokenizer = load_tokenizer(parent.model, trust_remote_code=trust_remote_code)
            chat_templates.set_template_variables(tokenizer, template_variables, where=where(key))
            foreign[key] = runs.Manifest.model_validate(manifest_fields(tokenizer, None))

    def difference(first: Parent, second: Parent) -> str | None:
        complete = all(parent.sha256 or parent.stage == runs.FOREIGN for parent in (first, second))
        folders = first.model, first.sha256, second.model, second.sha256
        return _difference(*folders, trust_remote_code) if complete else None

    check = partial(runs.check_same_tokenizer, parents[first], foreign=foreign, difference=difference)
    collect_errors(*(partial(check, parent, where=where(key)) for key, parent in parents.items()))


@lru_cache(maxsize=64)
def _difference(first: Path, first_sha: str, second: Path, second_sha: str, trust_remote_code: bool) -> str | None:
    if first == second:
        return None
    tokenizer = load_tokenizer(first, trust_remote_code=trust_remote_code)
    other = load_tokenizer(second, trust_remote_code=trust_remote_code)
    return first_difference(tokenizer, other)


def same_tokenization(first: Parent, second: Parent, *, trust_remote_code: bool) -> bool:
    """Return True if two models' tokenizers give the same token ids. Raises RLHFError M01, M08."""
    try:
        compared = {"models.sft": replace(first, key="models.sft"), second.key: second}
        check_same_tokenization(compared, str, trust_remote_code=trust_remote_code)
    except RLHFError as error:
        if error.problems[0].code not in ("T04", "T05"):
            raise
        return False
    return True


def manifest_fields(tokenizer: Any, stop_token_id: StopTokenId) -> dict[str, Any]:
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
            yield from _strings(
                item.get("content", item.get("value")) if isinstance(item, dict) else item for item in value
            )


def first_difference(first: Any, second: Any) -> str | None:
    """Describe a text that two tokenizers with the same vocabulary encode differently; None if there is none.

    If all settings that affect ids are equal, so are the ids. Different settings may still be equivalent: a newer
    version of the library writes more fields, or a rule can be written in two ways. Then the ids of three kinds of
    texts decide:
    - short texts in which normalizers and pre-tokenizers are known to differ, and added tokens inside texts;
    - each Unicode character next to letters, digits and spaces: any change that a normalizer makes shows in one;
    - the text of each token in the vocabulary: if only one pre-tokenizer splits a text at some point, the ids differ
      only if a token spans that point, and then that token's own text is encoded differently.
    """
    start = _start_ids(first)
    other_start = _start_ids(second)
    if start != other_start:
        return f"one begins a text with {start or 'nothing'}, the other one with {other_start or 'nothing'}"
    if first.is_fast and second.is_fast and _settings(first) == _settings(second):
        return None

    tokens = first.batch_decode([[token] for token in sorted(first.get_vocab().values())])
    for texts in (_short_texts(first), _character_texts(), [f"{text} a{text}b" for text in tokens]):
        try:
            encodings = tokenize(first, texts)
            other_encodings = tokenize(second, texts)
        except RLHFError:
            raise
        except Exception as error:  # texts that a tokenizer cannot encode prove nothing
            return f"their rules are written differently, and one fails on a text ({error})"
        for text, ids, other_ids in zip(texts, encodings, other_encodings, strict=True):
            if ids != other_ids:
                return f"{text[:40]!r} becomes other tokens"
    return None


def _settings(tokenizer: Any) -> dict[str, Any]:
    """Return the settings that affect ids, except vocabulary, merges and special tokens (`_start_ids`)."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    names = ("id", "content", "single_word", "lstrip", "rstrip", "normalized")
    tokens = [token for token in backend["added_tokens"] if token["content"] != PAD]
    added = [{name: token.get(name) for name in names} for token in tokens]
    model = {name: value for name, value in backend["model"].items() if name != "merges"}
    if isinstance(model.get("vocab"), dict):  # a list also contains a score for each token
        del model["vocab"]
    return {
        "normalizer": backend["normalizer"],
        "pre_tokenizer": backend["pre_tokenizer"],
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "model": model,
        "split_special_tokens": tokenizer.split_special_tokens,
    }


def _start_ids(tokenizer: Any) -> list[int]:
    """Return the special tokens that a tokenizer puts before a text."""
    try:
        (text_ids,) = tokenize(tokenizer, ["a"])
        full = tokenizer("a").input_ids
    except Exception:  # the vocabulary has neither this letter nor an unknown token
        return tokenizer("").input_ids
    for start in range(len(full)):
        if full[start : start + len(text_ids)] == text_ids:
            return full[:start]
    return []


def _short_texts(tokenizer: Any) -> list[str]:
    frames = ("{}", "a{}b", "a {} b", "  {}  ", "{0}{0}", "\n{}\n")
    texts = list(TEXTS)
    for token in tokenizer.added_tokens_decoder.values():
        if token.content != PAD:
            texts += [frame.format(token.content) for frame in frames]
    return texts


@lru_cache(maxsize=1)
def _character_texts() -> list[str]:
    """Return the characters of CODE_POINTS, each next to letters, digits, spaces and itself."""
    texts = []
    for char in map(chr, chain.from_iterable(CODE_POINTS)):
        if unicodedata.category(char) not in SKIPPED_CATEGORIES:
            texts.append(f"x{char}X {char}{char}1")
    return texts
