"""`rlhf launch ENGINE RUN`: print one file to read, edit and submit with the scheduler's own tool.

Nothing is submitted, scheduled or restarted here.
"""

from pathlib import Path

from rlhf_cli import terminal
from rlhf_cli.commands.launch.engines import ENGINES, Engine, render
from rlhf_cli.commands.launch.job import LaunchOptions, make_job
from rlhf_cli.config.base import Options
from rlhf_cli.errors import RLHFError, did_you_mean, shown


def print_file(engine: str, folder: Path, options: Options, choices: LaunchOptions, *, out: Path | None) -> None:
    """Print the file of a scheduler that runs the stages of a run, or write it to `out`.

    Raises RLHFError C07 for an unknown engine, C15 if `out` exists, C17 for an option of another engine; as `make_job`.
    """
    if engine not in ENGINES:
        raise RLHFError("C07", f"{engine}: not one of {', '.join(ENGINES)}", hint=did_you_mean(engine, ENGINES))
    _require_options(engine, ENGINES[engine], choices)
    if out and out.exists():
        raise RLHFError("C15", f"--out {shown(out)}: the file exists, and may have been edited", hint="name another")

    text = render(ENGINES[engine], make_job(engine, folder, options, choices))
    if out is None:
        terminal.answer(text, end="")
        return
    out.write_text(text, encoding="utf-8")
    terminal.say(f"launch   {shown(out)} is written; read it, edit it, and submit it")
    terminal.conclude(shown(out), {"file": shown(out)})


def _require_options(name: str, engine: Engine, choices: LaunchOptions) -> None:
    """Raise RLHFError C17 for an option that the engine cannot use."""
    given = {"--image": choices.image, "--partition": choices.partition, "--servers": choices.servers}
    for option, value in given.items():
        if value and option not in engine.options:
            users = [each for each, other in ENGINES.items() if option in other.options]
            raise RLHFError("C17", f"{option} is not for {name}", hint=f"it is for {', '.join(users)}")
