"""Token limits of a run's answers and rows, and the speed of its base model.

The answer length is chosen first; pairs that do not fit beside an answer of that length are dropped.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlhf_cli import data, terminal
from rlhf_cli.commands.init.split import MIN_PROMPTS, split_keys
from rlhf_cli.config.common import MAX_DROPPED
from rlhf_cli.data.texts import Pair
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import devices, load
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.progress import Progress
from rlhf_cli.stages.setup import WARN_DROPPED_FRACTION

ENDED_SHARE = 0.9  # of the chosen answers that fit half of the context, this share ends within response_length
MIN_RESPONSE = 32  # tokens, if a chosen answer is longer
DEFAULT_CONTEXT = 4096  # for a model without a stated limit
MAX_TAIL = 1.25  # if the longest row is within this multiple of the 99th percentile, no row is dropped as too long
CHUNK_PAIRS = 2048  # pairs tokenized at a time


class Length(NamedTuple):
    """Token counts of a pair; answers include the end token."""

    prompt: int
    chosen: int
    rejected: int

    @property
    def row(self) -> int:
        """Length of the longer of its two rows."""
        return self.prompt + max(self.chosen, self.rejected)


@dataclass(frozen=True)
class Lengths:
    """Token limits of a run, and mean lengths of the pairs within them."""

    response_length: int
    max_length: int
    ended: float  # share of the chosen answers that end within response_length
    prompt_mean: float
    answer_mean: float  # of the chosen ones
    row_mean: float  # prompt and answer


def measure_lengths(tokenizer: Any, pairs: Sequence[Pair]) -> list[Length]:
    """Count the tokens of each pair as all stages do. Raises RLHFError D06, D14, T06."""
    lengths: list[Length] = []
    with Progress("data", len(pairs), "pair", brief=True) as bar:
        for first in range(0, len(pairs), CHUNK_PAIRS):
            chunk = pairs[first : first + CHUNK_PAIRS]
            prompts = [prompt for pair in chunk for prompt in (pair.prompt, None)]
            answers = [answer for pair in chunk for answer in (pair.chosen, pair.rejected)]
            ids = data.encode_many(tokenizer, prompts, answers)
            for (prompt, chosen), (_, rejected) in zip(ids[::2], ids[1::2], strict=True):
                lengths.append(Length(len(prompt), len(chosen), len(rejected)))
            bar.advance(len(chunk), note="tokenised")
    return lengths


def fit_lengths(pairs: Sequence[Pair], lengths: Sequence[Length], context: int | None) -> tuple[list[Pair], Lengths]:
    """Choose the token limits for a model with `context` positions; return the pairs that fit, and the limits.

    Warns (D10) about dropped pairs. Raises RLHFError D10 if too too_few fit.
    """
    context = context or DEFAULT_CONTEXT
    kept, response, longest = _select(lengths, context)
    _report_dropped(pairs, lengths, kept, context, response, longest)
    used = [lengths[i] for i in kept]
    ended = sum(length.chosen <= response for length in used) / len(used)
    if ended < 1 - WARN_DROPPED_FRACTION:
        text = f"only {percent(ended)} of the chosen answers end within response_length {response}"
        reason = f"the others are longer than half of the {context} positions of the base model"
        terminal.warn("D10", f"{text}: {reason}", where="--data", hint="name a base model with more positions")
    rows = [length.prompt + answer for length in used for answer in (length.chosen, length.rejected)]
    return [pairs[i] for i in kept], Lengths(
        response_length=response,
        max_length=longest,
        ended=ended,
        prompt_mean=sum(length.prompt for length in used) / len(used),
        answer_mean=sum(length.chosen for length in used) / len(used),
        row_mean=sum(rows) / len(rows),
    )


def _select(lengths: Sequence[Length], context: int) -> tuple[list[int], int, int]:
    """Return the indices of the pairs that fit, the maximum response length and the maximum row length."""
    half = context // 2
    fitting = [length.chosen for length in lengths if length.chosen <= half]
    if len(fitting) < (1 - MAX_DROPPED) * len(lengths):
        return [], half, context
    target = max(quantile(fitting, ENDED_SHARE), min(MIN_RESPONSE, max(length.chosen for length in lengths)))
    response = min(round_up(target), max(half, MIN_RESPONSE))
    kept = [i for i, length in enumerate(lengths) if length.prompt + response <= context and length.row <= context]
    if not kept:
        return [], response, context
    rows = [lengths[i].row for i in kept]
    percentile = quantile(rows, 0.99)
    longest = min(round_up(max(rows) if max(rows) <= MAX_TAIL * percentile else percentile), context)
    return [i for i in kept if lengths[i].row <= longest], response, longest


def _report_dropped(
    pairs: Sequence[Pair], lengths: Sequence[Length], kept: Sequence[int], context: int, response: int, longest: int
) -> None:
    dropped = len(pairs) - len(kept)
    if not dropped:
        return
    long_answers = sum(length.chosen > context // 2 for length in lengths)
    long_prompts = sum(length.prompt + response > context for length in lengths)
    long_rows = sum(length.row > context >= length.prompt + response for length in lengths)
    counts = {
        f"whose prompts leave less than {response} of {context} positions to an answer": long_prompts,
        f"longer than {context} positions": long_rows,
        f"longer than {longest} tokens, much longer than the others": dropped - long_prompts - long_rows,
    }
    if long_answers > MAX_DROPPED * len(pairs):
        counts = {f"whose chosen answers are longer than half of {context} positions": long_answers}
    reasons = " and ".join(f"{count} {reason}" for reason, count in counts.items() if count)
    share = f"{dropped} of {len(pairs)} pairs ({percent(dropped / len(pairs))})"
    too_few = len(split_keys([pairs[i] for i in kept])) < MIN_PROMPTS <= len(split_keys(pairs))
    hint = (
        _suggest_context(pairs, lengths, context) if too_few or dropped > WARN_DROPPED_FRACTION * len(pairs) else None
    )
    if too_few or dropped > MAX_DROPPED * len(pairs):
        raise RLHFError("D10", f"{share} do not fit: {reasons}", where="--data", hint=hint)
    terminal.warn("D10", f"{share} left out: {reasons}", where="--data", hint=hint)


def _suggest_context(pairs: Sequence[Pair], lengths: Sequence[Length], context: int) -> str:
    """Return a hint with the context length, a power of two times this one, that fits most pairs."""
    longer, kept = context, 0
    while kept < (1 - WARN_DROPPED_FRACTION) * len(pairs):
        longer *= 2
        kept = len(_select(lengths, longer)[0])
    share = percent(kept / len(pairs))
    return f"take a base model with {longer} positions, where {share} of the pairs fit, or bring shorter pairs"


def quantile(values: Sequence[int], share: float) -> int:
    """Return the smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def percent(share: float) -> str:
    """Format a share in whole percent; 0 % and 100 % only if it is exactly that."""
    rounded = round(100 * share)
    return f"{rounded if share in (0, 1) else min(max(rounded, 1), 99)} %"


def round_up(tokens: int) -> int:
    """Round up to a multiple of 8."""
    return -(-tokens // 8) * 8


BATCH_ROWS, BATCH_TOKENS, NEW_TOKENS = 8, 64, 16  # of the measured batch
MAX_CALLS, MAX_CALLS_S = 3, 5.0  # per function and round: number of calls, seconds after which none is added
MAX_ROUNDS, MAX_ROUNDS_S = 5, 10.0  # on a busy machine: number of rounds, seconds after which none is added


@dataclass(frozen=True)
class Speed:
    """Speed of the base model in tokens per second."""

    training: float  # forward and backward
    generation: float
    cpu_share: float = 1.0  # share of the processor that the measurement had


def measure_speed(folder: Path) -> Speed:
    """Measure the speed of a folder's model, as the best of several short measurements.

    While other processes use part of the processor, the measurement is repeated a few times.
    """
    model = load.load_causal_lm(folder).to(devices.device())
    config = model.config.get_text_config()
    width = min(BATCH_TOKENS, load.context_length(config) or BATCH_TOKENS)
    ids = torch.arange(BATCH_ROWS * width, device=model.device).remainder(config.vocab_size).reshape(BATCH_ROWS, width)

    def train() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    engine = HFEngine(model, None, 0)
    new_tokens = min(NEW_TOKENS, width // 2)
    prompts = Prompts.from_lists(ids.cpu()[:, :new_tokens].tolist())
    seeded = Prompts(prompts.ids, prompts.mask, tuple(range(BATCH_ROWS)), new_tokens)
    training_s, generation_s, share = fastest(train, lambda: engine.generate(seeded))
    return Speed(BATCH_ROWS * width / training_s, BATCH_ROWS * new_tokens / generation_s, share)


def fastest(*calls: Callable[[], Any]) -> tuple[float, ...]:
    """Return the minimum seconds of each call, and the maximum CPU share of any round."""
    for call in calls:
        call()  # warm-up
    start = time.perf_counter()
    rounds: list[tuple[float, ...]] = []
    while len(rounds) < MAX_ROUNDS and (not rounds or time.perf_counter() - start < MAX_ROUNDS_S):
        seconds, share = devices.measure_cpu_share(lambda: [_min_seconds(call) for call in calls])
        rounds.append((*seconds, share))
        if share >= devices.MIN_CPU_SHARE:
            break
    *seconds_of_calls, shares = zip(*rounds, strict=True)
    return *map(min, seconds_of_calls), max(shares)


def _min_seconds(call: Callable[[], Any]) -> float:
    seconds: list[float] = []
    while len(seconds) < MAX_CALLS and sum(seconds) < MAX_CALLS_S:
        seconds.append(_time(call))
    return min(seconds)


def _time(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
