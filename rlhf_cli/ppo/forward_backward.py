"""Forward and backward passes of a micro-batch through the policy, reference and value models.

Shapes: N response tokens of a micro-batch, V vocabulary, H hidden size.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.models import compiled, devices, forward, packing
from rlhf_cli.models.batch import MicroBatch, slices
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup
from rlhf_cli.ppo import losses, monitor
from rlhf_cli.ppo.experience import Stats, TokenBatch
from rlhf_cli.ppo.fused_logprobs import fused_logprobs_and_entropy

MAX_LOGITS_CPU = 2**20  # logits_at_a_time `auto`: on a CPU the logits of a chunk fit its cache
AUTO_MICRO_BATCH_TOKENS_CPU = 640  # micro_batch_tokens `auto`: more are no faster on a CPU and take memory

TokenMetrics = dict[str, Tensor]  # metric -> its value at each token, (N,), detached


def max_micro_batch_tokens(settings: PPOSettings, *, on_cpu: bool) -> int | None:
    """Return the token limit of a micro-batch; None if only its rows limit it."""
    if settings.micro_batch_tokens != "auto":
        return settings.micro_batch_tokens
    return AUTO_MICRO_BATCH_TOKENS_CPU if on_cpu else None


def logits_chunk_size(settings: PPOSettings, vocab_size: int, *, on_cpu: bool) -> int | None:
    """Return the number of response tokens whose logits are in memory at once; None for all of a micro-batch."""
    size = settings.logits_at_a_time
    if size == "auto":
        return forward.logit_chunk_size(vocab_size, MAX_LOGITS_CPU if on_cpu else None)
    return None if size == "all" else size


def logprobs_and_entropy(logits: Tensor, ids: Tensor, settings: PPOSettings) -> tuple[Tensor, Tensor]:
    """Return the log-probs of `ids` (N,) and the entropies (N,) of logits (N, V); an entropy in no loss is detached."""
    log_probs = losses.log_probs(logits, settings.temperature)
    has_gradient = settings.entropy_coef > 0 and torch.is_grad_enabled()
    with torch.set_grad_enabled(has_gradient):
        entropy = losses.entropy(log_probs)
    return losses.gather_logprobs(log_probs, ids), entropy


def policy_loss_and_metrics(
    tokens: TokenBatch,
    logits: Tensor,
    ref_logits: Tensor | None,
    kl_loss_coef: float,
    settings: PPOSettings,
    *,
    fused: bool = False,
) -> tuple[Tensor, TokenMetrics]:
    """Return the policy's loss (N,), with gradient, and metrics from its logits (N, V).

    loss = weight * surrogate - entropy_coef * entropy, plus kl_loss_coef * KL unless kl_in is reward. The weights are
    those of rollout_correction. `ref_logits` (N, V): for kl_estimator full. `fused`: log-probs by
    `fused_logprobs_and_entropy`.
    """
    if fused:
        logprobs, entropy = fused_logprobs_and_entropy(logits, tokens.ids, settings.temperature)
    else:
        logprobs, entropy = logprobs_and_entropy(logits, tokens.ids, settings)

    surrogate, ratio, clipped = losses.policy_loss(
        logprobs,
        tokens.logprobs,
        tokens.advantages,
        cliprange=settings.cliprange,
        cliprange_high=settings.cliprange_high,
        dual_clip=settings.dual_clip,
    )
    if tokens.weights is not None:
        surrogate = surrogate * tokens.weights
    loss = surrogate
    if settings.entropy_coef:
        loss = loss - settings.entropy_coef * entropy

    if settings.kl_in_loss:
        if ref_logits is not None:
            kl = losses.exact_kl(logits, ref_logits, settings.temperature)
        else:
            kl = losses.token_kl_loss(logprobs, tokens.logprobs, tokens.ref_logprobs, settings.kl_estimator)
        loss = loss + kl_loss_coef * kl

    metrics = {
        "loss/policy_avg": surrogate,
        "policy/clipfrac_avg": clipped.float(),
        "policy/entropy_avg": entropy,
        "policy/approxkl_avg": losses.approx_kl(logprobs, tokens.logprobs),  # k2 of the old policy and this one
        "policy/policykl": tokens.logprobs - logprobs,  # k1
        "val/ratio": ratio,
    }
    return loss, {name: metric.detach() for name, metric in metrics.items()}


def value_loss_and_metrics(tokens: TokenBatch, values: Tensor, settings: PPOSettings) -> tuple[Tensor, TokenMetrics]:
    """Return the loss (N,), with gradient, and the metrics of the value model's `values` (N,)."""
    assert tokens.values is not None and tokens.returns is not None
    loss, clipped = losses.value_loss(values, tokens.values, tokens.returns, settings.cliprange_value)
    return loss, {"loss/value_avg": loss.detach(), "val/clipfrac_avg": clipped.float()}


@dataclass(frozen=True)
class MicroBatchResult:
    """Detached loss and metrics of a micro-batch after backward()."""

    micro_batch: MicroBatch
    loss: Tensor  # (N,)
    metrics: TokenMetrics


@dataclass(frozen=True)
class MinibatchStats:
    """Metrics that one rank accumulated over its micro-batches of a minibatch."""

    token_sums: Stats  # metric -> sum over the response tokens
    ptx: Stats  # this rank's part of a mean: the sum over the ranks is the metric
    max_ratio_error: float  # max |ratio - 1| over the response tokens
    error: monitor.NonFiniteError | None  # of a loss that is not finite

    @classmethod
    def from_results(cls, results: list[MicroBatchResult], ptx: Stats, step: int) -> "MinibatchStats":
        """Sum the metrics of the micro-batches of update `step`."""
        sums: Stats = {}
        for name in results[0].metrics if results else ():
            total = sum(result.metrics[name].sum() for result in results)
            sums[name] = float(total)

        max_ratio_error = 0.0
        error = None
        for result in results:
            ratio_errors = (result.metrics["val/ratio"] - 1).abs()
            max_ratio_error = max(max_ratio_error, float(ratio_errors.max()))
            error = error or monitor.non_finite_loss(result.loss, result.micro_batch, step)
        return cls(sums, ptx, max_ratio_error, error)


@dataclass(frozen=True)
class StepResult:
    """Metrics of an optimizer step, means over the tokens of all ranks."""

    metrics: Stats
    max_ratio_error: float
    skipped: bool  # by ratio_threshold: no step was taken


def sum_metrics(parts: Iterable[Stats]) -> Stats:
    """Return the sums by name; a part may lack names."""
    sums: Stats = {}
    for part in parts:
        for name, number in part.items():
            sums[name] = sums.get(name, 0.0) + number
    return sums


def mean_over_steps(steps: list[StepResult]) -> Stats:
    """Return the means over optimizer steps, without those skipped (unless all were), and what else they show."""
    taken = [step.metrics for step in steps if not step.skipped]
    counted = taken or [step.metrics for step in steps]

    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(counted)

    stats = {name: mean(step[name] for step in counted) for name in counted[0]}
    mean_ratio = stats["val/ratio"]
    stats["val/ratio_var"] = mean((step["val/ratio"] - mean_ratio) ** 2 for step in counted)

    if not taken:
        stats["policy/grad_norm"] = 0.0
        if "loss/value_avg" in stats:
            stats["value/grad_norm"] = 0.0
    stats["policy/skipped_minibatches"] = float(len(steps) - len(taken))
    stats["policy/first_ratio_error"] = steps[0].max_ratio_error
    return stats


class ModelRunner:
    """Runs the policy, reference and value models on micro-batches.

    `policy` and `ref` are causal models, `value` a one-label sequence classifier, a `forward.ValueHead` on the policy,
    or None. The constructor enables packing, as set, if all models support it (`packed`): it tries them on the main
    process of `loading`, the only one that has weights yet.
    """

    def __init__(
        self,
        policy: Any,
        ref: Any,
        value: Any,
        settings: PPOSettings,
        loading: ProcessGroup = SINGLE_PROCESS,
    ):
        self.policy = policy
        self.ref = ref
        self.value = value
        self.settings = settings
        self.has_value_head = isinstance(value, forward.ValueHead)
        self.has_value_model = value is not None and not self.has_value_head  # a separate one
        self.trained_backbones = [policy, value] if self.has_value_model else [policy]
        self.output_names = ["logprobs", "ref_logprobs", "kl"]  # of `forward`
        if value is not None:
            self.output_names.append("values")
        self.packed = settings.packing and packing.enable([*self.trained_backbones, ref], loading)

    @property
    def compiled(self) -> bool:
        """True if the policy's layers and the log-probs run compiled."""
        return compiled.is_enabled(self.policy)

    def forward(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """Return logprobs, ref_logprobs, kl and any values of the response tokens, (N,) each."""
        values = {}
        with self._autocast():
            # Compiled, only the function that the update runs, with gradients, gives ratios of exactly 1.
            with torch.set_grad_enabled(self.compiled):
                hidden = forward.response_hidden_states(self.policy, micro_batch).detach()
            if self.value is not None:
                values["values"] = forward.response_values(self.value, micro_batch, hidden)
            ref_hidden = forward.response_hidden_states(self.ref, micro_batch)

        chunks = []
        for part in self.logit_chunks(len(hidden)):
            ids = micro_batch.response_ids[part]
            chunks.append(self._forward_chunk(ids, hidden[part], ref_hidden[part]))
        return {**_concat(chunks), **values}

    def _forward_chunk(self, ids: Tensor, hidden: Tensor, ref_hidden: Tensor) -> dict[str, Tensor]:
        """Return logprobs, ref_logprobs and kl of some tokens (n,) from the hidden states (n, H)."""
        with self._autocast():
            logits = forward.lm_head_logits(self.policy, hidden)
            ref_logits = forward.lm_head_logits(self.ref, ref_hidden)

        logprobs = self._token_logprobs(logits, ids)
        ref_logprobs = self._token_logprobs(ref_logits, ids)
        if self.settings.kl_estimator == "full":
            kl = losses.exact_kl(logits, ref_logits, self.settings.temperature)
        else:
            kl = losses.token_kl(logprobs, ref_logprobs, self.settings.kl_estimator)
        return {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "kl": kl}

    def _token_logprobs(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the log-probs of `ids` (n,), by the function that the update runs."""
        if not self.compiled:
            return losses.token_logprobs(logits, ids, self.settings.temperature)
        logprobs, _ = fused_logprobs_and_entropy(logits, ids, self.settings.temperature)
        return logprobs

    def backward(
        self,
        tokens: TokenBatch,
        micro_batch: MicroBatch,
        kl_loss_coef: float,
        scale: float,
        *,
        train_policy: bool,
    ) -> MicroBatchResult:
        """Add the gradients of `scale` times the losses, summed over the micro-batch's tokens.

        Logits and their gradients are computed in chunks of tokens. The backbone's backward pass runs once, on the
        accumulated gradient of the hidden states. Without `train_policy` the policy gets no gradient.
        """
        value_loss: Tensor | float = 0.0
        value_metrics: TokenMetrics = {}
        if self.has_value_model:  # before the policy's activations take their memory
            value_loss, value_metrics = self._backward_value(tokens, micro_batch, None, scale)

        with torch.set_grad_enabled(train_policy or self.compiled), self._autocast():
            hidden = forward.response_hidden_states(self.policy, micro_batch)
        leaf = hidden.detach().requires_grad_(train_policy)  # collects the gradients of the chunks
        ref_hidden = None
        if self.settings.exact_kl_in_loss:
            with torch.no_grad(), self._autocast():
                ref_hidden = forward.response_hidden_states(self.ref, micro_batch)

        chunk_losses = []
        chunk_metrics = []
        for part in self.logit_chunks(len(leaf)):
            ref_part = None if ref_hidden is None else ref_hidden[part]
            with torch.set_grad_enabled(train_policy):
                loss, metrics = self._policy_loss_of_chunk(tokens[part], leaf[part], ref_part, kl_loss_coef)
            if train_policy:
                (loss.sum() * scale).backward()
            chunk_losses.append(loss.detach())
            chunk_metrics.append(metrics)

        if self.has_value_head:
            value_loss, value_metrics = self._backward_value(tokens, micro_batch, leaf, scale)
        if train_policy:
            hidden.backward(leaf.grad)

        loss = torch.cat(chunk_losses) + self.settings.vf_coef * value_loss
        return MicroBatchResult(micro_batch, loss, {**value_metrics, **_concat(chunk_metrics)})

    def _policy_loss_of_chunk(
        self,
        tokens: TokenBatch,
        hidden: Tensor,
        ref_hidden: Tensor | None,
        kl_loss_coef: float,
    ) -> tuple[Tensor, TokenMetrics]:
        """Return the policy's loss and metrics, (n,) each, from the hidden states (n, H) of some tokens."""
        with self._autocast():
            logits = forward.lm_head_logits(self.policy, hidden)
        ref_logits = None
        if ref_hidden is not None:
            with torch.no_grad(), self._autocast():
                ref_logits = forward.lm_head_logits(self.ref, ref_hidden)
        return policy_loss_and_metrics(tokens, logits, ref_logits, kl_loss_coef, self.settings, fused=self.compiled)

    def _backward_value(
        self,
        tokens: TokenBatch,
        micro_batch: MicroBatch,
        hidden: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, TokenMetrics]:
        """Add the gradients of the value loss; return the loss and its metrics. `hidden`: the policy's, for a head."""
        with self._autocast():
            values = forward.response_values(self.value, micro_batch, hidden)
        loss, metrics = value_loss_and_metrics(tokens, values, self.settings)
        scaled = self.settings.vf_coef * loss.sum() * scale
        scaled.backward()
        return loss.detach(), metrics

    def backward_ptx(self, micro_batch: MicroBatch, scale: float) -> float:
        """Add the gradient of ptx_coef times the loss; return the loss.

        The loss is `scale` times the negative log-likelihood, summed over the micro-batch's tokens.
        """
        with self._autocast():
            hidden = forward.response_hidden_states(self.policy, micro_batch)
        leaf = hidden.detach().requires_grad_()

        total = 0.0
        for part in self.logit_chunks(len(leaf)):
            with self._autocast():
                logits = forward.lm_head_logits(self.policy, leaf[part])
            logprobs = losses.token_logprobs(logits, micro_batch.response_ids[part], temperature=1.0)
            loss = -logprobs.sum() * scale
            (self.settings.ptx_coef * loss).backward()
            total += float(loss.detach())
        hidden.backward(leaf.grad)
        return total

    def logit_chunks(self, num_tokens: int) -> list[slice]:
        """Return slices of the response tokens whose logits are computed together (settings.logits_at_a_time)."""
        vocab_size = self.policy.config.get_text_config().vocab_size
        on_cpu = self.policy.device.type == "cpu"
        size = logits_chunk_size(self.settings, vocab_size, on_cpu=on_cpu) or num_tokens
        return slices(num_tokens, size)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Context manager of `forward`: compiled layers, and checkpoints where the policy runs as in training."""
        models = self.trained_backbones if self.compiled else []
        with self.compiled_layers(), forward.gradient_checkpointing(*models):
            yield

    def compiled_layers(self) -> AbstractContextManager[None]:
        """Context manager in which the layers of the models that `models.compiled` was enabled for run compiled."""
        return compiled.compiled_layers(*self.trained_backbones, self.ref)

    def accumulate_in_place(self) -> AbstractContextManager[None]:
        """Context manager that adds gradients of embeddings and heads in place, unless logits_at_a_time is `all`."""
        if self.settings.logits_at_a_time == "all":
            return nullcontext()
        return forward.in_place_embedding_gradients(*self.trained_backbones)

    def _autocast(self) -> torch.autocast:
        return devices.autocast(bf16=self.settings.bf16, on=self.policy.device)


def _concat(chunks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of consecutive chunks of tokens as one, by name."""
    return {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
