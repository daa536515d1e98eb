"""The demo's judge: what it sees, and that it reads what the generators write."""

import itertools

import pytest

from rlhf_cli.demo import gold as judge
from rlhf_cli.demo import world
from rlhf_cli.demo.gold import FAMILIES, PHRASES, gold, read_reply, read_request

PROMPT = "Can you recommend a song about trains for my grandmother?"
ANSWER = 'How about "The Silver Railway"? It is a song about trains.'
FIT = "I think your grandmother will like it."
PERFECT = f"Happy to help! {ANSWER} {FIT} Enjoy!"


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
