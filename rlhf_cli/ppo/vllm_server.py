"""A vLLM server that draws from the policy. It is proven after each sync that it has the policy's weights."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlhf_cli.errors import RLHFError
from rlhf_cli.models import devices, forward, sharding
from rlhf_cli.models.batch import Prompts, Rollout, StopTokenId, right_pad, stop_ids
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup
from rlhf_cli.ppo.vllm_client import ServerLostError, VLLMClient

NOISE_FACTOR = 4.0  # a gap of so many times that of the reference's weights is no rounding
MIN_GAP_LIMIT = 1e-4  # nats: two float32 implementations agree to 1e-5
MAX_STANDARD_ERRORS = 5.0
MAX_ATTEMPTS = 5  # of what a server does that is lost in between
T = TypeVar("T")
Weights = tuple[str, Path]  # version and folder


@dataclass(frozen=True)
class Drawn:
    """A response to a prompt of the probe, with numbers of each token, (n,) float32."""

    tokens: Tensor  # (n,) int64
    theirs: Tensor  # log-prob by the server
    logprobs: Tensor  # by the trainer
    surprise: Tensor  # by the trainer: -log p - entropy
    variance: Tensor  # by the trainer: of log p


@dataclass
class SentPolicy:
    """The policy that all servers of an engine should have, how it is drawn from, and what proves that they have it."""

    ref: Any
    probe: Prompts
    stop_token_id: StopTokenId
    pad_token_id: int
    temperature: float  # of the probe: other responses may be drawn at another one
    bf16: bool
    max_gap: float  # nats per token: ppo.max_logprob_gap
    process_group: ProcessGroup = SINGLE_PROCESS  # rank 0 alone talks to the servers
    names: Sequence[str] = ()  # of the policies, by the number of their sync; those of PPO are steps
    model: Any = None  # of the last sync
    update: int = 0
    weights: Weights | None = None  # None: what the servers were started with
    computing: Lock = field(default_factory=Lock)  # held while the models compute: servers are checked in turn

    def read(self, rollout: Rollout, *, by_reference: bool) -> list[Drawn]:
        """Return what a server drew with the log-probs by the policy, or the reference. Rank 0 calls it."""
        asked = (rollout, by_reference)
        with self.computing:
            self.process_group.ask_to_join(asked)
            return self.join(asked)

    def join(self, asked: tuple[Rollout, bool]) -> list[Drawn]:
        """Do what `read` does. All ranks take part, because each may have a shard of the model."""
        rollout, by_reference = asked
        model = self.ref if by_reference else self.model
        rollout = rollout.to(model.device)
        with sharding.gathered_embeddings(model, self.process_group.all_reduce):
            drawn = []
            for row in range(len(rollout)):
                drawn.append(self._read_row(model, rollout, row))
        return drawn

    def _read_row(self, model: Any, rollout: Rollout, row: int) -> Drawn:
        """Return a row's response with its log-probs by the server and by `model`, on the CPU."""
        assert rollout.logprobs is not None
        rows = torch.tensor([row], device=rollout.ids.device)
        micro_batch = rollout.micro_batch(rows)
        theirs = rollout.logprobs[micro_batch.response_index]
        with torch.no_grad(), devices.autocast(bf16=self.bf16, on=model.device):
            logits = forward.response_logits(model, micro_batch)  # (N, V)

        scaled = logits.float() / self.temperature
        log_p = scaled.log_softmax(-1)
        logprobs = log_p.gather(1, micro_batch.response_ids[:, None])[:, 0]

        p = log_p.exp()
        entropy = -(p * log_p).sum(-1)
        mean_square = (p * log_p.square()).sum(-1)
        variance = mean_square - entropy.square()
        surprise = -logprobs - entropy

        numbers = torch.stack([theirs, logprobs, surprise, variance])
        return Drawn(micro_batch.response_ids.cpu(), *numbers.cpu())


@dataclass
class VLLMServer:
    """A server that gets the policy's weights, adapters or a folder of all, and draws from them.

    After every sync it draws responses to the probe's prompts, with fixed seeds, and the trainer computes their
    log-probs. Old weights, a head left behind, another tokenizer, a stale prefix cache or a filter on the draws are an
    error (R19) before anything is trained on them. If it is lost, it is waited for, gets the weights again, and repeats
    the rollout with the same seeds.
    """

    client: VLLMClient
    policy: SentPolicy
    max_wait: float  # seconds
    longest_row: int  # tokens
    report: Callable[[str], None]  # tells the user
    stage: str = "ppo"  # for messages
    served: str = ""  # name of the model that has the policy's weights; "" before a sync
    noise: float | None = None  # gap of the reference's weights, in nats per token
    before: list[Drawn] = field(default_factory=list)  # of the check before

    def generate(self, prompts: Prompts, temperature: float) -> Rollout:
        """Draw a response to each prompt."""

        def draw() -> Rollout:
            if not self.served:
                self._load()
            rollout = self._draw(self.served, prompts, temperature)
            if self.policy.weights:
                self.client.require_version(self.policy.weights[0])
            return rollout

        return self._retry(draw)

    def sync(self, reference: Weights | None) -> None:
        """Load the policy's written weights, and check that the server has them; at first the reference's."""
        if self.noise is None:
            self._retry(lambda: self._start(reference))
        self.served = ""
        self._retry(self._load)

    def sleep(self) -> None:
        """Let the server sleep."""
        self._retry(self.client.sleep)

    def _retry(self, action: Callable[[], T]) -> T:
        """Return what `action` returns. If the server is lost, wait for it and repeat. Raises RLHFError R20."""
        for _ in range(MAX_ATTEMPTS):
            try:
                return action()
            except ServerLostError as error:
                problem = str(error)
                self.served = ""
                waits = f"{self.stage} waits up to {self.max_wait:.0f} s, and sends the weights again"
                self.report(f"the server at {self.client.url} {problem}; {waits}")
                self._connect()
        raise self.client.error(f"{problem} ({MAX_ATTEMPTS} attempts)")

    def _connect(self) -> None:
        """Wait for the server, and read what it serves."""
        self.client.wait(self.max_wait)
        self.client.read_models(self.longest_row)

    def _start(self, reference: Weights | None) -> None:
        """Measure how far the server's log-probs are from the trainer's for the weights of the reference."""
        self._connect()
        self.noise = self._check(self._send(reference), self.policy.max_gap)

    def _load(self) -> None:
        """Load the policy's weights and check them."""
        assert self.noise is not None
        served = self._send(self.policy.weights)

        least = max(MIN_GAP_LIMIT, NOISE_FACTOR * self.noise)
        limit = min(self.policy.max_gap, least)
        self._check(served, limit)
        self.served = served

    def _send(self, weights: Weights | None) -> str:
        """Make the server load weights; return the name of the model that has them."""
        return self.client.load(*weights) if weights else self.client.served

    def _check(self, name: str, limit: float) -> float:
        """Draw the probe and compare the server's log-probs with the policy's; return the gap in nats per token.

        Before `noise` is known, with the reference's. Raises RLHFError R19 for the weights of the check before, a gap
        above `limit`, draws of another distribution.
        """
        rollout = self._draw(name, self.policy.probe, self.policy.temperature)
        drawn = self.policy.read(rollout, by_reference=self.noise is None)
        if self.before and _has_old_weights(drawn, self.before):
            raise self._error("still has the weights of the sync before: those of the last update did not arrive")

        gaps = torch.cat([row.theirs - row.logprobs for row in drawn])
        gap = float(gaps.abs().mean())
        if not gap <= limit:
            what = "models.sft" if self.noise is None else "the policy, or only a part of them"
            causes = "old head, old prefix cache, other adapter, penalty, or no --logprobs-mode processed_logprobs"
            difference = f"its log-probs differ by {gap:.3g} nats a token, more than {limit:.3g}"
            raise self._error(f"does not draw from the weights of {what}: {difference} ({causes})")

        errors = _surprise(drawn)
        if abs(errors) > MAX_STANDARD_ERRORS:
            difference = f"-log p of its draws is {errors:+.1f} standard errors from the entropy"
            raise self._error(f"draws from another distribution: {difference} (a filter such as top_k, a temperature)")

        self.before = drawn
        return gap

    def _error(self, text: str) -> RLHFError:
        """Return RLHFError R19."""
        names = self.policy.names
        update = self.policy.update
        place = names[update] if names else f"step {update + 1}"
        consequence = "none of its draws is used" if names else "nothing was trained on its draws"
        text = f"{place}: the server at {self.client.url} {text}; {consequence}"
        return RLHFError("R19", text, hint="the same command resumes; docs/engines.md has the causes")

    def _draw(self, name: str, prompts: Prompts, temperature: float) -> Rollout:
        """Return the server's responses. Raises RLHFError R20 for an answer that cannot be one."""
        stop_token_id = self.policy.stop_token_id
        limit = prompts.response_length
        rows = [ids[mask].tolist() for ids, mask in zip(prompts.ids, prompts.mask, strict=True)]
        options = {
            "model": name,
            "temperature": temperature,
            "max_tokens": limit,
            "stop_token_ids": stop_ids(stop_token_id),
        }
        choices = self.client.complete(rows, prompts.seeds, options)

        tokens: list[list[int]] = []
        values: list[float] = []
        for choice in choices:
            row_tokens, row_values = self._read(choice, limit)
            tokens.append(row_tokens)
            values += row_values

        responses, response_mask = right_pad(tokens, self.policy.pad_token_id)
        logprobs = torch.zeros(response_mask.shape)
        logprobs[response_mask] = torch.tensor(values)

        return Rollout.of_responses(
            prompts,
            responses,
            response_mask,
            stop_token_id=stop_token_id,
            logprobs=logprobs,
        )

    def _read(self, choice: Any, limit: int) -> tuple[list[int], list[float]]:
        """Return a choice's tokens, through its stop token, and their log-probs."""
        ids = choice.get("token_ids")
        answered = choice.get("logprobs") or {}
        values = answered.get("token_logprobs")
        if not (isinstance(ids, list) and isinstance(values, list) and ids and len(ids) == len(values)):
            raise self.client.error("gives no token ids with their log-probs (return_token_ids, logprobs)")

        length = len(ids)
        stops = stop_ids(self.policy.stop_token_id)
        *before, last = [token in stops for token in ids]
        is_complete = last or length == limit
        if any(before) or not is_complete or length > limit:
            raise self.client.error(f"ended a response after {length} of {limit} tokens with token {ids[-1]}")

        for value in values:
            if not isinstance(value, float | int) or not math.isfinite(value):
                raise self.client.error("gave a log-prob that is not finite")
        return ids, values


def _surprise(drawn: list[Drawn]) -> float:
    """Return the sum of -log p - entropy, in its standard errors: near 0 for tokens drawn from p."""
    total = torch.cat([row.surprise for row in drawn]).sum()
    variance = torch.cat([row.variance for row in drawn]).sum()
    return float(total) / math.sqrt(float(variance) or 1.0)


def _has_old_weights(now: list[Drawn], before: list[Drawn]) -> bool:
    """Return True if a server's log-probs are those of the weights before, at tokens that it drew both times.

    By least squares on the way from the old log-probs (0) to the new ones (1), and its standard error: rounding hides
    small ways. A server with old weights draws all tokens again, because the probe has fixed seeds.
    """
    ways = []
    moves = []
    for new, old in zip(now, before, strict=True):
        same = _num_equal(new.tokens, old.tokens)
        start = old.logprobs[:same]
        ways.append(new.logprobs[:same] - start)
        moves.append(new.theirs[:same] - start)

    way = torch.cat(ways)
    moved = torch.cat(moves)
    length = float(way.square().sum())
    if not length:
        return False

    at = float((moved * way).sum()) / length
    rest = float((moved - at * way).square().mean())
    return at + MAX_STANDARD_ERRORS * math.sqrt(rest / length) < 0.5


def _num_equal(tokens: Tensor, others: Tensor) -> int:
    """Return how many tokens two rows have in common from the start."""
    width = min(len(tokens), len(others))
    is_equal = tokens[:width] == others[:width]
    return int(is_equal.cumprod(0).sum())
