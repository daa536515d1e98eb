"""Preference pairs of `rlhf init preferences`: read them, choose token limits, split them into parts.

The answer length is chosen first; pairs that do not fit beside an answer of that length are dropped. Parts share no
prompt.
"""

import math
import random
from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rlhf_cli import data, terminal
from rlhf_cli.config.sections import MAX_DROPPED
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.texts import Pair
from rlhf_cli.data.tokens import as_answer
from rlhf_cli.errors import RLHFError, at_location
from rlhf_cli.progress import Progress
from rlhf_cli.stages.common.reading import WARN_DROPPED_FRACTION

SHARES = {"sft": 0.3, "pairs": 0.45, "prompts": 0.15, "held-out": 0.1}  # of the prompts
PART_USES = {
    "sft": "SFT learns the chosen answers",
    "pairs": "the reward model learns to tell them apart",
    "prompts": "PPO answers them",
    "held-out": "evaluation alone",
}
MAX_HELD_OUT = 1000  # prompts; the interval of a win rate is then 0.06 wide
MIN_PROMPTS = 20  # distinct prompts, so that two are held out
MIN_BALANCED = {"pairs": 9, "held-out": 2}  # pairs that balance_parts must keep: as many as MIN_PROMPTS prompts give
MAX_ANSWERS = 4  # per prompt, for SFT, so that prompts have similar weights
ENDED_SHARE = 0.9  # of the chosen answers that fit half of the context, this share ends within response_length
MIN_RESPONSE = 32  # tokens, if a chosen answer is longer
DEFAULT_CONTEXT = 4096  # for a model without a stated limit
MAX_TAIL = 1.25  # if the longest row is within this multiple of the 99th percentile, no row is dropped as too long
CHUNK_PAIRS = 2048  # pairs tokenized at a time
NOT_RENDERED = ("D06", "T09")  # codes of a conversation that the chat template does not render
Parts = dict[str, list[Pair]]


@dataclass(frozen=True)
class PairFormat:
    """The pairs of a file in the form in which they are written."""

    pairs: list[Pair]
    read: int  # rows of the file
    text: str  # one line: what the prompts are
    chat_template: str | None  # to set in sft.yaml
    columns: str  # one line: which columns were read as what, and which were not
    from_texts: bool  # the pairs were texts, and are conversations


def read_pairs(source: DataSource, tokenizer: Any, *, plain: bool) -> PairFormat:
    """Read the valid pairs of a source in the form that suits the tokenizer; warnings count the other rows.

    With a chat template, prompts become conversations unless `plain`. Without one, conversations use chatml unless
    `plain`, and transcripts stay text. A text prompt with a system text is a conversation.
    Raises RLHFError D01-D12, D16 if too many rows are not usable.
    """
    file = data.preference_pairs(source, reads_system_texts=not plain)
    _check_dropped(source, file)
    pairs = file.pairs
    own_template, text = tokenizer.chat_template, "plain text"
    template: str | None = None
    has_conversations = any(not isinstance(pair.prompt, str) for pair in pairs)
    has_system_texts = not plain and any(pair.system for pair in pairs)
    if has_conversations:
        if (file.transcripts and (plain or not own_template)) or (plain and not own_template):
            text = "dialogues in one text" + ("" if plain else ", as the model has no chat template")
            pairs = [pair.as_text() for pair in pairs]
        else:
            template = None if own_template else "chatml"
            text = "conversations" + (", in chatml: the model has no chat template" if template else "")
    elif has_system_texts or (own_template and not plain):
        template = None if own_template else "chatml"
        text = "conversations, by the model's chat template" if own_template else "conversations, in chatml"
        text += ", with system messages" if has_system_texts else ""
        pairs = [_as_conversation(pair) for pair in pairs]
    elif sum(not str(p.prompt)[-1:].isspace() and not p.chosen[:1].isspace() for p in pairs) > len(pairs) / 2:
        # most answers would join the last word of their prompts
        text = "plain text, a space put before each answer"
        pairs = [replace(p, chosen=f" {p.chosen}", rejected=f" {p.rejected}") for p in pairs]
    return PairFormat(pairs, file.num_read, text, template, file.columns, from_texts=not has_conversations)


def _as_conversation(pair: Pair) -> Pair:
    """Return a pair of texts as a conversation of its system text and prompt."""
    system = [{"role": "system", "content": pair.system}] if pair.system else []
    user = {"role": "user", "content": str(pair.prompt)}
    return replace(pair, prompt=[*system, user], chosen=pair.chosen.strip(), rejected=pair.rejected.strip())


def _check_dropped(source: DataSource, file: data.PairFile) -> None:
    """Warn (D16) if many rows are not usable. Raises RLHFError D16 if most are not, for any reason."""
    share = file.num_dropped / file.num_read
    if share <= WARN_DROPPED_FRACTION:
        return
    text = f"{file.num_dropped} of {file.num_read} rows are dropped: {file.dropped}"
    hint = "look at these rows: a column may be read as what it is not"
    if share > MAX_DROPPED:
        raise RLHFError("D16", f"{text}; at most {MAX_DROPPED:.0%} may be", where=source.shown(), hint=hint)
    terminal.warn("D16", text, where=source.shown(), hint=hint)


def split_pairs(pairs: Sequence[Pair], seed: int) -> Parts:
    """Split the pairs into parts; all pairs of a prompt, or of a conversation's first message, share a part.

    Raises RLHFError D11 for fewer than 20 distinct prompts.
    """
    keys = split_keys(pairs)
    if len(keys) < MIN_PROMPTS:
        text = f"{len(keys)} different prompts; at least {MIN_PROMPTS} are needed to hold some of them out"
        raise RLHFError("D11", text, where="--data", hint="bring pairs for more prompts")
    random.Random(f"{seed} preferences").shuffle(keys)
    counts = {name: round(share * len(keys)) for name, share in SHARES.items()}
    counts["held-out"] = min(counts["held-out"], MAX_HELD_OUT)
    counts["pairs"] = len(keys) - sum(count for name, count in counts.items() if name != "pairs")
    names = iter([name for name, count in counts.items() for _ in range(count)])
    part_of = dict(zip(keys, names, strict=True))
    parts: Parts = {name: [] for name in SHARES}
    for pair in pairs:
        parts[part_of[data.split_key(pair.prompt)]].append(pair)
    for name, part in parts.items():
        random.Random(f"{seed} {name}").shuffle(part)  # eval takes the first ones, which must be a random sample
    return parts


def split_keys(pairs: Sequence[Pair]) -> list[str]:
    """Return the distinct keys that decide the part of a prompt, in order."""
    return list(dict.fromkeys(data.split_key(pair.prompt) for pair in pairs))


def most_chosen(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs for SFT: of each prompt the MAX_ANSWERS answers that were chosen most often, each once."""
    answers: dict[str, Counter[str]] = {}
    first: dict[tuple[str, str], Pair] = {}
    for pair in pairs:
        prompt = repr(pair.prompt)
        answers.setdefault(prompt, Counter())[pair.chosen] += 1
        first.setdefault((prompt, pair.chosen), pair)
    selected = {(prompt, answer) for prompt, counts in answers.items() for answer, _ in counts.most_common(MAX_ANSWERS)}
    return [pair for key, pair in first.items() if key in selected]


def balance_lengths(lengths: Sequence[tuple[int, int]]) -> list[int]:
    """Return the indices of pairs whose lengths (chosen, rejected) do not tell which answer was chosen, in order.

    Each pair whose chosen answer is the shorter one keeps the nearest of those whose chosen answer is as many times the
    longer one, or the other way round if these are fewer.
    """
    sides: tuple[list[tuple[float, int]], list[tuple[float, int]]] = ([], [])
    kept = set()
    for index, (chosen, rejected) in enumerate(lengths):
        if chosen == rejected:
            kept.add(index)
        else:
            sides[chosen > rejected].append((abs(math.log((chosen + 1) / (rejected + 1))), index))
    rarer, other = sorted(map(sorted, sides), key=len)
    for ratio, index in rarer:
        place = bisect(other, (ratio, index))
        nearest = min(range(max(0, place - 1), min(place + 1, len(other))), key=lambda i: abs(other[i][0] - ratio))
        kept |= {index, other.pop(nearest)[1]}
    return sorted(kept)


def balance_parts(parts: Parts) -> Parts:
    """Return the reward model's pairs that `balance_lengths` keeps. Raises RLHFError D11 if they are too few."""
    kept = {name: [parts[name][i] for i in balance_lengths(character_lengths(parts[name]))] for name in MIN_BALANCED}
    if any(len(kept[name]) < least for name, least in MIN_BALANCED.items()):
        (train, held_out), (train_all, held_out_all) = ([len(each[name]) for name in kept] for each in (kept, parts))
        text = f"--balance-length would leave {train} of {train_all} pairs to train the reward model and {held_out} of "
        text += f"{held_out_all} to measure it; at least {' and '.join(map(str, MIN_BALANCED.values()))} are needed"
        lacking = "shorter" if longer_share(parts["pairs"]) > 0.5 else "longer"
        hint = f"leave it out, or bring more pairs in which the {lacking} answer is the chosen one"
        raise RLHFError("D11", text, where="--data", hint=hint)
    return kept


def character_lengths(pairs: Sequence[Pair]) -> list[tuple[int, int]]:
    """Return the lengths of chosen and rejected answers in characters."""
    return [(len(pair.chosen), len(pair.rejected)) for pair in pairs]


def longer_share(pairs: Sequence[Pair]) -> float:
    """Return the share of pairs in which the longer answer is the chosen one; 0.5 if all lengths are equal."""
    longer = [chosen > rejected for chosen, rejected in character_lengths(pairs) if chosen != rejected]
    return sum(longer) / len(longer) if longer else 0.5


def rows_of_files(parts: Parts, *, balance: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each file in data/; `balance` the lengths of the reward model's pairs (D11)."""
    held_out, rewarded = parts["held-out"], balance_parts(parts) if balance else parts
    return {
        "sft": [_example(pair) for pair in most_chosen(parts["sft"])],
        "sft_eval": [_example(pair) for pair in most_chosen(held_out)],
        "pairs": [_preference(pair) for pair in rewarded["pairs"]],
        "pairs_eval": [_preference(pair) for pair in rewarded["held-out"]],
        "prompts": [{"prompt": prompt} for prompt in distinct_prompts(parts["prompts"])],
        "heldout": [{"prompt": prompt} for prompt in distinct_prompts(held_out)],
    }


def distinct_prompts(pairs: list[Pair]) -> list[Any]:
    """Return each prompt once, in order."""
    return list({repr(pair.prompt): pair.prompt for pair in pairs}.values())


def _example(pair: Pair) -> dict[str, Any]:
    return {"prompt": pair.prompt, "completion": _answer(pair, pair.chosen)}


def _preference(pair: Pair) -> dict[str, Any]:
    answers = {"chosen": _answer(pair, pair.chosen), "rejected": _answer(pair, pair.rejected)}
    return {"prompt": pair.prompt, **answers, **({} if pair.margin is None else {"margin": pair.margin})}


def _answer(pair: Pair, text: str) -> Any:
    return text if isinstance(pair.prompt, str) else [{"role": "assistant", "content": text}]


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
    prompt_max: int


def measure_lengths(tokenizer: Any, pairs: Sequence[Pair]) -> list[Length]:
    """Count the tokens of each pair as all stages do. Raises RLHFError D06, D14, T06, T09."""
    lengths: list[Length] = []
    with Progress("data", len(pairs), "pair", brief=True) as bar:
        for first in range(0, len(pairs), CHUNK_PAIRS):
            chunk = pairs[first : first + CHUNK_PAIRS]
            prompts = [prompt for pair in chunk for prompt in (pair.prompt, None)]
            answers = [as_answer(pair.prompt, text) for pair in chunk for text in (pair.chosen, pair.rejected)]
            ids = data.encode_many(tokenizer, prompts, answers)
            for (prompt, chosen), (_, rejected) in zip(ids[::2], ids[1::2], strict=True):
                lengths.append(Length(len(prompt), len(chosen), len(rejected)))
            bar.advance(len(chunk), note="tokenised")
    return lengths


def measure_rendered(tokenizer: Any, pairs: Sequence[Pair]) -> tuple[list[Pair], list[Length]]:
    """Return the pairs that the chat template renders, and their lengths; a warning counts the others.

    Raises RLHFError D06 or T09 of the first of them if they are many, and otherwise as `measure_lengths`.
    """
    try:
        return list(pairs), measure_lengths(tokenizer, pairs)
    except RLHFError as error:
        if error.problems[0].code not in NOT_RENDERED:
            raise
    rendered: list[Pair] = []
    errors: list[RLHFError] = []
    for pair in pairs:
        try:
            with at_location(str(pair.location)):
                measure_lengths(tokenizer, [pair])
            rendered.append(pair)
        except RLHFError as error:
            errors.append(error)
    if len(errors) > WARN_DROPPED_FRACTION * len(pairs):
        raise errors[0]
    first = errors[0].problems[0]
    text = f"{len(errors)} of {len(pairs)} pairs dropped: {first.text} (first: {first.where})"
    terminal.warn(first.code, text, where="--data", hint="correct these pairs")
    return rendered, measure_lengths(tokenizer, rendered)


def fit_lengths(pairs: Sequence[Pair], lengths: Sequence[Length], context: int | None) -> tuple[list[Pair], Lengths]:
    """Choose the token limits for a model with `context` positions; return the pairs that fit, and the limits.

    Warns (D10) about dropped pairs. Raises RLHFError D10 if too few fit.
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
        prompt_max=max(length.prompt for length in used),
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
    reasons = f"a prompt and {response} more tokens must fit {context} positions, and a row {longest} tokens"
    if sum(length.chosen > context // 2 for length in lengths) > MAX_DROPPED * len(pairs):
        reasons = f"most chosen answers are longer than half of {context} positions"
    share = f"{dropped} of {len(pairs)} pairs ({percent(dropped / len(pairs))})"
    too_few = len(split_keys([pairs[i] for i in kept])) < MIN_PROMPTS <= len(split_keys(pairs))
    hint = None
    if too_few or dropped > WARN_DROPPED_FRACTION * len(pairs):
        longer, fitting = context, 0
        while fitting < (1 - WARN_DROPPED_FRACTION) * len(pairs):
            longer *= 2
            fitting = len(_select(lengths, longer)[0])
        most = f"{percent(fitting / len(pairs))} of the pairs fit"
        hint = f"take a base model with {longer} positions, where {most}, or use shorter pairs"
    if too_few or dropped > MAX_DROPPED * len(pairs):
        raise RLHFError("D10", f"{share} do not fit: {reasons}", where="--data", hint=hint)
    terminal.warn("D10", f"{share} dropped: {reasons}", where="--data", hint=hint)


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
