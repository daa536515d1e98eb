"""The only place where errors become messages and exit codes."""

import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from rlhf_cli import distributed, system, terminal
from rlhf_cli.config.machinery.aliases import COMMANDS
from rlhf_cli.errors import NOT_FOUND, RLHFError, closest_match, read_error, shell_word, shown
from rlhf_cli.runs.layout import STAGES, seed_of

RUN_ARGUMENTS = ("folder", "folders", "path")  # names of the arguments that take a run
READ_CONFIGS = {"run", "check", "plan", "status", "launch"}
STDOUT_ONLY = {"status", "ls", "check", "plan", "schema", "explain", "env", "verify", "replay", "serve", "launch"}
COMMAND_WIDTH = 7  # characters, so that all groups of --help share one column
MAX_LISTED_RUNS = 5
FILE_ERRORS = {errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ENXIO, errno.ETIMEDOUT} | system.DISK_FULL
STOPPED = "stopped by a signal"
REPORT_WAIT_S = 5.0  # for another process to report its error


class RunNotGiven(Exception):
    """A command needs a run, and the command line names none."""


def only_run(*, has_configs: bool = False) -> Path:
    """Return the only run here, or the only one with configs, and print its name.

    Raises RunNotGiven if there are none or several.
    """
    folders = _runs_here(has_configs=has_configs)
    if len(folders) != 1:
        raise RunNotGiven
    terminal.say(f"{folders[0]} is the only run here" if folders[0] != "." else "this folder is a run")
    return Path(folders[0])


def _runs_here(*, has_configs: bool) -> list[str]:
    """Return the runs here; with `has_configs` without those of a seed, which have no configs."""
    from rlhf_cli.commands import status

    folders = status.runs_here()
    return [folder for folder in folders if not seed_of(Path(folder))] if has_configs else folders


class CommandGroup(TyperGroup):
    """All commands, with the one error handler around them."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by group (Train, Inspect, Ship), each with its full first sentence."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            if command.hidden:
                continue
            summary = (command.help or "").split("\n\n")[0]
            row = (name.ljust(COMMAND_WIDTH), " ".join(summary.split()))
            panel = getattr(command, "rich_help_panel", "Commands")
            groups.setdefault(panel, []).append(row)
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def main(self, args: Sequence[str] | None = None, **extra: Any) -> Any:  # type: ignore[override]
        """Run a command line and exit: 0 success, 2 invalid input, 1 run-time failure, 130 and 143 on signals."""
        arguments = list(sys.argv[1:] if args is None else args)
        trains = bool(arguments) and arguments[0] in STAGES and "--dry-run" not in arguments
        group = nullcontext() if trains else distributed.alone()
        with group:
            self._run_and_exit(arguments, **extra)

    def _run_and_exit(self, arguments: list[str], **extra: Any) -> None:
        code = 0
        terminal.reset()
        previous_handler = _set_sigterm_handler(system.raise_terminated)
        try:
            try:
                code = super().main(arguments, **{**extra, "standalone_mode": False}) or 0
            except Exception as error:
                if "--debug" in arguments:
                    terminal.log_from_any_rank(traceback.format_exc().rstrip())
                code = _report_error(error, arguments, self.commands)
            if code == 0 and _writes_to_stdout_only(arguments) and (write_error := terminal.stdout_error()):
                text = f"stdout cannot be written: {write_error.strerror}"
                hint = "free space on its disk, or redirect it elsewhere"
                code = _report_error(system.OutOfResources("E03", text, hint=hint))
        except system.Terminated:  # also while an error is reported
            code = 143
        finally:
            _set_sigterm_handler(previous_handler)
            if locks := sys.modules.get("rlhf_cli.runs.locks"):
                locks.release()
        if code in (129, 130, 143) and terminal.is_first_time(STOPPED):  # a child process may have said so
            terminal.error(STOPPED)
        sys.exit(code)


def _writes_to_stdout_only(arguments: Sequence[str]) -> bool:
    return "--dry-run" in arguments or (bool(arguments) and arguments[0] in STDOUT_ONLY)


def _report_error(error: Exception, arguments: Sequence[str] = (), commands: Collection[str] = ()) -> int:
    """Print an error on stderr, with a line and a hint per problem; return the exit code."""
    parameter = getattr(getattr(error, "param", None), "name", None)
    run_is_missing = parameter in RUN_ARGUMENTS and type(error).__name__ == "MissingParameter"
    if (run_is_missing and arguments[0] != "convert") or isinstance(error, RunNotGiven):
        error = _run_not_given_error(arguments)
    if isinstance(error, OSError):
        error = _translate_file_error(error) or error
    if isinstance(error, RLHFError):
        if distributed.world_size() == 1 or not _reported_elsewhere(error):
            show = terminal.error if distributed.is_main_process() else terminal.log_from_any_rank
            show(str(error))
        return error.exit_code
    if isinstance(error, typer.Abort):
        return 130
    if hasattr(error, "format_message"):  # typer's usage errors
        terminal.error(str(_usage_error(error.format_message(), arguments, commands)))
        return 2

    message = " ".join(str(error).split())
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    terminal.log_from_any_rank(str(RLHFError("R00", text, hint="the same command with --debug shows where")))
    return 1


def _usage_error(message: str, arguments: Sequence[str], commands: Collection[str]) -> RLHFError:
    """Return typer's message as an error, with the command that was meant or its help as the hint."""
    text = " ".join(message.split())
    command = arguments[0] if arguments else ""
    if command in commands:
        return RLHFError("C11", text, hint=f"rlhf {command} --help")
    if command in COMMANDS:
        return RLHFError("C11", f"there is no command {command}", hint=COMMANDS[command])
    near = None if command.startswith("-") else closest_match(command, commands)
    return RLHFError("C11", text, hint=f"did you mean rlhf {near}?" if near else "rlhf --help")


def _translate_file_error(error: OSError) -> RLHFError | None:
    """Return E08 for a file that cannot be read, E03 for one that cannot be written, None for other errors."""
    name = error.filename
    if not isinstance(name, str | Path) or error.errno not in FILE_ERRORS:
        return None
    full = error.errno in system.DISK_FULL
    try:
        os.close(os.open(name, os.O_RDONLY | os.O_NONBLOCK))
        if not full and os.access(name, os.W_OK):
            return None  # readable and writable, so another operation failed
    except OSError as current_error:
        if not full and current_error.errno not in NOT_FOUND:
            return read_error(error, name)
    return RLHFError("E03", f"{shown(name)} cannot be written: {error.strerror}", hint="write to another place")


def _run_not_given_error(arguments: Sequence[str]) -> RLHFError:
    """Return an error that lists the runs here."""
    command = arguments[0]
    folders = _runs_here(has_configs=command in READ_CONFIGS)
    question = f"rlhf {command}: which run?"
    if not folders:
        return RLHFError("C11", f"{question} There is none here", hint="rlhf init demo runs/demo makes one")

    text = "This folder is one"
    if folders != ["."]:
        text = f"There are {', '.join(folders[:MAX_LISTED_RUNS])}"
        if len(folders) > MAX_LISTED_RUNS:
            text += f" and {len(folders) - MAX_LISTED_RUNS} more (rlhf ls)"
    place = 2 if command == "launch" else 1  # its first argument is the scheduler
    example = ["rlhf", *arguments[:place], folders[0], *arguments[place:]]
    return RLHFError("C11", f"{question} {text}", hint=" ".join(map(shell_word, example)))


def _reported_elsewhere(error: RLHFError) -> bool:
    """Return True if another process of the group reports the error. The launcher ends all when the first one exits.

    Rank 0 reports errors that all ranks find. Another rank reports its error if rank 0 is still running after a wait.
    A rank that only knows that another is missing (R14) waits for that one to report and exit first, since the exit
    code of the group is that of the first process to exit.
    """
    rank_missing = error.problems[0].code == "R14"
    is_main = distributed.is_main_process()
    try:
        if rank_missing or not is_main:
            time.sleep(2 * REPORT_WAIT_S if rank_missing else REPORT_WAIT_S)
    except system.Terminated:
        return not (rank_missing and is_main)
    return rank_missing and not is_main


def _set_sigterm_handler(handler: Any) -> Any:
    """Set the SIGTERM handler and return the previous one; do nothing off the main thread or if it is None."""
    if handler is not None and threading.current_thread() is threading.main_thread():
        return signal.signal(signal.SIGTERM, handler)
    return None
