"""Peak memory and operations of each phase of a stage, by the closed form of planning/memory.py.

The largest phase decides. Rows are as long as the longest: prompts as in the data, responses up to their limit. With
fsdp each of P processes (hybrid: P on a machine) keeps a P-th of weights, gradients and moments, beside what is
gathered: a layer, embeddings and heads, in a rollout the policy. On a CPU a process takes more than its tensors, since
glibc's malloc keeps what was freed (docs/scaling.md).
"""

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.config.sections import Adapters, LoRA
from rlhf_cli.models import lora, sharding
from rlhf_cli.planning import memory
from rlhf_cli.planning.memory import WORKING, WORKING_BACKWARD, WORKING_WITH_ADAPTERS, Kept, Lengths
from rlhf_cli.ppo.forward_backward import logits_chunk_size, max_micro_batch_tokens
from rlhf_cli.ppo.optimizer import embedding_weights

KINDS = ("weights", "gradients", "optimizer", "cache", "logits", "activations")  # each byte is counted as one of them
MODES = ("full", "lora", "qlora")  # PPO's adapters share one base
GPU_SHARE = 0.85  # of a GPU's memory that a plan may fill; the rest is for kernels, their caches and errors
DEFAULT_ADAPTERS: LoRA = Adapters(kind="lora")
# Copies of a micro-batch's logits (N, V) in float32: logits, log-probs, the terms of the entropy, gradients.
SFT_COPIES, SAMPLE_COPIES, JUDGE_COPIES, UPDATE_COPIES = 4, 2, 4, 5
FULL_KL_COPIES = 3.25  # more of them if the loss or penalty compares full distributions
RECOMPUTED = 0.75  # of a checkpointed layer's products: all but those of its last matrix
Bytes = Mapping[str, float]  # by kind


@dataclass(frozen=True)
class Phase:
    """Memory of a phase at its possible peaks, and its FLOPs per update (PPO), step, or stage if `once`."""

    name: str
    rows: int  # at a time
    moments: Sequence[Bytes]
    flops: float = 0
    once: bool = False

    @cached_property
    def bytes(self) -> dict[str, int]:
        """Bytes by kind at the peak."""
        peak = max(self.moments, key=lambda moment: sum(moment.values()))
        return {kind: round(peak[kind]) for kind in KINDS if peak.get(kind)}

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass
class StageModel:
    """A model of a stage, without content: its bytes, and what its passes take. `adapters` are added to it."""

    model: Any
    dtype: str  # of the config, and
    attn_implementation: str | None
    bf16: bool = False
    checkpointing: bool = False
    adapters: LoRA | None = None
    four_bits: bool = False
    frozen: bool = False
    parameters: int = field(init=False)
    full_weights: int = field(init=False)  # bytes of its parameters without adapters, in no 4 bits, frozen
    weights: int = field(init=False)  # bytes in memory
    _kept: dict[int, Kept] = field(init=False, default_factory=dict)  # by length

    def __post_init__(self) -> None:
        self.parameters, self.full_weights = self.model.num_parameters(), memory.size_bytes(self.model.parameters())
        if self.bf16:  # as the finished model is read
            self.full_weights -= memory.bytes_saved_by_bf16(self.model, all_weights=True)
        saved = memory.bytes_saved_by_4_bits(self.model) if self.four_bits else 0
        if self.adapters:
            memory.add_adapters(self.model, self.adapters)
        elif self.frozen:
            self.model.requires_grad_(False)
        self.weights = memory.size_bytes([*self.model.parameters(), *self.model.buffers()]) - saved
        if self.bf16 and not self.four_bits:
            self.weights -= memory.bytes_saved_by_bf16(self.model)
        text = self.model.config.get_text_config()
        heads = getattr(text, "num_attention_heads", 0)  # a recurrent model's state does not grow with the tokens
        self.layers, self.vocabulary, self.hidden = text.num_hidden_layers, text.vocab_size, text.hidden_size
        head_size = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
        self.heads_width = heads * head_size
        key_values = (getattr(text, "num_key_value_heads", None) or heads) * head_size
        self.softcaps = getattr(text, "final_logit_softcapping", None) is not None  # one more copy of the logits
        self.cache = 2 * self.layers * key_values * (2 if self.bf16 else self.model.dtype.itemsize)  # bytes of a token

    @property
    def trained(self) -> list[Tensor]:
        """Weights that are trained; of a model with adapters these and its head."""
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    def kept(self, length: int) -> Kept:
        """Return what a forward pass of rows keeps for the backward pass."""
        if length not in self._kept:
            kept = memory.kept_bytes(
                self.model.config, length, dtype=self.dtype, attn_implementation=self.attn_implementation,
                bf16=self.bf16, adapters=self.adapters,
            )  # fmt: skip
            stored = self.four_bits or self.adapters or self.frozen  # in bfloat16, or dequantized again
            self._kept[length] = kept._replace(copies=0) if stored else kept
        return self._kept[length]

    def working(self, rows: int, length: int) -> float:
        """Return the bytes of a pass that keeps nothing."""
        return (WORKING_WITH_ADAPTERS if self.adapters else WORKING) * rows * self.kept(length).layer

    def training_moments(self, rows: int, length: int, logits: float = 0) -> list[Bytes]:
        """Return activations and logits at the possible peaks of a forward and backward pass."""
        kept = self.kept(length)
        layer, stored = rows * kept.layer, rows * kept.row + kept.copies
        backward = stored + WORKING_BACKWARD * layer
        forward = []
        if self.checkpointing:
            stored = rows * kept.inputs
            backward = stored + (1 + WORKING_BACKWARD) * layer
            forward = [{"activations": stored + self.kept(length).copies + self.working(rows, length)}]
        return [{"activations": stored, "logits": logits}, {"activations": backward}, *forward]

    def value_head(self) -> Tensor:
        """Return the weight of a value head on this model."""
        return nn.Linear(self.hidden, 1, bias=False, device="meta", dtype=self.model.dtype).weight

    @cached_property
    def matrices(self) -> tuple[int, int]:
        """Numbers of the backbone's matrices, and of those that are trained."""
        weights = [layer.weight for _, _, layer in lora.linear_layers(self.model)]
        return sum(w.numel() for w in weights), sum(w.numel() for w in weights if w.requires_grad)

    def forward_flops(self, rows: int, length: int, answers: int = 0) -> float:
        """Return the operations of a forward pass, with the logits of `answers` tokens."""
        attention = 4 * self.layers * self.heads_width * length**2
        return rows * (2 * self.matrices[0] * length + attention) + 2 * self.vocabulary * self.hidden * answers

    def training_flops(self, rows: int, length: int, answers: int = 0) -> float:
        """Return the operations of a forward and backward pass; checkpointed layers run their forward pass again.

        Kaplan et al. 2020, section 2.1: 6 for each weight and token, and 14 for attention's products.
        """
        attention = 10 * self.layers * self.heads_width * length**2
        backward = rows * (2 * sum(self.matrices) * length + attention)
        backward += (2 if self.adapters else 4) * self.vocabulary * self.hidden * answers
        forward = self.forward_flops(rows, length, answers)
        return forward + backward + (RECOMPUTED * self.forward_flops(rows, length) if self.checkpointing else 0)

    def generation_flops(self, rows: int, lengths: Lengths) -> float:
        """Return the operations of writing a response to each prompt with a cache."""
        width = lengths.prompt + lengths.response / 2
        attention = 4 * self.layers * self.heads_width * width
        token = 2 * (self.matrices[0] + self.vocabulary * self.hidden) + attention
        return self.forward_flops(rows, lengths.prompt, rows) + rows * (lengths.response - 1) * token


def _add(fixed: Bytes, moments: Iterable[Bytes]) -> list[Bytes]:
    return [{**fixed, **moment} for moment in moments]


def _learning_bytes(trained: list[Tensor], models: Iterable[nn.Module], *, eight_bits: bool) -> Bytes:
    moments = memory.optimizer_bytes(trained, embedding_weights(models), eight_bits=eight_bits)
    return {"gradients": memory.size_bytes(trained), "optimizer": moments}


def _step_bytes(weights: list[Tensor], *, foreach: bool) -> Bytes:
    """Return the working memory of an optimizer step: AdamW of torch computes on all weights, or one at a time."""
    sizes = [weight.nbytes for weight in weights]
    return {"activations": sum(sizes) if foreach else 2 * max(sizes)}


def rollout_phase(policy: StageModel, fixed: Bytes, rows: int, total: int, lengths: Lengths) -> Phase:
    """Return the phase that generates `total` responses, `rows` at a time: prefill, then one pass per token."""
    rows = min(rows, total)
    cache = policy.cache * rows * lengths.row
    logits = SAMPLE_COPIES * 4 * rows * policy.vocabulary
    reading, writing = policy.working(rows, lengths.prompt), cache / (2 * policy.layers)  # a layer's keys are copied
    copies = policy.kept(lengths.prompt).copies
    moments = [
        {"cache": policy.cache * rows * lengths.prompt, "activations": copies + reading},
        {"cache": cache, "activations": copies + writing, "logits": logits},
    ]
    flops = policy.generation_flops(rows, lengths.average) * total / rows
    return Phase("rollout", rows, _add(fixed, moments), flops)


def trl_fixed(model: StageModel, *, eight_bits: bool, zero_stage: int = 0, processes: int = 1) -> dict[str, float]:
    """Return what a model that TRL trains takes in memory; ZeRO of DeepSpeed shards one kind more with each stage."""
    fixed = {"weights": model.weights, **_learning_bytes(model.trained, [model.model], eight_bits=eight_bits)}
    sharded = ("optimizer", "gradients", "weights")[:zero_stage]
    return {kind: size / (processes if kind in sharded else 1) for kind, size in fixed.items()}


def trl_phases(name: str, model: StageModel, settings: Any, lengths: Lengths, fixed: Bytes, gpu: bool) -> list[Phase]:
    """Return the phases of SFT, the reward model or DPO: an optimizer step, and with qlora reading the full model.

    `fixed` is from `trl_fixed`. TRL's loss makes no logits on a GPU. The two sides of a pair form one batch, which
    DPO's reference reads, too.
    """
    has_head = name != "reward"
    rows = settings.per_device_train_batch_size * (1 if name == "sft" else 2)
    parts, answers = settings.gradient_accumulation_steps, rows * lengths.response if has_head else 0
    copy = 0 if gpu else 4 * answers * model.vocabulary
    logits = (SFT_COPIES + model.softcaps) * copy
    trained = model.trained
    moments = model.training_moments(rows, lengths.row, logits)
    head = model.model.get_output_embeddings() if has_head else None
    if copy and head is not None and head.weight.requires_grad:  # its gradient, while those of the logits are there
        moments.append({"activations": moments[0]["activations"] + head.weight.nbytes, "logits": logits - copy})
    gradients = fixed["gradients"] if parts > 1 else 0  # of the micro-batches before
    within = [{**moment, "gradients": gradients} for moment in moments]
    average = lengths.average
    read: Any = rows, average.row, rows * average.response if has_head else 0
    flops = parts * (model.training_flops(*read) + (model.forward_flops(*read) if name == "dpo" else 0))
    moments = _add(fixed, [*within, {} if gpu else _step_bytes(trained, foreach=False)])  # fused on a GPU
    phases = [Phase("step", settings.per_device_train_batch_size, moments, flops)]
    if model.four_bits:  # the finished model is read in full, to be measured
        phases.append(Phase("read again", 0, [{"weights": model.full_weights}]))
    return phases


@dataclass
class PPOModels:
    """Models of a PPO run; without a `value` model the policy may have a value head, whose weight is `head`.

    `sharing`: names of value and reward models that add only their adapters to the weights of other models.
    """

    policy: StageModel
    value: StageModel | None
    rewards: dict[str, StageModel]
    mode: str
    sharing: Collection[str] = ()
    head: Tensor | None = None

    @property
    def learning(self) -> list[StageModel]:
        return [self.policy] if self.value is None else [self.policy, self.value]

    @property
    def trained(self) -> list[Tensor]:
        head = [] if self.head is None else [self.head]
        return [weight for model in self.learning for weight in model.trained] + head

    def share_layers(self, count: int) -> int:
        """Freeze the layers that policy and reference share; return the bytes that the reference saves."""
        if not count:
            return 0
        model = self.policy.model
        modules: list[nn.Module] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        modules += sharding.decoder_layers(model)[:count]
        shared = [weight for module in modules for weight in module.parameters()]
        for weight in shared:
            weight.requires_grad_(False)
        return memory.size_bytes(shared) if self.mode == "full" else 0

    def weights(self, *, bf16_reference: bool) -> dict[str, int]:
        """Return the bytes of weights that each model adds to those of the others."""
        weights = {"policy": self.policy.weights, "value": 0 if self.head is None else self.head.nbytes, "reference": 0}
        if self.mode == "full":
            saved = 2 * self.policy.matrices[0] if bf16_reference and self.policy.model.dtype == torch.float32 else 0
            weights["reference"] = self.policy.weights - saved
        for name, model in (self.rewards | ({"value": self.value} if self.value else {})).items():
            weights[name] = memory.size_bytes(model.trained) if name in self.sharing else model.weights
        return weights


class PPOPlan:
    """The phases of an update after the first, per process, each with `memory` bytes."""

    def __init__(
        self,
        models: PPOModels,
        settings: PPOSettings,
        lengths: Lengths,
        *,
        gpu: bool,
        memory: int,
        processes: int,
        engine: str = "hf",
    ):
        self.models, self.settings, self.lengths, self.gpu, self.memory = models, settings, lengths, gpu, memory
        self.engine = engine
        self.policy, self.episodes, self.processes = models.policy, settings.episodes_per_update, processes
        self.width = lengths.row - 1  # a row's last token is not read
        self.mean_width = lengths.average.row - 1
        tokens = max_micro_batch_tokens(settings, on_cpu=not gpu) or sys.maxsize
        rows = max(1, min(settings.per_device_train_batch_size, tokens // lengths.row))
        self.rows = min(rows, self.episodes // settings.num_mini_batches)
        self.answers = self.rows * lengths.response
        chunk = min(self.answers, logits_chunk_size(settings, self.policy.vocabulary, on_cpu=not gpu) or self.answers)
        self.logits = 4 * chunk * self.policy.vocabulary  # bytes of a copy
        self.shared = models.share_layers(settings.num_shared_layers or 0)
        in_bf16 = bool(settings.bf16) and not settings.num_shared_layers and (settings.offload or not settings.fsdp)
        self.weights, self.trained = models.weights(bf16_reference=in_bf16), models.trained
        if engine == "graph" and gpu and settings.bf16 and models.mode == "full":
            self.weights["engine"] = 2 * self.policy.parameters  # a copy in bfloat16
        self.average = 4 * sum(weight.numel() for weight in models.policy.trained) if settings.average else 0
        if not gpu:
            self.weights["average"] = self.average  # in float32 in main memory
        learning = [model.model for model in models.learning]
        self.learning = _learning_bytes(self.trained, learning, eight_bits=settings.optim == "adamw_8bit")

    def phases(self) -> list[Phase]:
        """Return the phases rollout, judge and update."""
        at_once = self.settings.local_rollout_forward_batch_size or self.rollout_rows(self.episodes)
        rollout = [] if self.engine == "vllm" else [self._rollout(at_once)]
        return [*rollout, *map(self._sharded, (self._judge(), self._update()))]

    def rollout_rows(self, episodes: int) -> int:
        """Return how many of a process's responses are generated at a time by default.

        On a GPU all of them, half, a quarter, and so on, until they fit in GPU_SHARE of its memory.
        """
        rows = episodes
        while rows > 1 and self.gpu and self._rollout(rows).total > GPU_SHARE * self.memory:
            rows = -(-rows // 2)
        return rows

    def _rollout(self, rows: int) -> Phase:
        return self._sharded(rollout_phase(self.policy, self._fixed(), rows, self.episodes, self.lengths))

    def _sharded(self, phase: Phase) -> Phase:
        return replace(phase, moments=[self._shard(phase.name, moment) for moment in phase.moments])

    def fixed(self) -> Bytes:
        """Return what is in memory in the largest phase beside activations, logits and cache."""
        reads = [("rollout",), ("judge", "reference"), *(("judge", name) for name in self.models.rewards), ("update",)]
        kinds = [self._shard(name, self._fixed(*read, training=name == "update")) for name, *read in reads]
        return max(kinds, key=lambda each: sum(each.values()))

    def _fixed(self, *read: str, training: bool = False) -> Bytes:
        """Return what is in memory: all models, with offload the trained and `read` ones; gradients if `training`."""
        names = {"policy", "value", "engine", *read} & self.weights.keys() if self.settings.offload else self.weights
        reference_shares = self.shared if "reference" in names else 0
        learning = {**self.learning, "gradients": self.learning["gradients"] * training}
        return {"weights": sum(self.weights[name] for name in names) - reference_shares, **learning}

    def _judge(self) -> Phase:
        """Score the episodes, then compare policy, reference and value model on micro-batches."""
        settings, policy, models = self.settings, self.policy, self.models
        at_once = min(settings.local_rollout_forward_batch_size or settings.per_device_train_batch_size, self.episodes)
        moments, flops = list[Bytes](), 2 * policy.forward_flops(self.rows, self.mean_width, self.answers)
        flops += sum(model.forward_flops(self.rows, self.mean_width) for model in models.learning[1:])
        flops *= self.episodes / self.rows
        for name, model in models.rewards.items():
            moments += _add(self._fixed(name), [{"activations": model.working(at_once, self.lengths.row)}])
            flops += model.forward_flops(self.episodes, self.mean_width + 1)
        copies = JUDGE_COPIES + FULL_KL_COPIES * (settings.kl_estimator == "full")
        states = 2 * self.answers * policy.hidden * policy.model.dtype.itemsize
        cast = sum(model.kept(self.width).copies for model in models.learning)
        reading = {"activations": states + cast + policy.working(self.rows, self.width)}
        moments += _add(self._fixed("reference"), [reading, {"activations": states, "logits": copies * self.logits}])
        return Phase("judge", self.rows, moments, flops)

    def _update(self) -> Phase:
        """Train the value model, then the policy, on micro-batches, and step."""
        settings, policy, models = self.settings, self.policy, self.models
        compares = settings.kl_in == "loss" and settings.kl_estimator == "full"  # policy and reference
        copies = UPDATE_COPIES + policy.softcaps + FULL_KL_COPIES * compares
        moments = policy.training_moments(self.rows, self.width, copies * self.logits)
        flops = policy.training_flops(self.rows, self.mean_width, self.answers)
        flops += policy.forward_flops(self.rows, self.mean_width, self.answers) * compares
        if settings.num_shared_layers:  # frozen layers keep nothing
            part = 1 - settings.num_shared_layers / policy.layers
            moments = [{**moment, "activations": part * moment["activations"]} for moment in moments]
        for model in models.learning[1:]:
            moments += model.training_moments(self.rows, self.width)
            flops += model.training_flops(self.rows, self.mean_width)
        if settings.optim == "adamw_torch":
            moments.append(_step_bytes(policy.trained if self.gpu else self.trained, foreach=self.gpu))
        flops *= settings.num_ppo_epochs * self.episodes / self.rows
        return Phase("update", self.rows, _add(self._fixed(*["reference"] * compares, training=True), moments), flops)

    def _shard(self, phase: str, moment: Bytes) -> Bytes:
        """Return a moment of a phase with FSDP-sharded policy, value model and reference (models/sharding.py), if set.

        Each process keeps its shards and what is gathered: a layer, embeddings and heads, and in a rollout the policy.
        """
        if not self.settings.fsdp:
            return moment
        policy, learning = self.policy.model, [model.model for model in self.models.learning]
        gone = 1 - 1 / self.processes
        learnt = sum(memory.layer_bytes(model) + memory.vocabulary_bytes(model) for model in learning)
        reference = 0 if self.settings.offload else memory.layer_bytes(policy)
        layer = max(memory.size_bytes(layer.parameters()) for layer in sharding.decoder_layers(policy))
        gathered = sum(map(memory.vocabulary_bytes, learning)) + layer
        added = memory.layer_bytes(policy) + memory.vocabulary_bytes(policy) if phase == "rollout" else gathered
        gradients = gathered - gone * learnt if phase == "update" else 0
        return {
            **moment,
            "weights": moment["weights"] + added - gone * (learnt + reference),
            "gradients": moment["gradients"] + gradients,
            "optimizer": moment["optimizer"] * (1 - gone * learnt / memory.size_bytes(self.trained)),
        }
