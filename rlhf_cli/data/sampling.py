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
    """Return `size` indices of range(count) for update `step` (from 1); each epoch is ordered by (seed, epoch) only."""
    assert count > 0 and step > 0 and size > 0
    indices = []
    for position in range((step - 1) * size, step * size):
        epoch, place = divmod(position, count)
        indices.append(_permutation(count, seed, epoch)[place])
    return indices


@lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(derive_seed(seed, "prompts", epoch)).shuffle(order)
    return tuple(order)


def _chunks(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


class LengthGroupedSampler:
    """Sampler that groups rows of similar length into batches, in random order.

    The sampler of transformers orders each pool of 50 batches by length and draws from the global generator, so that a
    resumed epoch differs. Here an epoch is a function of (seed, epoch). `batch_size` is the number of rows that all
    processes read per step; the batches of the processes are adjacent slices of them.
    """

    POOL = 50  # batches whose rows are sorted together: a compromise between little padding and random order

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths = lengths
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; accelerate's dataloaders call this."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = random.Random(derive_seed(self.seed, "lengths", self.epoch))
        order = list(range(len(self)))
        generator.shuffle(order)
        batches: list[list[int]] = []
        for pool in _chunks(order, self.POOL * self.batch_size):
            pool.sort(key=self.lengths.__getitem__)
            batches += _chunks(pool, self.batch_size)

        short = [batch for batch in batches if len(batch) < self.batch_size]
        full = [batch for batch in batches if len(batch) == self.batch_size]
        generator.shuffle(full)
        # The short batch must be last, because the DataLoader splits by count.
        return chain.from_iterable(full + short)
