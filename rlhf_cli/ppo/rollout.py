"""Engines that write responses.

An engine is anything with `generate(Prompts) -> Rollout`; to add one, add a class here.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from rlhf_cli.ppo import formulas, noise
from rlhf_cli.ppo.records import Prompts, Rollout
from rlhf_cli.progress import counted


class RolloutEngine(Protocol):
    def generate(self, prompts: Prompts) -> Rollout:
        """Responses of at most `prompts.response_length` tokens.

        Row i's draws are keyed by `prompts.seeds[i]` alone.
        """
        ...


@dataclass
class HFEngine:
    """Samples with a transformers causal model, all rows together.

    Noise of the row's own is added to logits / temperature and the largest taken (ppo/noise.py), so that which rows
    share a batch changes no draw (but where float noise decides a near-tie). No top-k, top-p or repetition penalty: the
    log-probs that PPO trains on are those of the full softmax. Temperature 0 takes the most likely token.

    `thrifty`: a prompt that stands in several neighbouring rows is read once for all of them, and rows that have ended
    are dropped from the batch.
    """

    model: Any
    stop_token_id: int | None
    pad_token_id: int
    temperature: float = 1.0
    batch_size: int | None = None  # rows at a time; None = all
    bf16: bool = False  # forward passes under bfloat16 autocast, as those that log-probs are read from
    thrifty: bool = True

    @torch.no_grad()
    def generate(self, prompts: Prompts) -> Rollout:
        assert len(prompts.seeds) == len(prompts) and prompts.response_length > 0
        size = self.batch_size or len(prompts)
        with torch.autocast(self.model.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            starts = counted("batch", range(0, len(prompts), size))
            parts = [self._write(prompts.rows(start, start + size)) for start in starts]
        responses = torch.cat(parts)
        counts = formulas.response_mask(responses, self.stop_token_id)
        ended = torch.zeros(len(prompts), dtype=torch.bool, device=responses.device)
        if self.stop_token_id is not None:
            ended = (responses == self.stop_token_id).any(1)
        width = int(counts.sum(1).max())
        ids = torch.cat(
            [prompts.ids.to(responses.device), torch.where(counts, responses, self.pad_token_id)[:, :width]], 1
        )
        mask = torch.cat([prompts.mask.to(responses.device), counts[:, :width]], 1)
        return Rollout(ids, mask, counts[:, :width], ended)

    @torch.no_grad()
    def stream(self, prompt: Prompts) -> Iterator[int]:
        """The response to a single prompt as it is drawn, token by token, through the stop token.

        The tokens that `generate` gives. Not under autocast, which would reach into whoever takes them.
        """
        assert len(prompt) == len(prompt.seeds) == 1 and prompt.response_length > 0 and not self.bf16
        for _, tokens in self._drawn(prompt):
            yield int(tokens)

    def _write(self, prompts: Prompts) -> Tensor:
        """Response ids (b, response_length); what stands after a row's stop token is padding."""
        responses = torch.full((len(prompts), prompts.response_length), self.pad_token_id, device=self.model.device)
        for step, (rows, tokens) in enumerate(self._drawn(prompts)):
            responses[rows, step] = tokens
        return responses

    def _drawn(self, prompts: Prompts) -> Iterator[tuple[Tensor, Tensor]]:
        """Step by step the rows (n,) of `prompts` whose responses go on, and their next tokens (n,)."""
        device = self.model.device
        first = int(prompts.mask.int().argmax(1).min())  # what is padding in all of these rows costs nothing
        ids, mask = prompts.ids[:, first:].to(device), prompts.mask[:, first:].to(device)
        open_rows = torch.arange(len(prompts), device=device)  # batch row -> row of `prompts`
        going = torch.ones_like(open_rows, dtype=torch.bool)
        state = self._read(ids, mask)
        keys, counters = noise.keys(prompts.seeds, device), noise.counters(state.logits.shape[1], device)
        for step in counted("rollout: token", range(prompts.response_length)):
            if self.temperature:
                tokens = noise.drawn(state.logits / self.temperature, keys, step, counters)
            else:
                tokens = state.logits.argmax(-1)
            yield open_rows[going], tokens[going]
            if self.stop_token_id is not None:
                going = going & (tokens != self.stop_token_id)
            if not going.any() or step + 1 == prompts.response_length:
                break
            if self.thrifty and going.sum() <= 0.8 * len(going):  # shrinking copies the cache: not for every row
                keep = going.nonzero()[:, 0]
                state.keep(keep)
                open_rows, tokens, going, keys = open_rows[keep], tokens[keep], going[keep], keys[keep]
            state.append(tokens)

    def _read(self, ids: Tensor, mask: Tensor) -> "_Decoder":
        """The prompts (b, P), read."""
        if not self.thrifty:
            return _Decoder(self.model, ids, mask)
        new = torch.ones_like(mask[:, 0])
        new[1:] = ((ids[1:] != ids[:-1]) | (mask[1:] != mask[:-1])).any(1)
        state = _Decoder(self.model, ids[new], mask[new])
        if not new.all():
            state.keep(new.cumsum(0) - 1)
        return state


class _Decoder:
    """Next-token logits (b, V) float32 of a growing batch, with a key-value cache."""

    logits: Tensor

    def __init__(self, model: Any, ids: Tensor, mask: Tensor):
        self.model, self.mask = model, mask.long()
        self.cache = DynamicCache(config=model.config)
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._forward(ids, (self.mask.cumsum(1) - 1).clamp(min=0))

    def append(self, tokens: Tensor) -> None:
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], 1)
        self._forward(tokens[:, None], self.mask.sum(1, keepdim=True) - 1)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone, some of them several times."""
        self.logits = self.logits[rows]
        self.cache.batch_select_indices(rows)
        self.mask = self.mask[rows]

    def _forward(self, ids: Tensor, positions: Tensor) -> None:
        extra = {"position_ids": positions} if self.takes_positions else {}
        output = self.model(
            input_ids=ids,
            attention_mask=self.mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
            **extra,
        )
        self.logits = output.logits[:, -1].float()
