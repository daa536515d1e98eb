"""What was said, as rows that the data keys of the stages read again."""

from collections.abc import Iterator
from typing import Any

from rlhf_cli.chat.speech import Voice
from rlhf_cli.chat.talk import Talk
from rlhf_cli.chat.turns import Reply, Turn


def rows(talk: Talk) -> Iterator[dict[str, Any]]:
    """Of each model one row {messages}; of plain text, which has no turns, a row {prompt, completion} a reply.

    Under `chat` stands which model it was, how each reply was drawn, and its numbers.
    """
    for voice in talk.voices:
        turns = [turn for turn in talk.turns if voice.name in turn.replies]
        if not talk.form.has_turns:
            yield from (_alone(voice, turn, turn.replies[voice.name]) for turn in turns)
        elif turns:
            messages = talk.form.conversation(talk.system, turns, voice.name)
            replies = [_reply(turn.replies[voice.name]) for turn in turns]
            yield {"messages": messages, "chat": {**_model(voice), "replies": replies}}


def _alone(voice: Voice, turn: Turn, reply: Reply) -> dict[str, Any]:
    return {"prompt": turn.said, "completion": reply.text, "chat": {**_model(voice), **_reply(reply)}}


def _model(voice: Voice) -> dict[str, Any]:
    role = voice.role
    return {"model": role.name, "from": role.told} | ({"sha256": role.sha256} if role.sha256 else {})


def _reply(reply: Reply) -> dict[str, Any]:
    """How a reply was drawn, and its numbers; what is not known is absent."""
    how, numbers = reply.how, reply.numbers
    known = {"scores": numbers.scores or None, "sum": numbers.total, "kl": numbers.kl}
    return {
        "temperature": how.temperature,
        "max_new_tokens": how.max_new_tokens,
        "seed": how.seed,
        "draw": how.draws,
        "length": reply.length,
        "ended": reply.ended,
        **{name: value for name, value in known.items() if value is not None},
    }
