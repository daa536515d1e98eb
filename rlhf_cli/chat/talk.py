"""The state of a chat, and one turn of it: replies that are shown while they are made, and their numbers."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from rlhf_cli import terminal
from rlhf_cli.chat.judge import Judge
from rlhf_cli.chat.speech import Speech, Voice
from rlhf_cli.chat.turns import Form, Reply, Sampling, Turn
from rlhf_cli.errors import RLHFError


class Talk:
    """Who talks, how replies are drawn, and what was said since the last /clear.

    `live`: a person types, who may stop a reply with Ctrl-C; else whatever is wrong ends the command.
    """

    def __init__(
        self, voices: list[Voice], judge: Judge, form: Form, stop_token_id: int | None, how: Sampling, *, live: bool
    ) -> None:
        self.voices, self.judge, self.form, self.stop_token_id, self.live = voices, judge, form, stop_token_id, live
        self.how = how
        self.system: str | None = None
        self.turns: list[Turn] = []
        self.stopped = False  # whether Ctrl-C has ended the last reply

    def say(self, said: str) -> None:
        """The next turn. Raises RLHFError C13, D06, D08 for what cannot be answered, R05 as `Judge.numbers` does."""
        if turn := self._answered(said, self.turns):
            self.turns.append(turn)

    def retry(self) -> None:
        """Another reply in place of the last one. Raises RLHFError as `say` does."""
        *before, last = self.turns
        if turn := self._answered(last.said, before):
            self.turns[-1] = turn

    def _answered(self, said: str, before: Sequence[Turn]) -> Turn | None:
        """The turn with all replies, each shown as it comes; None where Ctrl-C came before the first word."""
        speeches = []
        for voice in self.voices:
            prompt = self.form.prompt(self.system, before, voice.name, said)
            speeches.append(Speech(voice, self.form, prompt, self.stop_token_id, self.how))
        self.how, self.stopped = replace(self.how, draws=self.how.draws + 1), False
        turn, compared = Turn(said, {}), len(speeches) > 1
        together = compared and terminal.has_room(len(speeches))
        if together:
            self._hear_together(speeches)
        for speech in speeches:
            if not together and not self.stopped:
                terminal.piece(f"{speech.voice.name}: " if compared else "")
                self._hear(speech)
            self._take(speech, turn, compared=compared)
        if self.live:
            terminal.out()
        return turn if turn.replies else None

    def _hear(self, speech: Speech) -> None:
        try:
            for piece in speech:
                terminal.piece(piece)
        except KeyboardInterrupt:
            self._stop()
        terminal.out()

    def _hear_together(self, speeches: list[Speech]) -> None:
        """A token of each in turn, beside one another."""
        with terminal.Columns([speech.voice.name for speech in speeches]) as columns:
            try:
                for pieces in zip_longest(*speeches, fillvalue=""):
                    for column, piece in enumerate(pieces):
                        columns.add(column, piece)
            except KeyboardInterrupt:
                self._stop()

    def _stop(self) -> None:
        if not self.live:
            raise KeyboardInterrupt
        self.stopped = True

    def _take(self, speech: Speech, turn: Turn, *, compared: bool) -> None:
        """Keep what was said, and tell its numbers."""
        if not speech.ids:
            return
        stopped = self.stopped and not speech.ended
        reply = Reply(speech.text, len(speech.ids), speech.ended, stopped, speech.seconds, speech.how)
        try:
            numbers = self.judge.numbers(speech.voice.model, speech.prompt, speech.prompt_ids, speech.ids)
            reply = replace(reply, numbers=numbers)
        except RLHFError as error:
            if not self.live:
                raise
            terminal.say(str(error))
        except KeyboardInterrupt:
            if self.stopped:  # the second one
                raise
            self._stop()
        turn.replies[speech.voice.name] = reply
        terminal.aside((f"{speech.voice.name}  " if compared else "") + told(reply))


def told(reply: Reply) -> str:
    """The numbers of a reply in a line."""
    numbers = reply.numbers
    scores = numbers.scores if numbers.total is None else {**numbers.scores, "sum": numbers.total}
    said = [f"{name} {score:.3f}" for name, score in scores.items()]
    said += [f"KL {numbers.kl:.2f}"] if numbers.kl is not None else []
    how = "ended" if reply.ended else "stopped" if reply.stopped else "cut off"
    said.append(f"{reply.length} token{'s' * (reply.length != 1)}, {how}")
    return "  ".join([*said, f"{reply.length / reply.seconds:.0f} tokens/s"])
