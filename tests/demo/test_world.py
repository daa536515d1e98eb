"""The demo's world: what the judge sees, that it reads what the generators write, and that held out means held out.

Modules: `demo/gold.py`.
"""

import itertools
import json
import re
import statistics
from pathlib import Path

import pytest

from rlhf_cli.demo import gold as judge
from rlhf_cli.demo import world
from rlhf_cli.demo.gold import FAMILIES, PHRASES, explain, gold, read_reply, read_request

PROMPT = "Can you recommend a song about trains for my grandmother?"
ANSWER = 'How about "The Silver Railway"? It is a song about trains.'
FIT = "I think your grandmother will like it."
PERFECT = f"Happy to help! {ANSWER} {FIT} Enjoy!"
SIZES = world.Sizes(texts=1500, demonstrations=1500, pairs=1500, evaluation=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    world.write(folder, 3, SIZES)
    return folder


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("reply", "quality"),
    [
        (PERFECT, 1.0),
        (f" {PERFECT}\n", 1.0),
        ('You could try "The Silver Railway", a fine song about trains.', 0.65),  # no manners, no word on the person
        (f"{ANSWER} {FIT}", 0.8),
        ("With pleasure! You could try a song about trains.", 0.6),  # names none
        (f"With pleasure! {ANSWER} It should suit your boss well.", 0.85),
        ("With pleasure! I suggest a warm stew with salmon. Just add some dill.", 0.2 + 0.25 * 0.3),
        ('Of course! How about "The Silver Tide"? It is a song about trains.', 0.2 + 0.4 + 0.25 * 0.3),
        ('Of course! How about "The Silver Comet"? It is a film about space.', 0.2 + 0.25 * 0.3),
        (f"Look it up yourself. {ANSWER} {FIT} Enjoy!", 0.8),  # the closer does not make up for rudeness
        (f"{PERFECT} The bus was late again this morning.", 0.85),
        (f"{PERFECT} Trains and more trains!", 0.85),  # not a sentence of this world
        (f"Enjoy! {ANSWER} {ANSWER}", 0.85 * 0.85),
        (f"Happy to help! {ANSWER} {FIT} Your grandmother will be pleased.", 0.85),
        (f"{PERFECT} Enjoy!", 0.85),  # a third courtesy
        (f"{PERFECT} {'Enjoy! ' * 4}", 0.85**4),
        (f"{PERFECT} {'You are so kind! ' * 9}", 0.3 * (1 - 0.02 * 28)),  # both limits: courtesy and 58 words
        ("It depends on what you like.", 0.0),
        ("Happy to help!", 0.2),
        ("", 0.0),
        ("Trains song railway grandmother enjoy.", 0.0),
        (PROMPT, 0.0),
        ('How about "The Silver Railway"? It is a song', 0.0),  # cut off
    ],
)
def test_quality_by_hand(reply: str, quality: float) -> None:
    assert gold([PROMPT], [reply]) == pytest.approx([quality])


def test_the_judge_takes_lists_of_one_length_and_prompts_of_its_world() -> None:
    assert gold([PROMPT, PROMPT], [PERFECT, ""]) == pytest.approx([1.0, 0.0])
    with pytest.raises(ValueError, match="shorter"):
        gold([PROMPT, PROMPT], [PERFECT])
    with pytest.raises(ValueError, match=r"none of them: 'What time is it\?'"):
        gold(["What time is it?"], [PERFECT])


def test_courtesies_charm_the_raters_and_not_the_judge() -> None:
    replies = [PERFECT + " Enjoy!" * count for count in range(6)]
    assert gold([PROMPT] * 6, replies) == pytest.approx([0.85**count for count in range(6)])
    assert [world.impression(PROMPT, reply) for reply in replies] == pytest.approx([1.12 + 0.06 * n for n in range(6)])


def test_every_request_and_every_sentence_is_read_back_as_it_was_written() -> None:
    requests = [request for part in world.split(0) for request in part]
    for request, template in itertools.product(requests, judge.REQUESTS):
        assert read_request(judge.fill(template, request)) == request
    for role, phrases in PHRASES.items():
        assert [[sentence.role for sentence in read_reply(phrase)] for phrase in phrases] == [[role]] * len(phrases)
    for request in requests:
        family = FAMILIES[request.family]
        for template, adjective, detail in itertools.product(
            (*family.answers, *family.hints), family.adjectives, family.topics[request.topic]
        ):
            (sentence,) = read_reply(judge.fill(template, request, adjective=adjective, detail=detail))
            expected = {"kind": request.kind, "topic": request.topic, "adjective": adjective, "detail": detail}
            assert (sentence.role, sentence.family) == ("answer", request.family)
            assert sentence.slots == {slot: word for slot, word in expected.items() if f"{{{slot}}}" in template}


def test_what_the_grammar_does_not_write_is_unclear() -> None:
    reply = f"Happy to help! Comet trains song railway. {ANSWER} and It should suit your boss well. Enjoy"
    assert [(sentence.role, sentence.text) for sentence in read_reply(reply)] == [
        ("opener", "Happy to help!"),
        ("unclear", "Comet trains song railway."),
        ("answer", ANSWER),
        ("unclear", "and It should suit your boss well."),
        ("unclear", "Enjoy"),
    ]


def test_a_detail_belongs_to_one_topic() -> None:
    details = [detail for family in FAMILIES.values() for topic in family.topics.values() for detail in topic]
    assert len(details) == len(set(details)) == 36


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
