"""Order of rows as a function of seed and step or epoch: resuming needs no generator state."""

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import chain


def derive_seed(seed: int, purpose: str, *numbers: int) -> int:
    """Return a 63-bit seed for `purpose` ("sample", "shuffle", ...), keyed by `numbers` (step, row, ...).

    A row is the episode's number in the whole update, not in a micro-batch or on a rank. No generator is shared, so
    logging more, evaluating more or resuming changes no other random number.
    """
    text = "/".join([str(seed), purpose, *map(str, numbers)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def prompt_batch(count: int, step: int, size: int, seed: int) -> list[int]:
    """Indices, `size` of range(count), of update `step` (from 1); an epoch's order is keyed by (seed, epoch) alone."""
    assert count > 0 and step > 0 and size > 0
    places = range((step - 1) * size, step * size)
    return [_permutation(count, seed, place // count)[place % count] for place in places]


@lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(derive_seed(seed, "prompts", epoch)).shuffle(order)
    return tuple(order)


class LengthGroupedSampler:
    """A sampler for DataLoaders that cut it into batches: each batch holds rows of like length, in random order.

    transformers' own sampler gives the long batches of 50 first and the short ones last, over and over, and draws from
    the global generator, so that a resumed epoch is another one. Here an epoch is a function of (seed, epoch).
    `batch_size` counts the rows that all processes read at the same time: their batches are its neighbouring parts.
    """

    POOL = 50  # batches whose rows are sorted together: enough to leave little padding, few enough to keep them mixed

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, 0

    def __len__(self) -> int:
        return len(self.lengths)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next pass is; accelerate's dataloaders call this."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        draw = random.Random(derive_seed(self.seed, "lengths", self.epoch))
        order = list(range(len(self)))
        draw.shuffle(order)
        batches = []
        for start in range(0, len(order), self.POOL * self.batch_size):
            pool = sorted(order[start : start + self.POOL * self.batch_size], key=self.lengths.__getitem__)
            batches += [pool[i : i + self.batch_size] for i in range(0, len(pool), self.batch_size)]
        short = [batch for batch in batches if len(batch) < self.batch_size]
        full = [batch for batch in batches if len(batch) == self.batch_size]
        draw.shuffle(full)
        # The one short batch comes last: the DataLoader cuts by count.
        return chain.from_iterable(full + short)
