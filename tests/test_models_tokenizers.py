"""Tokenizers: trained from files, padded by a token that is nothing else, told apart by hash."""

from pathlib import Path
from typing import Any

import pytest
from conftest import World
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from rlhf_cli import data, jsonl
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import tokenizer_diff, tokenizers


@pytest.fixture
def tokenizer(world: World) -> Any:
    return world.tokenizer()


def test_a_trained_tokenizer_spells_any_text_and_is_the_same_each_time(world: World, tmp_path: Path) -> None:
    tokenizer = tokenizers.train_tokenizer(world.text, 300)
    assert len(tokenizer) == 300 and (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.padding_side == "left"
    text = "The café — 日本, \t\n ok"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    again = tokenizers.train_tokenizer(world.text, 300)
    assert tokenizers.tokenizer_sha256(again) == tokenizers.tokenizer_sha256(tokenizer)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    other = tokenizers.train_tokenizer(world.text, 299)
    assert tokenizers.tokenizer_sha256(other) != tokenizers.tokenizer_sha256(tokenizer)


def test_it_learns_from_plain_text_and_from_the_contents_of_messages(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("zebra zebra zebra\n")
    jsonl.write_jsonl(tmp_path / "chat.jsonl", [{"messages": [{"role": "quagga", "content": "okapi okapi okapi"}]}])
    assert "zebra" in tokenizers.train_tokenizer(tmp_path / "plain.txt", 400).get_vocab()
    words = tokenizers.train_tokenizer(tmp_path / "chat.jsonl", 400).get_vocab()
    assert "okapi" in words and "quagga" not in words


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
def test_what_no_tokenizer_can_be_made_of(tmp_path: Path, name: str, content: bytes, size: int, code: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RLHFError) as error:
        tokenizers.train_tokenizer(tmp_path / name, size)
    assert error.value.problems[0].code == code


def test_the_hash_survives_a_folder_and_sees_special_tokens(tokenizer: Any, tmp_path: Path) -> None:
    before = tokenizers.tokenizer_sha256(tokenizer)
    tokenizer.padding_side, tokenizer.model_max_length = "right", 7
    tokenizer.save_pretrained(tmp_path)
    assert tokenizers.tokenizer_sha256(tokenizers.load_tokenizer(tmp_path)) == before
    tokenizer.eos_token = "sun"
    assert tokenizers.tokenizer_sha256(tokenizer) != before


@pytest.mark.parametrize("pad", [None, "<eos>"])
def test_the_hash_does_not_see_padding_which_no_text_holds(tokenizer: Any, tmp_path: Path, pad: str | None) -> None:
    """A base model without a pad token reads text like the SFT model that was given one."""
    tokenizer.pad_token = pad
    before = tokenizers.tokenizer_sha256(tokenizer)
    assert tokenizers.ensure_pad_token(tokenizer, stop_token_id=tokenizer.eos_token_id) == "[PAD]"
    tokenizer.save_pretrained(tmp_path)
    assert tokenizers.tokenizer_sha256(tokenizers.load_tokenizer(tmp_path)) == before


def test_t02_a_pad_token_is_added_where_there_is_none(tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer.pad_token = None
    size = len(tokenizer)
    assert tokenizers.ensure_pad_token(tokenizer, stop_token_id=tokenizer.eos_token_id) == "[PAD]"
    assert tokenizer.pad_token == "[PAD]" and tokenizer.pad_token_id == size == len(tokenizer) - 1
    assert capsys.readouterr().err.startswith("warning[T02]")


@pytest.mark.parametrize("ends", ["eos", "stop"])
def test_t01_a_pad_token_that_ends_a_text_is_replaced(
    tokenizer: Any, capsys: pytest.CaptureFixture[str], ends: str
) -> None:
    tokenizers.set_chat_template(tokenizer, "chatml")
    stop = data.stop_token_id(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token if ends == "eos" else "<|im_end|>"
    assert tokenizers.ensure_pad_token(tokenizer, stop_token_id=stop) == "[PAD]"
    assert tokenizer.pad_token_id not in (stop, tokenizer.eos_token_id)
    assert capsys.readouterr().err.startswith("warning[T01]")


def test_a_good_pad_token_is_left_alone(tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert tokenizers.ensure_pad_token(tokenizer, stop_token_id=tokenizer.eos_token_id) is None
    assert tokenizer.pad_token == "<pad>" and not capsys.readouterr().err


def test_a_chat_template_is_a_file_a_text_or_chatml(tokenizer: Any, tmp_path: Path) -> None:
    assert tokenizers.template_sha256(tokenizer) is None
    text = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    (tmp_path / "chat.jinja").write_text(text)
    tokenizers.set_chat_template(tokenizer, str(tmp_path / "chat.jinja"))
    first = tokenizers.template_sha256(tokenizer)
    tokenizers.set_chat_template(tokenizer, text)
    assert tokenizers.template_sha256(tokenizer) == first
    tokenizers.set_chat_template(tokenizer, "chatml")
    assert tokenizers.template_sha256(tokenizer) not in (None, first)
    tokenizer.save_pretrained(tmp_path / "saved")
    assert tokenizers.template_sha256(tokenizers.load_tokenizer(tmp_path / "saved")) == tokenizers.template_sha256(
        tokenizer
    )
    with pytest.raises(RLHFError, match="C07"):
        tokenizers.set_chat_template(tokenizer, "chatlm")


def test_m01_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as error:
        tokenizers.load_tokenizer(tmp_path)
    assert error.value.problems[0].code == "M01" and error.value.exit_code == 2


def test_a_tokenizer_that_knows_no_letters_loads(tmp_path: Path) -> None:
    """Digits alone, and no token for what is unknown: as worlds of research have it."""
    backend = Tokenizer(WordLevel({**{str(digit): digit for digit in range(10)}, "<eos>": 10}))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(tmp_path)
    first, other = (tokenizers.load_tokenizer(tmp_path) for _ in range(2))
    assert first("7").input_ids == [7] and tokenizer_diff.first_difference(first, other, tokenizers.PAD) is None
