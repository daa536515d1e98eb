"""Token limits of `rlhf init preferences`: the answer length is chosen first; pairs that do not fit are dropped."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_cli import data, terminal
from rlhf_cli.commands.init.parts import MIN_PROMPTS, split_keys
from rlhf_cli.config.sections import MAX_DROPPED
from rlhf_cli.data.texts import Pair
from rlhf_cli.data.tokens import as_answer
from rlhf_cli.errors import RLHFError, at_location
from rlhf_cli.progress import Progress
from rlhf_cli.stages.common.reading import WARN_DROPPED_FRACTION

ENDED_SHARE = 0.9  # of the chosen answers that fit half of the context, this share ends within response_length
MIN_RESPONSE = 32  # tokens, if a chosen answer is longer
DEFAULT_CONTEXT = 4096  # for a model without a stated limit
MAX_TAIL = 1.25  # if the longest row is within this multiple of the 99th percentile, no row is dropped as too long
CHUNK_PAIRS = 2048  # pairs tokenized at a time
NOT_RENDERED = ("D06", "T09")  # codes of a conversation that the chat template does not render


@dataclass(frozen=True)
class TokenCounts:
    """Token counts of a pair; answers include the end token."""

    prompt: int
    chosen: int
    rejected: int

    @property
    def longer_row(self) -> int:
        """Prompt and the longer answer."""
        return self.prompt + max(self.chosen, self.rejected)


@dataclass(frozen=True)
class TokenLimits:
    """Token limits of a run, and mean lengths of the pairs within them."""

    response_length: int
    max_length: int
    ended: float  # share of the chosen answers that end within response_length
    prompt_mean: float
    answer_mean: float  # of the chosen ones
    row_mean: float  # prompt and answer
    prompt_max: int


@dataclass(frozen=True)
class Selection:
    """The pairs that fit a context, by their indices, and the limits that they fit."""

    kept: list[int]
    response_length: int
    max_length: int


def count_tokens(tokenizer: Any, pairs: Sequence[Pair]) -> list[TokenCounts]:
    """Count the tokens of each pair as all stages do. Raises RLHFError D06, D14, T06, T09."""
    counts: list[TokenCounts] = []
    with Progress("data", len(pairs), "pair", brief=True) as bar:
        for first in range(0, len(pairs), CHUNK_PAIRS):
            chunk = pairs[first : first + CHUNK_PAIRS]
            chosen = [pair.chosen for pair in chunk]
            rejected = [as_answer(pair.prompt, pair.rejected) for pair in chunk]
            rows = data.encode_many(tokenizer, [pair.prompt for pair in chunk], chosen)
            answers = data.encode_many(tokenizer, [None] * len(chunk), rejected)
            for (prompt_ids, chosen_ids), (_, rejected_ids) in zip(rows, answers, strict=True):
                counts.append(TokenCounts(len(prompt_ids), len(chosen_ids), len(rejected_ids)))
            bar.advance(len(chunk), note="tokenised")
    return counts


def drop_unrendered(tokenizer: Any, pairs: Sequence[Pair]) -> tuple[list[Pair], list[TokenCounts]]:
    """Return the pairs that the chat template renders, and their token counts; a warning counts the others.

    Raises RLHFError D06 or T09 of the first of them if they are many, and otherwise as `count_tokens`.
    """
    try:
        return list(pairs), count_tokens(tokenizer, pairs)
    except RLHFError as error:
        if error.problems[0].code not in NOT_RENDERED:
            raise

    rendered: list[Pair] = []
    refusals: list[RLHFError] = []
    for pair in pairs:
        try:
            with at_location(str(pair.location)):
                count_tokens(tokenizer, [pair])
            rendered.append(pair)
        except RLHFError as refusal:
            refusals.append(refusal)
    if len(refusals) > WARN_DROPPED_FRACTION * len(pairs):
        raise refusals[0]

    first = refusals[0].problems[0]
    text = f"{len(refusals)} of {len(pairs)} pairs dropped: {first.text} (first: {first.where})"
    terminal.warn(first.code, text, where="--data", hint="correct these pairs")
    return rendered, count_tokens(tokenizer, rendered)


def fit_pairs(
    pairs: Sequence[Pair], counts: Sequence[TokenCounts], context: int | None
) -> tuple[list[Pair], TokenLimits]:
    """Choose the token limits for a model with `context` positions; return the pairs that fit, and the limits.

    Warns (D10) about dropped pairs. Raises RLHFError D10 if too few fit.
    """
    context = context or DEFAULT_CONTEXT
    selection = _select(counts, context)
    _report_dropped(pairs, counts, selection, context)

    used = [counts[index] for index in selection.kept]
    limits = _summarize(used, selection)
    if limits.ended < 1 - WARN_DROPPED_FRACTION:
        share = whole_percent(limits.ended)
        text = f"only {share} of the chosen answers end within response_length {limits.response_length}"
        reason = f"the others are longer than half of the {context} positions of the base model"
        terminal.warn("D10", f"{text}: {reason}", where="--data", hint="name a base model with more positions")
    return [pairs[index] for index in selection.kept], limits


def _select(counts: Sequence[TokenCounts], context: int) -> Selection:
    """Choose the response length, then the longest row beside it, and the pairs that fit both, which may be none."""
    half = context // 2
    chosen = [count.chosen for count in counts]
    fitting = [length for length in chosen if length <= half]
    if len(fitting) < (1 - MAX_DROPPED) * len(counts):
        return Selection([], half, context)

    wanted = max(quantile(fitting, ENDED_SHARE), min(MIN_RESPONSE, max(chosen)))
    response = min(round_up(wanted), max(half, MIN_RESPONSE))
    row_lengths = {  # by the index of the pair
        index: count.longer_row
        for index, count in enumerate(counts)
        if max(count.prompt + response, count.longer_row) <= context
    }
    if not row_lengths:
        return Selection([], response, context)

    longest = max(row_lengths.values())
    percentile = quantile(list(row_lengths.values()), 0.99)
    if longest > MAX_TAIL * percentile:
        longest = percentile
    longest = min(round_up(longest), context)
    return Selection([index for index, length in row_lengths.items() if length <= longest], response, longest)


def _summarize(used: Sequence[TokenCounts], selection: Selection) -> TokenLimits:
    """Return the limits of a selection with the means of the pairs used."""
    prompts = sum(count.prompt for count in used)
    chosen = sum(count.chosen for count in used)
    rejected = sum(count.rejected for count in used)
    return TokenLimits(
        response_length=selection.response_length,
        max_length=selection.max_length,
        ended=sum(count.chosen <= selection.response_length for count in used) / len(used),
        prompt_mean=prompts / len(used),
        answer_mean=chosen / len(used),
        row_mean=(2 * prompts + chosen + rejected) / (2 * len(used)),
        prompt_max=max(count.prompt for count in used),
    )


def _report_dropped(pairs: Sequence[Pair], counts: Sequence[TokenCounts], selection: Selection, context: int) -> None:
    """Warn (D10) of pairs that do not fit. Raises RLHFError D10 if they are too many."""
    dropped = len(pairs) - len(selection.kept)
    if not dropped:
        return

    reasons = (
        f"a prompt and {selection.response_length} more tokens must fit {context} positions, "
        f"and a row {selection.max_length} tokens"
    )
    if sum(count.chosen > context // 2 for count in counts) > MAX_DROPPED * len(pairs):
        reasons = f"most chosen answers are longer than half of {context} positions"
    share = f"{dropped} of {len(pairs)} pairs ({whole_percent(dropped / len(pairs))})"

    kept_prompts = split_keys([pairs[index] for index in selection.kept])
    too_few = len(kept_prompts) < MIN_PROMPTS <= len(split_keys(pairs))
    hint = None
    if too_few or dropped > WARN_DROPPED_FRACTION * len(pairs):
        hint = _larger_context_hint(counts, context)
    if too_few or dropped > MAX_DROPPED * len(pairs):
        raise RLHFError("D10", f"{share} do not fit: {reasons}", where="--data", hint=hint)
    terminal.warn("D10", f"{share} dropped: {reasons}", where="--data", hint=hint)


def _larger_context_hint(counts: Sequence[TokenCounts], context: int) -> str:
    """Name the first doubling of the context that most pairs fit."""
    fitting = 0
    while fitting < (1 - WARN_DROPPED_FRACTION) * len(counts):
        context *= 2
        fitting = len(_select(counts, context).kept)
    most = f"{whole_percent(fitting / len(counts))} of the pairs fit"
    return f"take a base model with {context} positions, where {most}, or use shorter pairs"


def quantile(values: Sequence[int], share: float) -> int:
    """Return the smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def whole_percent(share: float) -> str:
    """Format a share in whole percent; 0 % and 100 % only if it is exactly that."""
    rounded = round(100 * share)
    if share not in (0, 1):
        rounded = min(max(rounded, 1), 99)
    return f"{rounded} %"


def round_up(tokens: int) -> int:
    """Round up to a multiple of 8."""
    return math.ceil(tokens / 8) * 8
