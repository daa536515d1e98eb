"""What Linux alone has is not needed: a machine without /proc, /sys and Linux's calls stands in for macOS."""

from pathlib import Path

import pytest
from run_cli import ROOT, python

from rlhf_cli.runs import locks

# torch is loaded first, as the build for this machine; psutil reads /proc here, and asks the system there.
SCRIPT = """
import os, signal, sys
import psutil, torch, transformers
memory, process = psutil.virtual_memory(), psutil.Process()
info, created, status = process.memory_info(), process.create_time(), process.status()
class Mac:
    def __init__(self, pid=None): self.pid = pid
    def memory_info(self): return info
    def create_time(self): return created
    def status(self): return status
psutil.virtual_memory, psutil.Process = lambda: memory, Mac
for module, names in ((os, LINUX_OS), (signal, LINUX_SIGNAL)):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
def look(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])
sys.addaudithook(look)
from rlhf_cli.cli import app
for command in COMMANDS:
    try:
        app(command)
    except SystemExit as end:
        print("ended", command[0], end.code, flush=True)
"""
LINUX_OS = [
    "copy_file_range", "eventfd", "fdatasync", "getresuid", "memfd_create", "O_TMPFILE", "pidfd_open", "pipe2",
    "posix_fadvise", "posix_fallocate", "sched_getaffinity", "sched_setaffinity", "setns", "setresuid", "splice",
    "unshare",
]  # fmt: skip
LINUX_SIGNAL = ["SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGSTKFLT", "sigtimedwait", "sigwaitinfo"]


@pytest.mark.full
def test_plan_check_and_a_locked_stage_do_without_linux(folder: Path) -> None:
    commands = [["plan", "sft.yaml"], ["check", "sft.yaml"], ["ls"], ["env"]]
    script = f"LINUX_OS, LINUX_SIGNAL, COMMANDS = {LINUX_OS}, {LINUX_SIGNAL}, {commands}\n{SCRIPT}"
    locks.lock_folder(folder / "sft")  # `rlhf ls` asks whether its process runs
    done = python("-c", script)
    ends = [line for line in done.stdout.splitlines() if line.startswith("ended")]
    assert ends == [f"ended {command[0]} 0" for command in commands], done.stdout + done.stderr


SANDBOX = ("sandbox", "sandboxed")


def test_no_code_asks_linux_alone() -> None:
    """psutil supports each system; /sys has a container's limit, if any. The sandbox needs Linux, and says so."""
    exempt = {ROOT / f"rlhf_cli/rewards/{name}.py" for name in SANDBOX}
    exempt.add(ROOT / "rlhf_cli/data/template_trial.py")  # without psutil it starts sooner; it does with no such limit
    for path in {*(ROOT / "rlhf_cli").rglob("*.py")} - exempt:
        text = path.read_text(encoding="utf-8")
        for word in ("/proc/", "os.sysconf", "sched_getaffinity", "import resource\n"):
            assert word not in text, f"{path.name}: {word}"
