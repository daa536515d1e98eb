"""Models cut up over the processes of a group by FSDP2, torch's fully_shard (Zhao et al. 2023, arXiv 2304.11277).

The weights of a layer come together for its own passes alone, and its gradients are added up and cut up at its own
backward pass. Embeddings and output head are together for a whole minibatch: their passes are many, and as many as a
process has response tokens, so that they cannot wait for one another. Norms and one-label heads are small, and whole.
"""

import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.models import sharing

Add = Callable[[Iterable[Tensor]], None]  # puts the sum over all processes in the place of tensors


def shard(model: Any, device: torch.device, *, trained: bool) -> None:
    """Leave this process its part of a model that all have alike, on the device; layers are moved one at a time.

    Without `trained` embeddings and head stay whole: nothing but themselves is kept for them.
    """
    mesh = _mesh(device)
    layers: Any = sharing.layers(model)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        # Losses are divided by the tokens of all processes: their gradients are to be added, not averaged.
        layer.set_force_sum_reduction_for_comms(True)
        layer.set_gradient_divide_factor(1.0)
    model.to(device)
    for weight, places in words(model) if trained else ():
        part = distribute_tensor(weight.data, mesh, [Shard(0)], src_data_rank=None)
        _put(nn.Parameter(part, requires_grad=weight.requires_grad), places)


def is_sharded(model: Any) -> bool:
    """Whether `shard` has cut the model up."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


@contextmanager
def words_together(model: Any, add: Add) -> Iterator[None]:
    """Within, embeddings and head are whole; their gradients are added up and cut up at the end."""
    cut = [(weight, places) for weight, places in words(model) if isinstance(weight, DTensor)]
    whole: list[nn.Parameter] = [nn.Parameter(w.full_tensor().detach(), requires_grad=w.requires_grad) for w, _ in cut]
    for all_of_it, (_, places) in zip(whole, cut, strict=True):
        _put(all_of_it, places)
    try:
        yield
    finally:
        for weight, places in cut:
            _put(weight, places)
    held = torch.tensor([float(all_of_it.grad is not None) for all_of_it in whole])
    add([held])
    for (weight, _), all_of_it, anybody in zip(cut, whole, held.tolist(), strict=True):
        if anybody:
            grad = torch.zeros_like(all_of_it) if all_of_it.grad is None else all_of_it.grad
            all_of_it.grad = None
            add([grad])
            weight.grad = distribute_tensor(grad, weight.device_mesh, [Shard(0)], src_data_rank=None)


@contextmanager
def together(model: Any, add: Add) -> Iterator[None]:
    """Within, all of the model is whole, and a forward pass, without gradients, waits for nobody."""
    layers = [module for module in model.modules() if isinstance(module, FSDPModule)]
    with torch.no_grad(), words_together(model, add):
        for layer in layers:
            layer.set_reshard_after_forward(False)
            layer.unshard()
        try:
            yield
        finally:
            for layer in layers:
                layer.reshard()
                layer.set_reshard_after_forward(True)


def whole_state(model: Any) -> dict[str, Tensor] | None:
    """All of a model's weights on the CPU, for which all processes must ask; None where it is not cut up."""
    state = model.state_dict()
    if not any(isinstance(tensor, DTensor) for tensor in state.values()):
        return None
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).cpu() for name, t in state.items()}


def fill(model: Any, state: dict[str, Tensor]) -> None:
    """Give a model the weights of a whole one, of which each process keeps its part."""
    own = model.state_dict()
    for name, tensor in state.items():
        there = own[name]
        if isinstance(there, DTensor):
            tensor = distribute_tensor(tensor.to(there.device), there.device_mesh, [Shard(0)], src_data_rank=None)
        there.copy_(tensor)


def total_norm(tensors: Iterable[Tensor], add: Add) -> Tensor:
    """The 2-norm of tensors, some of which are cut up: that of all parts."""
    tensors = list(tensors)
    whole = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
    parts = [tensor.to_local() for tensor in tensors if isinstance(tensor, DTensor)]
    if not parts:
        return nn.utils.get_total_norm(whole)
    squares = nn.utils.get_total_norm(parts) ** 2
    add([squares])
    return (squares + nn.utils.get_total_norm(whole) ** 2).sqrt()


def clip(weights: Iterable[Tensor], most: float, add: Add) -> Tensor:
    """Scale the gradients down to the norm `most`, and return the norm that they had."""
    learnt = [weight for weight in weights if weight.grad is not None]
    norm = total_norm([weight.grad for weight in learnt if weight.grad is not None], add)
    nn.utils.clip_grads_with_norm_([weight for weight in learnt if not isinstance(weight, DTensor)], most, norm)
    for weight in learnt:
        if isinstance(weight.grad, DTensor):
            weight.grad.to_local().mul_((most / (norm + 1e-6)).clamp(max=1.0))
    return norm


def write(folder: Path, parts: Mapping[str, Tensor]) -> None:
    """All processes write what each has of the tensors: torch.distributed.checkpoint's format."""
    dcp.save(dict(parts), checkpoint_id=folder)


def read(folder: Path, kinds: Mapping[str, tuple[list[int], torch.dtype]]) -> dict[str, Tensor]:
    """The tensors, of these shapes and formats, that `write` left: each process its part, one by itself all of them.

    Raises RLHFError M05 where the list of their places holds anything else, of which nothing is run.
    """
    alone = not dist.is_initialized()
    device = torch.device("cuda" if torch.cuda.is_available() and not alone else "cpu")
    found: dict[str, Tensor] = {}
    for name, (shape, dtype) in kinds.items():
        empty = torch.zeros(shape, dtype=dtype, device=device)
        found[name] = empty if alone else distribute_tensor(empty, _mesh(device), [Shard(0)], src_data_rank=None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this process is alone
            dcp.load(dict(found), storage_reader=_Reader(folder), no_dist=alone)
    except (pickle.UnpicklingError, CheckpointException) as error:
        text = f"{shown(folder)} cannot be read, or holds something else than numbers, none of which was run"
        raise RLHFError("M05", text, hint="remove that state; an older one is used where there is one") from error
    return found


class _Reader(dcp.FileSystemReader):
    """Of the pickle that lists places, what such a list is made of and nothing else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Places(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Places(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        ours = module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        number_format = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | type(torch.Size))
        known = {("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("collections", "OrderedDict")}
        if not (ours or number_format or (module, name) in known):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a list of places")
        return super().find_class(module, name)


def _mesh(device: torch.device) -> DeviceMesh:
    """All processes, in a row."""
    return init_device_mesh(device.type, (dist.get_world_size(),))


def words(model: Any) -> list[tuple[Any, list[nn.Module]]]:
    """The weights of embeddings and output head, and the modules that have each as their `weight`."""
    found = [model.get_input_embeddings(), *([model.get_output_embeddings()] if model.can_generate() else [])]
    modules = [module for module in found if module is not None]
    weights: dict[int, Any] = {id(module.weight): module.weight for module in modules}
    return [(weight, [m for m in modules if m.weight is weight]) for weight in weights.values()]


def _put(weight: Any, modules: list[nn.Module]) -> None:
    for module in modules:
        module.weight = weight
