"""Rows of other systems' forms as ours: ShareGPT's, Alpaca's, answers with scores.

`python -m rlhf_cli.data.convert DATA OUT.jsonl`: DATA is what a data key may name, a file, a folder or a hub id. OUT is
a new file. No other module imports this one: Python would warn of it.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_cli import jsonl, terminal
from rlhf_cli.config.paths import resolved_data
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data import other_formats
from rlhf_cli.data.bad_row import BadRow
from rlhf_cli.data.sources import read_rows
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import write_text


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    if len(arguments) != 2:
        terminal.say(str(__doc__))
        return 2
    try:
        _convert(arguments[0], Path(arguments[1]))
    except RLHFError as problem:
        terminal.say(str(problem))
        return problem.exit_code
    return 0


def _convert(name: str, out: Path) -> None:
    """Raises RLHFError D01-D06, D12 for the data, C15 and E03 for `out`."""
    if os.path.lexists(out):
        raise RLHFError("C15", f"{shown(out)} exists; nothing is overwritten", hint="use another file name")
    if not out.parent.is_dir():
        raise RLHFError("E03", f"{shown(out)} cannot be written: {shown(out.parent)} is not a folder")
    source = DataSource(resolved_data(name, os.getcwd()))
    found, told = _rows(source)
    if not found:
        raise RLHFError("D05", f"no usable row{told}", where=source.shown())
    try:
        write_text(out, "".join(jsonl.to_json(row) + "\n" for row in found))
    except OSError as error:
        raise RLHFError("E03", f"{shown(out)} cannot be written: {error.strerror}") from error
    terminal.say(f"{shown(out)}: {len(found)} rows{told}")


def _rows(source: DataSource) -> tuple[list[dict[str, Any]], str]:
    """The rows to write, and how many were left out for what. Rows of prompts alone are left out beside answers."""
    answered, prompts, ties = [], [], 0
    for place, row in read_rows(source):
        try:
            new = other_formats.converted(row)
        except BadRow as bad:
            raise RLHFError(bad.code, bad.text, where=str(place)) from bad
        if new is None:
            ties += 1
        elif any(turn["role"] == "assistant" for turn in new.get("messages", ())) or "chosen" in new:
            answered.append(new)
        else:
            prompts.append(new)
    told = ""
    if prompts:
        told = f"; {len(prompts)} without an answer dropped" if answered else " without an answer: prompts for ppo"
    if ties:
        told += f"; {ties} with equal scores dropped"
    return answered or prompts, told


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
