"""Rollout engine whose token step has fixed shapes: on a GPU it is captured once as a CUDA graph, and replayed.

A step reads nothing back from the device and allocates no tensor of another shape than the step before it. Eagerly, a
step of a small batch takes as long as it takes to start its kernels: about ten for each layer.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from rlhf_cli import system
from rlhf_cli.errors import short_reason
from rlhf_cli.models import forward, packing, row_trial
from rlhf_cli.models.batch import Prompts, StopTokenId, is_stop
from rlhf_cli.models.compiled import compiled_token_step
from rlhf_cli.ppo.rollout import (
    Autocast,
    AutocastMixin,
    HFEngine,
    _CachedDecoder,
    accepts,
    row_keys,
    token_counters,
    uses_cache,
)

READ_INTERVAL = 16  # steps between two reads of which rows have ended: a read waits for the device
WIDTH_MULTIPLE = 64  # a cache's width: one captured step serves prompts and responses of several lengths


class _StaticLayer(AutocastMixin, StaticLayer):
    pass


def reason_against(model: Any) -> str | None:
    """Return why a model's token step cannot have fixed shapes, None if it can."""
    if model.config._attn_implementation != "sdpa":
        return f"its attention is computed by {model.config._attn_implementation}, not by sdpa"
    if not accepts(model, "position_ids"):
        return "it takes no positions"

    try:
        layers = StaticCache(config=model.config, max_cache_len=1).layers
    except (KeyError, ValueError, TypeError) as error:
        return f"transformers has no static cache for it ({error})"
    if any(type(layer) is not StaticLayer for layer in layers):
        return "it has layers with another cache than full attention's, such as sliding windows"

    if not uses_cache(model):
        return "it is sampled from without a cache"
    return _step_problem(model)


def _step_problem(model: Any) -> str | None:
    """Return how a first token step fails, None if it does not: positions by ALiBi need a mask of another shape."""
    rows, pad = row_trial.probe_rows(model)
    prompts = replace(Prompts.from_lists(rows, pad), seeds=(0, 1), response_length=2)
    try:
        engine = GraphEngine(model, None, pad, bf16=model.dtype == torch.bfloat16)
        engine.generate(prompts)
    except Exception as error:  # each family fails in its own way
        if system.is_out_of_memory(error):
            raise
        return f"its token step raises {type(error).__name__} ({short_reason(error)})"
    return None


def row_bucket(rows: int) -> int:
    """Return the smallest of 1, 2, 3, 4, 6, 8, 12, 16, ... that is at least `rows`."""
    power = 1 << (rows - 1).bit_length()
    three_quarters = power // 4 * 3
    return three_quarters if rows <= three_quarters else power


@dataclass
class GraphEngine(HFEngine):
    """HFEngine with fixed shapes: the same draws, and in float32 the same tokens except in a near-tie.

    On a GPU with bf16 a policy without adapters is sampled from a bfloat16 copy, which `update_weights` fills.
    """

    steps: dict[tuple[int, int], "FixedStep"] = field(default_factory=dict)  # by rows and width
    name: ClassVar[str] = "graph"

    @torch.no_grad()
    def update_weights(self, update: int, policy: Any) -> None:
        """Copy the policy's weights in bfloat16, if the engine samples from a copy."""
        trains_all = all(weight.requires_grad for weight in policy.parameters())
        if policy.device.type != "cuda" or not self.bf16 or not trains_all:
            return

        if self.model is policy:
            self.model = copy.deepcopy(policy).requires_grad_(False)
            for weight in self.model.parameters():
                weight.data = weight.data.bfloat16()

        for ours, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
            ours.copy_(theirs)

    def release_memory(self) -> None:
        """Free the caches and the captured steps."""
        self.steps.clear()

    def _generate_ids(self, prompts: Prompts) -> tuple[Tensor, Tensor]:
        """Return what HFEngine's does; the batch shrinks when fewer rows are unfinished."""
        device = self.model.device
        length = prompts.response_length
        responses = torch.full((len(prompts), length), self.pad_token_id, device=device)
        logprobs = torch.zeros_like(responses, dtype=torch.float32)

        decoder = self._prefill(prompts)
        assert isinstance(decoder, _CachedDecoder), "see `reason_against`"
        rows = torch.arange(len(prompts), device=device)  # of `prompts`, in the order of the step's first rows
        width = decoder.mask.shape[1] + length
        keys = row_keys(prompts.seeds, device)

        step = self._step(len(rows), width)
        step.start(decoder, keys)
        for number in range(1, length):
            if number % READ_INTERVAL == 0:
                unfinished = step.unfinished.nonzero()[:, 0]
                count = len(unfinished)
                if not count:
                    break
                if row_bucket(count) < step.rows:
                    responses[rows], logprobs[rows] = step.results(len(rows), length)
                    larger = step
                    step = self._step(count, width)
                    step.take_rows(larger, unfinished)
                    rows = rows[unfinished]
            step()

        responses[rows], logprobs[rows] = step.results(len(rows), length)
        return responses, logprobs

    def _step(self, rows: int, width: int) -> "FixedStep":
        """Return the step of the smallest shape that holds `rows` rows of `width` positions; make it once."""
        bucket = row_bucket(rows)
        width = -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        if (bucket, width) in self.steps:
            return self.steps[bucket, width]
        self.steps = {shape: step for shape, step in self.steps.items() if shape[1] >= width}  # rows may come by length

        device = self.model.device.type
        autocast = partial(torch.autocast, device, dtype=torch.bfloat16, enabled=bool(self.bf16))
        step = FixedStep(
            self.model,
            bucket,
            width,
            sample=self._sample,
            stop=self.stop_token_id,
            pad=self.pad_token_id,
            autocast=autocast,
            compiles=self.compiles and packing.is_enabled(self.model),
        )
        self.steps[bucket, width] = step
        return step


class FixedStep:
    """One token for each of `rows` rows, with a cache of `width` positions, in tensors that never move.

    Rows beyond those in use have ended.
    """

    def __init__(
        self,
        model: Any,
        rows: int,
        width: int,
        *,
        sample: Callable[..., Any],
        stop: StopTokenId,
        pad: int,
        autocast: Autocast,
        compiles: bool,
    ) -> None:
        self.model = model
        self.rows = rows
        self.sample = sample
        self.stop = stop
        self.pad = pad
        self.autocast = autocast
        self.compiles = compiles
        self.graph: Any = None  # of a GPU, once it is captured

        zeros = partial(torch.zeros, device=model.device)
        self.cache = StaticCache(config=model.config, max_cache_len=width)
        self.cache.layers = [_StaticLayer(width) for _ in self.cache.layers]
        self.mask = zeros(rows, 1, 1, width, dtype=torch.bool)  # positions of the cache that are read
        self.column = zeros(1, dtype=torch.int64)  # of the cache, which is written next
        self.number = zeros(1, dtype=torch.int32)  # of the response's token
        self.tokens = zeros(rows, 1, dtype=torch.int64)  # last ones
        self.positions = zeros(rows, 1, dtype=torch.int64)
        self.unfinished = zeros(rows, dtype=torch.bool)
        self.keys = zeros(rows, 2, dtype=torch.int32)
        self.ids = zeros(rows, width, dtype=torch.int64)  # of the responses
        self.logprobs = zeros(rows, width)
        self.counters = token_counters(model.get_output_embeddings().weight.shape[0], model.device)

    def start(self, decoder: Any, keys: Tensor) -> None:
        """Take the rows of a decoder that has read the prompts, with their keys (n, 2), and draw their first tokens."""
        count = len(keys)
        read = decoder.mask.shape[1]
        own_rows = torch.arange(count, device=keys.device)
        index = self._fill(own_rows)
        decoder.select_rows(index)

        for layer, source in zip(self.cache.layers, decoder.cache.layers, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(source.keys, source.values)
            layer.keys[:, :, :read].copy_(source.keys)
            layer.values[:, :, :read].copy_(source.values)
            layer.cumulative_length.fill_(read)

        self.mask.zero_()
        self.mask[:, 0, 0, :read] = decoder.mask.bool()
        self.positions.copy_(decoder.mask.sum(1, keepdim=True))
        self.column.fill_(read)
        self.number.zero_()

        self.unfinished.zero_()
        self.unfinished[:count] = True
        self.keys.copy_(keys[index])
        self.ids.fill_(self.pad)
        self.logprobs.zero_()
        self._draw(decoder.logits)

    def take_rows(self, other: "FixedStep", rows: Tensor) -> None:
        """Go on with some unfinished rows (n,) of a larger step."""
        index = self._fill(rows)
        for layer, source in zip(self.cache.layers, other.cache.layers, strict=True):
            if not layer.is_initialized:
                first = slice(self.rows)
                layer.lazy_initialization(source.keys[first], source.values[first])
            layer.keys.copy_(source.keys[index])
            layer.values.copy_(source.values[index])
            layer.cumulative_length.copy_(source.cumulative_length)

        for name in ("tokens", "positions", "mask", "keys", "ids", "logprobs"):
            source = getattr(other, name)
            getattr(self, name).copy_(source[index])
        self.column.copy_(other.column)
        self.number.copy_(other.number)

        self.unfinished.zero_()
        self.unfinished[: len(rows)] = True

    def results(self, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Return ids and log-probs, (count, length) each, of the rows in use; padding after a row's stop token."""
        return self.ids[:count, :length], self.logprobs[:count, :length]

    def __call__(self) -> None:
        """Append a row's last token and draw the next one: on a GPU by replaying the captured graph."""
        if self.model.device.type != "cuda":
            self._forward_and_draw()
            return
        if self.graph is None:
            self._capture()
        self.graph.replay()

    def _forward_and_draw(self) -> None:
        """Read the last tokens and draw the next ones."""
        self.mask.index_fill_(3, self.column, True)
        layers = compiled_token_step(self.model, self.cache.layers) if self.compiles else nullcontext()

        with self.autocast(cache_enabled=False), forward.float32_logits(self.model), layers:
            output = self.model(
                input_ids=self.tokens,
                position_ids=self.positions,
                attention_mask=self.mask,
                past_key_values=self.cache,
                use_cache=True,
            )
            logits = output.logits[:, -1].float()

        self.column += 1
        self.positions += 1
        self._draw(logits)

    def _draw(self, logits: Tensor) -> None:
        """Draw a token of each row from the logits (rows, V); padding for rows that have ended."""
        tokens, logprobs = self.sample(logits, self.keys, self.number, self.counters)
        tokens = torch.where(self.unfinished, tokens, self.pad)
        logprobs = torch.where(self.unfinished, logprobs, 0)

        at = self.number.long()
        self.ids.index_copy_(1, at, tokens[:, None])
        self.logprobs.index_copy_(1, at, logprobs[:, None])

        self.unfinished &= ~is_stop(tokens, self.stop)
        self.tokens.copy_(tokens[:, None])
        self.number += 1

    def _fill(self, rows: Tensor) -> Tensor:
        """Return `rows` (n,) and the first of them again for each row that is not in use, (self.rows,)."""
        return torch.cat([rows, rows[:1].expand(self.rows - len(rows))])

    def _capture(self) -> None:
        """Capture a step as a CUDA graph, after two that are undone: the first ones choose kernels and workspaces."""
        moved = [
            self.tokens,
            self.positions,
            self.mask,
            self.column,
            self.number,
            self.unfinished,
            self.ids,
            self.logprobs,
            *(layer.cumulative_length for layer in self.cache.layers),
        ]
        before = [tensor.clone() for tensor in moved]

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())

        with torch.cuda.stream(stream):
            for _ in range(2):
                self._forward_and_draw()
        torch.cuda.current_stream().wait_stream(stream)

        for tensor, value in zip(moved, before, strict=True):
            tensor.copy_(value)

        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._forward_and_draw()
