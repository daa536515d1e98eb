"""Labels at the terminal: the same keys as on the page."""

import textwrap
import time

from rlhf_cli import terminal
from rlhf_cli.commands.label.session import LabelSession, Refused, Shown
from rlhf_cli.data.tokens import Conversation

SLOT_OF_KEY = {"1": "1", "2": "2", "0": "tie", "b": "bad", "s": "skip"}
HELP = "1 first is better  2 second is better  0 tie  b both bad  s skip  u undo  q quit"
WIDTH = 100  # characters of a line of an answer
ENOUGH = 3  # lines between two pairs


def label_at_terminal(session: LabelSession) -> None:
    """Show the annotators' pairs one after the other and store what is typed, until q or the end of the input.

    Words behind the key are tags: `1 shorter, correct`. Raises RLHFError E03 if a label cannot be written.
    """
    for annotator in session.annotators:
        if len(session.annotators) > 1:
            terminal.say(f"label    annotator {annotator}")
        if not _label_all(session, annotator):
            return


def _label_all(session: LabelSession, annotator: str) -> bool:
    """Label the pairs of one annotator; return False if the input ended or q was typed."""
    terminal.say(HELP)
    shown = session.next(annotator)
    while shown is not None:
        _show(shown, str(session.progress(annotator)))
        began = time.monotonic()
        following: Shown | None = shown
        while following is shown:
            typed = terminal.ask("> ")
            if typed is None or typed.strip() == "q":
                return False
            following = _answer(session, annotator, shown, typed, time.monotonic() - began)
        shown = following
    return True


def _answer(session: LabelSession, annotator: str, shown: Shown, typed: str, seconds: float) -> Shown | None:
    """Do what was typed, and return the pair to show next: the same object if it is not to be shown again."""
    key, _, tags = typed.strip().partition(" ")
    if key == "u":
        before = session.undo(annotator)
        if before is None:
            terminal.say("there is no label to undo")
        return before or shown
    if key not in SLOT_OF_KEY:
        terminal.say(HELP)
        return shown
    try:
        session.choose(
            annotator,
            shown.pair.name,
            SLOT_OF_KEY[key],
            seconds=seconds,
            tags=[tag.strip() for tag in tags.split(",") if tag.strip()],
        )
    except Refused as error:
        terminal.error(str(error))
        return shown
    return session.next(annotator)


def _show(shown: Shown, progress: str) -> None:
    """Print a prompt and its two answers."""
    terminal.answer("\n" * ENOUGH + f"-- {progress}")
    terminal.answer(_prompt_text(shown.pair.prompt))
    for number in (1, 2):
        cut = "" if shown.ended[number - 1] else "  cut off at the length limit"
        terminal.answer(f"\n[{number}]{cut}")
        terminal.answer(_wrapped(shown.answers[number - 1].strip()))


def _prompt_text(prompt: str | Conversation) -> str:
    """Return a prompt as text, the turns of a conversation under the names of their roles."""
    if isinstance(prompt, str):
        return _wrapped(prompt)
    return "\n".join(f"{turn['role']}: {_wrapped(turn['content'])}" for turn in prompt)


def _wrapped(text: str) -> str:
    lines = [textwrap.fill(line, WIDTH, replace_whitespace=False) for line in text.splitlines()]
    return "\n".join(lines)
