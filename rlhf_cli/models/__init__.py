"""Tokenizers and models: loading, saving, forward passes, adapters and sharding."""

import logging
import os
import sys

from rlhf_cli import terminal
from rlhf_cli.errors import RLHFError

if sys.flags.optimize > 1:
    text = "Python runs without docstrings (-OO), and transformers needs them"
    raise RLHFError("E11", text, where="PYTHONOPTIMIZE", hint="unset PYTHONOPTIMIZE, or start Python without -OO")


class _CleanRecord(logging.LogRecord):
    """A library's log record without control characters, which names in third-party files may contain."""

    def getMessage(self) -> str:
        return terminal.clean(super().getMessage())


# Set before transformers, trl and bitsandbytes are imported, to keep their start-up messages from the user.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# Growing caches otherwise leave holes in a GPU's memory. torch reads it when it first allocates on the GPU.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
logging.setLogRecordFactory(_CleanRecord)
