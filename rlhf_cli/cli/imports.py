"""Bringing in torch and what stands on it, which is most of a short command's time."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Garbage is not looked for among what is imported in here: not on the way, and not in any later collection.

    None of those million objects is ever garbage. Walking over them took a sixth of the CPU time of a tiny chain.
    """
    known, collecting = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:  # else what lives now is somebody's who calls more than one command
            gc.freeze()
        if collecting:
            gc.enable()
