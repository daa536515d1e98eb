"""Child processes of `rlhf run`: the exit code after a signal."""

import sys

import pytest

from rlhf_cli.pipeline import children

ENDS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
ENDS_ITS_PARENT = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: None)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(0.5)
"""


@pytest.mark.parametrize(("script", "code"), [(ENDS_ITSELF, 137), (ENDS_ITS_PARENT, 143)])
def test_the_exit_code_after_a_signal_to_the_child_or_to_its_parent(script: str, code: int) -> None:
    """That of a shell; after a signal to the parent the next stage does not start."""
    assert children.run_child([sys.executable, "-c", script]) == code
