"""Peak memory and FLOPs of each phase of a stage.

The stages' own code runs on meta tensors (see `measure`): the PPO trainer itself for scoring and update, and for SFT
and reward one step as TRL's trainers make it. So the plan follows changes of that code. The result, in bytes of
float32, for W weights of which T are trained, and micro-batches of n rows of L tokens, N of them response tokens;
hidden size H, intermediate size I, A heads of which K are key-value heads, V vocabulary:

    weights      4 W        PPO: policy, reference, value and reward models, each folder of a reward model once; with
                            adapters the weights of models.sft once, and reward models that are no adapters of them;
                            with offload reference and reward models where they are read, one at a time
    gradients    4 T        PPO keeps them from one backward pass to the next
    optimizer    8 T        AdamW's two averages; of 8 bits each 2 T, but 8 for embeddings and small weights
    activations  what a backward pass needs. Of a Llama's layer 4 n L (8 H + 2 H K / A + 4 I): each norm keeps its
                 input, the normalised and its output (6 H), attention its query, its output (2 H), its key and value
                 (2 H K / A), the MLP its gate before and after, its other factor and their product (4 I)
    logits       4 N V      for each copy that the loss makes; in PPO of logits_at_a_time tokens for N
    cache        8 b (P + R) (K / A) H a layer: keys and values of the b rows that are written at a time

Adapters put r (in + out) numbers beside a matrix, and these are T; qlora's matrices take half a byte a number and
their scales. Such a model is then read whole, to be measured.

With fsdp each of P processes keeps a P-th of weights, gradients and averages, beside what is together: a layer,
embeddings and heads, in a rollout the policy.

The largest phase decides. Rows are as long as the longest: prompts as in the data, responses up to their limit.

On a CPU that is what tensors take; a process holds more, since glibc's malloc keeps what was freed (docs/scaling.md).
"""

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_cli.commands.plan import meta
from rlhf_cli.commands.plan.measure import MemoryCounter, StepTimer
from rlhf_cli.commands.plan.meta import Lengths, fake_rollout, init_optimizer_state
from rlhf_cli.config.adapters import LoRA
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.models import build, devices, forward, sharding
from rlhf_cli.ppo import losses
from rlhf_cli.ppo.forward_backward import logits_chunk_size, max_micro_batch_tokens
from rlhf_cli.ppo.optimizer import adamw_8bit, embedding_weights
from rlhf_cli.ppo.rollout import NOISE_CHUNK_ELEMENTS_CPU, gumbel_sample, token_counters
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.model import ModelReward
from rlhf_cli.stages import hardware

Count = (
    type[MemoryCounter] | type[StepTimer]
)  # a stage's bytes and operations without its models, or its seconds with small ones


@dataclass(frozen=True)
class Phase:
    """Memory of a phase at several moments. `work`: per update (PPO), optimizer step (SFT, reward) or run (eval)."""

    name: str
    rows: int  # at a time
    moments: Mapping[Any, Mapping[str, int]]  # bytes by kind
    work: float = 0  # FLOPs, or seconds with a StepTimer

    @property
    def peak(self) -> Any:
        """Moment with the most bytes."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @cached_property
    def bytes(self) -> dict[str, int]:
        """Bytes by kind at the peak."""
        return dict(self.moments[self.peak])

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class PPOModels:
    """Models of a PPO run. `whole` and `beside` are arguments of `meta.apply_mode`."""

    policy: Any
    ref: Any
    value: Any
    rewards: dict[str, Any] = field(default_factory=dict)  # by folder
    adapters: LoRA = meta.STANDARD
    whole: Collection[str] = ()
    beside: str | None = None

    @property
    def all(self) -> list[nn.Module]:
        return [self.policy, self.ref, self.value, *self.rewards.values()]


def ppo(
    models: PPOModels, settings: PPOSettings, lengths: Lengths, *, mode: str = "full", gpu: bool, processes: int = 1,
    count: Count = MemoryCounter,
) -> list[Phase]:  # fmt: skip
    """Return the phases of an update after the first, per process."""
    vocabulary, episodes = _vocabulary(models.policy), settings.episodes_per_update
    minibatch = episodes // settings.num_mini_batches
    tokens = max_micro_batch_tokens(settings, on_cpu=not gpu) or sys.maxsize
    size = max(1, min(settings.per_device_train_batch_size, tokens // lengths.row))
    rows = min(minibatch, count.together * size)
    held = logits_chunk_size(settings, vocabulary, on_cpu=not gpu) or "all"
    once = settings.model_copy(
        update={
            "num_mini_batches": 1, "num_ppo_epochs": 1, "value_only_updates": 0, "logits_at_a_time": held,
            "micro_batch_tokens": tokens, "offload": False, "fsdp": False,
            "optim": "adamw_torch" if settings.optim == "adamw_torch_fused" else settings.optim,
        }
    )  # fmt: skip
    if mode != "full":
        four = (models.policy, models.ref, models.value, models.rewards)
        meta.apply_mode(*four, mode, models.adapters, models.whole, models.beside)
    rate: Any = _NoSchedule()
    with count([], vocabulary):  # to share layers, models are compared
        trainer = PPOTrainer(models.policy, models.ref, models.value, {}, _NoEngine(), once, None, rate)
    optimizer = trainer.optimizer
    for group in optimizer.param_groups:
        group["foreach"] = gpu and settings.optim == "adamw_torch"  # as torch chooses where it sees the device
    init_optimizer_state(optimizer, gradients=True)

    def tally(*read: Any) -> MemoryCounter | StepTimer:
        """With the models in memory: all; with offload those that are trained, and of the others what is `read`."""
        resident = [models.policy, models.value, *read] if settings.offload else models.all
        return count(resident, vocabulary, optimizer)

    at_once = settings.local_rollout_forward_batch_size or episodes
    found = [rollout_phase(models.policy, tally, at_once, episodes, lengths, gpu=gpu)]
    fake = fake_rollout(rows, lengths, count.device)
    judged: list[MemoryCounter | StepTimer] = []
    for model in models.rewards.values():
        at_once = settings.local_rollout_forward_batch_size or settings.per_device_train_batch_size
        with tally(model) as scored:
            ModelReward(model, at_once, packed=settings.packing)(fake)
        judged.append(scored)
    with tally(models.ref) as read:
        experience = trainer.make_experience(fake, torch.zeros(rows, device=count.device))
    judged.append(read)
    work = sum(each.work for each in judged) * episodes / rows
    found.append(Phase("judge", min(size, rows), _concat_moments(*(each.moments for each in judged)), work))
    with tally(*[models.ref] * trainer.model_runner.exact_kl_in_loss) as learnt:
        trainer.update(experience)
    work = learnt.work * episodes / rows * settings.num_ppo_epochs
    found.append(Phase("update", min(size, rows), learnt.moments, work))
    return [_shard(phase, models, settings, processes) for phase in found] if settings.fsdp else found


def _shard(phase: Phase, models: PPOModels, settings: PPOSettings, processes: int) -> Phase:
    """Return a phase with FSDP-sharded policy, value model and reference (models/sharding.py).

    Each process holds its shards and what is gathered: a layer, embeddings and heads, and in a rollout the policy.
    """

    def size(weights: Iterable[Tensor]) -> int:
        return sum({id(weight): weight.nbytes for weight in weights}.values())

    def layers(model: Any) -> list[int]:
        return [size(layer.parameters()) for layer in sharding.decoder_layers(model)]

    def words(model: Any) -> int:
        return size(weight for weight, _ in sharding.vocabulary_weights(model))

    learn = [model for model in (models.policy, models.value) if not isinstance(model, forward.ValueHead)]
    gone = 1 - 1 / processes
    learnt = sum(sum(layers(model)) + words(model) for model in learn)
    rest = 0 if settings.offload else sum(layers(models.ref))
    everyone = sum(w.nbytes for model in (models.policy, models.value) for w in model.parameters() if w.requires_grad)
    whole = sum(map(words, learn)) + max(layers(models.policy))
    more = sum(layers(models.policy)) + words(models.policy) if phase.name == "rollout" else whole
    cut = {}
    for moment, bytes_ in phase.moments.items():
        cut[moment] = held = Counter(bytes_)
        held["weights"] += more - round(gone * (learnt + rest))
        held["gradients"] += -round(gone * learnt) + (whole if phase.name == "update" else 0)
        held["optimizer"] -= round(held["optimizer"] * gone * learnt / everyone)
    return replace(phase, moments=cut)


def _concat_moments(*parts: dict[Any, Counter[str]]) -> dict[Any, Counter[str]]:
    """Return the moments of consecutive parts."""
    return {(number, moment): held for number, moments in enumerate(parts) for moment, held in moments.items()}


class _NoEngine:
    """Placeholder for the trainer's fake_rollout engine."""

    def generate(self, prompts: Any) -> Any:
        raise AssertionError("nothing is written on meta tensors")


class _NoSchedule:
    """Placeholder for the scheduler; those of transformers import peft, which takes over a second."""

    def step(self) -> None:
        """Do nothing."""


def rollout_phase(model: Any, tally: Any, rows: int, in_all: int, lengths: Lengths, *, gpu: bool) -> Phase:
    """Return the phase that generates `in_all` responses, `rows` at a time: prefill, then one pass per token."""
    rows = min(rows, in_all)
    with torch.no_grad():
        with tally() as read:
            cache = build.kv_cache(model)
            _generate_token(model, cache, rows, lengths.prompt, gpu=gpu)
            reading_them = _with_cache(read, cache)
        full, half = (build.kv_cache(model) for _ in range(2))
        with tally():
            _generate_token(model, full, rows, lengths.row - 1, gpu=gpu)
            _generate_token(model, half, rows, lengths.prompt + lengths.response // 2, gpu=gpu)
        with tally() as wrote:
            wrote.mark("cache", _held(full))
            _generate_token(model, full, rows, 1, before=lengths.row - 1, gpu=gpu)
            last_token = _with_cache(wrote, full)
        with tally() as step:
            _generate_token(model, half, rows, 1, before=lengths.prompt + lengths.response // 2, gpu=gpu)
    work = read.work + step.work * (lengths.response - 1)
    return Phase("rollout", rows, _concat_moments(reading_them, last_token), work * in_all / rows)


def _held(cache: Any) -> list[Tensor]:
    return [each for layer in cache.layers for each in (layer.keys, layer.values)]


def _with_cache(tally: MemoryCounter | StepTimer, cache: Any) -> dict[Any, Counter[str]]:
    """Count the grown cache as cache: its tensors are reallocated as it grows and would count as activations."""
    whole = sum(each.nbytes for each in _held(cache))
    moments = {}
    for moment, held in tally.moments.items():
        missing = max(0, whole - held["cache"])
        moments[moment] = held + Counter(cache=missing)
        moments[moment]["activations"] -= missing
    return moments


def _generate_token(model: Any, cache: Any, rows: int, width: int, before: int = 0, *, gpu: bool) -> Tensor:
    """Sample a token as HFEngine does, after `width` new tokens and `before` cached ones."""
    ids = torch.zeros(rows, width, dtype=torch.int64, device=model.device)
    mask = torch.ones(rows, before + width, dtype=torch.int64, device=model.device)
    made = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
    scaled = made.logits[:, -1].float() / 1.0
    at_once = rows if gpu else min(rows, max(1, NOISE_CHUNK_ELEMENTS_CPU // scaled.shape[1]))
    keys, counters = ids.new_zeros(at_once, 2, dtype=torch.int32), token_counters(scaled.shape[1], ids.device)
    return gumbel_sample(scaled[:at_once], keys, 0, counters)


# SFT, reward


@dataclass(frozen=True)
class TrainOptions:
    """TrainOptions a step is made."""

    bf16: bool
    checkpointing: bool
    mode: str
    gpu: bool
    adapters: LoRA = meta.STANDARD
    eight_bits: bool = False


def sft(
    model: Any, rows: int, lengths: Lengths, parts: int, options: TrainOptions, count: Count = MemoryCounter
) -> Phase:
    """Return an SFT step on `parts` micro-batches of `rows`, with the loss on the responses only."""

    def loss(micro: Any) -> Tensor:
        if options.gpu:  # TRL's fused head makes no logits
            return model.base_model(input_ids=micro.ids, use_cache=False).last_hidden_state.float().sum()
        logits = forward.response_logits(model, micro).float()
        logprobs = torch.log_softmax(logits, -1)
        with torch.no_grad():  # for TRL's log
            _entropy, _top = -(logprobs.exp() * logprobs).sum(-1), logits.argmax(-1)
        return logprobs.gather(-1, micro.targets[:, None]).sum()

    return _step(model, loss, rows, lengths, parts, options, count)


def reward(
    model: Any, pairs: int, lengths: Lengths, parts: int, options: TrainOptions, count: Count = MemoryCounter
) -> Phase:
    """Return a reward-model step on `parts` micro-batches of `pairs`, whose two sides form one batch."""

    def loss(micro: Any) -> Tensor:
        return forward.pooled_scores(model, micro).sum()

    return _step(model, loss, 2 * pairs, lengths, parts, options, count)


def _step(model: Any, loss: Any, rows: int, lengths: Lengths, parts: int, options: TrainOptions, count: Count) -> Phase:
    if options.checkpointing:
        forward.enable_gradient_checkpointing(model)
    if options.mode != "full":
        meta.add_adapters(model, options.mode, options.adapters)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, foreach=options.gpu)
    if options.eight_bits:
        optimizer = adamw_8bit([{"params": trained}], full_precision=embedding_weights([model]))
    init_optimizer_state(optimizer, gradients=False)
    made = min(parts, count.together)
    with count([model], _vocabulary(model), optimizer) as tally:
        for _ in range(made):
            micro = fake_rollout(rows, lengths, count.device).micro_batch(torch.arange(rows, device=count.device))
            with forward.gradient_checkpointing(model):
                with torch.autocast(count.device.type, dtype=torch.bfloat16, enabled=options.bf16):
                    found = loss(micro)
                found.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    return Phase("step", rows, tally.moments, tally.work * parts / made)


# Eval


def evaluation(
    policies: list[Any],
    judges: list[Any],
    rows: int,
    in_all: int,
    lengths: Lengths,
    *,
    gpu: bool,
    count: Count = MemoryCounter,
) -> list[Phase]:
    """Return the phases of an evaluation. `policies` are those in memory at once: SFT and one other."""
    vocabulary = _vocabulary(policies[0])

    def tally() -> MemoryCounter | StepTimer:
        return count([*policies, *judges], vocabulary)

    found = [rollout_phase(policies[0], tally, rows, in_all, lengths, gpu=gpu)]
    rows = min(rows, in_all)
    fake = fake_rollout(rows, lengths, count.device)
    with torch.no_grad(), tally() as scored:
        for judge in judges:
            ModelReward(judge, rows)(fake)
        micro = fake.micro_batch(torch.arange(rows, device=count.device))
        kept = [losses.token_logprobs(forward.response_logits(each, micro), micro.targets, 1.0) for each in policies]
        del kept
    return [*found, Phase("judge", rows, scored.moments, scored.work * in_all / rows)]


def _vocabulary(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


@dataclass(frozen=True)
class Target:
    """Hardware available to each of `processes`."""

    gpu: bool
    memory: int  # bytes
    name: str
    processes: int = 1

    @classmethod
    def of(cls, gib: float | None, processes: int) -> "Target":
        """Return a target of GPUs with `gib` GiB, or this machine; CPU processes share its memory."""
        if gib is not None:
            return cls(True, round(gib * 2**30), f"a GPU of {gib:g} GiB", processes)
        gpu = devices.device().type == "cuda"
        return cls(gpu, devices.memory_bytes() // (1 if gpu else processes), devices.device_name(), processes)

    def computes_in_bf16(self, requested: bool | None) -> bool:
        """Return devices.use_bf16; a planned GPU is assumed to support it."""
        return devices.use_bf16(requested) if not self.gpu else requested is not False

    def usable(self, settings: PPOSettings) -> PPOSettings:
        """Return the settings that this hardware supports."""
        bf16 = self.gpu or devices.supports_dtype("bfloat16")
        return hardware.supported_settings(settings, bf16=bf16, gpu=self.gpu, group=self.processes > 1)
