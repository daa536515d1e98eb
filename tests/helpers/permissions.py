"""Permissions that hold for root too, so that a test can take a file away from whoever runs it."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

DAC = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: see capabilities(7)
HEADER = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread


@contextmanager
def enforced() -> Iterator[None]:
    """Within, this thread obeys the permissions of files, even if it is root's. Skips where it cannot."""
    if os.geteuid() != 0:
        yield
        return
    libc, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice 32 bits
    if not hasattr(libc, "capset") or libc.capget(HEADER, sets):
        pytest.skip("capabilities cannot be read here")
    before = sets[0]
    sets[0] = before & ~DAC
    if libc.capset(HEADER, sets):
        pytest.skip("capabilities cannot be dropped here")
    try:
        yield
    finally:
        sets[0] = before
        assert libc.capset(HEADER, sets) == 0


@contextmanager
def taken_away(*paths: "os.PathLike[str]", mode: int = 0) -> Iterator[None]:
    """Within, files or folders have this mode, by default none for all users, and it is enforced."""
    before = [(path, os.stat(path).st_mode) for path in paths]
    for path in paths:
        os.chmod(path, mode)
    try:
        with enforced():
            yield
    finally:
        for path, old in before:
            os.chmod(path, old)
