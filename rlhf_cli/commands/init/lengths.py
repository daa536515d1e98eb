"""How long answers and rows may be. Answers come first: pairs that do not fit beside them are left out."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlhf_cli import data, terminal
from rlhf_cli.commands.init.split import LEAST, openings
from rlhf_cli.config.common import MAX_DROPPED
from rlhf_cli.data.texts import Pair
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import devices, load
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.progress import Progress
from rlhf_cli.stages.setup import WARN_DROPPED_FRACTION

ENDED = 0.9  # of the chosen answers that fit half of the context, this share ends within response_length
SHORTEST = 32  # tokens of a response at least, where a chosen answer is longer
CONTEXT = 4096  # for a model that names no limit
WORTH_IT = 1.25  # times the 99th percentile: up to there the longest rows are taken too
AT_ONCE = 2048  # pairs whose tokens are held in memory


class Length(NamedTuple):
    """Tokens of a pair; an answer's end token counts."""

    prompt: int
    chosen: int
    rejected: int

    @property
    def row(self) -> int:
        """The longer of its two rows."""
        return self.prompt + max(self.chosen, self.rejected)


@dataclass(frozen=True)
class Lengths:
    """What a run's token limits are, and how long the pairs within them are on average."""

    response_length: int
    max_length: int
    ended: float  # share of the chosen answers that end within response_length
    prompt_mean: float
    answer_mean: float  # of the chosen ones
    row_mean: float  # prompt and answer


def measure(tokenizer: Any, pairs: Sequence[Pair]) -> list[Length]:
    """The tokens of each pair, as all stages count them. Raises RLHFError D06, D14, T06."""
    found: list[Length] = []
    with Progress("data", len(pairs), "pair", brief=True) as bar:
        for first in range(0, len(pairs), AT_ONCE):
            part = pairs[first : first + AT_ONCE]
            prompts = [prompt for pair in part for prompt in (pair.prompt, None)]
            answers = [answer for pair in part for answer in (pair.chosen, pair.rejected)]
            ids = data.encode_many(tokenizer, prompts, answers)
            for (prompt, chosen), (_, rejected) in zip(ids[::2], ids[1::2], strict=True):
                found.append(Length(len(prompt), len(chosen), len(rejected)))
            bar.advance(len(part), note="tokenised")
    return found


def fit(pairs: Sequence[Pair], lengths: Sequence[Length], context: int | None) -> tuple[list[Pair], Lengths]:
    """The pairs that fit the limits of a model with `context` positions, and these limits; warns (D10) of the others.

    Raises RLHFError D10 where too few would fit.
    """
    context = context or CONTEXT
    kept, response, longest = _within(lengths, context)
    _tell_left_out(pairs, lengths, kept, context, response, longest)
    used = [lengths[i] for i in kept]
    ended = sum(one.chosen <= response for one in used) / len(used)
    if ended < 1 - WARN_DROPPED_FRACTION:
        text = f"only {percent(ended)} of the chosen answers end within response_length {response}"
        reason = f"the others are longer than half of the {context} positions of the base model"
        terminal.warn("D10", f"{text}: {reason}", where="--data", hint="name a base model with more positions")
    both = [one.prompt + answer for one in used for answer in (one.chosen, one.rejected)]
    return [pairs[i] for i in kept], Lengths(
        response_length=response,
        max_length=longest,
        ended=ended,
        prompt_mean=sum(one.prompt for one in used) / len(used),
        answer_mean=sum(one.chosen for one in used) / len(used),
        row_mean=sum(both) / len(both),
    )


def _within(lengths: Sequence[Length], context: int) -> tuple[list[int], int, int]:
    """The numbers of the pairs that fit, the most tokens of a response, and those of a row."""
    half = context // 2
    fitting = [one.chosen for one in lengths if one.chosen <= half]
    if len(fitting) < (1 - MAX_DROPPED) * len(lengths):
        return [], half, context
    wanted = max(quantile(fitting, ENDED), min(SHORTEST, max(one.chosen for one in lengths)))
    response = min(up(wanted), max(half, SHORTEST))
    kept = [i for i, one in enumerate(lengths) if one.prompt + response <= context and one.row <= context]
    if not kept:
        return [], response, context
    rows = [lengths[i].row for i in kept]
    usual = quantile(rows, 0.99)
    longest = min(up(max(rows) if max(rows) <= WORTH_IT * usual else usual), context)
    return [i for i in kept if lengths[i].row <= longest], response, longest


def _tell_left_out(
    pairs: Sequence[Pair], lengths: Sequence[Length], kept: Sequence[int], context: int, response: int, longest: int
) -> None:
    out = len(pairs) - len(kept)
    if not out:
        return
    halves = sum(one.chosen > context // 2 for one in lengths)
    crowded = sum(one.prompt + response > context for one in lengths)
    beyond = sum(one.row > context >= one.prompt + response for one in lengths)
    counts = {
        f"whose prompts leave less than {response} of {context} positions to an answer": crowded,
        f"longer than {context} positions": beyond,
        f"longer than {longest} tokens, much longer than the others": out - crowded - beyond,
    }
    if halves > MAX_DROPPED * len(pairs):
        counts = {f"whose chosen answers are longer than half of {context} positions": halves}
    reasons = " and ".join(f"{count} {reason}" for reason, count in counts.items() if count)
    share = f"{out} of {len(pairs)} pairs ({percent(out / len(pairs))})"
    few = len(openings([pairs[i] for i in kept])) < LEAST <= len(openings(pairs))
    hint = _longer_context(pairs, lengths, context) if few or out > WARN_DROPPED_FRACTION * len(pairs) else None
    if few or out > MAX_DROPPED * len(pairs):
        raise RLHFError("D10", f"{share} do not fit: {reasons}", where="--data", hint=hint)
    terminal.warn("D10", f"{share} left out: {reasons}", where="--data", hint=hint)


def _longer_context(pairs: Sequence[Pair], lengths: Sequence[Length], context: int) -> str:
    """How many positions are enough, in steps of two, as models have them."""
    enough, kept = context, 0
    while kept < (1 - WARN_DROPPED_FRACTION) * len(pairs):
        enough *= 2
        kept = len(_within(lengths, enough)[0])
    fits = percent(kept / len(pairs))
    return f"take a base model with {enough} positions, where {fits} of the pairs fit, or bring shorter pairs"


def quantile(values: Sequence[int], share: float) -> int:
    """The smallest of the values that at least `share` of them do not pass."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def percent(share: float) -> str:
    """A share in whole percent, and neither 0 nor 100 where it is not that."""
    whole = round(100 * share)
    return f"{whole if share in (0, 1) else min(max(whole, 1), 99)} %"


def up(tokens: int) -> int:
    """The next multiple of 8."""
    return -(-tokens // 8) * 8


ROWS, TOKENS, WRITTEN = 8, 64, 16
CALLS, ENOUGH = 3, 5.0  # of each kind a round: calls at most, and seconds after which no other one is made
ROUNDS, LONG = 5, 10.0  # beside other work: rounds at most, and seconds after which no other one begins


@dataclass(frozen=True)
class Speed:
    """Tokens a second; `share`: how much of the processor other work left to the measurement."""

    trained: float  # forward and backward
    written: float
    share: float = 1.0


def measure_speed(folder: Path) -> Speed:
    """Tokens a second that the model of a folder learns from and writes, the best of several short measurements.

    As long as other work takes part of the processor the measurement is made again, a few times.
    """
    model = load.load_causal_lm(folder).to(devices.device())
    config = model.config.get_text_config()
    width = min(TOKENS, load.context_length(config) or TOKENS)
    ids = torch.arange(ROWS * width, device=model.device).remainder(config.vocab_size).reshape(ROWS, width)

    def train() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    engine = HFEngine(model, None, 0)
    written = min(WRITTEN, width // 2)
    prompts = Prompts.from_lists(ids.cpu()[:, :written].tolist())
    asked = Prompts(prompts.ids, prompts.mask, tuple(range(ROWS)), written)
    trained, wrote, share = best(train, lambda: engine.generate(asked))
    return Speed(ROWS * width / trained, ROWS * written / wrote, share)


def best(*calls: Callable[[], Any]) -> tuple[float, ...]:
    """The fewest seconds that each of the calls took, and the largest share of the processor in any round of them."""
    for call in calls:
        call()  # what is made once is made
    began = time.perf_counter()
    rounds: list[tuple[float, ...]] = []
    while len(rounds) < ROUNDS and (not rounds or time.perf_counter() - began < LONG):
        seconds, share = devices.measure_cpu_share(lambda: [_fewest(call) for call in calls])
        rounds.append((*seconds, share))
        if share >= devices.MIN_CPU_SHARE:
            break
    *taken, shares = zip(*rounds, strict=True)
    return *map(min, taken), max(shares)


def _fewest(call: Callable[[], Any]) -> float:
    taken: list[float] = []
    while len(taken) < CALLS and sum(taken) < ENOUGH:
        taken.append(_seconds(call))
    return min(taken)


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began
