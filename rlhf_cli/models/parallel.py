"""Data-parallel training: collectives of the process group, and replicated or sharded (FSDP2) models.

Every rank has the same rollout and experience, to the last bit. It generates its part of the responses and runs its
share of the forward and backward passes; gradients are all-reduced once per optimizer step. Everything else is computed
redundantly on each rank from the same numbers. A single process communicates nothing.
"""

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlhf_cli import distributed
from rlhf_cli.errors import RLHFError, short_reason
from rlhf_cli.models import sharding

T = TypeVar("T")
BUCKET_ELEMENTS = 2**24  # per all_reduce
RENDEZVOUS_TIMEOUT_S = 120.0  # for all processes to start
REPLICA_TOLERANCE = 1e-6  # relative, of weight norms: equal processes on equal machines have equal bits
COLLECTIVE_TIMEOUT = timedelta(hours=1)  # rank 0 may be writing a large checkpoint while the others wait


def part_of(total: int, part: int, parts: int) -> slice:
    """Return the rows of one of several equal parts, some of which have one row more."""
    return slice(total * part // parts, total * (part + 1) // parts)


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that train together, seen from one of them.

    All ranks must call its methods, except `shard`, in the same order. They raise RLHFError R14 if another rank ended.
    `group`: a part of the processes, for all_gather_object, all_reduce and all_reduce_gradients only.
    """

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None

    def shard(self, items: Sequence[T]) -> Sequence[T]:
        """Return every `world_size`-th item, starting at this rank; empty for some ranks if there are too few."""
        return items[self.rank :: self.world_size]

    def all_gather_object(self, value: T) -> list[T]:
        """Return the value of each rank, by rank. Values are pickled: tensors must be on the CPU."""
        if self.world_size == 1:
            return [value]
        values: list[T | None] = [None] * self.world_size
        with self._raise_peer_ended():
            dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]

    def gather_results(self, function: Callable[[], T]) -> list[T]:
        """Call a function on each rank and return all results, by rank. An exception on one rank is raised on all."""
        if self.world_size == 1:
            return [function()]
        outcomes = self.all_gather_object(_outcome(function))
        return [_result(outcome) for outcome in outcomes]

    def map_rows(self, total: int, function: Callable[[slice], T]) -> list[T]:
        """Call a function on each rank's slice of `total` rows; return the results of non-empty slices, in order."""
        rows = part_of(total, self.rank, self.world_size)
        results = self.gather_results(lambda: [function(rows)] if rows.start < rows.stop else [])
        return list(chain.from_iterable(results))

    def run_on_main(self, function: Callable[[], T], join: Callable[[Any], object] | None = None) -> T:
        """Call a function on rank 0 and return its result on all ranks. Its exception is raised on all.

        Meanwhile the others call `join` with what rank 0 passes to `ask_to_join`: it then runs their collectives too.
        """
        if self.world_size == 1:
            return function()
        if self.rank == 0:
            return _result(self._broadcast(_outcome(function)))

        received = self._broadcast(None)
        while isinstance(received, _Request):
            assert join
            join(received.value)
            received = self._broadcast(None)
        return _result(received)

    def ask_to_join(self, value: Any) -> None:
        """Make the other ranks, which wait in `run_on_main`, call their `join` with the value."""
        if self.world_size > 1:
            self._broadcast(_Request(value))

    def _broadcast(self, value: Any) -> Any:
        """Return rank 0's value on all ranks. It is pickled: tensors must be on the CPU."""
        box = [value]
        with self._raise_peer_ended():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def load_on_main(self, load: Callable[[bool], T]) -> T:
        """Call `load(empty)` on each rank, with empty=False on rank 0 only. An exception on one is raised on all."""
        loaded: list[T] = []
        self.gather_results(lambda: loaded.append(load(self.rank > 0)))
        return loaded[0]

    def all_reduce(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks, bit-identical on each."""
        if self.world_size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            with self._raise_peer_ended():
                dist.all_reduce(flat, group=self.group)

            sizes = [tensor.numel() for tensor in bucket]
            for tensor, summed in zip(bucket, flat.split(sizes), strict=True):
                tensor.copy_(summed.view_as(tensor))

    def all_reduce_gradients(self, weights: Iterable[Tensor]) -> None:
        """Sum the gradients over all ranks; a weight with a gradient on some ranks gets one on all."""
        weights = list(weights)
        ranks = self.all_gather_object([weight.grad is not None for weight in weights])

        gradients = []
        for weight, *has_gradient in zip(weights, *ranks, strict=True):
            if any(has_gradient):
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                gradients.append(sharding.local_part(weight.grad))
        self.all_reduce(gradients)

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.all_gather_object(None)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Context manager that runs its body on rank 0 first, so that the others find what it cached."""
        if self.rank > 0:
            self.barrier()
        yield
        if self.rank == 0:
            self.barrier()

    @contextmanager
    def translate_dist_errors(self) -> Iterator[None]:
        """Context manager that turns communication errors of a library into R14."""
        try:
            yield
        except RuntimeError as error:
            if self.world_size == 1 or not (isinstance(error, dist.DistError) or "gloo/" in str(error)):
                raise
            with self._raise_peer_ended():
                raise

    @contextmanager
    def _raise_peer_ended(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # from gloo, and every torch.distributed error
            text = f"process {self.rank} of {self.world_size} waits for a process that has ended: {short_reason(error)}"
            hint = "look for the error of that process; the same command resumes from the last checkpoint"
            raise RLHFError("R14", text, hint=hint) from error


SINGLE_PROCESS = ProcessGroup()


@dataclass(frozen=True)
class _Request:
    """What rank 0 asks the others to do."""

    value: Any


def _outcome(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what a function returns, and what it raises."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def _result(outcome: tuple[Any, Exception | None]) -> Any:
    """Return or raise what the function of an `_outcome` did."""
    result, error = outcome
    if error:
        raise error
    return result


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Split tensors, in order, into buckets of one dtype and at most BUCKET_ELEMENTS elements."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        elements = sum(map(Tensor.numel, bucket)) + tensor.numel()
        if bucket and (bucket[0].dtype != tensor.dtype or elements > BUCKET_ELEMENTS):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def init_process_group() -> ProcessGroup:
    """Join the launched processes and select this one's GPU. Raises RLHFError E04 without enough processes or GPUs."""
    count = distributed.world_size()
    rank = distributed.rank()
    if count == 1:
        return SINGLE_PROCESS

    backend = "gloo"
    gpus = torch.cuda.device_count()
    if gpus:
        backend = "cpu:gloo,cuda:nccl"
        local_rank = distributed.local_rank()
        if local_rank >= gpus:
            text = f"process {rank} is number {local_rank + 1} on a machine with {gpus} GPUs"
            raise RLHFError("E04", text, where="WORLD_SIZE", hint="start as many processes as there are GPUs")
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        store = _rendezvous(count)
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=COLLECTIVE_TIMEOUT)
    return ProcessGroup(rank, count)


def _rendezvous(count: int) -> dist.Store:
    """Return the processes' store once all have started. Raises RLHFError E04 if one does not."""
    started = 1
    detail = ""
    try:
        store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT_S)))
        started = store.add("rlhf/here", 1)
        deadline = time.monotonic() + RENDEZVOUS_TIMEOUT_S
        while started < count and time.monotonic() < deadline:
            time.sleep(0.05)
            started = store.add("rlhf/here", 0)
        if started >= count:
            return store
    except RuntimeError as error:  # nothing listens at MASTER_ADDR
        detail = f" ({short_reason(error)})"
    text = f"{count} processes were requested, {started} started within {RENDEZVOUS_TIMEOUT_S:g} seconds{detail}"
    raise RLHFError("E04", text, where="WORLD_SIZE", hint="start all of them: --nproc N does, and torchrun")


@contextmanager
def open_process_group() -> Iterator[ProcessGroup]:
    """Context manager that joins the process group and leaves it at the end."""
    process_group = init_process_group()
    try:
        yield process_group
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
            _end_threads_of_groups()


def _end_threads_of_groups() -> None:
    """Free the process groups that device meshes hold, whose threads then end; DTensor caches meshes for good.

    A thread that is left when Python ends may abort the process (github.com/pytorch/pytorch/pull/179291).
    """
    gc.collect()  # sharded models hold groups, too
    for value in gc.get_objects():
        if type(value) is DeviceMesh:
            vars(value).get("_pg_registry", {}).clear()  # torch 2.11 has none


class ReplicatedModels:
    """Each process has complete copies of all models, as in DDP. `loading`: processes of which one loads weights."""

    loading = SINGLE_PROCESS
    mesh: DeviceMesh | None = None  # of the processes that have shards of one copy of the models

    def __init__(self, process_group: ProcessGroup) -> None:
        self.process_group = self.shard_group = process_group

    def micro_batches_of_rank(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        """Return this rank's micro-batches, each with True if it is real: its result counts."""
        return [(item, True) for item in self.process_group.shard(items)]

    def minibatch_context(self) -> AbstractContextManager[Any]:
        """Context manager for the passes of a minibatch, with or without gradients."""
        return nullcontext()

    def gathered_model(self, model: Any) -> AbstractContextManager[Any]:
        """Context manager for forward passes without gradients whose number differs by rank."""
        return nullcontext()

    def all_reduce_gradients(self, model: nn.Module) -> None:
        """Sum each weight's gradient over all ranks; those of sharded weights are summed over `mesh` already."""
        weights = (weight for weight in model.parameters() if not sharding.is_sharded_tensor(weight))
        self.process_group.all_reduce_gradients(weights)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scale a model's gradients down to norm `max_norm`; return the norm before."""
        return sharding.clip_grad_norm(model.parameters(), max_norm, self.process_group.all_reduce)

    def load_full_state_dict(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Load an unsharded state dict into a model."""
        model.load_state_dict(state)

    def trainable_norm(self, model: nn.Module) -> Tensor:
        """Return the norm of a model's trainable weights, in this process's copy of the model."""
        trainable = (weight for weight in model.parameters() if weight.requires_grad)
        return sharding.total_norm(trainable, self.shard_group.all_reduce)

    def check_replicas(self, norms: Mapping[str, Tensor]) -> None:
        """Raise RLHFError R18 if the norms of the models' weights differ between ranks by more than rounding."""
        own = {name: float(norm) for name, norm in norms.items()}
        ranks = self.process_group.all_gather_object(own)
        for name, norm in ranks[0].items():
            for rank, others in enumerate(ranks):
                other = others[name]
                if abs(other - norm) > REPLICA_TOLERANCE * abs(norm):
                    text = f"process {rank}: the weights of the {name} model are no longer those of process 0"
                    hint = "the same command resumes from the last checkpoint; if it happens again, test the hardware"
                    raise RLHFError("R18", f"{text}: norms {other:.9g} and {norm:.9g}", hint=hint)


class ShardedModels(ReplicatedModels):
    """Each process has a shard of the models' layers, embeddings, heads, gradients and optimizer state (FSDP2).

    The models' weights are rank 0's; those of the other ranks may be empty (`sharding.broadcast_weights`).
    """

    def __init__(self, process_group: ProcessGroup, trained: Sequence[Any], frozen: Sequence[Any]) -> None:
        super().__init__(process_group)
        self.loading = process_group
        self.trained = trained
        mesh = self.make_mesh("cuda" if torch.cuda.is_available() else "cpu")
        self.mesh = mesh
        for model in (*trained, *frozen):
            sharding.shard(model, mesh, trained=model in trained)

    def make_mesh(self, device: str) -> DeviceMesh:
        """Return the mesh of the processes that have shards of one copy of the models."""
        return init_device_mesh(device, (self.process_group.world_size,))

    def micro_batches_of_rank(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        """Pad each rank's items to the same number: a layer's pass is collective. Padding does not count."""
        own = super().micro_batches_of_rank(items)
        most = math.ceil(len(items) / self.process_group.world_size)
        padding = (items[0], False)
        return own + [padding] * (most - len(own))

    @contextmanager
    def minibatch_context(self) -> Iterator[None]:
        with ExitStack() as stack:
            for model in self.trained:
                stack.enter_context(sharding.gathered_embeddings(model, self.shard_group.all_reduce))
            yield

    def gathered_model(self, model: Any) -> AbstractContextManager[Any]:
        if not sharding.is_sharded(model):
            return nullcontext()
        return sharding.gathered(model, self.shard_group.all_reduce)

    def load_full_state_dict(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        sharding.load_full_state_dict(model, state)
