"""Dialogues written as one text: parsed and rendered without loss."""

import pytest

from rlhf_cli.data import texts
from rlhf_cli.data.readers import BadRow
from tests.data.test_transcripts import ONE, TURNS, TWO


def test_a_transcript_is_parsed_and_rendered_without_loss() -> None:
    assert texts.parse_transcript_prompt(TWO, "prompt") == TURNS and texts.render_transcript(TURNS) == TWO
    assert texts.parse_transcript_prompt(ONE, "prompt") == [{"role": "user", "content": "Why?"}]
    answered = texts.parse_transcript(f"{TWO} Human: is no turn here\n", "chosen")
    assert answered == [*TURNS, {"role": "assistant", "content": "Human: is no turn here"}]


@pytest.mark.parametrize("text", ["Why?", "Assistant", "Well.\n\nHuman: Why?\n\nAssistant:", ""])
def test_a_text_that_does_not_begin_with_a_turn_is_no_transcript(text: str) -> None:
    assert not texts.is_transcript(text)
    with pytest.raises(BadRow) as bad:
        texts.parse_transcript(text, "prompt")
    assert bad.value.code == "D12"
