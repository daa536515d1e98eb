"""A shell in which `rlhf` is a fork of this process, which has all imported: no command waits for an import."""

import array
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rlhf_cli.cli import app
from rlhf_cli.pipeline import children

# What the shell starts as `rlhf`: it sends its words, folder, variables and streams, and ends with the code it is sent.
CLIENT = """#!{python} -SE
import array, json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    server.sendmsg([b"rlhf"], streams)
    server.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
    server.shutdown(socket.SHUT_WR)
    sys.exit(int(server.recv(8)))
"""


class ForkedShell:
    """Runs shell scripts, in which each program of `stand_ins` accepts one command, and does nothing."""

    def __init__(self, folder: Path, stand_ins: Mapping[str, str]) -> None:
        self._programs = folder / "bin"
        self._programs.mkdir()
        self._server = socket.socket(socket.AF_UNIX)
        self._running: dict[int, socket.socket] = {}  # process -> whom its exit code is sent to
        address = str(folder / "socket")
        self._server.bind(address)
        self._server.listen()
        self._server.settimeout(0.02)
        self._add("rlhf", CLIENT.format(python=sys.executable, address=address))
        for name, command in stand_ins.items():
            self._add(name, f'#!/bin/sh\ntest "$1" = {command}\n')

    def _add(self, name: str, script: str) -> None:
        path = self._programs / name
        path.write_text(script)
        path.chmod(0o755)

    def close(self) -> None:
        self._server.close()

    def run(self, script: str, folder: Path, typed: Path) -> subprocess.CompletedProcess[str]:
        """Run a script until its first command that fails. Return its exit code, and all output as stdout."""
        paths = os.pathsep.join([str(self._programs), str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = {**os.environ, "PATH": paths, "HOME": str(folder)}
        command = ["bash", "-eux", "-o", "pipefail", "-c", script]
        output = folder / ".output"
        with typed.open() as stdin, output.open("w") as stdout:
            streams = {"stdin": stdin, "stdout": stdout, "stderr": stdout}
            shell = subprocess.Popen(command, cwd=folder, env=environment, **streams)
        while shell.poll() is None:
            with suppress(TimeoutError):
                self._start(self._server.accept()[0])
            self._report_ended()
        return subprocess.CompletedProcess(script, shell.returncode, output.read_text(), "")

    def _start(self, connection: socket.socket) -> None:
        child = os.fork()
        if child == 0:
            _run_command(connection)
        self._running[child] = connection

    def _report_ended(self) -> None:
        """Send the exit codes of the commands that ended."""
        for child in list(self._running):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                with self._running.pop(child) as connection:
                    connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def _run_command(connection: socket.socket) -> None:
    """Run the command of a connection in this fork, and end it."""
    code = 1
    try:
        _, messages, _, _ = connection.recvmsg(4, socket.CMSG_LEN(12))
        words, folder, variables = json.load(connection.makefile())
        for number, stream in enumerate(array.array("i", messages[0][2])):
            os.dup2(stream, number)
        sys.stdin = os.fdopen(0)
        sys.stdout = os.fdopen(1, "w")
        sys.stderr = os.fdopen(2, "w")
        os.chdir(folder)
        os.environ.update(variables)
        children.RLHF_COMMAND = ("rlhf",)  # the stages of `rlhf run` are forks, too
        app(words, prog_name="rlhf")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        os._exit(code)
