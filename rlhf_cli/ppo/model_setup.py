"""What happens to the models of a trainer before its first step. They are changed in place."""

from importlib import import_module
from typing import Any

import torch

from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.models import forward, lora, sharding
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup, ReplicatedModels, ShardedModels
from rlhf_cli.ppo.forward_backward import ModelRunner


def prepare_models(
    policy: Any,
    ref: Any,
    value: Any,
    settings: PPOSettings,
    process_group: ProcessGroup,
) -> tuple[ModelRunner, ReplicatedModels]:
    """Prepare the models to run; return what runs them, and how the processes share them.

    In this order: dropout is disabled, layers are shared, rows are packed, weights get their dtypes, shards and
    devices, and gradient checkpointing is enabled. `value` is None without a value model.
    """
    for model in (policy, ref, value):
        if model is not None:
            forward.disable_dropout(model)
    if settings.num_shared_layers:
        sharding.share_layers(policy, ref, settings.num_shared_layers)

    shards = bool(settings.fsdp) and process_group.world_size > 1
    loading = process_group if shards else SINGLE_PROCESS
    runner = ModelRunner(policy, ref, value, settings, loading)  # packs rows: before bfloat16, shards and devices
    _store_reference(ref, settings, shards=shards)
    if shards:
        frozen = [] if settings.offload else [ref]
        sharded_models = _sharded_models_class(settings)
        parallel: ReplicatedModels = sharded_models(process_group, runner.trained_backbones, frozen)
    else:
        parallel = ReplicatedModels(process_group)
    if runner.has_value_head:
        if shards:
            sharding.broadcast_weights(value, policy.device)
        value.to(policy.device)  # to which sharding has moved the policy

    if settings.gradient_checkpointing:
        for model in runner.trained_backbones:
            forward.enable_gradient_checkpointing(model)
    return runner, parallel


def _store_reference(ref: Any, settings: PPOSettings, *, shards: bool) -> None:
    """Store the reference's matrices in bfloat16 where nothing needs float32; with offload, in main memory."""
    fsdp_shards_it = settings.fsdp and not settings.offload  # it shards weights of one dtype
    if settings.bf16 and not settings.num_shared_layers and not fsdp_shards_it:
        lora.autocast_matrices(ref)
    if settings.offload:
        if shards:
            sharding.broadcast_weights(ref, torch.device("cpu"))
        sharding.offload_to_cpu(ref)


def _sharded_models_class(settings: PPOSettings) -> type[ShardedModels]:
    """Return the class of `ppo.fsdp`; nothing else imports `experimental`."""
    if settings.fsdp != "hybrid":
        return ShardedModels
    hybrid: type[ShardedModels] = import_module("rlhf_cli.experimental.hybrid_sharding").HybridShardedModels
    return hybrid
