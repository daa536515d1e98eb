"""Peak memory and operations of each phase of a stage, in closed form from the sizes of its models.

The largest phase decides. Rows are as long as the longest: prompts as in the data, responses up to their limit. With
fsdp each of P processes (hybrid: P on a machine) keeps a P-th of weights, gradients and moments, beside what is
gathered: a layer, embeddings and heads, in a rollout of this process the policy.

The shares and copies below make an estimate 0 to 15 % larger than the peaks that were recorded
(tests/planning/test_estimate_recorded.py).
"""

import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.models import forward
from rlhf_cli.planning.model_size import FLOAT32, Lengths, ModelSize
from rlhf_cli.ppo.forward_backward import logits_chunk_size, max_micro_batch_tokens

KINDS = ("weights", "gradients", "optimizer", "cache", "logits", "activations")  # each byte is counted as one of them
SCORING = "judge"  # name of this phase in `rlhf plan`, and in the metric time/judge_s: models read responses

# Copies of a micro-batch's logits (N, V) in float32: logits, log-probs, the terms of the entropy, gradients. Under
# autocast on a GPU there are copies in bfloat16, too.
SFT_COPIES = 4
SAMPLE_COPIES = 2
SCORING_COPIES = 4
UPDATE_COPIES_CPU = 7
UPDATE_COPIES_GPU = 9
FULL_KL_COPIES = 3.25  # more of them if the loss or penalty compares full distributions

# Freed memory that glibc's malloc keeps on a CPU, as a share of the tensors (docs/results/memory.md, chat-model.md):
# half of it after the first steps, all of it after some 25. PPO's phases allocate tensors of different sizes in turn;
# batches of pairs have the widths of their pairs.
FRAGMENTATION = {"sft": 0.24, "reward": 0.69, "dpo": 0.69, "ppo": 0.7, "eval": 0.22}
FIRST_SHARE = 0.5
SHARE_OF_A_STEP = 0.02
TRL_BYTES = 220_000_000  # that TRL and datasets add to torch and transformers
OTHER_BYTES = 40_000_000  # of a run: its rows, its tokenizer, and blocks too small to be given back

Bytes = Mapping[str, float]  # by kind


@dataclass(frozen=True)
class Phase:
    """Memory of a phase at its peak, and its FLOPs per update (PPO), step, or stage if `once`."""

    name: str
    rows: int  # at a time
    bytes: dict[str, int]  # by kind
    flops: float = 0
    once: bool = False

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


def peak(fixed: Bytes, *moments: Bytes) -> dict[str, int]:
    """Return the bytes by kind at the largest of several moments, each beside what is `fixed`."""
    sizes = [{**fixed, **moment} for moment in moments]
    largest = max(sizes, key=lambda size: sum(size.values()))
    return {kind: round(largest[kind]) for kind in KINDS if largest.get(kind)}


def training_moments(model: ModelSize, rows: int, length: int, logits: float = 0) -> list[Bytes]:
    """Return the possible peaks of a forward and backward pass: with the logits, or in a layer's backward pass."""
    kept, most = model.training(rows, length)
    return [{"activations": kept, "logits": logits}, {"activations": most}]


def rollout_phase(policy: ModelSize, fixed: Bytes, rows: int, total: int, lengths: Lengths) -> Phase:
    """Return the phase that generates `total` responses, `rows` at a time: prefill, then one pass per token."""
    rows = max(1, min(rows, total))
    cache = policy.cache * rows * lengths.row
    copies = policy.kept(lengths.prompt).copies
    prefill = {
        "cache": policy.cache * rows * lengths.prompt,
        "activations": copies + policy.reading(rows, lengths.prompt),
    }
    last_token = {
        "cache": cache,
        "activations": copies + cache / (2 * policy.shape.layers),  # a layer's keys are copied
        "logits": SAMPLE_COPIES * FLOAT32 * rows * policy.shape.vocabulary,
    }
    flops = policy.generation_flops(rows, lengths.average) * total / rows
    return Phase("rollout", rows, peak(fixed, prefill, last_token), flops)


@dataclass(frozen=True)
class Overhead:
    """Bytes that a process on a CPU needs beside its tensors."""

    holes: int  # freed memory that malloc keeps
    libraries: int

    @property
    def total(self) -> int:
        return self.holes + self.libraries


def estimate_overhead(stage: str, tensors: int, *, steps: int, gpu: bool, process: int) -> Overhead:
    """Return what a process of a stage needs beside `tensors`, its bytes at the peak; nothing on a GPU.

    `steps`: of the optimizer, or updates of PPO. `process`: bytes of this process before it computes.
    """
    if gpu:
        return Overhead(0, 0)
    grown = 1.0 if stage == "eval" else min(1.0, FIRST_SHARE + SHARE_OF_A_STEP * steps)
    libraries = process + OTHER_BYTES
    if stage in ("sft", "reward", "dpo"):
        libraries += TRL_BYTES
    return Overhead(round(grown * FRAGMENTATION[stage] * tensors), libraries)


# SFT, reward model and DPO


def trl_step(stage: str, model: ModelSize, settings: Any, lengths: Lengths, fixed: Bytes, *, gpu: bool) -> Phase:
    """Return the phase of an optimizer step of SFT, the reward model or DPO.

    `fixed` includes the gradients, which a forward pass has beside it only after an earlier micro-batch. TRL's
    loss makes no logits on a GPU. The two sides of a pair form one batch, which DPO's reference reads, too.
    """
    has_head = stage != "reward"
    rows = settings.per_device_train_batch_size * (1 if stage == "sft" else 2)
    parts = settings.gradient_accumulation_steps
    answers = rows * lengths.response if has_head else 0

    copy = 0 if gpu else FLOAT32 * answers * model.shape.vocabulary
    moments = training_moments(model, rows, lengths.row, (SFT_COPIES + model.shape.softcaps) * copy)
    if parts == 1:
        moments = [{**moment, "gradients": 0} for moment in moments]
    largest_weight = model.shape.vocabulary * model.shape.hidden * FLOAT32
    stepping = 0 if gpu or model.adapters else min(2 * largest_weight, model.gradients)  # on a GPU it is one kernel
    moments.append({"activations": stepping})

    average = lengths.average
    counted = rows * average.response if has_head else 0
    flops = model.training_flops(rows, average.row, counted)
    if stage == "dpo":
        flops += model.forward_flops(rows, average.row, counted)
    return Phase("step", settings.per_device_train_batch_size, peak(fixed, *moments), parts * flops)


# Evaluation


def evaluation_phases(
    policies: list[ModelSize], judges: list[ModelSize], weights: int, rows: int, total: int, lengths: Lengths
) -> list[Phase]:
    """Return the phases of an evaluation. `policies` are those in memory at once: SFT and one other."""
    sft = policies[0]
    vocabulary = sft.shape.vocabulary
    fixed = {"weights": weights}
    rows = max(1, min(rows, total))
    answers = rows * lengths.response
    reading = max(model.reading(rows, lengths.row) for model in (*policies, *judges))
    logits = SAMPLE_COPIES * FLOAT32 * min(answers, forward.logit_chunk_size(vocabulary)) * vocabulary

    width = lengths.average.row
    flops = sum(model.forward_flops(rows, width) for model in judges)
    flops += sum(model.forward_flops(rows, width - 1, answers) for model in policies)
    scoring = peak(fixed, {"activations": reading}, {"logits": logits})
    return [
        rollout_phase(sft, fixed, rows, total, lengths),
        Phase(SCORING, rows, scoring, flops * total / rows),
    ]


# PPO


@dataclass(frozen=True)
class PPOMemory:
    """The models of PPO, and the memory of its phases in an update after the first, per process.

    Without a `value` model the policy may have a value head of `head` numbers. `sharing`: names of value and reward
    models that add only their adapters to the weights of other models. `shards`: processes that share the weights.
    """

    policy: ModelSize
    value: ModelSize | None
    rewards: dict[str, ModelSize]
    settings: PPOSettings
    lengths: Lengths
    gpu: bool
    usable: float  # bytes that the choice of rollout rows may fill
    shards: int = 1
    engine: str = "hf"
    head: int = 0
    sharing: Collection[str] = field(default_factory=tuple)

    @property
    def learning(self) -> list[ModelSize]:
        return [self.policy] if self.value is None else [self.policy, self.value]

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        settings = self.settings
        tokens = max_micro_batch_tokens(settings, on_cpu=not self.gpu) or sys.maxsize
        rows = max(1, min(settings.per_device_train_batch_size, tokens // self.lengths.row))
        return min(rows, settings.episodes_per_update // settings.num_mini_batches)

    @property
    def logits(self) -> int:
        """Bytes of a copy of the logits that are in memory at a time."""
        vocabulary = self.policy.shape.vocabulary
        answers = self.rows * self.lengths.response
        chunk = logits_chunk_size(self.settings, vocabulary, on_cpu=not self.gpu) or answers
        return FLOAT32 * min(chunk, answers) * vocabulary

    # What is in memory through an update

    def weights(self) -> dict[str, int]:
        """Return the bytes that each model adds to those of the others."""
        policy = self.policy
        settings = self.settings
        weights = {"policy": policy.weights, "value": FLOAT32 * self.head, "reference": 0, "average": 0}
        if not policy.adapters:
            shared = policy.shared * policy.shape.itemsize
            in_bf16 = settings.bf16 and not shared and (settings.offload or not settings.fsdp)
            weights["reference"] = policy.full_weights if in_bf16 else policy.weights - shared

        scorers = dict(self.rewards)
        if self.value:
            scorers["value"] = self.value
        for name, model in scorers.items():
            weights[name] = model.gradients if name in self.sharing else model.weights

        if self.engine == "graph" and self.gpu and settings.bf16 and not policy.adapters:
            weights["engine"] = 2 * policy.parameters  # a copy in bfloat16
        if settings.average and not self.gpu:
            weights["average"] = self.average
        return weights

    @property
    def average(self) -> int:
        """Bytes of the policy's average, in float32 in main memory."""
        return FLOAT32 * self.policy.trained if self.settings.average else 0

    @property
    def trained_bytes(self) -> int:
        return sum(model.gradients for model in self.learning) + FLOAT32 * self.head

    @property
    def optimizer(self) -> int:
        eight_bits = self.settings.optim == "adamw_8bit"
        return sum(model.optimizer(eight_bits=eight_bits) for model in self.learning) + 2 * FLOAT32 * self.head

    def fixed(self, phase: str, *read: str) -> Bytes:
        """Return what is in memory: all models, with offload the trained and `read` ones; gradients in the update."""
        weights = self.weights()
        names = {"policy", "value", "engine", "average", *read} if self.settings.offload else set(weights)
        fixed = {
            "weights": sum(size for name, size in weights.items() if name in names),
            "gradients": self.trained_bytes if phase == "update" else 0,
            "optimizer": self.optimizer,
        }
        return self._sharded(phase, fixed) if self.settings.fsdp else fixed

    def _sharded(self, phase: str, fixed: dict[str, int]) -> Bytes:
        """Return what a process keeps with FSDP (models/sharding.py): its shards, and what is gathered."""
        policy = self.policy.shape
        away = 1 - 1 / self.shards
        vocabulary = sum(model.shape.itemsize * model.shape.vocabulary_parts for model in self.learning)
        learnt = vocabulary + sum(model.shape.itemsize * model.shape.decoder for model in self.learning)
        reference = 0 if self.settings.offload else policy.itemsize * policy.decoder

        gathered = vocabulary + policy.itemsize * policy.largest_layer
        in_memory = gathered
        if phase == "rollout" and self.engine != "vllm":
            in_memory = policy.itemsize * (policy.decoder + policy.vocabulary_parts)
        gradients = fixed["gradients"]
        return {
            "weights": fixed["weights"] + in_memory - away * (learnt + reference),
            "gradients": gradients + gathered - away * learnt if gradients else 0,
            "optimizer": fixed["optimizer"] * (1 - away * learnt / self.trained_bytes),
        }

    def largest_fixed(self) -> Bytes:
        """Return what is in memory in the largest phase, beside activations, logits and cache."""
        scoring = [self.fixed(SCORING, name) for name in ("reference", *self.rewards)]
        phases = [self.fixed("rollout"), *scoring, self.fixed("update")]
        return max(phases, key=lambda fixed: sum(fixed.values()))

    # Phases

    def phases(self) -> list[Phase]:
        """Return the phases rollout, scoring and update."""
        others = [self._scoring(), self._update()]
        if self.engine == "vllm":
            return others
        return [self._rollout(self._rows_at_once()), *others]

    def _rows_at_once(self) -> int:
        settings = self.settings
        return settings.local_rollout_forward_batch_size or self.rollout_rows(settings.episodes_per_update)

    def rollout_rows(self, episodes: int) -> int:
        """Return how many of a process's responses are generated at a time by default.

        On a GPU all of them, half, a quarter, and so on, until they fit in `usable` bytes.
        """
        rows = episodes
        while rows > 1 and self.gpu and self._rollout(rows).total > self.usable:
            rows = math.ceil(rows / 2)
        return rows

    def _rollout(self, rows: int) -> Phase:
        return rollout_phase(self.policy, self.fixed("rollout"), rows, self.settings.episodes_per_update, self.lengths)

    def _scoring(self) -> Phase:
        """Score the episodes, then compare policy, reference and value model on micro-batches."""
        settings = self.settings
        policy = self.policy
        lengths = self.lengths
        episodes = settings.episodes_per_update
        at_once = min(settings.local_rollout_forward_batch_size or settings.per_device_train_batch_size, episodes)
        peaks = []
        for name, model in self.rewards.items():
            peaks.append(peak(self.fixed(SCORING, name), {"activations": model.reading(at_once, lengths.row)}))

        answers = self.rows * lengths.response
        width = lengths.row - 1  # a row's last token is not read
        states = 2 * answers * policy.shape.hidden * policy.shape.itemsize
        casts = sum(model.kept(width).copies for model in self.learning)
        reading = states + casts + policy.reading(self.rows, width)
        if policy.compiled:  # it runs the update's function, which keeps what a backward pass needs
            reading = states + policy.training(self.rows, width)[1]
        copies: float = SCORING_COPIES
        if settings.kl_estimator == "full":
            copies += FULL_KL_COPIES
        fixed = self.fixed(SCORING, "reference")
        peaks.append(peak(fixed, {"activations": reading}, {"activations": states, "logits": copies * self.logits}))

        mean = lengths.average.row - 1
        flops = 2 * policy.forward_flops(self.rows, mean, answers)
        if self.value:
            flops += self.value.forward_flops(self.rows, mean)
        flops *= episodes / self.rows
        flops += sum(model.forward_flops(episodes, mean + 1) for model in self.rewards.values())
        largest = max(peaks, key=lambda size: sum(size.values()))
        return Phase(SCORING, self.rows, largest, flops)

    def _update(self) -> Phase:
        """Train the value model, then the policy, on micro-batches, and step."""
        settings = self.settings
        policy = self.policy
        lengths = self.lengths
        compares = settings.exact_kl_in_loss
        answers = self.rows * lengths.response
        width = lengths.row - 1

        copies: float = UPDATE_COPIES_GPU if self.gpu and settings.bf16 else UPDATE_COPIES_CPU
        copies += policy.shape.softcaps
        if compares:
            copies += FULL_KL_COPIES
        moments = training_moments(policy, self.rows, width, copies * self.logits)
        if self.value:
            moments += training_moments(self.value, self.rows, width)
        if self.rows >= settings.episodes_per_update // settings.num_mini_batches:  # no earlier micro-batch
            before = self.value.gradients if self.value else 0  # the value model is trained first
            kept, most = policy.training(self.rows, width)
            moments = [*({**moment, "gradients": before} for moment in moments), {"activations": most - kept}]
        if settings.optim == "adamw_torch" and self.gpu:
            moments.append({"activations": policy.gradients})  # torch's AdamW computes on all weights together

        mean = lengths.average.row - 1
        flops = policy.training_flops(self.rows, mean, answers)
        if compares:
            flops += policy.forward_flops(self.rows, mean, answers)
        if self.value:
            flops += self.value.training_flops(self.rows, mean)
        flops *= settings.num_ppo_epochs * settings.episodes_per_update / self.rows
        fixed = self.fixed("update", "reference") if compares else self.fixed("update")
        return Phase("update", self.rows, peak(fixed, *moments), flops)
