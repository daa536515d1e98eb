"""The cache of tokens gives the same tokens as without it, and a damaged or unwritable cache is no obstacle."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from canaries import Trap

from rlhf_cli import data, jsonl
from rlhf_cli.data import tokens
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import tokenizers
from tests.conftest import World

CONTENTS = [
    {"prompt": "Tell me about the sun.", "chosen": " Bright", "rejected": " Dull\n"},
    {"prompt": "é 😀", "chosen": " a", "rejected": " b"},
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokens, "MIN_CACHED_ROWS", 1)
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The prompts of each call of `encode_many`."""
    calls: list[list[Any]] = []
    encode_many = tokens.encode_many

    def recording(tokenizer: Any, prompts: Any, responses: Any) -> Any:
        calls.append(prompts)
        return encode_many(tokenizer, prompts, responses)

    monkeypatch.setattr(tokens, "encode_many", recording)
    return calls


def pairs(tokenizer: Any, path: Path, contents: list[dict[str, str]] = CONTENTS) -> list[dict[str, Any]]:
    jsonl.write_jsonl(path / "pairs.jsonl", contents)
    return data.preference_rows(path / "pairs.jsonl", tokenizer, max_length=99)


def test_the_second_read_tokenises_nothing_and_gives_the_same_ids(
    tokenizer: Any, tmp_path: Path, folder: Path, encoded: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pairs(tokenizer, tmp_path)
    assert encoded == [[CONTENTS[0]["prompt"], CONTENTS[1]["prompt"], None, None]]  # each prompt once
    assert pairs(tokenizer, tmp_path) == rows and len(encoded) == 1 and len(list(folder.iterdir())) == 1
    assert all(type(token) is int for token in rows[0]["rejected_ids"])
    monkeypatch.setattr(tokens, "MIN_CACHED_ROWS", 99)
    assert pairs(tokenizer, tmp_path) == rows and len(encoded) == 2  # without the cache


def test_a_different_text_order_template_or_tokenizer_is_tokenised(
    world: World, chat: Any, tmp_path: Path, folder: Path, encoded: list[list[Any]]
) -> None:
    for contents in (
        CONTENTS,
        CONTENTS[::-1],
        [{**CONTENTS[0], "chosen": " Bright "}, CONTENTS[1]],
        [{**CONTENTS[0], "prompt": "Tell me"}, CONTENTS[1]],
    ):
        pairs(world.tokenizer(), tmp_path, contents)
    pairs(chat, tmp_path)  # another stop token
    pairs(tokenizers.train_tokenizer(world.text, 300), tmp_path)
    assert len(encoded) == 6 == len(list(folder.iterdir()))


def test_a_template_that_prints_the_time_is_never_read_from_the_cache(
    tokenizer: Any, tmp_path: Path, folder: Path, encoded: list[list[Any]]
) -> None:
    tokenizer.chat_template = "{{ strftime_now('%s%f') }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    pairs(tokenizer, tmp_path)
    pairs(tokenizer, tmp_path)
    assert len(encoded) == 2


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "flipped", "pickle", "pickled array"])
def test_a_damaged_or_pickled_file_is_replaced_and_never_executed(
    tokenizer: Any, tmp_path: Path, folder: Path, encoded: list[list[Any]], damage: str
) -> None:
    rows = pairs(tokenizer, tmp_path)
    (file,) = folder.iterdir()
    raw, planted = file.read_bytes(), Trap(tmp_path / "executed")
    contents = {"cut": raw[:-30], "empty": b"", "text": b"text", "flipped": raw[:450] + b"\0\1\2" + raw[453:]}
    if damage == "pickled array":
        with file.open("wb") as opened:
            np.savez(opened, lengths=np.array([[planted]], dtype=object), tokens=np.array([1]))
    else:
        file.write_bytes(contents.get(damage) or (pickle.dumps(planted) if damage == "pickle" else b""))
    assert file.read_bytes() != raw
    assert pairs(tokenizer, tmp_path) == rows and len(encoded) == 2
    assert pairs(tokenizer, tmp_path) == rows and len(encoded) == 2 and file.read_bytes() == raw
    assert not (tmp_path / "executed").exists()


def test_an_unwritable_cache_is_reported_once(
    tokenizer: Any, tmp_path: Path, folder: Path, encoded: list[list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder.parent.write_text("a file, no folder")
    rows = pairs(tokenizer, tmp_path)
    assert pairs(tokenizer, tmp_path) == rows and len(encoded) == 2
    assert capsys.readouterr().err.count("tokens are not cached") == 1


def test_the_least_recently_used_files_are_deleted(
    tokenizer: Any, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs(tokenizer, tmp_path)
    (kept,) = folder.iterdir()
    for name, age in (("old.npz", 900), ("partial.npz-77", 800), ("young.npz", -100)):
        (folder / name).write_bytes(b"0" * kept.stat().st_size)
        os.utime(folder / name, (kept.stat().st_mtime - age,) * 2)
    os.utime(kept, (kept.stat().st_mtime - 1000,) * 2)
    monkeypatch.setattr(tokens, "MAX_CACHE_BYTES", 3.5 * kept.stat().st_size)
    pairs(tokenizer, tmp_path)  # reading renews it
    pairs(tokenizer, tmp_path, CONTENTS[:1])
    assert kept.exists() and (folder / "young.npz").exists()
    assert not (folder / "old.npz").exists() and not (folder / "partial.npz-77").exists()


def test_equal_ids_are_one_object(tokenizer: Any) -> None:
    (_, first), (_, second) = data.encode_many(tokenizer, [None, None], ["Tell 😀 me", "Tell 😀 me"])
    assert max(first) > 256 and all(one is other for one, other in zip(first, second, strict=True))


def test_rows_of_a_model_with_more_embeddings_are_not_read_for_one_with_fewer(
    tokenizer: Any, tmp_path: Path, folder: Path
) -> None:
    contents = [{**CONTENTS[0], "chosen": "<pad> yes"}, *CONTENTS[1:]]
    assert pairs(tokenizer, tmp_path, contents)
    setattr(tokenizer, tokens.WITHOUT_EMBEDDING, frozenset([tokenizer.pad_token_id]))
    for _ in range(2):
        with pytest.raises(RLHFError, match=r"M06.*pairs.jsonl:1: a text contains <pad>"):
            pairs(tokenizer, tmp_path, contents)
