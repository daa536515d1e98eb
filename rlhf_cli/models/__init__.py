"""Tokenizers and models: what enters from transformers, and how numbers are read off it."""

import logging
import os

from rlhf_cli import terminal


class _CleanRecord(logging.LogRecord):
    """A line of a library's log, which may hold names out of files of others: they move no cursor here."""

    def getMessage(self) -> str:
        return terminal.clean(super().getMessage())


# Before transformers, trl and bitsandbytes are imported anywhere: their notes about themselves are no messages of ours.
for _name, _value in (
    ("TRANSFORMERS_VERBOSITY", "error"),
    ("HF_HUB_DISABLE_TELEMETRY", "1"),
):
    os.environ.setdefault(_name, _value)
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
logging.setLogRecordFactory(_CleanRecord)
