"""The one place where errors become lines and exit codes."""

import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import typer
from typer.core import TyperGroup

from rlhf_cli import distributed, system, terminal
from rlhf_cli.cli.options import STAGES, config_of
from rlhf_cli.errors import NOT_FOUND, RLHFError, closest_match, read_error, shell_path, shell_word, shown

_TRAIN = "rlhf run DIR trains all stages of a folder; one alone: rlhf sft --config FILE, or reward, ppo, eval"
_PUSH = "rlhf export RUN --out DIR writes a plain model folder, adapters merged; --push REPO uploads it"
_PAIRS = "there is no such stage; rlhf reward and rlhf ppo learn from the same pairs: rlhf init preferences"
_GROUPS = "there is no such stage; PPO learns from the same rewards: rlhf ppo --config FILE"

ELSEWHERE = {
    "train": _TRAIN,
    "finetune": _TRAIN,
    "serve": "rlhf export RUN --out DIR, then: vllm serve DIR; to talk to it here: rlhf chat RUN",
    "vllm-serve": "rlhf export RUN --out DIR, then: vllm serve DIR",
    "compare": "rlhf report A B shows runs side by side",
    "sweep": (
        "for x in 0.02 0.05; do cp -r runs/mine runs/kl-$x && rlhf run runs/kl-$x -s ppo.kl_coef=$x; done; "
        "rlhf report runs/kl-*"
    ),
    "merge": _PUSH,
    "push": _PUSH,
    "doctor": "rlhf env shows versions and devices, rlhf check DIR what is wrong with a run",
    "dpo": _PAIRS,
    "kto": _PAIRS,
    "orpo": _PAIRS,
    "grpo": _GROUPS,
    "rloo": _GROUPS,
}


RUNS = ("folder", "folders", "path")  # the arguments that name a run
RESULT_ALONE = {"status", "ls", "check", "plan", "schema", "explain", "env", "verify", "replay"}  # write only to stdout
LONGEST = 7  # characters of a command name, so that all groups of --help share one column
NAMED = 5  # runs, where more could be meant
SYSTEM = {errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ENXIO, errno.ETIMEDOUT} | system.DISK_FULL
TO_SPEAK = 5.0  # seconds that another process has to say what it found


class Terminated(BaseException):
    """SIGTERM, as an exception: what is open is closed on the way out."""


class WhichRun(Exception):
    """A command was given no run."""


def only_run() -> Path:
    """The run that lies here, where there is one alone, which is said. Raises WhichRun where there is not."""
    from rlhf_cli.commands import status

    found = status.runs_here()
    if len(found) != 1:
        raise WhichRun
    terminal.say(f"{found[0]} is the only run here" if found[0] != "." else "this folder is a run")
    return Path(found[0])


class Commands(TyperGroup):
    """All commands, inside the one error handler."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by group (Train, Inspect, Ship), each with its whole first sentence."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            if not command.hidden:
                summary = (command.help or "").split("\n\n")[0]
                panel = getattr(command, "rich_help_panel", "Commands")
                groups.setdefault(panel, []).append((name.ljust(LONGEST), " ".join(summary.split())))
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line and exit: 0 done, 2 wrong beforehand, 1 failed on the way, 130 and 143 by a signal."""
        arguments = list(sys.argv[1:] if args is None else args)
        code = 0
        terminal.reset()
        before = _on_sigterm(_raise_terminated)
        try:
            try:
                code = super().main(arguments, prog_name, complete_var, False, windows_expand_args, **extra) or 0
            except Exception as error:
                if "--debug" in arguments:
                    terminal.log_from_any_rank(traceback.format_exc().rstrip())
                code = _explain(error, arguments, self.commands)
            looks = "--dry-run" in arguments or bool(RESULT_ALONE & {*arguments[:1]})
            if code == 0 and looks and (lost := terminal.stdout_error()):
                text = f"could not write to stdout: {lost.strerror}"
                code = _explain(
                    system.OutOfResources("E03", text, hint="make room on its disk, or write to another place")
                )
        except Terminated:  # while it explained, too
            code = 143
        finally:
            _on_sigterm(before)
            if checkpoints := sys.modules.get("rlhf_cli.runs"):
                checkpoints.release()
        if code in (129, 130, 143):
            terminal.say("stopped by a signal")
        sys.exit(code)


def _explain(error: Exception, arguments: Sequence[str] = (), commands: Collection[str] = ()) -> int:
    """Say on stderr what is wrong, a line and a hint for each problem; returns the exit code."""
    if isinstance(error, WhichRun):
        error = _no_run(arguments)
    if isinstance(error, OSError):
        error = _of_the_system(error) or error
    if isinstance(error, RLHFError):
        if distributed.world_size() == 1 or not _told_by_others(error):
            (terminal.say if distributed.is_main_process() else terminal.log_from_any_rank)(str(error))
        return error.exit_code
    if isinstance(error, typer.Abort):
        return 130
    if hasattr(error, "format_message"):  # typer's errors of usage
        if getattr(getattr(error, "param", None), "name", None) in RUNS and type(error).__name__ == "MissingParameter":
            return _explain(_no_run(arguments))
        command = arguments[0] if arguments else ""
        if command in ELSEWHERE and command not in commands:
            terminal.say(str(RLHFError("C11", f"there is no command {command}", hint=ELSEWHERE[command])))
            return 2
        near = closest_match(command, commands) if command not in commands else None
        hint = f"did you mean rlhf {near}?" if near and not command.startswith("-") else _meant(arguments)
        hint = hint or " ".join(["rlhf", *[word for word in [command] if word in commands], "--help"])
        terminal.say(str(RLHFError("C11", " ".join(error.format_message().split()), hint=hint)))
        return 2
    said = " ".join(str(error).split())
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    terminal.log_from_any_rank(str(RLHFError("R00", text, hint="the same command with --debug shows where")))
    return 1


def _of_the_system(error: OSError) -> RLHFError | None:
    """What the system refused about a file: E08 where it cannot be read, E03 where it cannot be written."""
    name = error.filename
    if not isinstance(name, str | Path) or error.errno not in SYSTEM:
        return None
    full = error.errno in system.DISK_FULL
    try:
        os.close(os.open(name, os.O_RDONLY | os.O_NONBLOCK))
        if not full and os.access(name, os.W_OK):
            return None  # it can be read and written: something else was asked of it
    except OSError as now:
        if not full and now.errno not in NOT_FOUND:
            return read_error(error, name)
    return RLHFError("E03", f"{shown(name)} cannot be written: {error.strerror}", hint="write to another place")


def _meant(arguments: Sequence[str]) -> str | None:
    """What `rlhf ppo runs/mine` and `rlhf ppo runs/mine/ppo.yaml` are meant to be."""
    stage = arguments[0] if arguments else ""
    if stage not in STAGES or {"--config", "-c"} & set(arguments):
        return None
    files = [file for word in arguments[1:] if (file := config_of(stage, Path(word)))]
    return f"rlhf {stage} --config {shell_path(files[0])}" if files else None


def _no_run(arguments: Sequence[str]) -> RLHFError:
    """Which runs a command that was given none could have meant."""
    from rlhf_cli.commands import status

    found = status.runs_here()
    command, *options = arguments
    if not found:
        text, hint = "There is none here", "rlhf init demo runs/demo makes one"
    else:
        more = f" and {len(found) - NAMED} more (rlhf ls)" if len(found) > NAMED else ""
        text = "This folder is one" if found == ["."] else f"There are {', '.join(found[:NAMED])}{more}"
        hint = " ".join(map(shell_word, ["rlhf", command, found[0], *options]))
    return RLHFError("C11", f"rlhf {command}: which run? {text}", hint=hint)


def _told_by_others(error: RLHFError) -> bool:
    """Of several processes, whether another one says it: who ends first has the launcher end the others.

    Most of what is wrong all find, and the first process says it. What another one found alone, that one says when the
    first has not ended. Who only knows that one is missing (R14) waits for it to speak, and to end first: the exit code
    of the group is that one's.
    """
    missing, first = error.problems[0].code == "R14", distributed.is_main_process()
    try:
        if missing or not first:
            time.sleep(2 * TO_SPEAK if missing else TO_SPEAK)
    except Terminated:
        return not (missing and first)
    return missing and not first


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _on_sigterm(handler: Any) -> Any:
    """Set what SIGTERM does and return what it did before; only the main thread may, and None leaves it."""
    if handler is not None and threading.current_thread() is threading.main_thread():
        return signal.signal(signal.SIGTERM, handler)
    return None
