"""A first signal is a wish, a second one is obeyed at once."""

import os
import signal
import subprocess
import sys

import pytest

from rlhf_cli.signals import StopWish


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_noted_and_answered(number: signal.Signals, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(one) for one in StopWish.SIGNALS]
    with StopWish() as stop:
        assert stop.wished is None
        os.kill(os.getpid(), number)
        assert (stop.wished, stop.exit_code) == (number, code)
    assert "stopping after this step, with a checkpoint; a second signal ends it at once" in capfd.readouterr().err
    assert [signal.getsignal(one) for one in StopWish.SIGNALS] == before


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_process_at_once(second: signal.Signals) -> None:
    script = (
        "import os, signal\nfrom rlhf_cli.signals import StopWish\n"
        "with StopWish():\n    os.kill(os.getpid(), signal.SIGTERM)\n    print('first', flush=True)\n"
        f"    os.kill(os.getpid(), {int(second)})\n    print('too late', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("first\n", -second)
