"""The cache of tokens: never other tokens than without it, and never an obstacle."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import World

from rlhf_cli import data, jsonl
from rlhf_cli.data import datasets, hub, tokens
from rlhf_cli.models import tokenizers

CONTENTS = [
    {"prompt": "Tell me about the sun.", "chosen": " Bright", "rejected": " Dull\n"},
    {"prompt": "é 😀", "chosen": " a", "rejected": " b"},
]


class Planted:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.fixture
def tokenizer(world: World) -> Any:
    return world.tokenizer()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokens, "MIN_CACHED_ROWS", 1)
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each call of `encode_many` got."""
    calls: list[int] = []

    def counting(tokenizer: Any, prompts: Any, responses: Any) -> Any:
        calls.append(len(prompts))
        return data.encode_many(tokenizer, prompts, responses)

    monkeypatch.setattr(datasets, "encode_many", counting)
    return calls


def pairs(tokenizer: Any, path: Path, contents: list[dict[str, str]] = CONTENTS) -> list[dict[str, Any]]:
    jsonl.write_jsonl(path / "pairs.jsonl", contents)
    return data.preference_rows(path / "pairs.jsonl", tokenizer, max_length=99)


def test_the_second_time_nothing_is_tokenised_and_all_is_the_same(
    tokenizer: Any, tmp_path: Path, folder: Path, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pairs(tokenizer, tmp_path)
    assert encoded == [4] and pairs(tokenizer, tmp_path) == made and encoded == [4]
    monkeypatch.setattr(tokens, "MIN_CACHED_ROWS", 99)
    assert pairs(tokenizer, tmp_path) == made and encoded == [4, 4]  # without the cache
    for row, one in zip(made, CONTENTS, strict=True):
        prompt, chosen = data.encode(tokenizer, one["prompt"], one["chosen"])
        assert row["prompt_ids"] == prompt and row["chosen_ids"] == prompt + chosen
        assert all(type(token) is int for token in row["rejected_ids"])
    assert len(list(folder.iterdir())) == 1


def test_another_text_order_template_or_tokenizer_is_a_miss(
    world: World, tmp_path: Path, folder: Path, encoded: list[int]
) -> None:
    pairs(world.tokenizer(), tmp_path)
    pairs(world.tokenizer(), tmp_path, CONTENTS[::-1])
    pairs(world.tokenizer(), tmp_path, [{**CONTENTS[0], "chosen": " Bright "}, CONTENTS[1]])
    pairs(world.tokenizer(), tmp_path, [{**CONTENTS[0], "prompt": "Tell me"}, CONTENTS[1]])
    tokenizer = world.tokenizer()
    tokenizers.set_chat_template(tokenizer, "chatml")  # another stop token
    pairs(tokenizer, tmp_path)
    tokenizer = tokenizers.train_tokenizer(world.text, 300)
    assert pairs(tokenizer, tmp_path)[0]["prompt_ids"] == data.encode(tokenizer, CONTENTS[0]["prompt"], None)[0]
    assert encoded == [4] * 6 and len(list(folder.iterdir())) == 6


def test_a_template_that_writes_the_day_is_asked_for_it(
    tokenizer: Any, tmp_path: Path, folder: Path, encoded: list[int]
) -> None:
    tokenizer.chat_template = (
        "{{ strftime_now('%s%f') }}{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    )
    pairs(tokenizer, tmp_path)
    pairs(tokenizer, tmp_path)
    assert encoded == [4, 4]


@pytest.mark.parametrize(
    "damage",
    [lambda raw: raw[:-30], lambda raw: b"", lambda raw: b"text", lambda raw: raw[:450] + b"\0\1\2" + raw[453:]],
)
def test_a_damaged_file_is_made_again(
    tokenizer: Any, tmp_path: Path, folder: Path, encoded: list[int], damage: Any
) -> None:
    made = pairs(tokenizer, tmp_path)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert file.read_bytes() != whole
    assert pairs(tokenizer, tmp_path) == made and encoded == [4, 4]
    assert pairs(tokenizer, tmp_path) == made and encoded == [4, 4]


@pytest.mark.parametrize("plain", [True, False])
def test_a_pickle_in_the_cache_is_never_read(tokenizer: Any, tmp_path: Path, folder: Path, plain: bool) -> None:
    """Alone, or as one of the arrays."""
    made = pairs(tokenizer, tmp_path)
    [file] = folder.iterdir()
    planted = Planted(tmp_path / "it ran")
    if plain:
        file.write_bytes(pickle.dumps(planted))
    else:
        with file.open("wb") as opened:
            np.savez(opened, lengths=np.array([[planted]], dtype=object), tokens=np.array([1]))
    assert pairs(tokenizer, tmp_path) == made and not (tmp_path / "it ran").exists()
    with file.open("rb") as opened, np.load(opened, allow_pickle=False) as again:
        assert again["tokens"].dtype == np.int32, "it was made again"


def test_a_folder_that_cannot_be_written_is_told_once(
    tokenizer: Any, tmp_path: Path, folder: Path, encoded: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    folder.parent.write_text("a file, no folder")
    made = pairs(tokenizer, tmp_path)
    assert pairs(tokenizer, tmp_path) == made and encoded == [4, 4]
    assert capsys.readouterr().err.count("tokens are not cached") == 1


def test_what_was_used_longest_ago_goes(
    tokenizer: Any, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs(tokenizer, tmp_path)
    (kept,) = folder.iterdir()
    for name, age in (("old.npz", 900), ("left.npz-77", 800), ("young.npz", -100)):
        (folder / name).write_bytes(b"0" * kept.stat().st_size)
        os.utime(folder / name, (kept.stat().st_mtime - age,) * 2)
    os.utime(kept, (kept.stat().st_mtime - 1000,) * 2)
    monkeypatch.setattr(tokens, "MAX_CACHE_BYTES", 3.5 * kept.stat().st_size)
    pairs(tokenizer, tmp_path)  # used, which makes it young again
    pairs(tokenizer, tmp_path, CONTENTS[:1])
    assert kept.exists() and (folder / "young.npz").exists()
    assert not (folder / "old.npz").exists() and not (folder / "left.npz-77").exists()


def test_a_pairs_prompt_is_tokenised_once(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(datasets, "encode_many", lambda t, p, r: asked.extend(p) or data.encode_many(t, p, r))
    pairs(tokenizer, tmp_path)
    assert [prompt for prompt in asked if prompt is not None] == [one["prompt"] for one in CONTENTS]


def test_equal_ids_are_one_object(tokenizer: Any) -> None:
    (_, first), (_, second) = data.encode_many(tokenizer, [None, None], ["Tell 😀 me", "Tell 😀 me"])
    assert max(first) > 256 and all(one is other for one, other in zip(first, second, strict=True))


def test_the_suite_never_touches_the_users_cache() -> None:
    assert not hub.cache_folder().is_relative_to(Path.home() / ".cache")
