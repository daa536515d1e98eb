"""Settings with which a stage fits that does not fit as it is: what costs least quality and time first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_cli.commands.common.plan.inputs import ModelResolver
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.loading import load
from rlhf_cli.config.machinery.yaml_io import to_yaml
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft import SFTConfig
from rlhf_cli.errors import RLHFError, shell_word
from rlhf_cli.planning.estimate import Estimate, estimate_stage
from rlhf_cli.planning.memory import Overhead, Phase, estimate_overhead
from rlhf_cli.planning.placement import memory_savings

MIN_SAVING = 0.01  # of the peak: a setting that saves less is left out
FIXED_KINDS = ("weights", "gradients", "optimizer")


@dataclass(frozen=True)
class Advice:
    """A combination of settings, as --set takes them, and what the stage needs with them."""

    set: str
    memory_bytes: int
    fits: bool | None


def overhead_of(stage: Estimate, process: int) -> Overhead:
    """Return what the process of a stage takes beside its tensors; `process`: before it computes."""
    return estimate_overhead(
        stage.config.stage, stage.peak.total, steps=stage.steps, gpu=stage.target.gpu, process=process
    )


def verdict(stage: Estimate, needed: int) -> bool | None:
    """Return whether a stage fits its target; None if its optimizer may take less than the AdamW that was counted."""
    if needed <= stage.target.memory:
        return True
    optimizer = getattr(stage.config, "trainer", {}).get("optim", "adamw")
    return False if optimizer.startswith(("adamw", "paged_adamw")) else None


def advise(stage: Estimate, overrides: Sequence[str], chain: ModelResolver, process: int) -> list[Advice]:
    """Return combinations of settings that save memory, with adapters first and then without.

    Settings are added, one after the other if it saves memory, until the stage fits; if none fits, both go to the end.
    Rows are cut, which loses data, only if what is in memory beside their activations fits.
    """
    found = [_combination(stage, overrides, chain, process, adapters=adapters) for adapters in (True, False)]
    return [each for each in found if each]


def _combination(
    stage: Estimate, overrides: Sequence[str], chain: ModelResolver, process: int, *, adapters: bool
) -> Advice | None:
    """Return the settings that save memory, with what the stage needs then; None if none saves any."""
    found = None
    chosen: list[str] = []
    peak = stage.peak
    for changes in _candidates(stage, adapters=adapters):
        if _cuts_rows(changes) and _fixed(peak) > stage.target.memory:
            break
        changed = {_key(change) for change in changes}
        kept = [text for text in chosen if _key(text) not in changed]
        try:
            config = load(stage.config.stage, stage.config.file, [*overrides, *kept, *changes])
            inputs = chain.with_adapters(config).stage_inputs(config, None, stage.target)
            smaller = estimate_stage(config, inputs, None, stage.target)
        except RLHFError:  # a value that does not go with the others
            continue

        if smaller.peak.total < (1 - MIN_SAVING) * peak.total:
            chosen = [*kept, *changes]
            peak = smaller.peak
            needed = peak.total + overhead_of(smaller, process).total
            found = Advice(" ".join(map(shell_word, chosen)), needed, verdict(smaller, needed))
            if found.fits:
                break
    return found


def _key(change: str) -> str:
    return change.partition("=")[0]


def _cuts_rows(changes: Sequence[str]) -> bool:
    return _key(changes[0]).endswith("_length")


def _fixed(peak: Phase) -> int:
    return sum(peak.bytes.get(kind, 0) for kind in FIXED_KINDS)


def _candidates(stage: Estimate, *, adapters: bool) -> Iterator[list[str]]:
    """Yield settings in the order in which they are tried."""
    config: Any = stage.config
    settings = getattr(config, config.stage)
    if isinstance(config, EvalConfig) and adapters:
        return
    if settings.bf16 is False and stage.target.computes_in_bf16(True):
        yield [f"{config.stage}.bf16=true"]
    if isinstance(config, EvalConfig):
        for rows in _halves(settings.per_device_batch_size):
            yield [f"eval.per_device_batch_size={rows}"]
    else:
        yield from _training_candidates(config, settings, adapters=adapters)


def _training_candidates(config: Any, settings: Any, *, adapters: bool) -> Iterator[list[str]]:
    is_ppo = isinstance(config, PPOConfig)
    section = "models" if is_ppo else "model"
    has_adapters = getattr(config, section).adapters is not None

    if adapters and not has_adapters:
        unusable = [key for key in ("offload", "fsdp") if is_ppo and getattr(settings, key)]
        yield [f"{section}.adapters={{kind: lora}}", *(f"ppo.{key}=false" for key in unusable)]
    if isinstance(config, SFTConfig) and config.best_of:
        for at_once in _halves(config.best_of.per_device_batch_size):
            yield [f"best_of.per_device_batch_size={at_once}"]

    savings = [[f"{key}={to_yaml(value)}"] for key, value in memory_savings(config.stage).values()]
    yield from savings[:1] if adapters or has_adapters else savings

    if is_ppo:
        for at_once in _halves(settings.local_rollout_forward_batch_size or settings.episodes_per_update):
            yield [f"ppo.local_rollout_forward_batch_size={at_once}"]
    yield from _fewer_rows(config.stage, settings)
    if is_ppo:
        yield ["ppo.logits_at_a_time=64"]
    if adapters:
        yield [f"{section}.adapters.kind=qlora" if has_adapters else f"{section}.adapters={{kind: qlora}}"]

    key = "response_length" if is_ppo else "max_length"
    length = getattr(settings, key)
    if isinstance(length, int):
        for tokens in _halves(length)[:3]:
            yield [f"{config.stage}.{key}={tokens}"]


def _fewer_rows(stage: str, settings: Any) -> Iterator[list[str]]:
    """Yield fewer rows at a time, in batches of the same size."""
    rows = settings.per_device_train_batch_size
    batch = rows * settings.gradient_accumulation_steps
    for fewer in _halves(rows):
        yield [
            f"{stage}.per_device_train_batch_size={fewer}",
            f"{stage}.gradient_accumulation_steps={batch // fewer}",
        ]


def _halves(size: int) -> list[int]:
    """Return half of a size, a quarter, and so on, as long as nothing is left over."""
    halves = []
    while size > 1 and size % 2 == 0:
        size //= 2
        halves.append(size)
    return halves
