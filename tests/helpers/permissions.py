"""Permissions that hold for root too, so that a test can take a file away from whoever runs it."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

DAC = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: see capabilities(7)
VERSION = 0x20080522


class Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextmanager
def obeyed() -> Iterator[None]:
    """Within, this thread obeys the permissions of files, even if it is root's. Skips where it cannot."""
    if os.geteuid() != 0:
        yield
        return
    if sys.platform != "linux":
        pytest.skip("root reads everything here")
    libc, header, sets = ctypes.CDLL(None, use_errno=True), Header(VERSION, 0), (Sets * 2)()
    if libc.capget(ctypes.byref(header), ctypes.byref(sets)):
        pytest.skip("capabilities cannot be read here")
    before = sets[0].effective
    sets[0].effective = before & ~DAC
    if libc.capset(ctypes.byref(header), ctypes.byref(sets)):
        pytest.skip("capabilities cannot be dropped here")
    try:
        yield
    finally:
        sets[0].effective = before
        assert libc.capset(ctypes.byref(header), ctypes.byref(sets)) == 0


@contextmanager
def taken_away(*paths: "os.PathLike[str]", mode: int = 0) -> Iterator[None]:
    """Within, files or folders have this mode, by default none for anybody, and it is obeyed."""
    before = [(path, os.stat(path).st_mode) for path in paths]
    for path in paths:
        os.chmod(path, mode)
    try:
        with obeyed():
            yield
    finally:
        for path, old in before:
            os.chmod(path, old)
