"""What would make a stage smaller: keys to change, each with what it saves by itself."""

from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_cli.config import EvalConfig, PPOConfig, load
from rlhf_cli.errors import RLHFError
from rlhf_cli.plan import estimate
from rlhf_cli.plan.chain import Chain
from rlhf_cli.plan.estimate import Estimate


def savings(found: Estimate, overrides: Sequence[str], chain: Chain) -> list[tuple[str, int]]:
    """(settings, bytes saved at the fullest moment), the largest saving first; what saves nothing is left out."""
    saved = []
    for changes in _ideas(found):
        try:
            config = load(found.config.stage, found.config.file, [*overrides, *changes])
            smaller = estimate.of(config, chain, found.mode, found.target)
        except RLHFError:  # a value that does not go with the others
            continue
        gain = found.fullest.total - smaller.fullest.total
        if gain > 0.01 * found.fullest.total:
            saved.append((" ".join(changes), gain))
    return sorted(saved, key=lambda each: -each[1])


def _ideas(found: Estimate) -> Iterator[list[str]]:
    config, stage = found.config, found.config.stage
    settings: Any = getattr(config, stage)
    if isinstance(config, EvalConfig):
        yield [f"eval.per_device_batch_size={max(1, settings.per_device_batch_size // 2)}"]
        return
    if not settings.gradient_checkpointing:
        yield [f"{stage}.gradient_checkpointing=true"]
    rows, parts = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    if rows % 2 == 0:
        half = f"{stage}.per_device_train_batch_size={rows // 2}"
        yield [half, f"{stage}.gradient_accumulation_steps={2 * parts}"]
    if not settings.bf16 and found.target.computes_in_bf16(True):
        yield [f"{stage}.bf16=true"]
    key = "ppo.optim" if isinstance(config, PPOConfig) else "trainer.optim"
    yield [f"{key}=adamw_8bit"]
    if not isinstance(config, PPOConfig):
        yield [f"{stage}.max_length={settings.max_length // 2}"]
        return
    yield [f"ppo.micro_batch_tokens={max(1, rows // 2) * found.lengths.row}"]
    at_once = settings.local_rollout_forward_batch_size or settings.episodes_per_update
    yield [f"ppo.local_rollout_forward_batch_size={max(1, at_once // 2)}"]
    if not config.models.adapters:
        yield ["ppo.offload=true"]
        yield ["ppo.fsdp=true"]
    if config.models.value != "policy_head":
        yield ["models.value=policy_head"]
    if not settings.num_shared_layers and found.layers > 1:
        yield [f"ppo.num_shared_layers={found.layers // 2}"]
    yield ["ppo.logits_at_a_time=64"]
    if isinstance(settings.response_length, int):
        yield [f"ppo.response_length={max(1, settings.response_length // 2)}"]
