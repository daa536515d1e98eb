"""What is typed, or comes through a pipe: prompts and commands, one a line, or a prompt of several lines."""

from pathlib import Path

from rlhf_cli import terminal
from rlhf_cli.errors import RLHFError
from rlhf_cli.rows import decoded

BLOCK = '"""'


class Lines:
    """The lines of stdin, told apart by their number in messages."""

    def __init__(self) -> None:
        self.number = 0

    def next(self) -> str | None:
        """The next prompt or command; None at the end.

        A line that begins with three quotes begins a prompt, which goes on to the next three at a line's end; that one
        is no command, whatever it begins with.
        Raises RLHFError D04 for what is not UTF-8, C11 for a prompt without an end.
        """
        line = self._line("> ")
        if line is None or not line.startswith(BLOCK):
            return line
        lines, first = [line.removeprefix(BLOCK)], self.number
        while not lines[-1].endswith(BLOCK):
            more = self._line("... ")
            if more is None:
                raise RLHFError("C11", f"the prompt that begins here has no {BLOCK} at its end", where=f"stdin:{first}")
            lines.append(more)
        text = "\n".join(lines).removesuffix(BLOCK).strip("\n")
        return f"/{text}" if text.startswith("/") else text

    def _line(self, prompt: str) -> str | None:
        line = terminal.ask(prompt)
        self.number += 1
        return None if line is None else decoded(line.encode("utf-8", "surrogateescape"), Path("stdin"), self.number)
