"""Rollout engines: generate responses to prompts. To add one, add a class with the methods of `RolloutEngine`."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache

from rlhf_cli import terminal
from rlhf_cli.models import build, devices, forward, packing, row_trial
from rlhf_cli.models.batch import Prompts, Rollout, StopTokenId, is_stop, slices
from rlhf_cli.models.compiled import compiled
from rlhf_cli.ppo import losses
from rlhf_cli.progress import track_progress

Autocast = Callable[..., AbstractContextManager[Any]]

NOISE_CHUNK_ELEMENTS_CPU = 2**17  # random numbers made at once on a CPU: they fit its cache


class RolloutEngine(Protocol):
    """Generates responses to prompts, with the policy's weights.

    An engine of this process may also have `model`, which it samples from (default: the policy), and `batch_size`, rows
    at a time, which is set to what fits in memory. Any may have `name`, for the manifest, and the `temperature` and
    `bf16` that it samples with, which are compared with the settings. An engine that is not deterministic draws on rank
    0; the other ranks call its `join`, if it has one, with what it passes to `ProcessGroup.ask_to_join`. One that
    `sleeps` after `release_memory` gets the weights before each draw.
    """

    deterministic: ClassVar[bool]  # row i's tokens depend on `prompts.seeds[i]` alone: each process draws its rows

    def generate(self, prompts: Prompts) -> Rollout:
        """Return responses of at most `prompts.response_length` tokens, with the engine's own log-probs of them."""
        ...

    def update_weights(self, update: int, policy: Any) -> None:
        """Take the policy's weights after `update` updates; called before the first draw from them."""
        ...

    def release_memory(self) -> None:
        """Free what the next rollout can allocate again: scoring and training come next."""
        ...


@dataclass
class HFEngine:
    """Batched sampling with a transformers causal model.

    Tokens are sampled by the Gumbel-max trick with noise keyed by row, so a row's tokens do not depend on the batch
    (except in a near-tie decided by rounding). There is no top-k, top-p or repetition penalty: PPO trains on log-probs
    of the full softmax. Temperature 0 is greedy.

    `compact_batch`: a prompt repeated in adjacent rows is prefilled once, and finished rows are dropped from the batch.
    `compiles`: the arithmetic of sampling is compiled, which takes seconds once.
    A model whose cache does not give the log-probs of each row alone (models/row_trial.py) is sampled from without one:
    each token is computed from the whole row. Warns M17.
    """

    model: Any
    stop_token_id: StopTokenId
    pad_token_id: int
    temperature: float = 1.0
    batch_size: int | None = None  # rows per batch; None: all
    bf16: bool | None = None  # bfloat16 autocast, as in the forward passes of log-probs; None: on a GPU that can
    compact_batch: bool = True
    compiles: bool = False
    name: ClassVar[str] = "hf"  # of models.engine
    deterministic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.bf16 = devices.use_bf16(self.bf16)

    @torch.no_grad()
    def generate(self, prompts: Prompts) -> Rollout:
        """Generate a response to each prompt."""
        assert len(prompts.seeds) == len(prompts) and prompts.response_length > 0
        batches = slices(len(prompts), self.batch_size or len(prompts))

        with self._autocast(), forward.float32_logits(self.model):  # around all tokens: both keep copies of the weights
            parts = [self._generate_ids(prompts.rows(batch)) for batch in track_progress("batch", batches)]

        responses = torch.cat([ids for ids, _ in parts])
        logprobs = torch.cat([part_logprobs for _, part_logprobs in parts])
        response_mask = losses.response_mask(responses, self.stop_token_id)
        width = int(response_mask.sum(1).max())
        return Rollout.of_responses(
            prompts,
            responses[:, :width],
            response_mask[:, :width],
            stop_token_id=self.stop_token_id,
            logprobs=logprobs[:, :width],
        )

    def update_weights(self, update: int, policy: Any) -> None:
        """Do nothing: the engine samples from the model that is trained."""

    def release_memory(self) -> None:
        """Do nothing: a rollout leaves nothing in memory."""

    @torch.no_grad()
    def stream(self, prompt: Prompts) -> Iterator[int]:
        """Yield the response to a single prompt token by token, through the first stop token.

        The tokens are those of `generate`.
        """
        assert len(prompt) == len(prompt.seeds) == 1 and prompt.response_length > 0
        for _, tokens, _ in self._decode_steps(prompt):
            yield int(tokens)

    def _autocast(self) -> torch.autocast:
        return devices.autocast(bf16=self.bf16, on=self.model.device)

    def _generate_ids(self, prompts: Prompts) -> tuple[Tensor, Tensor]:
        """Return response ids (b, response_length), padded after a row's stop token, and their log-probs."""
        device = self.model.device
        shape = (len(prompts), prompts.response_length)
        responses = torch.full(shape, self.pad_token_id, device=device)
        logprobs = torch.zeros(shape, device=device)

        for step, drawn in enumerate(self._decode_steps(prompts)):
            rows, tokens, token_logprobs = drawn
            responses[rows, step] = tokens
            logprobs[rows, step] = token_logprobs
        return responses, logprobs

    def _decode_steps(self, prompts: Prompts) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for each step the unfinished rows (n,) of `prompts`, next tokens (n,) and their log-probs (n,)."""
        device = self.model.device
        num_steps = prompts.response_length
        rows = torch.arange(len(prompts), device=device)  # of `prompts`, for each row of the batch
        unfinished = torch.ones_like(rows, dtype=torch.bool)

        decoder = self._prefill(prompts)
        keys = row_keys(prompts.seeds, device)
        counters = token_counters(decoder.logits.shape[1], device)
        step_tensor = torch.zeros(1, dtype=torch.int32, device=device)  # `step`, where a compiled function can read it

        for step in track_progress("rollout: token", range(num_steps)):
            tokens, logprobs = self._sample(decoder.logits, keys, step_tensor, counters)
            step_tensor += 1

            yield rows[unfinished], tokens[unfinished], logprobs[unfinished]

            unfinished = unfinished & ~is_stop(tokens, self.stop_token_id)
            if not unfinished.any() or step + 1 == num_steps:
                break

            few = 0.8 * len(unfinished)
            if self.compact_batch and unfinished.sum() <= few:  # rarely: copies the cache
                kept = unfinished.nonzero()[:, 0]
                decoder.select_rows(kept)
                rows = rows[kept]
                tokens = tokens[kept]
                unfinished = unfinished[kept]
                keys = keys[kept]
            decoder.append(tokens)

    def _sample(self, logits: Tensor, keys: Tensor, step: Tensor, counters: Tensor) -> tuple[Tensor, Tensor]:
        """Return next tokens (n,) and their log-probs (n,)."""
        draw = sample
        if self.compiles:
            torch._dynamo.mark_static(logits, 1)  # see fused_logprobs
            draw = compiled(sample)
        return draw(logits, self.temperature, keys, step, counters)

    def _prefill(self, prompts: Prompts) -> "_CachedDecoder | _WholeRowDecoder":
        """Return a decoder that has read the prompts, each of adjacent equal ones once."""
        model = self.model
        open_decoder = _CachedDecoder if uses_cache(model) else _WholeRowDecoder

        first_tokens = prompts.mask.int().argmax(1)
        start = int(first_tokens.min())  # skip columns that are padding in all rows
        ids = prompts.ids[:, start:].to(model.device)
        mask = prompts.mask[:, start:].to(model.device)

        is_new = torch.ones_like(mask[:, 0])
        if self.compact_batch:
            other_ids = ids[1:] != ids[:-1]  # than in the row before
            other_mask = mask[1:] != mask[:-1]
            is_new[1:] = (other_ids | other_mask).any(1)

        decoder = open_decoder(model, ids[is_new], mask[is_new], self._autocast)
        if not is_new.all():
            source_rows = is_new.cumsum(0) - 1
            decoder.select_rows(source_rows)
        return decoder


def accepts(model: Any, argument: str) -> bool:
    """Return True if a model takes an argument. Without `position_ids` it numbers the tokens that a mask shows."""
    return argument in inspect.signature(model.forward).parameters


_cache_problems: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()


def uses_cache(model: Any) -> bool:
    """Return True if rows of a model are decoded right with a cache; each model is tried once.

    Warns M17 if they are right without one only, raises RLHFError M16 if they are not.
    """
    if model not in _cache_problems:
        _cache_problems[model] = _cache_problem(model)
    problem = _cache_problems[model]
    if problem:
        text = f"{model.config.model_type} models are sampled from without a cache: with one, {problem}"
        terminal.warn("M17", text, hint="the results are right, but long responses take longer")
    return problem is None


def _cache_problem(model: Any) -> str | None:
    """Return how rows fail or differ with a cache, None if they are right. Raises M16 if they do without one, too."""
    with_cache = partial(_CachedDecoder, model, autocast=nullcontext)
    problem = row_trial.generation_problem(model, with_cache)
    if problem is None:
        return None

    without_cache = partial(_WholeRowDecoder, model, autocast=nullcontext)
    worse = row_trial.generation_problem(model, without_cache)
    if worse:
        raise row_trial.refusal(model, f"token by token, {worse}")
    return problem


class AutocastMixin:
    """Cache in autocast's dtype: attention casts keys and values to it anyway, and most models give float32."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Add keys and values in autocast's dtype."""
        device = key_states.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            key_states = key_states.to(dtype)
            value_states = value_states.to(dtype)
        return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]


class _AutocastCache(AutocastMixin, DynamicCache):
    pass


class _CachedDecoder:
    """Next-token logits (b, V) float32 of a batch, with a cache."""

    logits: Tensor

    def __init__(self, model: Any, ids: Tensor, mask: Tensor, autocast: Autocast):
        self.model = model
        self.autocast = autocast
        self.cache_name = "cache_params" if accepts(model, "cache_params") else "past_key_values"
        self.accepts_position_ids = accepts(model, "position_ids")

        self.cache = _AutocastCache(config=model.config)
        self.mask = mask.long()
        positions = self.mask.cumsum(1) - 1
        positions = positions.clamp(min=0)
        self._forward(ids, positions)

    def append(self, tokens: Tensor) -> None:
        """Add one token (b,) to each row."""
        column = torch.ones_like(self.mask[:, :1])
        self.mask = torch.cat([self.mask, column], 1)
        positions = self.mask.sum(1, keepdim=True) - 1
        self._forward(tokens[:, None], positions)

    def select_rows(self, rows: Tensor) -> None:
        """Replace the batch by these of its rows (n,), which may repeat."""
        self.logits = self.logits[rows]
        self.cache.reorder_cache(rows)  # batch_select_indices would leave out convolutions and recurrences
        self.mask = self.mask[rows]

    def _forward(self, ids: Tensor, positions: Tensor) -> None:
        """Compute the logits behind `ids` (b, n) at `positions` (b, n)."""
        inputs: dict[str, Any] = {self.cache_name: self.cache, "use_cache": True}
        if self.accepts_position_ids:
            inputs["position_ids"] = positions
        is_prompt = ids.shape == self.mask.shape
        if is_prompt or self.cache_name == "past_key_values":  # Mamba masks the tokens of this call
            inputs["attention_mask"] = self.mask

        with self.autocast(), forward.float32_logits(self.model):  # a streaming caller's code runs between two tokens
            output = self.model(input_ids=ids, logits_to_keep=1, **inputs)
            self.logits = output.logits[:, -1].float()


class _WholeRowDecoder:
    """Next-token logits (b, V) float32 of a batch, each computed from the whole rows, as training computes them."""

    logits: Tensor

    def __init__(self, model: Any, ids: Tensor, mask: Tensor, autocast: Autocast):
        self.model = model
        self.autocast = autocast
        self.lengths = mask.sum(1)

        width = ids.shape[1]
        first = width - self.lengths  # (b,): column of a row's first token
        offsets = torch.arange(width, device=ids.device)
        columns = (first[:, None] + offsets) % width
        self.ids = ids.gather(1, columns)  # padded on the right
        self._forward()

    def append(self, tokens: Tensor) -> None:
        """Add one token (b,) to each row."""
        column = torch.zeros_like(self.ids[:, :1])
        self.ids = torch.cat([self.ids, column], 1)
        last_column = self.lengths[:, None]
        self.ids.scatter_(1, last_column, tokens[:, None])
        self.lengths = self.lengths + 1
        self._forward()

    def select_rows(self, rows: Tensor) -> None:
        """Replace the batch by these of its rows (n,), which may repeat."""
        self.logits = self.logits[rows]
        self.ids = self.ids[rows]
        self.lengths = self.lengths[rows]

    def _forward(self) -> None:
        """Compute the logits behind the last token of each row."""
        rows = torch.arange(len(self.ids), device=self.ids.device)
        last = self.lengths - 1
        decoder = build.decoder(self.model)

        with self.autocast():
            hidden = packing.hidden_states_at(decoder, self.ids, self.lengths, row=rows, column=last)
            self.logits = forward.lm_head_logits(self.model, hidden).float()


def sample(
    logits: Tensor,
    temperature: float,
    keys: Tensor,
    step: int | Tensor,
    counters: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return a token of each row of logits (b, V) and its log-prob, (b,) each: 0 at temperature 0."""
    if not temperature:
        tokens = logits.argmax(-1)
        return tokens, torch.zeros_like(tokens, dtype=torch.float32)

    logits = logits / temperature
    tokens = gumbel_sample(logits, keys, step, counters)
    return tokens, losses.token_logprobs(logits, tokens, 1.0)


# Random numbers are a function of (row's seed, step, token), by a counter-based generator (Salmon et al. 2011,
# "Parallel random numbers: as easy as 1, 2, 3"). There is no state: batching, early ends and resuming change no draw.


def hash_int32(x: Tensor) -> Tensor:
    """Hash an int32 tensor in place by lowbias32, a bijection (Wellons 2018, "Prospecting for hash functions").

    int32 overflow wraps around like the unsigned integers of the original.
    """
    shifted = torch.empty_like(x)
    rounds = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, None))
    for shift, factor in rounds:
        torch.bitwise_right_shift(x, shift, out=shifted)
        shifted &= (1 << 32 - shift) - 1  # a signed shift copies the sign bit
        x ^= shifted
        if factor:
            x *= factor
    return x


def row_keys(seeds: Sequence[int], device: torch.device) -> Tensor:
    """Return the rows' 63-bit seeds as two int32 each, the lower half first, (b, 2)."""
    wide = torch.tensor(seeds, dtype=torch.int64)
    return wide[:, None].view(torch.int32).to(device)


def token_counters(vocab_size: int, device: torch.device) -> Tensor:
    """Return a hash of each token id, (V,) int32, the same for all rows and steps."""
    return hash_int32(torch.arange(vocab_size, dtype=torch.int32, device=device))


def log_exponential(keys: Tensor, step: int | Tensor, counters: Tensor) -> Tensor:
    """Return log E of independent E ~ Exp(1), (b, V) float32, from 31 random bits each.

    `step` is a number, or an int32 tensor (1,) on the device. Resolution is finest near E = 0, which decides the argmax
    in `gumbel_sample`.
    """
    steps = torch.zeros_like(keys[:, :1]) + step
    step_hash = hash_int32(steps)
    first = hash_int32(keys[:, :1] ^ step_hash)
    second = hash_int32(keys[:, 1:] + first)

    mixed = (counters[None] ^ first).add_(second)
    bits = hash_int32(mixed).bitwise_and_(0x7FFFFFFF)
    minus_uniform = bits.to(torch.float32).add_(0.5).mul_(-(2.0**-31))
    return minus_uniform.log1p_().neg_().log_()


def gumbel_sample(logits: Tensor, keys: Tensor, step: int | Tensor, counters: Tensor) -> Tensor:
    """Sample a token (b,) int64 from the softmax of each row of logits (b, V) as argmax_v (z_v - log E_v).

    This is the Gumbel-max trick: Maddison, Tarlow and Minka 2014 (arXiv 1411.0030).
    """
    if logits.device.type != "cpu":
        return (logits - log_exponential(keys, step, counters)).argmax(-1)

    rows = max(1, NOISE_CHUNK_ELEMENTS_CPU // logits.shape[1])
    tokens = []
    for part_logits, part_keys in zip(logits.split(rows), keys.split(rows), strict=True):
        noise = log_exponential(part_keys, step, counters)
        tokens.append((part_logits - noise).argmax(-1))
    return torch.cat(tokens)
