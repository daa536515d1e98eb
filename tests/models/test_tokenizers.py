"""Tokenizers: trained from files, padded by a token that no text contains, compared by hash and by token ids (T04)."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from bad_inputs import check, foreign_scorer, refused, rlhf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from rlhf_cli import data, jsonl, runs, terminal
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import tokenizers
from rlhf_cli.models.tokenizers import template_sha256, tokenizer_sha256
from rlhf_cli.stages.common.shared_base import SharedBaseModels
from tests.conftest import World


def reloaded(tokenizer: Any, folder: Path) -> Any:
    tokenizer.save_pretrained(folder)
    return tokenizers.load_tokenizer(folder)


# --- training


def test_a_trained_tokenizer_encodes_any_text_and_is_reproducible(world: World) -> None:
    tokenizer = tokenizers.train_tokenizer(world.text, 300)
    assert len(tokenizer) == 300 and (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.padding_side == "left"
    text = "The café — 日本, \t\n ok"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    again = tokenizers.train_tokenizer(world.text, 300)
    assert tokenizer_sha256(again) == tokenizer_sha256(tokenizer)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert tokenizer_sha256(tokenizers.train_tokenizer(world.text, 299)) != tokenizer_sha256(tokenizer)


def test_training_reads_plain_text_and_the_contents_of_messages(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("zebra zebra zebra\n")
    turns = {"messages": [{"role": "quagga", "content": "okapi okapi okapi"}]}
    sharegpt = {"conversations": [{"from": "tapir", "value": "lemur lemur lemur"}]}
    jsonl.write_jsonl(tmp_path / "chat.jsonl", [turns, sharegpt])
    assert "zebra" in tokenizers.train_tokenizer(tmp_path / "plain.txt", 400).get_vocab()
    words = tokenizers.train_tokenizer(tmp_path / "chat.jsonl", 400).get_vocab()
    assert {"okapi", "lemur"} <= words.keys() and not {"quagga", "tapir"} & words.keys()


@pytest.mark.parametrize(
    ("name", "content", "size", "code"),
    [
        ("a.txt", b"text", 257, "C06"),
        ("a.txt", b"", 300, "D05"),
        ("a.txt", b"caf\xe9", 300, "D04"),
        ("a.jsonl", b"{", 300, "D03"),
        ("b.txt", None, 300, "D01"),
    ],
)
def test_bad_training_data_of_a_tokenizer(
    tmp_path: Path, name: str, content: bytes | None, size: int, code: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RLHFError, match=rf"^error\[{code}\]"):
        tokenizers.train_tokenizer(tmp_path / name, size)


# --- pad token, chat template and hash


@pytest.mark.parametrize(("reserved", "pad"), [(tokenizers.RESERVED, "<pad>"), ((), "[PAD]")])
def test_the_hash_covers_special_tokens_but_not_padding(
    world: World, tmp_path: Path, reserved: tuple[str, ...], pad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers, "RESERVED", reserved)
    tokenizer = world.tokenizer()
    before = tokenizer_sha256(tokenizer)
    tokenizer.padding_side, tokenizer.model_max_length = "right", 7
    assert tokenizer_sha256(reloaded(tokenizer, tmp_path / "a")) == before
    tokenizer.eos_token = "sun"
    assert tokenizer_sha256(tokenizer) != before
    for declared in (None, "<eos>"):  # a base without a pad token reads text like the SFT model with one
        tokenizer = world.tokenizer()
        tokenizer.pad_token = declared
        before = tokenizer_sha256(tokenizer)
        assert tokenizers.ensure_pad_token(tokenizer, stop_token_id=tokenizer.eos_token_id) == pad
        assert tokenizer_sha256(reloaded(tokenizer, tmp_path / "b")) == before


@pytest.mark.parametrize(("pad", "code"), [(None, "T02"), ("<eos>", "T01"), ("<|im_end|>", "T01"), ("<pad>", None)])
def test_a_pad_token_is_added_if_it_is_missing_or_ends_a_text(
    chat: Any, pad: str | None, code: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers, "RESERVED", ())
    chat.pad_token, size, stop = pad, len(chat), data.stop_token_id(chat)
    assert tokenizers.ensure_pad_token(chat, stop_token_id=stop) == ("[PAD]" if code else None)
    assert chat.pad_token == ("[PAD]" if code else pad) and chat.pad_token_id not in (stop, chat.eos_token_id)
    assert len(chat) == size + bool(code)
    assert [line.partition(":")[0] for line in terminal.emitted_warnings()] == ([f"warning[{code}]"] if code else [])


@pytest.mark.parametrize(
    ("special", "template", "pad"),
    [
        (["<|reserved_special_token_0|>", "<|finetune_right_pad_id|>"], "", "<|finetune_right_pad_id|>"),
        (["<|reserved_special_token_0|>"], "", "<|reserved_special_token_0|>"),
        (["<|reserved_special_token_0|>"], "<|reserved_special_token_0|>", "[PAD]"),
        (["<|eot_id|>"], "", "[PAD]"),
    ],
)
def test_a_reserved_token_pads_a_tokenizer_without_pad_token(
    special: list[str], template: str, pad: str, world: World
) -> None:
    """As Llama 3's: its number of embeddings stays a multiple of 64. A token of the template is not reserved."""
    tokenizer = tokenizers.train_tokenizer(world.text, 300)
    tokenizer.pad_token, tokenizer.bos_token = None, "<pad>"
    tokenizer.add_special_tokens({"extra_special_tokens": special})
    tokenizer.chat_template, size = template, len(tokenizer)
    assert tokenizers.ensure_pad_token(tokenizer, stop_token_id=1) == pad == tokenizer.pad_token
    assert len(tokenizer) == size + (pad == "[PAD]")
    assert ("is added" if pad == "[PAD]" else "is used") in terminal.emitted_warnings()[0]


def test_a_chat_template_is_a_file_a_text_or_chatml(tokenizer: Any, tmp_path: Path) -> None:
    assert template_sha256(tokenizer) is None
    text = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    (tmp_path / "chat.jinja").write_text(text)
    tokenizers.set_chat_template(tokenizer, str(tmp_path / "chat.jinja"))
    first = template_sha256(tokenizer)
    tokenizers.set_chat_template(tokenizer, text)
    assert template_sha256(tokenizer) == first
    tokenizers.set_chat_template(tokenizer, "chatml")
    chatml = template_sha256(tokenizer)
    assert chatml not in (None, first) and template_sha256(reloaded(tokenizer, tmp_path / "saved")) == chatml
    tokenizer.chat_template = {"default": text, "tool_use": "{{ tools }}"}  # by name, as some models have
    assert template_sha256(reloaded(tokenizer, tmp_path / "two")) == first


def test_a_tokenizer_of_digits_without_an_unknown_token_loads(tmp_path: Path) -> None:
    backend = Tokenizer(WordLevel({**{str(digit): digit for digit in range(10)}, "<eos>": 10}))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(tmp_path)
    first, other = (tokenizers.load_tokenizer(tmp_path) for _ in range(2))
    assert first("7").input_ids == [7] and tokenizers.first_difference(first, other) is None


@pytest.mark.parametrize(("special", "reason"), [(True, None), (False, "an adapter with additional tokens")])
def test_an_adapter_shares_weights_without_an_embedding_for_an_unused_special_token(
    world: World, special: bool, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = world.tokenizer()
    shared: Any = SharedBaseModels(*[None] * 3, tiny.causal("llama", vocab_size=len(tokenizer)))
    tokenizer.add_tokens([AddedToken("<image>", special=special)], special_tokens=special)
    monkeypatch.setattr(runs, "is_adapter_of", lambda *_: True)
    assert shared.own_weights_reason(SimpleNamespace(base="base"), tokenizer) == reason


# --- comparison by token ids


def difference(one: Any, other: Any) -> str | None:
    """Return the first difference of two tokenizers with the same hash."""
    assert tokenizer_sha256(one) == tokenizer_sha256(other)
    return tokenizers.first_difference(one, other)


def backend(part: str, value: Any) -> Callable[[Any], None]:
    """Return a change of a part of a tokenizer's backend; a callable `value` gets the existing part."""

    def change(tokenizer: Any) -> None:
        existing = getattr(tokenizer.backend_tokenizer, part)
        setattr(tokenizer.backend_tokenizer, part, value(existing) if callable(value) else value)

    return change


def added_token(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken("<eos>", special=True, lstrip=True)])


def own_pad_token(tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})


CHANGED_IDS: dict[str, Callable[[Any], object]] = {
    "lower case": backend("normalizer", normalizers.Lowercase()),
    "composed accents": backend("normalizer", normalizers.NFC()),
    "no outer spaces": backend("normalizer", normalizers.Strip()),
    "one rare letter": backend("normalizer", normalizers.Replace("\u01c5", "d")),
    "a space in front": backend("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "a split inside a word": backend(
        "pre_tokenizer", lambda own: pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("oo"), "isolated"), own])
    ),
    "spaces next to an added token": added_token,
    "a token in front": backend("post_processor", TemplateProcessing("<eos> $A", special_tokens=[("<eos>", 1)])),
}
SAME_IDS: list[Callable[[Any], object]] = [
    own_pad_token,
    lambda tokenizer: tokenizer.backend_tokenizer.enable_padding(length=9),
    lambda tokenizer: tokenizer.backend_tokenizer.enable_truncation(3),
    backend("decoder", decoders.Fuse()),
    backend("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)),
    backend("pre_tokenizer", lambda own: pre_tokenizers.Sequence([own])),
    backend("normalizer", normalizers.Sequence([])),
]


@pytest.mark.full
@pytest.mark.parametrize("name", CHANGED_IDS)
def test_a_change_of_token_ids_is_found(name: str, world: World) -> None:
    changed = world.tokenizer()
    CHANGED_IDS[name](changed)
    assert difference(world.tokenizer(), changed)


@pytest.mark.full
def test_settings_that_do_not_change_ids_are_no_difference(world: World, tmp_path: Path) -> None:
    changed = world.tokenizer()
    for change in SAME_IDS:
        change(changed)
    changed.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(dict(reversed(settings.items())), indent=1))
    assert difference(world.tokenizer(), tokenizers.load_tokenizer(tmp_path)) is None


@pytest.mark.full
def test_the_token_scores_of_a_unigram_model_are_compared(world: World) -> None:
    first, other = world.tokenizer(), world.tokenizer()
    for tokenizer, score in ((first, -1.0), (other, -900.0)):
        settings = json.loads(tokenizer.backend_tokenizer.to_str())
        words = sorted(settings["model"]["vocab"], key=settings["model"]["vocab"].get)
        vocab = [[word, score if word == max(words, key=len) else -5.0] for word in words]
        settings["model"] = {"type": "Unigram", "unk_id": 0, "vocab": vocab}
        tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(settings))
    assert difference(first, other) is not None


@pytest.mark.full
def test_slow_tokenizers_are_compared_by_their_ids() -> None:
    first, other = ByT5Tokenizer(), ByT5Tokenizer()
    assert not first.is_fast and difference(first, other) is None
    tokenize = other._tokenize
    other._tokenize = lambda text, **options: tokenize(text.lower(), **options)
    assert difference(first, other) is not None


def test_t04_one_vocabulary_with_different_rules(folder: Path) -> None:
    """`rlhf check` and the stage refuse it; a reward model that only scores is given re-encoded text."""
    foreign_scorer(folder)
    path = folder / "scorer/tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": {"type": "Lowercase"}}))
    reason = "models.reward has another tokenizer than models.sft (scorer beside model: 'Tell me about the Sun.'"
    assert refused(rlhf("ppo"), "T04", "ppo.yaml:1: ", reason, "hint: ")
    assert f"error[T04]: ppo.yaml:1: {reason}" in check("ppo.yaml").stderr
    scores = check("ppo.yaml", "-s", "models.value=policy_head")
    assert scores.exit_code == 0 and "one label; encoded again for it" in scores.stdout
    path.write_text((folder / "model/tokenizer.json").read_text())
    assert check("ppo.yaml").exit_code == 0


# --- spaces


@pytest.mark.parametrize("answer", [" named Lily.", "named", "\nYes", "\n", "  two", ""])
def test_no_space_stands_between_a_prompt_and_its_answer(answer: str) -> None:
    """SentencePiece's tokenizers put one before each text: it was a token of its own, in front of every answer."""
    words = [
        "▁",
        "▁named",
        "▁Lily",
        "n",
        "a",
        "m",
        "e",
        "d",
        "Y",
        "s",
        "▁two",
        "L",
        "i",
        "l",
        "y",
        ".",
        "t",
        "w",
        "o",
        "▁q",
    ]
    vocabulary = {word: index for index, word in enumerate(["<unk>", "</s>", "<0x0A>", *words])}
    unigram = Tokenizer(models.Unigram([(word, -float(len(word) == 1)) for word in vocabulary], 0, byte_fallback=True))
    unigram.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=unigram, eos_token="</s>", unk_token="<unk>")
    assert tokenizer.tokenize("named") == ["▁named"]
    prompt, response = data.encode(tokenizer, "q", answer)
    assert prompt + response == [*tokenizer.encode(f"q{answer}"), tokenizer.eos_token_id]
