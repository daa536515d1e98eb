"""Shared, sharded and offloaded weights: FSDP2, DeepSpeed ZeRO-3, layers shared by two models, CPU offloading.

FSDP2 (torch's fully_shard; Zhao et al. 2023, arXiv 2304.11277) gathers the weights of a layer for each pass, and
shards its gradients. Embeddings and output head are gathered for a whole minibatch, because the number of their passes
depends on a process's response tokens. Norms and one-label heads are replicated.

DeepSpeed's ZeRO-3 (Rajbhandari et al. 2020, arXiv 1910.02054), for `trainer.deepspeed`, leaves empty weights in the
model, with each process's shard as their `ds_tensor`.
"""

import copy
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, share_comm_ctx
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rlhf_cli import distributed
from rlhf_cli.errors import RLHFError, shown

METADATA_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
METADATA_NAMES = ("torch.serialization._get_layout", "pathlib.PosixPath", "collections.OrderedDict")

AllReduce = Callable[[Iterable[Tensor]], None]  # replaces each tensor by its sum over a group of processes


def shard(model: Any, mesh: DeviceMesh, *, trained: bool) -> None:
    """Shard a model over a 1-D mesh, one layer at a time. Its weights are rank 0's: the other ranks' may be empty.

    Embeddings and head are sharded only if `trained`: frozen ones have no gradients or optimizer state.
    """
    device = torch.device(mesh.device_type)
    layers: list[Any] = list(decoder_layers(model))
    for layer in layers:
        broadcast_weights(layer, device)
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        # Losses are divided by the tokens of all processes, so gradients are summed and not averaged.
        layer.set_force_sum_reduction_for_comms(True)
        layer.set_gradient_divide_factor(1.0)
    share_comm_ctx(layers)  # each layer is a root: otherwise each keeps its unsharded gradients to the end
    broadcast_weights(model, device)
    if trained:
        for weight, modules in vocabulary_weights(model):
            part = _distribute(weight.data, mesh)
            _set_weight(nn.Parameter(part, requires_grad=weight.requires_grad), modules)


def broadcast_weights(model: Any, device: torch.device) -> None:
    """Replace parameters and buffers that are not sharded by copies of rank 0's, on the device.

    All processes must call it. On other ranks than 0 the model may be empty, on the meta device.
    """
    named = chain(model.named_parameters(), model.named_buffers())
    own = [(name, tensor.shape, tensor.dtype) for name, tensor in named]
    expected = [own]
    dist.broadcast_object_list(expected, src=0)
    assert own == expected[0], "this process has another model than the main process"

    copies: dict[Tensor, Tensor] = {}  # tied weights stay one tensor
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or isinstance(tensor, DTensor):
                    continue
                if tensor not in copies:
                    copies[tensor] = _copy_from_main(tensor, device)
                tensors[name] = copies[tensor]


def _copy_from_main(tensor: Tensor, device: torch.device) -> Tensor:
    data = tensor.detach()
    data = torch.empty_like(data, device=device) if data.is_meta else data.to(device, copy=True)
    dist.broadcast(data, src=0)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    return data


def is_sharded(model: Any) -> bool:
    """Return True if `shard` was applied to the model."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def is_sharded_tensor(tensor: Tensor) -> bool:
    """Return True if this process has only a shard of the tensor."""
    return isinstance(tensor, DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, or a tensor that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def gathered_embeddings(model: Any, all_reduce: AllReduce) -> Iterator[None]:
    """Context manager that gathers embeddings and head; on exit their gradients are summed and sharded.

    `all_reduce` sums over the processes of the model's mesh.
    """
    gathered: list[tuple[DTensor, nn.Parameter, list[nn.Module]]] = []
    for weight, modules in vocabulary_weights(model):
        if isinstance(weight, DTensor):
            full = nn.Parameter(weight.full_tensor().detach(), requires_grad=weight.requires_grad)
            _set_weight(full, modules)
            gathered.append((weight, full, modules))
    try:
        yield
    finally:
        for weight, _, modules in gathered:
            _set_weight(weight, modules)

    has_gradient = torch.tensor([float(full.grad is not None) for _, full, _ in gathered])
    all_reduce([has_gradient])
    for (weight, full, _), on_any_rank in zip(gathered, has_gradient.tolist(), strict=True):
        if on_any_rank:
            grad = torch.zeros_like(full) if full.grad is None else full.grad
            full.grad = None
            all_reduce([grad])
            weight.grad = _distribute(grad, weight.device_mesh)


@contextmanager
def gathered(model: Any, all_reduce: AllReduce) -> Iterator[None]:
    """Context manager that gathers a whole model, for forward passes without gradients and communication."""
    layers = [module for module in model.modules() if isinstance(module, FSDPModule)]
    with torch.no_grad(), gathered_embeddings(model, all_reduce):
        for layer in layers:
            layer.set_reshard_after_forward(False)
            layer.unshard()
        try:
            yield
        finally:
            for layer in layers:
                layer.reshard()
                layer.set_reshard_after_forward(True)


def full_state_dict(model: Any) -> dict[str, Tensor] | None:
    """Return all weights, on the CPU of rank 0; None if the model is not sharded. All processes must call it."""
    state = model.state_dict()
    if not any(isinstance(tensor, DTensor) for tensor in state.values()):
        return None
    full: dict[str, Tensor] = {}
    for name, tensor in state.items():
        gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if distributed.is_main_process():
            full[name] = gathered.cpu()
    return full


def load_full_state_dict(model: Any, state: dict[str, Tensor]) -> None:
    """Load rank 0's unsharded weights into a sharded model; each process keeps its shard."""
    for name, target in model.state_dict().items():
        full = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        if distributed.is_main_process():
            full.copy_(state[name])
        dist.broadcast(full, src=0)
        if isinstance(target, DTensor):
            full = _distribute(full, target.device_mesh)
        target.copy_(full)


def total_norm(tensors: Iterable[Tensor], all_reduce: AllReduce) -> Tensor:
    """Return the 2-norm of tensors, of which some may be sharded.

    `all_reduce` sums over the processes of their mesh, or over several meshes with the same shards.
    """
    replicated: list[Tensor] = []
    shards: list[Tensor] = []
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            shards.append(tensor.to_local())
            num_shards = tensor.device_mesh.size()
        else:
            replicated.append(tensor)
    replicated_norm = nn.utils.get_total_norm(replicated)
    if not shards:
        return replicated_norm

    squares = nn.utils.get_total_norm(shards) ** 2
    sums = torch.stack([squares, torch.ones_like(squares)])
    all_reduce([sums])
    copies = sums[1] / num_shards  # of each shard
    return (sums[0] / copies + replicated_norm**2).sqrt()


def clip_grad_norm(weights: Iterable[Tensor], max_norm: float, all_reduce: AllReduce) -> Tensor:
    """Scale the gradients down to `max_norm`, and return their norm before."""
    weights = list(weights)
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    norm = total_norm(gradients, all_reduce)
    replicated = [weight for weight in weights if not is_sharded_tensor(weight)]
    nn.utils.clip_grads_with_norm_(replicated, max_norm, norm)

    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            gradient.to_local().mul_(factor)
    return norm


def save_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write sharded tensors in torch.distributed.checkpoint's format. All processes must call it."""
    dcp.save(dict(tensors), checkpoint_id=folder)


def load_shards(
    folder: Path, specs: Mapping[str, tuple[list[int], torch.dtype]], mesh: DeviceMesh | None
) -> dict[str, Tensor]:
    """Load tensors, name -> (shape, dtype), that `save_shards` wrote on any mesh; unsharded without one. Raises M05."""
    tensors: dict[str, Tensor] = {}
    for name, (shape, dtype) in specs.items():
        if mesh:
            empty = torch.zeros(shape, dtype=dtype, device=mesh.device_type)
            tensors[name] = _distribute(empty, mesh)
        else:
            tensors[name] = torch.zeros(shape, dtype=dtype)
    try:
        with warnings.catch_warnings(action="ignore"):  # that there is no process group
            dcp.load(dict(tensors), storage_reader=_Reader(folder), no_dist=mesh is None)
    except (pickle.UnpicklingError, CheckpointException) as error:
        text = f"{shown(folder)} cannot be read, or contains non-tensor objects; they were not executed"
        raise RLHFError("M05", text, hint="remove that checkpoint; an older one is used if there is one") from error
    return tensors


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that allows only the classes of a checkpoint's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | type(torch.Size))
        is_known = is_dtype or module in METADATA_MODULES or f"{module}.{name}" in METADATA_NAMES
        if not is_known:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong to a checkpoint's metadata")
        return super().find_class(module, name)


def _distribute(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return this process's shard of a tensor that is identical in all processes."""
    return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)


def vocabulary_weights(model: Any) -> list[tuple[Any, list[nn.Module]]]:
    """Return the weights of embeddings and output head, each with the modules that have it as their `weight`."""
    modules = [model.get_input_embeddings()]
    if model.can_generate():
        modules.append(model.get_output_embeddings())

    modules_by_weight: dict[Any, list[nn.Module]] = {}  # tied weights are one
    for module in filter(None, modules):
        modules_by_weight.setdefault(module.weight, []).append(module)
    return list(modules_by_weight.items())


def _set_weight(weight: Any, modules: list[nn.Module]) -> None:
    for module in modules:
        module.weight = weight


def is_zero3_sharded(model: Any) -> bool:
    """Return True if DeepSpeed has sharded the model."""
    return any(hasattr(weight, "ds_tensor") for weight in model.parameters())


def zero3_shard(weight: Tensor) -> Tensor:
    """Return this process's shard of a weight, or a weight that is not sharded."""
    return getattr(weight, "ds_tensor", weight)


def zero3_full_state_dict(model: Any) -> dict[str, Tensor]:
    """Return all weights, gathered one at a time, on the CPU of rank 0. All processes must call it."""
    import deepspeed  # installed by the user

    state = model.state_dict(keep_vars=True)
    full: dict[Tensor, Tensor] = {}
    for tensor in dict.fromkeys(state.values()):  # tied weights stay one tensor
        with deepspeed.zero.GatheredParameters([tensor], enabled=hasattr(tensor, "ds_tensor")):
            if distributed.is_main_process():
                full[tensor] = tensor.detach().to("cpu", copy=True)
    if not distributed.is_main_process():
        return {}
    return {name: full[tensor] for name, tensor in state.items()}


def disable_zero3() -> None:
    """Make transformers load unsharded models from now on, in every process."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config  # most of a second

    unset_hf_deepspeed_config()


@contextmanager
def zero3_disabled() -> Iterator[None]:
    """Context manager in which transformers loads unsharded models, even with `trainer.deepspeed`."""
    from transformers.integrations import deepspeed  # most of a second

    before = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = before


def clone_sharing_storage(model: Any) -> Any:
    """Return a copy whose parameters are new, over the same memory until `broadcast_weights` replaces them."""
    memo: dict[int, Any] = {}
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach()
    for weight in model.parameters():
        memo[id(weight)] = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
    return copy.deepcopy(model, memo=memo)


def clone_sharing_weights(model: Any) -> Any:
    """Return a copy of a model with new modules and the same tensors: moving or freezing one affects both."""
    return copy.deepcopy(model, memo={id(tensor): tensor for tensor in parameters_and_buffers(model)})


def share_layers(policy: Any, ref: Any, count: int) -> None:
    """Freeze the embeddings and first `count` layers of `policy`, and replace those of `ref` by them.

    Raises ValueError as `layers_to_share`.
    """
    for parent, name, module in layers_to_share(policy, ref, count):
        setattr(parent, name, module.requires_grad_(False))
    ref.tie_weights()


def layers_to_share(policy: Any, ref: Any, count: int) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return the modules of `ref` to replace: the module around it, its name there, and its twin of `policy`.

    Raises ValueError if no layer of `policy` remains to be trained, or if the shared weights differ.
    """
    layers = decoder_layers(policy)
    if count >= len(layers):
        raise ValueError(f"num_shared_layers {count} of {len(layers)} layers leaves none to train")

    shared: list[tuple[nn.Module, str, nn.Module]] = []
    ref_stack = _layer_stack(ref)
    for name, child in _layer_stack(policy).named_children():
        if isinstance(child, nn.Embedding):
            shared.append((ref_stack, name, child))
    ref_layers = decoder_layers(ref)
    for index in range(count):
        shared.append((ref_layers, str(index), layers[index]))

    for parent, name, module in shared:
        if not _equal(module, getattr(parent, name)):
            raise ValueError("policy and reference differ in the layers that num_shared_layers would have them share")
    return shared


def _equal(first: nn.Module, second: nn.Module) -> bool:
    return all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))


def _layer_stack(model: Any) -> nn.Module:
    """Return the module that contains the embeddings and the list of layers."""
    size = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if any(isinstance(child, nn.ModuleList) and len(child) == size for child in module.children()):
            return module
    raise ValueError(f"no list of {size} layers in a {type(model).__name__}")


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return the list of a model's decoder layers."""
    return next(child for child in _layer_stack(model).children() if isinstance(child, nn.ModuleList))


def offload_to_cpu(model: Any) -> None:
    """Move a model to the CPU; if there is an accelerator, into pinned memory, which is faster to copy from."""
    model.to("cpu")
    if torch.accelerator.is_available():
        for tensor in parameters_and_buffers(model):
            tensor.data = tensor.data.pin_memory()


@contextmanager
def on_device(model: Any, device: torch.device) -> Iterator[None]:
    """Context manager that replaces a frozen model's tensors by copies on the device, which are discarded on exit."""
    offloaded = [(tensor, tensor.data) for tensor in parameters_and_buffers(model)]
    for tensor, cpu_data in offloaded:
        tensor.data = torch.empty_like(cpu_data, device=device).copy_(cpu_data, non_blocking=True)
    try:
        yield
    finally:
        for tensor, cpu_data in offloaded:
            tensor.data = cpu_data


def parameters_and_buffers(model: Any) -> list[Tensor]:
    """Return parameters and buffers; tied weights once."""
    return list(chain(model.parameters(), model.buffers()))
