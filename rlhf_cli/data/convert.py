"""Convert rows of ShareGPT, Alpaca and answers with scores to rlhf's columns.

`python -m rlhf_cli.data.convert DATA OUT.jsonl`: DATA is a file, a folder or a hub id, as in a data key. OUT is a new
file. No other module imports this one, because `python -m` would warn about it.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_cli import jsonl, terminal
from rlhf_cli.config.paths import resolve_data
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data import other_formats
from rlhf_cli.data.readers import BadRow
from rlhf_cli.data.sources import read_rows
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import write_text


def main(arguments: Sequence[str]) -> int:
    """Convert the data named by `arguments`; return the exit code."""
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
    """Write the converted rows to `out`. Raises RLHFError D01-D06, D12 for the data, C15 and E03 for `out`."""
    if os.path.lexists(out):
        raise RLHFError("C15", f"{shown(out)} exists; nothing is overwritten", hint="use another file name")
    if not out.parent.is_dir():
        raise RLHFError("E03", f"{shown(out)} cannot be written: {shown(out.parent)} is not a folder")
    source = DataSource(resolve_data(name, os.getcwd()))
    rows, dropped = _converted_rows(source)
    if not rows:
        raise RLHFError("D05", f"no usable row{dropped}", where=source.shown())
    try:
        write_text(out, "".join(jsonl.to_json(row) + "\n" for row in rows))
    except OSError as error:
        raise RLHFError("E03", f"{shown(out)} cannot be written: {error.strerror}") from error
    terminal.say(f"{shown(out)}: {len(rows)} rows{dropped}")


def _converted_rows(source: DataSource) -> tuple[list[dict[str, Any]], str]:
    """Return the converted rows and a message about dropped ones; with answers, bare prompts are dropped."""
    answered, prompts, ties = [], [], 0
    for location, row in read_rows(source):
        try:
            converted = other_formats.convert_row(row)
        except BadRow as bad:
            raise RLHFError(bad.code, bad.text, where=str(location)) from bad
        if converted is None:
            ties += 1
        elif any(turn["role"] == "assistant" for turn in converted.get("messages", ())) or "chosen" in converted:
            answered.append(converted)
        else:
            prompts.append(converted)
    dropped = ""
    if prompts:
        dropped = f"; {len(prompts)} without an answer dropped" if answered else " without an answer: prompts for ppo"
    if ties:
        dropped += f"; {ties} with equal scores dropped"
    return answered or prompts, dropped


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
