"""T04 goes by the ids that tokenizers make: of one vocabulary, those that read text in another way are told apart."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bad_inputs import check, foreign_scorer, refused, rlhf
from conftest import World
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer

from rlhf_cli.models import tokenizer_diff, tokenizers

Change = Callable[[Any], object]


def difference(one: Any, other: Any) -> str | None:
    """That of `tokenizer_diff`, of two tokenizers whose hash alone is the same."""
    assert tokenizers.tokenizer_sha256(one) == tokenizers.tokenizer_sha256(other)
    return tokenizer_diff.first_difference(one, other, tokenizers.PAD)


def backend(part: str, make: Callable[[Any], Any]) -> Change:
    """A part of the tokenizer's backend, made of the one that it has."""
    return lambda tokenizer: setattr(
        tokenizer.backend_tokenizer, part, make(getattr(tokenizer.backend_tokenizer, part))
    )


def after(*more: Any) -> Callable[[Any], Any]:
    return lambda _: normalizers.Sequence(list(more))


def before(*more: Any) -> Callable[[Any], Any]:
    return lambda own: pre_tokenizers.Sequence([*more, own])


def added(tokenizer: Any, **flags: bool) -> None:
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken("<eos>", special=True, **flags)])


def begun(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<eos> $A", special_tokens=[("<eos>", 1)])


def padded(tokenizer: Any) -> None:
    tokenizer.pad_token = None
    tokenizers.ensure_pad_token(tokenizer, stop_token_id=tokenizer.eos_token_id)


UNLIKE: dict[str, Change] = {
    "lower case": backend("normalizer", after(normalizers.Lowercase())),
    "composed accents": backend("normalizer", after(normalizers.NFC())),
    "no outer spaces": backend("normalizer", after(normalizers.Strip())),
    "one rare letter": backend("normalizer", after(normalizers.Replace("\u01c5", "d"))),
    "a space in front": backend("pre_tokenizer", lambda _: pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "cut inside of one word": backend("pre_tokenizer", before(pre_tokenizers.Split(Regex("oo"), "isolated"))),
    "spaces beside an added token": lambda tokenizer: added(tokenizer, lstrip=True),
    "a token in front": begun,
}
ALIKE: dict[str, Change] = {
    "nothing": lambda _: None,
    "our own pad token": padded,
    "padding": lambda tokenizer: tokenizer.backend_tokenizer.enable_padding(length=9),
    "truncation": lambda tokenizer: tokenizer.backend_tokenizer.enable_truncation(3),
    "decoder": backend("decoder", lambda _: decoders.Fuse()),
    "offsets": backend("pre_tokenizer", lambda _: pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)),
    "an empty list of normalizers": backend("normalizer", after()),
    "a list of one": backend("pre_tokenizer", before()),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_makes_other_ids_is_found(name: str, world: World) -> None:
    changed = world.tokenizer()
    UNLIKE[name](changed)
    assert difference(world.tokenizer(), changed)


@pytest.mark.parametrize("name", ALIKE)
def test_what_makes_the_same_ids_is_alike(name: str, world: World, tmp_path: Path) -> None:
    changed = world.tokenizer()
    ALIKE[name](changed)
    changed.save_pretrained(tmp_path)
    told = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(dict(reversed(told.items())), indent=1))
    assert difference(world.tokenizer(), tokenizers.load_tokenizer(tmp_path)) is None


def test_scores_of_tokens_count(world: World) -> None:
    """Those of a Unigram model decide how a text is cut."""
    first, other = world.tokenizer(), world.tokenizer()
    for tokenizer, score in ((first, -1.0), (other, -900.0)):
        told = json.loads(tokenizer.backend_tokenizer.to_str())
        words = sorted(told["model"]["vocab"], key=told["model"]["vocab"].get)
        vocab = [[word, score if word == max(words, key=len) else -5.0] for word in words]
        told["model"] = {"type": "Unigram", "unk_id": 0, "vocab": vocab}
        tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(told))
    assert difference(first, other) is not None


def test_tokenizers_in_python_are_compared_by_their_ids() -> None:
    first, other = ByT5Tokenizer(), ByT5Tokenizer()
    assert not first.is_fast and difference(first, other) is None
    plain = other._tokenize
    other._tokenize = lambda text, **how: plain(text.lower(), **how)
    assert difference(first, other) is not None


def test_t04_of_one_vocabulary_read_in_another_way(folder: Path) -> None:
    """In check and in the stage; where the reward model only scores, the text is encoded anew for it."""
    foreign_scorer(folder)
    path = folder / "scorer/tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": {"type": "Lowercase"}}))
    says = (
        "models.reward has another tokenizer than models.sft (scorer beside model: 'Tell me about the Sun.' becomes",
    )
    assert refused(rlhf("ppo"), "T04", "ppo.yaml:1: ", *says, "hint: ")
    assert f"error[T04]: ppo.yaml:1: {says[0]}" in check("ppo.yaml").stderr
    scores = check("ppo.yaml", "-s", "models.value=policy_head")
    assert scores.exit_code == 0 and "one label; encoded anew for it" in scores.stdout
    path.write_text((folder / "model/tokenizer.json").read_text())
    assert check("ppo.yaml").exit_code == 0
