"""A first signal asks a stage to stop after its step, a second one ends the process immediately."""

import os
import signal
import subprocess

import pytest
from run_cli import python

from rlhf_cli.models.parallel import SINGLE_PROCESS
from rlhf_cli.system import GracefulStop


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_requests_a_stop(number: signal.Signals, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(one) for one in GracefulStop.SIGNALS]
    with GracefulStop() as stop:
        os.kill(os.getpid(), number)
        stop.sync(SINGLE_PROCESS.all_gather_object)
        assert (stop.requested, stop.exit_code) == (number, code)
    assert "stopping after this step, with a checkpoint; a second signal stops at once" in capfd.readouterr().err
    assert [signal.getsignal(one) for one in GracefulStop.SIGNALS] == before


def test_all_ranks_stop_at_the_same_step() -> None:
    """A signal that one rank receives after `sync` takes effect at the next one."""
    with GracefulStop() as stop:
        stop.sync(lambda own: [own, None])
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested is None
        stop.sync(lambda own: [signal.SIGINT, own])
        assert stop.exit_code == 130  # of the first one in order of rank, the same for all


SCRIPT = """
import os, signal, sys, time
from rlhf_cli.system import GracefulStop
with GracefulStop() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    print("first", flush=True)
    time.sleep(float(sys.argv[1]))
    os.kill(os.getpid(), int(sys.argv[2]))
    print("too late", flush=True)
"""


@pytest.mark.parametrize(("pause", "second"), [(0.3, signal.SIGINT), (0.3, signal.SIGTERM), (0, signal.SIGTERM)])
def test_a_second_signal_ends_the_process_unless_it_comes_at_once(pause: float, second: signal.Signals) -> None:
    """A signal to a process group reaches a stage directly and through `rlhf run`, and counts once."""
    done = python("-c", SCRIPT, pause, int(second))
    assert (done.stdout, done.returncode) == (("first\n", -second) if pause else ("first\ntoo late\n", 0))


def test_a_hang_up_saves_unless_nohup_ignores_it() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the suite itself may run under nohup
    try:
        with GracefulStop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            stop.sync(SINGLE_PROCESS.all_gather_object)
            assert stop.exit_code == 129
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        with GracefulStop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            stop.sync(SINGLE_PROCESS.all_gather_object)
            assert stop.requested is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_is_handled_although_stderr_is_closed() -> None:
    """Ctrl-C on `rlhf ppo ... 2>&1 | tee log` ends tee first."""
    reader, writer = os.pipe()
    os.close(reader)
    script = SCRIPT.replace("stop:", "stop:\n    from rlhf_cli import terminal; terminal.say('progress')", 1)
    pipes = {"capture_output": False, "stdout": subprocess.PIPE, "stderr": writer}
    done = python("-c", script, 0, int(signal.SIGTERM), **pipes)
    os.close(writer)
    assert (done.stdout, done.returncode) == ("first\ntoo late\n", 0)


FORK = """
import os, signal
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))  # before the child's handlers are gone
from rlhf_cli.system import GracefulStop, raise_terminated

def fork():
    if (child := os.fork()) == 0:
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

with GracefulStop():
    print(fork())
signal.signal(signal.SIGTERM, raise_terminated)
print(fork(), signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


def test_a_forked_child_loses_no_signal() -> None:
    """A pool sends each worker one SIGTERM, which may come early, and waits for it."""
    result = python("-c", FORK)
    assert (result.stdout, result.stderr) == ("-15\n-15 set()\n", "")
