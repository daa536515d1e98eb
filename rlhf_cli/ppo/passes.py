"""The forward and backward passes of a micro-batch through policy, reference and value model."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.models import forward, packing
from rlhf_cli.ppo import finite, formulas
from rlhf_cli.ppo.losses import Gauges, PolicyLosses, policy_losses, value_losses
from rlhf_cli.ppo.records import MicroBatch, Told
from rlhf_cli.ppo.settings import PPOSettings

# What logits_at_a_time `auto` holds: on a CPU what its cache holds, at least so many tokens that the product is quick.
CELLS_ON_CPU, CELLS, FEWEST = 2**20, 2**27, 64
TOKENS_ON_CPU = 640  # of a micro-batch with micro_batch_tokens `auto`: more are no quicker there, and take memory


def most_tokens(settings: PPOSettings, *, on_cpu: bool) -> int | None:
    """Tokens of a micro-batch at most; none: only its rows bound it."""
    if settings.micro_batch_tokens != "auto":
        return settings.micro_batch_tokens
    return TOKENS_ON_CPU if on_cpu else None


def logits_held(settings: PPOSettings, vocabulary: int, *, on_cpu: bool) -> int | None:
    """Response tokens whose logits are held at a time; none: all of a micro-batch's."""
    held = settings.logits_at_a_time
    if held == "auto":
        return max(FEWEST, (CELLS_ON_CPU if on_cpu else CELLS) // vocabulary)
    return None if held == "all" else held


@dataclass(frozen=True)
class Learned:
    """What is left of a micro-batch when its gradients are taken: no graph."""

    micro: MicroBatch
    loss: Tensor  # (N,)
    gauges: Gauges


@dataclass(frozen=True)
class Made:
    """What a rank's micro-batches of a minibatch came to, beside their gradients."""

    gauges: dict[str, float]  # summed over tokens
    ptx: dict[str, float]
    ratio_error: float
    problem: finite.NotFinite | None  # a loss that is not finite

    @classmethod
    def of(cls, found: list[Learned], ptx: dict[str, float], step: int) -> "Made":
        names = found[0].gauges if found else ()
        sums = {name: float(sum(learned.gauges[name].sum() for learned in found)) for name in names}
        errors = [float((learned.gauges["val/ratio"] - 1).abs().max()) for learned in found]
        return cls(sums, ptx, max(errors, default=0.0), cls._problem(found, step))

    @staticmethod
    def _problem(found: list[Learned], step: int) -> finite.NotFinite | None:
        try:
            for learned in found:
                finite.check_loss(learned.loss, learned.micro, step)
        except finite.NotFinite as problem:
            return problem
        return None


class Passes:
    """`policy` and `ref` are causal models, `value` a one-label sequence classifier or a `reading.ValueHead` on the
    policy. With settings.packing they are made to pack their rows, where all of them can: `packed`.
    """

    def __init__(self, policy: Any, ref: Any, value: Any, settings: PPOSettings):
        self.policy, self.ref, self.value, self.settings = policy, ref, value, settings
        self.head_on_policy = isinstance(value, forward.ValueHead)
        readers = [policy, ref] if self.head_on_policy else [policy, ref, value]
        self.packed = settings.packing and packing.enable(readers)

    def read(self, micro: MicroBatch) -> dict[str, Tensor]:
        """Log-probs of policy and reference, KL and values of the response tokens, (N,) each."""
        with self._autocast():
            hidden = forward.response_hidden_states(self.policy, micro)
            values = forward.response_values(self.value, micro, hidden)
            ref_hidden = forward.response_hidden_states(self.ref, micro)
        parts = [self._read_part(micro.targets, hidden, ref_hidden, part) for part in self.parts(len(hidden))]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} | {"values": values}

    def _read_part(self, ids: Tensor, hidden: Tensor, ref_hidden: Tensor, part: slice) -> dict[str, Tensor]:
        temperature, kind = self.settings.temperature, self.settings.kl_estimator
        with self._autocast():
            logits = forward.lm_head_logits(self.policy, hidden[part])
            ref_logits = forward.lm_head_logits(self.ref, ref_hidden[part])
        logprobs = formulas.token_logprobs(logits, ids[part], temperature)
        ref_logprobs = formulas.token_logprobs(ref_logits, ids[part], temperature)
        if kind == "full":
            kl = formulas.kl_full(logits, ref_logits, temperature)
        else:
            kl = formulas.kl_tokens(logprobs, ref_logprobs, kind)
        return {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "kl": kl}

    def backward(self, told: Told, micro: MicroBatch, kl_coef: float, share: float, *, learn_policy: bool) -> Learned:
        """Add the gradients of the micro-batch's losses, summed over its tokens, times `share`.

        The head's logits are made, and their gradients taken, some tokens at a time; then all that is below the head
        goes back once, with what they left on the hidden states. Without `learn_policy` no gradient goes into the
        policy.
        """
        if not self.head_on_policy:  # before the policy's activations take their memory
            value_loss, gauges = self._backward_value(told, micro, None, share)
        with torch.set_grad_enabled(learn_policy), self._autocast():
            hidden = forward.response_hidden_states(self.policy, micro)
        leaf, ref_hidden = hidden.detach().requires_grad_(learn_policy), self._ref_hidden(micro)
        found = []
        for part in self.parts(len(leaf)):
            with torch.set_grad_enabled(learn_policy):
                losses = self._policy_losses(told[part], leaf[part], ref_hidden[part], kl_coef)
            if learn_policy:
                (losses.loss.sum() * share).backward()
            found.append((losses.loss.detach(), losses.gauges))
        if self.head_on_policy:
            value_loss, gauges = self._backward_value(told, micro, leaf, share)
        if learn_policy:
            hidden.backward(leaf.grad)
        loss = torch.cat([loss for loss, _ in found]) + self.settings.vf_coef * value_loss
        gauges |= {name: torch.cat([part[name] for _, part in found]) for name in found[0][1]}
        return Learned(micro, loss, gauges)

    def _policy_losses(self, told: Told, hidden: Tensor, ref_hidden: Tensor, kl_coef: float) -> PolicyLosses:
        with self._autocast():
            logits = forward.lm_head_logits(self.policy, hidden)
            with torch.no_grad():
                ref_logits = forward.lm_head_logits(self.ref, ref_hidden) if self.exact_kl_in_loss else None
        return policy_losses(told, logits, ref_logits, kl_coef, self.settings)

    def _backward_value(
        self, told: Told, micro: MicroBatch, hidden: Tensor | None, share: float
    ) -> tuple[Tensor, Gauges]:
        with self._autocast():
            values = forward.response_values(self.value, micro, hidden)
        loss, gauges = value_losses(told, values, self.settings)
        (self.settings.vf_coef * loss.sum() * share).backward()
        return loss.detach(), gauges

    @torch.no_grad()
    def _ref_hidden(self, micro: MicroBatch) -> Tensor:
        """The reference's hidden states (N, H) where the loss needs its logits, else (N, 0)."""
        if not self.exact_kl_in_loss:
            return torch.empty(len(micro.targets), 0, device=micro.ids.device)
        with self._autocast():
            return forward.response_hidden_states(self.ref, micro)

    @property
    def exact_kl_in_loss(self) -> bool:
        """Whether an update reads the reference's logits."""
        return self.settings.kl_in == "loss" and self.settings.kl_estimator == "full"

    def backward_ptx(self, micro: MicroBatch, share: float) -> float:
        """Add the gradient of ptx_coef times the negative log-likelihood, summed over the micro-batch's tokens, times
        `share`; returns it without the coefficient.
        """
        with self._autocast():
            hidden = forward.response_hidden_states(self.policy, micro)
        leaf, total = hidden.detach().requires_grad_(), 0.0
        for part in self.parts(len(leaf)):
            with self._autocast():
                logits = forward.lm_head_logits(self.policy, leaf[part])
            loss = -formulas.token_logprobs(logits, micro.targets[part], 1.0).sum() * share
            (self.settings.ptx_coef * loss).backward()
            total += float(loss.detach())
        hidden.backward(leaf.grad)
        return total

    def parts(self, tokens: int) -> list[slice]:
        """Slices of response tokens whose logits are held at a time: settings.logits_at_a_time."""
        vocabulary, on_cpu = self.policy.config.get_text_config().vocab_size, self.policy.device.type == "cpu"
        step = logits_held(self.settings, vocabulary, on_cpu=on_cpu) or tokens
        return [slice(start, start + step) for start in range(0, tokens, step)]

    def adding(self) -> AbstractContextManager:
        """Within, the gradients of embeddings and heads are added in place, but with logits_at_a_time `all`."""
        if self.settings.logits_at_a_time == "all":
            return nullcontext()
        return forward.in_place_embedding_gradients(self.policy, *([] if self.head_on_policy else [self.value]))

    def _autocast(self) -> AbstractContextManager:
        return torch.autocast(self.policy.device.type, dtype=torch.bfloat16, enabled=self.settings.bf16)
