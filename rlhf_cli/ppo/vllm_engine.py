"""Rollout engine that asks a vLLM server over HTTP. It proves after each sync that the server has the policy's weights.

The server needs `--logprobs-mode processed_logprobs` and VLLM_SERVER_DEV_MODE=1, and `--enable-sleep-mode` if it shares
the trainer's GPU; `rlhf serve` prints the command.
"""

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from rlhf_cli.errors import RLHFError
from rlhf_cli.http_client import HTTPClient, NoAnswerError, RefusalError
from rlhf_cli.models import devices, forward, sharding
from rlhf_cli.models.batch import Prompts, Rollout, StopTokenId, right_pad, stop_ids
from rlhf_cli.models.parallel import ProcessGroup

NOISE_FACTOR = 4.0  # a gap of so many times that of the reference's weights is no rounding
MIN_GAP_LIMIT = 1e-4  # nats: two float32 implementations agree to 1e-5
MAX_STANDARD_ERRORS = 5.0
MAX_ATTEMPTS = 5  # of what a server does that is lost in between
HEALTH_INTERVAL_S = 2.0
HEALTH_TIMEOUT_S = 10.0
HTTP_NOT_FOUND = 404
LOST_PATHS = ("/v1/completions", "/v1/unload_lora_adapter")  # not found: an adapter that a restarted server had
IS_SLEEPING = "/is_sleeping"
CANNOT_SLEEP = "start it as `rlhf serve RUN --rollouts` prints, or remove models.engine.vllm.sleep"
PLAIN_SAMPLING = {  # what a server may do besides temperature, switched off; it answers ids and their log-probs
    "return_token_ids": True,
    "logprobs": 0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "ignore_eos": True,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "skip_special_tokens": False,
}
T = TypeVar("T")
Weights = tuple[str, Path]  # version and folder


class ServerLostError(Exception):
    """The server gives no answer, or has lost the weights that it was given: it may have been restarted."""


@dataclass
class VLLMClient:
    """The requests to a vLLM server (0.28 or newer). Raises ServerLostError, and RLHFError R20 for a wrong answer."""

    url: str
    sync: Literal["lora", "disk"]
    client: HTTPClient
    sleeps: bool = False  # except in a rollout: it shares the trainer's GPU
    served: str = ""  # name of the model that the server was started with
    loaded: list[str] = field(default_factory=list)  # adapters, oldest first

    def call(self, path: str, body: Any = None) -> dict[str, Any]:
        """Return the JSON object that answers a POST, or a GET without a body; {} for any other answer."""
        return self.call_all(path, [body])[0]

    def call_all(self, path: str, bodies: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the answers of requests that are sent at the same time, as `call` does."""

        async def send() -> list[bytes]:
            async with self.client.connections() as connections:

                def request(body: Any) -> Awaitable[bytes]:
                    data = None if body is None else json.dumps(body).encode()
                    return self.client.request(connections, self.url + path, data)

                return await asyncio.gather(*map(request, bodies))

        try:
            answers = asyncio.run(send())
        except NoAnswerError as error:
            raise ServerLostError(f"{path} {error}") from None
        except RefusalError as error:
            if error.status == HTTP_NOT_FOUND and path in LOST_PATHS:
                raise ServerLostError(f"{path} {error}") from None
            if error.status == HTTP_NOT_FOUND and path == IS_SLEEPING:
                raise self.error(f"{path} {error}: it cannot sleep", hint=CANNOT_SLEEP) from None
            raise self.error(f"{path} {error}") from None
        return [_read_json(answer) for answer in answers]

    def wait(self, seconds: float) -> None:
        """Wait until the server answers. Raises RLHFError R20 after `seconds`."""
        probe = replace(self, client=HTTPClient(HEALTH_TIMEOUT_S, 0))
        end = time.monotonic() + seconds

        while True:
            try:
                probe.call("/health")
                return
            except ServerLostError as lost:
                if time.monotonic() >= end:
                    raise self.error(str(lost)) from None
            time.sleep(HEALTH_INTERVAL_S)

    def read_models(self, needed_tokens: int) -> None:
        """Read what the server serves. Raises RLHFError R20 if its rows are shorter than `needed_tokens`."""
        models = self.call("/v1/models").get("data") or []
        base = next((model for model in models if not model.get("parent")), None)
        if base is None:
            raise self.error("/v1/models names no model: is it a vLLM server?")
        self.served = base["id"]
        self.loaded = [model["id"] for model in models if model.get("parent")]

        limit = base.get("max_model_len") or needed_tokens
        if limit < needed_tokens:
            text = f"serves rows of {limit} tokens; prompt and response have up to {needed_tokens}"
            raise self.error(text, hint=f"start it with --max-model-len {needed_tokens}")

    def wake_up(self) -> None:
        """Wake the server up, if it sleeps. It has its weights again, and an empty cache."""
        if self.sleeps and self.call(IS_SLEEPING).get("is_sleeping"):
            self.call("/wake_up", {})
            self.call("/reset_prefix_cache", {})

    def sleep(self) -> None:
        """Make the server free its GPU memory; the weights go to main memory. Level 2 would drop them."""
        self.call("/sleep?level=1", {})

    def load(self, version: str, folder: Path) -> str:
        """Make the server use the weights in `folder`; return the name of the model that has them."""
        self.wake_up()
        if self.sync == "lora":
            self._load_adapter(version, folder)
            return version

        self.call("/pause?mode=wait", {})
        try:
            arguments = {"weights_path": str(folder)}
            self.call("/collective_rpc", {"method": "reload_weights", "kwargs": arguments})
            self.call("/reset_prefix_cache", {})
            self.call("/update_weight_version", {"new_version": version})
        finally:
            self.call("/resume", {})

        self.require_version(version)
        return self.served

    def _load_adapter(self, version: str, folder: Path) -> None:
        """Load an adapter, under a new name each time: the prefix cache is keyed by name. Unload all but two."""
        if version not in self.loaded:
            self.call("/v1/load_lora_adapter", {"lora_name": version, "lora_path": str(folder)})
            self.loaded.append(version)

        run = _run_of(version)
        ours = [name for name in self.loaded if _run_of(name) == run]
        for name in ours[:-2]:
            self.call("/v1/unload_lora_adapter", {"lora_name": name})
            self.loaded.remove(name)

    def require_version(self, version: str) -> None:
        """Raise ServerLostError if the server has other whole weights."""
        if self.sync != "disk":
            return

        found = self.call("/weight_info").get("weight_version")
        if found != version:
            raise ServerLostError(f"/weight_info answered version {found!r}, not {version!r}")

    def complete(self, rows: Sequence[list[int]], seeds: Sequence[int], options: dict[str, Any]) -> list[Any]:
        """Return the choice of each row of ids, which the server continues by `options` and the row's seed."""
        self.wake_up()
        bodies = []
        for ids, seed in zip(rows, seeds, strict=True):
            body = {**PLAIN_SAMPLING, **options, "prompt": ids, "seed": seed}
            bodies.append(body)
        answers = self.call_all("/v1/completions", bodies)

        choices = []
        for ids, answer in zip(rows, answers, strict=True):
            choice, *_ = answer.get("choices") or [{}]
            read = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
            if read != ids:
                raise self.error(f"read other tokens than the prompt's: {str(read)[:80]}")
            choices.append(choice)
        return choices

    def error(self, text: str, hint: str = "the same command resumes; docs/engines.md has its options") -> RLHFError:
        """Return RLHFError R20."""
        return RLHFError("R20", f"{self.url} {text}", hint=hint)


def _read_json(answer: bytes) -> dict[str, Any]:
    """Return a JSON object; {} for anything else."""
    try:
        value = json.loads(answer)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _run_of(version: str) -> str:
    """Return what the versions of one run have in common."""
    return version.rpartition("-update-")[0]


@dataclass(frozen=True)
class Drawn:
    """A response to a prompt of the probe, with numbers of each token, (n,) float32."""

    tokens: Tensor  # (n,) int64
    theirs: Tensor  # log-prob by the server
    logprobs: Tensor  # by the trainer
    surprise: Tensor  # by the trainer: -log p - entropy
    variance: Tensor  # by the trainer: of log p


@dataclass
class VLLMEngine:
    """Samples from a vLLM server that gets the policy's weights after each update: adapters, or a folder of weights.

    After every sync the server draws responses to the probe's prompts, with fixed seeds, and the trainer computes their
    log-probs. Old weights, a head left behind, another tokenizer, a stale prefix cache or a filter on the draws are an
    error (R19) before anything is trained on them. A server that is lost is waited for, gets the weights again, and the
    rollout is repeated with the same seeds.
    """

    server: VLLMClient
    ref: Any
    write: Callable[[str, int], Weights | None]  # those of the "policy" or the "reference" after an update
    probe: Prompts
    stop_token_id: StopTokenId
    pad_token_id: int
    temperature: float
    bf16: bool
    max_gap: float  # nats per token: ppo.max_logprob_gap
    max_wait: float  # seconds
    longest_row: int  # tokens
    report: Callable[[str], None]  # tells the user
    process_group: ProcessGroup  # rank 0 alone talks to the server
    computing: Lock = field(default_factory=Lock)  # held while the models compute
    policy: Any = None  # of the last sync
    update: int = 0
    weights: Weights | None = None  # that it should have; None: what it was started with
    served: str = ""  # name of the model that has them; "" before a sync
    noise: float | None = None  # gap of the reference's weights, in nats per token
    before: list[Drawn] = field(default_factory=list)  # of the check before
    stage: str = "ppo"  # for messages
    names: Sequence[str] = ()  # of the policies, by the number of their sync; those of PPO are steps
    probe_temperature: float = field(init=False)  # responses may be drawn at another one
    name: ClassVar[str] = "vllm"
    deterministic: ClassVar[bool] = False  # by the server's seeds: batches of another size round differently

    def __post_init__(self) -> None:
        self.probe_temperature = self.temperature

    def generate(self, prompts: Prompts) -> Rollout:
        """Draw a response to each prompt."""

        def draw() -> Rollout:
            if not self.served:
                self._load()
            rollout = self._draw(self.served, prompts, self.temperature)
            if self.weights:
                self.server.require_version(self.weights[0])
            return rollout

        return self._retry(draw)

    @property
    def sleeps(self) -> bool:
        """True if the server sleeps after a rollout: it is sent the weights, and checked, before each."""
        return self.server.sleeps

    def update_weights(self, update: int, policy: Any) -> None:
        """Write the policy's weights, make the server load them, and check that it has them. All ranks call it."""
        reference = self.reference_weights()
        weights = self.write("policy", update)
        self.policy = policy
        self.make_room()
        self.process_group.run_on_main(lambda: self.sync(update, reference, weights), self.join)

    def make_room(self) -> None:
        """Give the cached GPU memory of all ranks to a server that sleeps."""
        if self.sleeps:
            torch.cuda.empty_cache()
            self.process_group.barrier()

    def reference_weights(self) -> Weights | None:
        """Before the first sync, write the reference's whole weights, which a server may start from; None otherwise."""
        is_first = self.policy is None
        return self.write("reference", 0) if is_first and self.server.sync == "disk" else None

    def sync(self, update: int, reference: Weights | None, weights: Weights | None) -> None:
        """Make the server load the policy's written weights, and check that it has them; at first the reference's."""
        self.update = update
        if self.noise is None:
            self._retry(lambda: self._start(reference))
        self.weights = weights
        self.served = ""
        self._retry(self._load)

    def join(self, asked: tuple[Rollout, bool]) -> list[Drawn]:
        """Return what a server drew with the log-probs by the policy, or if True by the reference.

        All ranks take part, because each may have a shard of the model.
        """
        rollout, by_reference = asked
        model = self.ref if by_reference else self.policy
        rollout = rollout.to(model.device)
        with sharding.gathered_embeddings(model, self.process_group.all_reduce):
            return [self._read_row(model, rollout, row) for row in range(len(rollout))]

    def release_memory(self) -> None:
        """Let a server sleep that shares the GPU. All ranks call it, and go on when it has freed its memory."""
        if self.sleeps:
            self.process_group.run_on_main(self.sleep)

    def sleep(self) -> None:
        """Let the server sleep."""
        self._retry(self.server.sleep)

    def _retry(self, action: Callable[[], T]) -> T:
        """Return what `action` returns. If the server is lost, wait for it and repeat. Raises RLHFError R20."""
        for _ in range(MAX_ATTEMPTS):
            try:
                return action()
            except ServerLostError as error:
                problem = str(error)
                self.served = ""
                wait = f"{self.max_wait:.0f} s"
                waits = f"{self.stage} waits up to {wait}, and sends the weights again"
                self.report(f"the server at {self.server.url} {problem}; {waits}")
                self.server.wait(self.max_wait)
                self.server.read_models(self.longest_row)
        raise self.server.error(f"{problem} ({MAX_ATTEMPTS} attempts)")

    def _start(self, weights: Weights | None) -> None:
        """Measure how far the server's log-probs are from the trainer's for the weights of the reference."""
        self.server.wait(self.max_wait)
        self.server.read_models(self.longest_row)
        self.noise = self._check(self._send(weights), self.max_gap)

    def _load(self) -> None:
        """Load `weights` and check them."""
        assert self.noise is not None
        served = self._send(self.weights)

        least = max(MIN_GAP_LIMIT, NOISE_FACTOR * self.noise)
        limit = min(self.max_gap, least)
        self._check(served, limit)
        self.served = served

    def _send(self, weights: Weights | None) -> str:
        """Make the server load weights; return the name of the model that has them."""
        return self.server.load(*weights) if weights else self.server.served

    def _check(self, name: str, limit: float) -> float:
        """Draw the probe and compare the server's log-probs with the policy's; return the gap in nats per token.

        Before `noise` is known, with the reference's. Raises RLHFError R19 for the weights of the check before, a gap
        above `limit`, draws of another distribution.
        """
        asked = (self._draw(name, self.probe, self.probe_temperature), self.noise is None)
        with self.computing:
            self.process_group.ask_to_join(asked)
            drawn = self.join(asked)
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
        place = self.names[self.update] if self.names else f"step {self.update + 1}"
        consequence = "none of its draws is used" if self.names else "nothing was trained on its draws"
        text = f"{place}: the server at {self.server.url} {text}; {consequence}"
        return RLHFError("R19", text, hint="the same command resumes; docs/engines.md has the causes")

    def _read_row(self, model: Any, rollout: Rollout, row: int) -> Drawn:
        """Return a row's response with its log-probs by the server and by `model`, on the CPU."""
        assert rollout.logprobs is not None
        rows = torch.tensor([row], device=rollout.ids.device)
        micro_batch = rollout.micro_batch(rows)
        theirs = rollout.logprobs[micro_batch.response_index]
        with torch.no_grad(), devices.autocast(bf16=self.bf16, on=model.device):
            logits = forward.response_logits(model, micro_batch)  # (N, V)

        scaled = logits.float() / self.probe_temperature
        log_p = scaled.log_softmax(-1)
        logprobs = log_p.gather(1, micro_batch.response_ids[:, None])[:, 0]

        p = log_p.exp()
        entropy = -(p * log_p).sum(-1)
        mean_square = (p * log_p.square()).sum(-1)
        variance = mean_square - entropy.square()
        surprise = -logprobs - entropy

        return Drawn(
            micro_batch.response_ids.cpu(),
            theirs.cpu(),
            logprobs.cpu(),
            surprise=surprise.cpu(),
            variance=variance.cpu(),
        )

    def _draw(self, name: str, prompts: Prompts, temperature: float) -> Rollout:
        """Return the server's responses. Raises RLHFError R20 for an answer that cannot be one."""
        limit = prompts.response_length
        rows = [ids[mask].tolist() for ids, mask in zip(prompts.ids, prompts.mask, strict=True)]
        options = {
            "model": name,
            "temperature": temperature,
            "max_tokens": limit,
            "stop_token_ids": stop_ids(self.stop_token_id),
        }
        choices = self.server.complete(rows, prompts.seeds, options)

        tokens: list[list[int]] = []
        values: list[float] = []
        for choice in choices:
            row_tokens, row_values = self._read(choice, limit)
            tokens.append(row_tokens)
            values += row_values

        responses, response_mask = right_pad(tokens, self.pad_token_id)
        logprobs = torch.zeros(response_mask.shape)
        logprobs[response_mask] = torch.tensor(values)

        return Rollout.of_responses(
            prompts,
            responses,
            response_mask,
            stop_token_id=self.stop_token_id,
            logprobs=logprobs,
        )

    def _read(self, choice: Any, limit: int) -> tuple[list[int], list[float]]:
        """Return a choice's tokens, through its stop token, and their log-probs."""
        ids = choice.get("token_ids")
        answered = choice.get("logprobs") or {}
        values = answered.get("token_logprobs")
        if not (isinstance(ids, list) and isinstance(values, list) and ids and len(ids) == len(values)):
            raise self.server.error("gives no token ids with their log-probs (return_token_ids, logprobs)")

        length = len(ids)
        stops = stop_ids(self.stop_token_id)
        *before, last = [token in stops for token in ids]
        is_complete = last or length == limit
        if any(before) or not is_complete or length > limit:
            raise self.server.error(f"ended a response after {length} of {limit} tokens with token {ids[-1]}")

        for value in values:
            if not isinstance(value, float | int) or not math.isfinite(value):
                raise self.server.error("gave a log-prob that is not finite")
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
