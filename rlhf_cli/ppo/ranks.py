"""Several processes that train one policy: who does what, and how what each found becomes what all know.

Every rank holds the same models, the same rollout and the same experience, to the last bit; it writes its part of the
responses and makes its share of the passes, and gradients are added up once for each optimizer step. So all that is not
a pass is computed by each rank for itself, from the same numbers. With one rank nothing is sent.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_cli import processes
from rlhf_cli.errors import RLHFError

T = TypeVar("T")
BUCKET = 2**24  # numbers that are sent at a time
COMING_UP = 120.0  # seconds that all processes have to find each other
PATIENCE = timedelta(hours=1)  # rank 0 may be writing a large state while the others wait


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together. All of its methods but `share` are for all ranks, in the same
    order, and raise RLHFError R14 where another one has ended.
    """

    rank: int = 0
    count: int = 1

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's of the items: every `count`-th. Where there are fewer than ranks, some have none."""
        return items[self.rank :: self.count]

    def told(self, what: T) -> list[T]:
        """What each rank says, by rank. Objects are pickled: tensors must be on the CPU."""
        if self.count == 1:
            return [what]
        found: list[T | None] = [None] * self.count
        with self._together():
            dist.all_gather_object(found, what)
        return found  # type: ignore[return-value]

    def each(self, ask: Callable[[], T]) -> list[T]:
        """What each rank found when it was asked, by rank; what one of them raised, all raise."""
        if self.count == 1:
            return [ask()]
        own: tuple[T | None, Exception | None]
        try:
            own = ask(), None
        except Exception as error:
            own = None, error
        said = self.told(own)
        if failed := next((error for _, error in said if error), None):
            raise failed
        return [what for what, _ in said]  # type: ignore[misc]

    def parted(self, total: int, ask: Callable[[slice], T]) -> list[T]:
        """What each rank found for its part of `total` rows, in the rows' order; one without rows is not asked."""
        part = slice(total * self.rank // self.count, total * (self.rank + 1) // self.count)
        return list(chain.from_iterable(self.each(lambda: [ask(part)] if part.start < part.stop else [])))

    def first(self, ask: Callable[[], T]) -> T:
        """What rank 0 found, who alone was asked; what it raised, all raise."""
        if self.count == 1:
            return ask()
        box: list[T | Exception | None] = [None, None]
        if self.rank == 0:
            try:
                box[0] = ask()
            except Exception as error:
                box[1] = error
        with self._together():
            dist.broadcast_object_list(box, src=0)
        found, failed = box
        if isinstance(failed, Exception):
            raise failed
        return found  # type: ignore[return-value]

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Put the sum over all ranks in the place of each tensor; all ranks get the same bits."""
        if self.count == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            with self._together():
                dist.all_reduce(flat)
            for tensor, summed in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(summed.view_as(tensor))

    def add_gradients(self, weights: Iterable[Tensor]) -> None:
        """`add` the gradients; a weight that has one on some ranks has one on all from then on."""
        weights = list(weights)
        held = map(any, zip(*self.told([weight.grad is not None for weight in weights]), strict=True))
        learnt = [weight for weight, has in zip(weights, held, strict=True) if has]
        for weight in learnt:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        self.add(weight.grad for weight in learnt if weight.grad is not None)

    def wait(self) -> None:
        """Until all ranks have come here."""
        self.told(None)

    @contextmanager
    def after_the_first(self) -> Iterator[None]:
        """Within, rank 0 goes first and the others after it: what it left in a cache is there for them."""
        if self.rank > 0:
            self.wait()
        yield
        if self.rank == 0:
            self.wait()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Within, a library sends between the processes: R14 where another one has ended."""
        try:
            yield
        except RuntimeError as error:
            if self.count == 1 or not (isinstance(error, dist.DistError) or "gloo/" in str(error)):
                raise
            with self._together():
                raise

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of gloo, and all of torch.distributed's own
            said = " ".join(str(error).split())[:200]
            text = f"process {self.rank} of {self.count} waits for another that has ended: {said}"
            hint = "look for that one's own message; the same command goes on from the last state"
            raise RLHFError("R14", text, hint=hint) from error


ALONE = Ranks()


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in their order, some at a time: of one format, and few numbers together."""
    held: list[Tensor] = []
    for tensor in tensors:
        if held and (held[0].dtype != tensor.dtype or sum(map(Tensor.numel, held)) + tensor.numel() > BUCKET):
            yield held
            held = []
        held.append(tensor)
    if held:
        yield held


def join() -> Ranks:
    """Find the others of this process's group, where a launcher started several; this process then has its own GPU.

    Raises RLHFError E04 where they do not come up, or there are fewer GPUs than processes.
    """
    count, rank = processes.count(), processes.rank()
    if count == 1:
        return ALONE
    gpus = torch.cuda.device_count()
    if gpus:
        if processes.local_rank() >= gpus:
            text = f"process {rank} is number {processes.local_rank() + 1} on a machine with {gpus} GPUs"
            raise RLHFError("E04", text, where="WORLD_SIZE", hint="start as many processes as there are GPUs")
        torch.cuda.set_device(processes.local_rank())
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        dist.init_process_group(backend, store=_meeting(count), rank=rank, world_size=count, timeout=PATIENCE)
    return Ranks(rank, count)


def _meeting(count: int) -> dist.Store:
    """The place where the processes meet, once all are there."""
    here, text = 1, ""
    try:
        store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=COMING_UP)))
        here, until = store.add("rlhf/here", 1), time.monotonic() + COMING_UP
        while here < count and time.monotonic() < until:
            time.sleep(0.05)
            here = store.add("rlhf/here", 0)
        if here >= count:
            return store
    except RuntimeError as error:  # nobody listens at MASTER_ADDR
        text = f" ({' '.join(str(error).split())[:100]})"
    said = f"{count} processes were asked for, {here} came up within {COMING_UP:g} seconds{text}"
    raise RLHFError("E04", said, where="WORLD_SIZE", hint="start all of them: --nproc N does, and torchrun")


@contextmanager
def group() -> Iterator[Ranks]:
    """`join`, and leave the group at the end."""
    ranks = join()
    try:
        yield ranks
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
