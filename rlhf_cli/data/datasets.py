"""Rows of a file to token rows: examples for SFT, pairs for the reward model, prompts for PPO and evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, TypeVar

from rlhf_cli import terminal
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data import other_formats, texts
from rlhf_cli.data import tokens as cache
from rlhf_cli.data.bad_row import BadRow
from rlhf_cli.data.formats import DataFile, Form
from rlhf_cli.data.readers import Place
from rlhf_cli.data.texts import Rows
from rlhf_cli.data.tokens import Conversation, Encoded, encode_many
from rlhf_cli.errors import RLHFError

SFT_FORMS = (("prompt", "completion"), ("messages",), ("text",))
PAIR_FORMS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
Asked = tuple[Place, str | Conversation | None, str | None]  # a row of what `encode_many` takes
PROMPT_FORMS = (*PAIR_FORMS, ("prompt",), ("messages",))
Row = TypeVar("Row")


@dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens, the text or conversation as given, and where it stands."""

    ids: list[int]
    text: str | Conversation
    place: Place


def is_plain_text(source: DataSource | Path | str) -> bool:
    """Whether the first row of SFT data is {text}, without a prompt. Raises RLHFError D01-D06, D12."""
    return _first_row(DataFile(source, SFT_FORMS))[0] == ("text",)


def prompt_form(source: DataSource | Path | str) -> Literal["text", "conversation", "transcript"]:
    """How the first row of any stage's data writes its prompt. Raises RLHFError D01-D06, D12."""
    file = DataFile(source, (*SFT_FORMS, *PROMPT_FORMS))
    form, row = _first_row(file)
    if file.transcripts:
        return "transcript"
    return "text" if isinstance(row[form[0]], str) else "conversation"


def _first_row(file: DataFile) -> tuple[Form, dict[str, Any]]:
    first = next(file.rows(), None)
    if first is None:
        file.finish(usable=0)
    assert first, "`finish` raises"
    return first[1:]


def sft_rows(
    source: DataSource | Path | str,
    tokenizer: Any,
    *,
    max_length: int | None,
    on_long: str = "drop",
    sample: int | None = None,
) -> Rows[dict[str, list[int]]]:
    """{input_ids, completion_mask} of each example; the mask is 1 on the tokens that the model has to write.

    Takes {prompt, completion}, {text} (no prompt: all of it is completion) and {messages} (one example per assistant
    turn). Without a tokenizer only the texts are checked; of more examples than `sample` only so many are tokenised.
    Raises RLHFError D01-D10, D12, D14 with file and line.
    """
    file = DataFile(source, SFT_FORMS)
    found = _examples(file)
    prompts = [example.prompt or example.response for example in found]
    if tokenizer is None:
        return _finished(file, [{} for _ in found], prompts)
    found, every = _sampled(file, found, sample)
    if file.transcripts and not tokenizer.chat_template:
        found = [example.as_text() for example in found]
    encoded = _encode(file, tokenizer, [(example.place, example.prompt, example.response) for example in found])
    rows = []
    for example, tokens in zip(found, encoded, strict=True):
        if tokens is None:
            continue
        prompt, response = tokens
        good = not example.prompt or _has_prompt(file, example.place, prompt)
        good = good and _has_response(file, example.place, "completion", response)
        if good and _fits(file, example.place, len(prompt) + len(response), max_length, on_long):
            rows.append({"input_ids": prompt + response, "completion_mask": [0] * len(prompt) + [1] * len(response)})
    return _finished(file, rows, prompts, every=every)


def preference_rows(
    source: DataSource | Path | str,
    tokenizer: Any,
    *,
    max_length: int | None,
    on_long: str = "drop",
    on_identical: str = "error",
    sample: int | None = None,
) -> Rows[dict[str, Any]]:
    """{prompt_ids, chosen_ids, rejected_ids[, margin]} of each pair; chosen_ids = prompt + response + stop token.

    Takes {prompt, chosen, rejected} and {chosen, rejected}, where the prompt is what the two begin with. Without a
    tokenizer only the texts are checked; of more pairs than `sample` only so many are tokenised.
    Raises RLHFError D01-D10, D12, D14 with file and line.
    """
    file = DataFile(source, PAIR_FORMS)
    pairs = [pair for pair in read_pairs(file, on_identical) if _is_ours(file, pair.prompt)]
    _warn_repeated(file, pairs)
    prompts = [pair.prompt for pair in pairs]
    if tokenizer is None:
        return _finished(file, [{} for _ in pairs], prompts)
    pairs, every = _sampled(file, pairs, sample)
    if file.transcripts and not tokenizer.chat_template:
        pairs = [pair.as_text() for pair in pairs]
    asked = ((pair.place, pair.prompt, pair.chosen) for pair in pairs)
    others = ((pair.place, None, pair.rejected) for pair in pairs)
    encoded = _encode(file, tokenizer, [*asked, *others])
    rows = []
    for pair, first, second in zip(pairs, encoded[: len(pairs)], encoded[len(pairs) :], strict=True):
        if first is None or second is None:
            continue
        (prompt, chosen), (_, rejected) = first, second
        good = _has_prompt(file, pair.place, prompt) and _has_response(file, pair.place, "chosen", chosen)
        good = good and _has_response(file, pair.place, "rejected", rejected)
        if good and _fits(file, pair.place, len(prompt) + max(len(chosen), len(rejected)), max_length, on_long):
            row = {"prompt_ids": prompt, "chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected}
            rows.append(row if pair.margin is None else {**row, "margin": pair.margin})
    return _finished(file, rows, prompts, every=every)


def preference_pairs(source: DataSource | Path | str) -> tuple[list[texts.Pair], int, bool]:
    """The usable pairs of a source, each once; how many rows it has; and whether they were transcripts.

    All other rows are left out and counted in warnings. Raises RLHFError D01-D05, D12 and where nothing is left.
    """
    file = DataFile(source, PAIR_FORMS)
    pairs: dict[str, texts.Pair] = {}
    for pair in read_pairs(file, "drop"):
        if pairs.setdefault(repr((pair.prompt, pair.chosen, pair.rejected)), pair) is not pair:
            file.drop(pair.place, "D15", "duplicate of an earlier pair")
    hints = {"D15": "each pair is counted once", "D07": "identical answers have no preference"}
    file.finish(len(pairs), hints, "the other rows are used")
    return list(pairs.values()), file.read, file.transcripts


def prompt_rows(
    source: DataSource | Path | str,
    tokenizer: Any,
    *,
    max_length: int | None,
    on_long: str = "drop",
    sample: int | None = None,
) -> Rows[Prompt]:
    """The prompts of a file: {prompt}, {messages} (up to the last assistant turn), or the distinct prompts of pairs.

    Without a tokenizer they have no tokens, only the texts are checked; of more than `sample` only so many are
    tokenised. Raises RLHFError D01-D06, D08, D10, D12, D14 with file and line.
    """
    file = DataFile(source, PROMPT_FORMS)
    found = _openings(file, [asked for asked in _distinct_prompts(file) if _is_ours(file, asked.text)])
    texts_as_given = [asked.text for asked in found]
    if tokenizer is None:
        told = [Prompt([], asked.text, asked.place) for asked in found]
        return _finished(file, told, texts_as_given, kept=sum(asked.rows for asked in found))
    found, every = _sampled(file, found, sample)
    if file.transcripts and not tokenizer.chat_template:
        found = [replace(asked, text=other_formats.render(asked.text)) for asked in found]
    encoded = _encode(file, tokenizer, [(asked.place, asked.text, None) for asked in found])
    prompts, kept = [], 0
    for asked, tokens in zip(found, encoded, strict=True):
        ids = tokens[0] if tokens else []
        if not tokens or not _has_prompt(file, asked.place, ids):
            continue
        if _fits(file, asked.place, len(ids), max_length, on_long, asked.rows):
            prompts.append(Prompt(ids, asked.text, asked.place))
            kept += asked.rows
    return _finished(file, prompts, texts_as_given, kept=kept, every=every)


def _examples(file: DataFile) -> list[texts.Example]:
    """The examples of a file that fall into the part asked for; what is wrong with the other rows is noted in it."""
    found: list[texts.Example] = []
    for place, form, row in file.rows():
        try:
            examples = texts.examples(place, form, row)
        except BadRow as bad:
            file.note(place, bad)
            continue
        found += [example for example in examples if _is_ours(file, example.prompt or example.response)]
    return found


def read_pairs(file: DataFile, on_identical: str) -> list[texts.Pair]:
    """The pairs of a file; what is wrong with the other rows is noted in it, or counted as left out."""
    pairs: list[texts.Pair] = []
    for place, form, row in file.rows():
        try:
            pair = texts.pair(place, form, row)
            if pairs and (pair.margin is None) != (pairs[0].margin is None):
                raise BadRow("D12", f'"margin" occurs only in some rows; compare {pairs[0].place.short}')
            pairs.append(pair)
        except BadRow as bad:
            if bad.code == "D07" and on_identical == "drop":
                file.drop(place, "D07", texts.IDENTICAL)
            else:
                file.note(place, bad)
    return pairs


def _warn_repeated(file: DataFile, pairs: list[texts.Pair]) -> None:
    """D15: the same pair twice counts twice; a pair in both directions says nothing."""
    seen: dict[bytes, Place] = {}
    twice: list[tuple[Place, Place]] = []
    turned: list[tuple[Place, Place]] = []
    for pair in pairs:
        key, mirrored = (
            blake2b(repr((pair.prompt, *answers)).encode("utf-8", "surrogatepass"), digest_size=16).digest()
            for answers in ((pair.chosen, pair.rejected), (pair.rejected, pair.chosen))
        )
        if key in seen:
            twice.append((seen[key], pair.place))
        elif mirrored in seen:
            turned.append((seen[mirrored], pair.place))
        seen.setdefault(key, pair.place)
    for found, what in (
        (twice, "occur twice in the file"),
        (turned, "contradict another pair, with chosen and rejected swapped"),
    ):
        if found:
            one, other = found[0]
            text = f"{len(found)} of {len(pairs)} pairs {what} (first: {one.short} and {other.short})"
            terminal.warn("D15", text, where=file.source.shown())


@dataclass
class _Distinct:
    """A prompt of a file: where it stands first, and how many rows have it."""

    place: Place
    text: str | Conversation
    rows: int = 1


def _distinct_prompts(file: DataFile) -> list[_Distinct]:
    found: list[_Distinct] = []
    seen: dict[str, _Distinct] = {}
    for place, form, row in file.rows():
        try:
            prompt = texts.pair(place, form, row).prompt if "chosen" in form else texts.bare_prompt(form, row)
        except BadRow as bad:
            if bad.code == "D07":
                file.drop(place, "D07", texts.IDENTICAL)
            else:
                file.note(place, bad)
            continue
        if "chosen" in form and (same := seen.get(repr(prompt))):
            same.rows += 1
            continue
        found.append(_Distinct(place, prompt))
        seen.setdefault(repr(prompt), found[-1])
    return found


def _openings(file: DataFile, found: list[_Distinct]) -> list[_Distinct]:
    """The prompts cut to their first words, where the source wants that."""
    words = file.source.first_words
    if words is None:
        return found
    kept: list[_Distinct] = []
    for asked in found:
        try:
            kept.append(replace(asked, text=texts.opening(asked.text, words)))
        except BadRow as bad:
            file.note(asked.place, bad, asked.rows)
    return kept


def _sampled(file: DataFile, found: list[Row], most: int | None) -> tuple[list[Row], int]:
    """Every n-th of what was found, at most `most` of them, and n: so a sample of a sorted file is like the whole.

    Of the rows that are left out already, one in n is counted from here on.
    """
    every = max(1, -(-len(found) // most)) if most else 1
    for lost in file.dropped.values():
        lost.rows = -(-lost.rows // every)
    return found[::every], every


def _is_ours(file: DataFile, prompt: str | Conversation) -> bool:
    """Whether a row falls into the part of the file that is asked for."""
    share = file.source.share
    return share is None or share.contains(texts.split_key(prompt))


def _encode(file: DataFile, tokenizer: Any, rows: list[Asked]) -> Sequence[Encoded | None]:
    """Tokens of all rows at once; where the chat template refuses one, row by row to find which, and None for it."""
    if file.problems:
        file.finish(usable=0)
    prompts, answers = [prompt for _, prompt, _ in rows], [text for _, _, text in rows]
    try:
        encoded: Sequence[Encoded | None] = cache.encoded(
            tokenizer, prompts, answers, lambda: encode_many(tokenizer, prompts, answers)
        )
    except RLHFError:
        encoded = _encode_one_by_one(file, tokenizer, rows)
    _warn_two_starts(file, tokenizer, rows, encoded)
    return encoded


def _encode_one_by_one(file: DataFile, tokenizer: Any, rows: list[Asked]) -> list[Encoded | None]:
    encoded: list[Encoded | None] = []
    for place, prompt, text in rows:
        try:
            encoded += encode_many(tokenizer, [prompt], [text])
        except RLHFError as error:
            problem = error.problems[0]
            if problem.code != "D06":  # the tokenizer's own fault, the same in every row
                raise RLHFError(problem.code, problem.text, where=str(place), hint=problem.hint) from error
            file.note(place, BadRow(problem.code, problem.text, problem.hint))
            encoded.append(None)
    if file.problems:
        file.finish(usable=0)
    return encoded


def _warn_two_starts(file: DataFile, tokenizer: Any, rows: list[Asked], encoded: Sequence[Encoded | None]) -> None:
    """T03: a text that begins with the start token where the tokenizer or the chat template writes one too."""
    start = tokenizer.bos_token_id
    doubled: list[Asked] = []
    asked = 0
    for row, tokens in zip(rows, encoded, strict=True):
        if tokens is None or row[1] is None:
            continue
        asked += 1
        if (tokens[0][:2] + tokens[1][:2])[:2] == [start, start]:
            doubled.append(row)
    if doubled:
        adds = "the tokenizer" if isinstance(doubled[0][1], str) else "the chat template"
        what = f"{len(doubled)} of {asked} texts start with {tokenizer.bos_token!r} twice"
        text = f"{what}: they contain one, and {adds} adds another"
        terminal.warn("T03", text, where=file.source.shown(), hint=f"remove {tokenizer.bos_token} from the texts")


def _has_prompt(file: DataFile, place: Place, ids: list[int]) -> bool:
    if not ids:
        file.note(place, BadRow("D08", "the tokenizer returns no tokens for the prompt"))
    return bool(ids)


def _has_response(file: DataFile, place: Place, column: str, ids: list[int]) -> bool:
    if len(ids) <= 1:
        file.note(place, BadRow("D09", f'"{column}" has no tokens besides the stop token'))
    return len(ids) > 1


def _fits(file: DataFile, place: Place, length: int, max_length: int | None, on_long: str, rows: int = 1) -> bool:
    file.longest = max(file.longest, length)
    if max_length is None or length <= max_length:
        file.longest_usable = max(file.longest_usable, length)
        return True
    if on_long == "drop":
        file.drop(place, "D10", f"longer than {max_length} tokens", rows)
    else:
        hint = "set data.on_long: drop, or raise the token limit"
        file.note(place, BadRow("D10", f"{length} tokens; the limit is {max_length}", hint))
    return False


def _finished(
    file: DataFile, rows: list[Row], prompts: Sequence[str | Conversation], *, kept: int | None = None, every: int = 1
) -> Rows[Row]:
    kept = len(rows) if kept is None else kept
    file.finish(kept)
    return Rows(rows, file, prompts, kept=kept, every=every)
