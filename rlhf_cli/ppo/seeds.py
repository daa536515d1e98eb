"""Randomness as a function of what it is for.

No generator is carried along, so logging more, evaluating more or resuming changes no draw.
"""

from hashlib import blake2b


def derive(seed: int, purpose: str, *numbers: int) -> int:
    """A 63-bit seed for `purpose` ("sample", "shuffle", ...), keyed by `numbers` (step, row, ...).

    A row is the episode's number in the whole update, never its place in a micro-batch or on a rank.
    """
    text = "/".join([str(seed), purpose, *map(str, numbers)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
