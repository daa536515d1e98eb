"""`ppo.fsdp: hybrid`: models sharded over the processes of each machine and replicated over machines (HSDP).

Tested with machines that are simulated on one CPU. It has never run on several machines.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlhf_cli import distributed
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import sharding
from rlhf_cli.models.parallel import ProcessGroup, ShardedModels


class HybridShardedModels(ShardedModels):
    """Each machine has all shards: only gradients cross the network, once per optimizer step."""

    def make_mesh(self, device: str) -> DeviceMesh:
        shape = machines_and_processes(self.process_group)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
        self.replicas = _group(mesh, "replicate")
        self.shard_group = _group(mesh, "shard")
        return mesh["shard"]

    def all_reduce_gradients(self, model: nn.Module) -> None:
        super().all_reduce_gradients(model)
        self.replicas.all_reduce_gradients(filter(sharding.is_sharded_tensor, model.parameters()))


def _group(mesh: DeviceMesh, name: str) -> ProcessGroup:
    return ProcessGroup(mesh.get_local_rank(name), mesh[name].size(), mesh.get_group(name))


def machines_and_processes(process_group: ProcessGroup) -> tuple[int, int]:
    """Return the number of machines and of processes on each. Raises RLHFError E04 if machines differ in it."""
    places = process_group.all_gather_object((distributed.local_rank(), distributed.local_world_size()))
    _, count = places[0]
    wrong = [rank for rank, place in enumerate(places) if place != (rank % count, count)]
    if wrong or len(places) % count:
        rank = (wrong or [len(places) - 1])[0]
        number, of = places[rank]
        text = "fsdp: hybrid needs the same number of processes on each machine, with consecutive ranks: "
        text += f"process {rank} is number {number + 1} of {of} on its machine, process 0 is one of {count}"
        hint = "start as many processes on each machine with torchrun, or set ppo.fsdp: true"
        raise RLHFError("E04", text, where="LOCAL_WORLD_SIZE", hint=hint)
    return len(places) // count, count
