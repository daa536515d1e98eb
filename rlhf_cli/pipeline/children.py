"""Child processes of `rlhf run`: one for each stage, and one for the check before the first."""

import os
import signal
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from rlhf_cli import terminal
from rlhf_cli.config.base import Config, Options
from rlhf_cli.distributed import RLHF_COMMAND
from rlhf_cli.system import die_with_parent, is_nohup

FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def child_command(config: Config, overrides: Sequence[str], options: Options, *, fresh: bool) -> list[str]:
    """Return the command line that runs one stage in a child process."""
    words = [config.stage, "--config", str(config.file)]
    if fresh:
        words.append("--fresh")
    return [*RLHF_COMMAND, *words, *_options(overrides, options)]


def check_command(folder: Path, overrides: Sequence[str], options: Options) -> list[str]:
    """Return the command line that checks all stages of a folder before the first one trains."""
    return [*RLHF_COMMAND, "check", str(folder), "--before-run", *_options(overrides, options)]


def _options(overrides: Sequence[str], options: Options) -> list[str]:
    words: list[str] = []
    if options.nproc:
        words += ["--nproc", options.nproc]
    for text in overrides:
        words += ["--set", text]
    words += terminal.mode_options()
    if options.trust_remote_code:
        words.append("--trust-remote-code")
    if options.debug:
        words.append("--debug")
    return words


def run_child(command: Sequence[str]) -> int:
    """Run a child process, forwarding signals to it; return its exit code, or 128 + n after signal n.

    After a signal the next stage does not start, even if the child had finished. The child has its own process group:
    Ctrl-C reaches it once, through the parent. If the parent is killed, the child is signalled, saves and exits.
    """
    child: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def send(number: int) -> None:
        if child is not None:
            child.send_signal(number)

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        send(number)

    def pause(number: int, frame: FrameType | None) -> None:
        send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)  # returns after `fg`
        send(signal.SIGCONT)

    forwarded = [number for number in FORWARDED_SIGNALS if not is_nohup(number)]
    handlers = {**dict.fromkeys(forwarded, forward), signal.SIGTSTP: pause}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        stdout = terminal.stdout_of_children()
        child = subprocess.Popen(
            command, process_group=0, stdout=stdout, preexec_fn=partial(die_with_parent, os.getpid())
        )
        for number in list(received):
            child.send_signal(number)
        code = child.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if code == 0 and received:
        return 128 + received[0]
    return code if code >= 0 else 128 - code
