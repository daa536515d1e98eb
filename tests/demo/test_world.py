"""The demo's world: a seed is a world, replies are of mixed quality, and held out means held out."""

import itertools
import json
import re
import statistics
from pathlib import Path

import pytest

from rlhf_cli.demo import world
from rlhf_cli.demo.gold import FAMILIES, explain, gold, read_request

SIZES = world.Sizes(texts=1500, demonstrations=1500, pairs=1500, evaluation=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    world.write(folder, 3, SIZES)
    return folder


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_training_texts_have_no_held_out_triple_but_each_of_its_pairs(folder: Path) -> None:
    train, held_out = world.split(3)
    assert len(held_out) == round(0.2 * (len(train) + len(held_out))) and not set(train) & set(held_out)
    for one, other in itertools.combinations(("kind", "topic", "who"), 2):
        seen = {(getattr(request, one), getattr(request, other)) for request in train}
        assert {(getattr(request, one), getattr(request, other)) for request in held_out} <= seen
    wishes = [(f"{request.kind} {FAMILIES[request.family].link} {request.topic}", request.who) for request in held_out]
    sought = re.compile(
        "|".join(f"{wish} for my {who}|My {who} (?:would like|wanted) a {wish}" for wish, who in wishes)
    )
    texts = [row["text"] for row in rows(folder, "base/data/text")]
    texts += [row["prompt"] for name in ("sft", "pairs", "prompts") for row in rows(folder, f"data/{name}")]
    assert not [text for text in texts if sought.search(text)]
    assert all(sought.search(row["prompt"]) for row in rows(folder, "data/heldout"))
    for name in ("sft_eval", "pairs_eval", "heldout"):
        assert {read_request(row["prompt"]) for row in rows(folder, f"data/{name}")} <= set(held_out)
    prompts = [row["prompt"] for row in rows(folder, "data/heldout")]
    assert len(prompts) == len(set(prompts)) == 516


def test_a_seed_is_a_world(folder: Path, tmp_path: Path) -> None:
    def content(folder: Path) -> dict[str, bytes]:
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.jsonl")}

    world.write(tmp_path / "same", 3, SIZES)
    world.write(tmp_path / "other", 4, SIZES)
    same, other = content(tmp_path / "same"), content(tmp_path / "other")
    assert same == content(folder) and len(same) == 7
    assert all(same[name] != other[name] for name in same)


def test_replies_are_in_the_grammar_and_of_mixed_quality(folder: Path) -> None:
    shown = rows(folder, "data/sft")
    seen = [explain(row["prompt"], row["completion"]) for row in shown]
    assert not any(what["unclear"] for what in seen)
    assert 0.4 < statistics.mean(what["score"] for what in seen) < 0.55
    assert sum(what["score"] > 0.95 for what in seen) < 0.1 * len(seen)
    assert all(re.match(r" \S", row["completion"]) for row in shown)


def test_raters_know_quality_but_for_their_charm_and_their_slips(folder: Path) -> None:
    rated = rows(folder, "data/pairs")
    prompts, chosen, rejected = ([row[key] for row in rated] for key in ("prompt", "chosen", "rejected"))
    liked = [world.impression(p, c) - world.impression(p, r) for p, c, r in zip(prompts, chosen, rejected, strict=True)]
    assert 0.02 < sum(more < 0 for more in liked) / len(rated) < 0.08 and 0 not in liked
    true = [c - r for c, r in zip(gold(prompts, chosen), gold(prompts, rejected), strict=True)]
    assert 0.8 < sum(more > 0 for more in true) / sum(more != 0 for more in true) < 0.95


def test_the_base_texts_hold_every_word(folder: Path) -> None:
    """A tokenizer trained on them cuts no word of the demo into letters."""
    words = re.compile(r"[A-Za-z]+")
    base = {word for row in rows(folder, "base/data/text") for word in words.findall(row["text"])}
    for name in ("sft", "pairs", "heldout"):
        assert {word for row in rows(folder, f"data/{name}") for word in words.findall(" ".join(row.values()))} <= base
