"""Tokenizers and models: what enters from transformers, and how numbers are read off it."""

import logging
import os

# Before transformers, trl and bitsandbytes are imported anywhere: their notes about themselves are no messages of ours.
for _name, _value in (
    ("TRANSFORMERS_VERBOSITY", "error"),
    ("HF_HUB_DISABLE_TELEMETRY", "1"),
):
    os.environ.setdefault(_name, _value)
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
