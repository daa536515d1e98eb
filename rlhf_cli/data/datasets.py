"""Read and tokenise data: examples for SFT, pairs for the reward model, prompts for PPO and evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, TypeVar

from rlhf_cli import terminal
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data import other_formats, texts
from rlhf_cli.data.formats import DatasetReader, Form
from rlhf_cli.data.readers import BadRow, RowLocation
from rlhf_cli.data.texts import Rows
from rlhf_cli.data.tokens import Conversation, Encoded, encode_cached, encode_many
from rlhf_cli.errors import RLHFError

SFT_FORMS = (("prompt", "completion"), ("messages",), ("text",))
PAIR_FORMS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
UnencodedRow = tuple[RowLocation, str | Conversation | None, str | None]  # location, prompt, response
PROMPT_FORMS = (*PAIR_FORMS, ("prompt",), ("messages",))
Row = TypeVar("Row")


@dataclass(frozen=True)
class Prompt:
    """Prompt: token ids, the original text or conversation, and its location."""

    ids: list[int]
    text: str | Conversation
    location: RowLocation


def is_plain_text(source: DataSource | Path | str) -> bool:
    """Return True if the first row of SFT data is {text}, without a prompt. Raises RLHFError D01-D06, D12."""
    return _first_row(DatasetReader(source, SFT_FORMS))[0] == ("text",)


def prompt_form(source: DataSource | Path | str) -> Literal["text", "conversation", "transcript"]:
    """Return the format of the prompt in the first row of any stage's data. Raises RLHFError D01-D06, D12."""
    reader = DatasetReader(source, (*SFT_FORMS, *PROMPT_FORMS))
    form, row = _first_row(reader)
    if reader.transcripts:
        return "transcript"
    return "text" if isinstance(row[form[0]], str) else "conversation"


def _first_row(reader: DatasetReader) -> tuple[Form, dict[str, Any]]:
    first = next(reader.rows(), None)
    if first is None:
        reader.finish(usable=0)
    assert first, "finish() must raise"
    return first[1:]


def sft_rows(
    source: DataSource | Path | str,
    tokenizer: Any,
    *,
    max_length: int | None,
    on_long: str = "drop",
    sample: int | None = None,
) -> Rows[dict[str, list[int]]]:
    """Return {input_ids, completion_mask} of each example; the mask is 1 on the tokens to train on.

    Accepts {prompt, completion}, {text} (all of it is completion) and {messages} (one example per assistant turn).
    Without a tokenizer only the texts are checked; at most `sample` examples are tokenised.
    Raises RLHFError D01-D10, D12, D14 with file and line.
    """
    reader = DatasetReader(source, SFT_FORMS)
    examples = _read_examples(reader)
    prompts = [example.prompt or example.response for example in examples]
    if tokenizer is None:
        return _finish_rows(reader, [{} for _ in examples], prompts)
    examples, stride = _subsample(reader, examples, sample)
    if reader.transcripts and not tokenizer.chat_template:
        examples = [example.as_text() for example in examples]
    encoded = _encode(reader, tokenizer, [(example.location, example.prompt, example.response) for example in examples])
    rows = []
    for example, tokens in zip(examples, encoded, strict=True):
        if tokens is None:
            continue
        prompt, response = tokens
        usable = not example.prompt or _has_prompt(reader, example.location, prompt)
        usable = usable and _has_response(reader, example.location, "completion", response)
        if usable and _fits(reader, example.location, len(prompt) + len(response), max_length, on_long):
            rows.append({"input_ids": prompt + response, "completion_mask": [0] * len(prompt) + [1] * len(response)})
    return _finish_rows(reader, rows, prompts, stride=stride)


def preference_rows(
    source: DataSource | Path | str,
    tokenizer: Any,
    *,
    max_length: int | None,
    on_long: str = "drop",
    on_identical: str = "error",
    sample: int | None = None,
) -> Rows[dict[str, Any]]:
    """Return {prompt_ids, chosen_ids, rejected_ids[, margin]} of each pair; chosen_ids is the prompt and the response.

    Accepts {prompt, chosen, rejected}, and {chosen, rejected} with the prompt as common prefix. Without a tokenizer
    only the texts are checked; at most `sample` pairs are tokenised.
    Raises RLHFError D01-D10, D12, D14 with file and line.
    """
    reader = DatasetReader(source, PAIR_FORMS)
    pairs = [pair for pair in read_pairs(reader, on_identical) if _in_split(reader, pair.prompt)]
    _warn_repeated(reader, pairs)
    prompts = [pair.prompt for pair in pairs]
    if tokenizer is None:
        return _finish_rows(reader, [{} for _ in pairs], prompts)
    pairs, stride = _subsample(reader, pairs, sample)
    if reader.transcripts and not tokenizer.chat_template:
        pairs = [pair.as_text() for pair in pairs]
    chosen_rows = ((pair.location, pair.prompt, pair.chosen) for pair in pairs)
    rejected_rows = ((pair.location, None, pair.rejected) for pair in pairs)
    encoded = _encode(reader, tokenizer, [*chosen_rows, *rejected_rows])
    rows = []
    for pair, chosen_tokens, rejected_tokens in zip(pairs, encoded[: len(pairs)], encoded[len(pairs) :], strict=True):
        if chosen_tokens is None or rejected_tokens is None:
            continue
        (prompt, chosen), (_, rejected) = chosen_tokens, rejected_tokens
        usable = _has_prompt(reader, pair.location, prompt) and _has_response(reader, pair.location, "chosen", chosen)
        usable = usable and _has_response(reader, pair.location, "rejected", rejected)
        if usable and _fits(reader, pair.location, len(prompt) + max(len(chosen), len(rejected)), max_length, on_long):
            row = {"prompt_ids": prompt, "chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected}
            rows.append(row if pair.margin is None else {**row, "margin": pair.margin})
    return _finish_rows(reader, rows, prompts, stride=stride)


def preference_pairs(source: DataSource | Path | str) -> tuple[list[texts.Pair], int, bool]:
    """Return the distinct usable pairs of a source, the number of rows read, and True if they were transcripts.

    Other rows are dropped with warnings. Raises RLHFError D01-D05, D12.
    """
    reader = DatasetReader(source, PAIR_FORMS)
    pairs: dict[str, texts.Pair] = {}
    for pair in read_pairs(reader, "drop"):
        if pairs.setdefault(repr((pair.prompt, pair.chosen, pair.rejected)), pair) is not pair:
            reader.drop(pair.location, "D15", "duplicate of an earlier pair")
    hints = {"D15": "each pair is counted once", "D07": "identical answers have no preference"}
    reader.finish(len(pairs), hints, "the other rows are used")
    return list(pairs.values()), reader.num_read, reader.transcripts


def prompt_rows(
    source: DataSource | Path | str,
    tokenizer: Any,
    *,
    max_length: int | None,
    on_long: str = "drop",
    sample: int | None = None,
) -> Rows[Prompt]:
    """Return the prompts of a file: {prompt}, {messages} up to the last assistant turn, or distinct prompts of pairs.

    Without a tokenizer only the texts are checked and prompts have no tokens; at most `sample` are tokenised.
    Raises RLHFError D01-D06, D08, D10, D12, D14 with file and line.
    """
    reader = DatasetReader(source, PROMPT_FORMS)
    distinct = [prompt for prompt in _distinct_prompts(reader) if _in_split(reader, prompt.text)]
    distinct = _cut_to_first_words(reader, distinct)
    original_texts = [prompt.text for prompt in distinct]
    if tokenizer is None:
        untokenised = [Prompt([], prompt.text, prompt.location) for prompt in distinct]
        return _finish_rows(reader, untokenised, original_texts, kept=sum(prompt.rows for prompt in distinct))
    distinct, stride = _subsample(reader, distinct, sample)
    if reader.transcripts and not tokenizer.chat_template:
        distinct = [replace(prompt, text=other_formats.render_transcript(prompt.text)) for prompt in distinct]
    encoded = _encode(reader, tokenizer, [(prompt.location, prompt.text, None) for prompt in distinct])
    rows, kept = [], 0
    for prompt, tokens in zip(distinct, encoded, strict=True):
        ids = tokens[0] if tokens else []
        if not tokens or not _has_prompt(reader, prompt.location, ids):
            continue
        if _fits(reader, prompt.location, len(ids), max_length, on_long, prompt.rows):
            rows.append(Prompt(ids, prompt.text, prompt.location))
            kept += prompt.rows
    return _finish_rows(reader, rows, original_texts, kept=kept, stride=stride)


def _read_examples(reader: DatasetReader) -> list[texts.Example]:
    """Return the examples of the selected split; note problems with other rows in the reader."""
    examples: list[texts.Example] = []
    for location, form, row in reader.rows():
        try:
            row_examples = texts.parse_examples(location, form, row)
        except BadRow as bad:
            reader.note(location, bad)
            continue
        examples += [example for example in row_examples if _in_split(reader, example.prompt or example.response)]
    return examples


def read_pairs(reader: DatasetReader, on_identical: str) -> list[texts.Pair]:
    """Return the pairs of a source; note problems with other rows in the reader, or drop them."""
    pairs: list[texts.Pair] = []
    for location, form, row in reader.rows():
        try:
            pair = texts.parse_pair(location, form, row)
            if pairs and (pair.margin is None) != (pairs[0].margin is None):
                raise BadRow("D12", f'"margin" occurs only in some rows; compare {pairs[0].location.short}')
            pairs.append(pair)
        except BadRow as bad:
            if bad.code == "D07" and on_identical == "drop":
                reader.drop(location, "D07", texts.IDENTICAL)
            else:
                reader.note(location, bad)
    return pairs


def _warn_repeated(reader: DatasetReader, pairs: list[texts.Pair]) -> None:
    """Warn (D15) about duplicate pairs and about pairs that also occur with swapped answers."""
    seen: dict[bytes, RowLocation] = {}
    duplicates: list[tuple[RowLocation, RowLocation]] = []
    swapped: list[tuple[RowLocation, RowLocation]] = []
    for pair in pairs:
        key, mirrored = (
            blake2b(repr((pair.prompt, *answers)).encode("utf-8", "surrogatepass"), digest_size=16).digest()
            for answers in ((pair.chosen, pair.rejected), (pair.rejected, pair.chosen))
        )
        if key in seen:
            duplicates.append((seen[key], pair.location))
        elif mirrored in seen:
            swapped.append((seen[mirrored], pair.location))
        seen.setdefault(key, pair.location)
    for matches, description in (
        (duplicates, "occur twice in the file"),
        (swapped, "contradict another pair, with chosen and rejected swapped"),
    ):
        if matches:
            first, second = matches[0]
            text = f"{len(matches)} of {len(pairs)} pairs {description} (first: {first.short} and {second.short})"
            terminal.warn("D15", text, where=reader.source.shown())


@dataclass
class _DistinctPrompt:
    """Prompt of a file, its first location and its number of rows."""

    location: RowLocation
    text: str | Conversation
    rows: int = 1


def _distinct_prompts(reader: DatasetReader) -> list[_DistinctPrompt]:
    """Return the prompts of a source; pairs with the same prompt give one."""
    prompts: list[_DistinctPrompt] = []
    seen: dict[str, _DistinctPrompt] = {}
    for location, form, row in reader.rows():
        try:
            prompt = texts.parse_pair(location, form, row).prompt if "chosen" in form else texts.parse_prompt(form, row)
        except BadRow as bad:
            if bad.code == "D07":
                reader.drop(location, "D07", texts.IDENTICAL)
            else:
                reader.note(location, bad)
            continue
        if "chosen" in form and (same := seen.get(repr(prompt))):
            same.rows += 1
            continue
        prompts.append(_DistinctPrompt(location, prompt))
        seen.setdefault(repr(prompt), prompts[-1])
    return prompts


def _cut_to_first_words(reader: DatasetReader, prompts: list[_DistinctPrompt]) -> list[_DistinctPrompt]:
    """Cut the prompts to data.first_words, if it is set."""
    words = reader.source.first_words
    if words is None:
        return prompts
    cut: list[_DistinctPrompt] = []
    for prompt in prompts:
        try:
            cut.append(replace(prompt, text=texts.first_words(prompt.text, words)))
        except BadRow as bad:
            reader.note(prompt.location, bad, prompt.rows)
    return cut


def _subsample(reader: DatasetReader, rows: list[Row], max_rows: int | None) -> tuple[list[Row], int]:
    """Return every stride-th row, at most `max_rows`, and the stride; so a sample of a sorted file is representative.

    The counts of rows dropped so far are divided by the stride.
    """
    stride = max(1, -(-len(rows) // max_rows)) if max_rows else 1
    for dropped in reader.dropped.values():
        dropped.rows = -(-dropped.rows // stride)
    return rows[::stride], stride


def _in_split(reader: DatasetReader, prompt: str | Conversation) -> bool:
    """Return True if a prompt belongs to the selected part of the source."""
    share = reader.source.share
    return share is None or share.contains(texts.split_key(prompt))


def _encode(reader: DatasetReader, tokenizer: Any, rows: list[UnencodedRow]) -> Sequence[Encoded | None]:
    """Encode all rows together; if that fails, encode row by row, with None for rows that the chat template rejects."""
    if reader.problems:
        reader.finish(usable=0)
    prompts, answers = [prompt for _, prompt, _ in rows], [text for _, _, text in rows]
    try:
        encoded: Sequence[Encoded | None] = encode_cached(
            tokenizer, prompts, answers, lambda: encode_many(tokenizer, prompts, answers)
        )
    except RLHFError:
        encoded = _encode_row_by_row(reader, tokenizer, rows)
    _warn_double_bos(reader, tokenizer, rows, encoded)
    return encoded


def _encode_row_by_row(reader: DatasetReader, tokenizer: Any, rows: list[UnencodedRow]) -> list[Encoded | None]:
    encoded: list[Encoded | None] = []
    for location, prompt, text in rows:
        try:
            encoded += encode_many(tokenizer, [prompt], [text])
        except RLHFError as error:
            problem = error.problems[0]
            if problem.code != "D06":  # a fault of the tokenizer, the same in every row
                raise RLHFError(problem.code, problem.text, where=str(location), hint=problem.hint) from error
            reader.note(location, BadRow(problem.code, problem.text, problem.hint))
            encoded.append(None)
    if reader.problems:
        reader.finish(usable=0)
    return encoded


def _warn_double_bos(
    reader: DatasetReader, tokenizer: Any, rows: list[UnencodedRow], encoded: Sequence[Encoded | None]
) -> None:
    """Warn (T03) about texts that start with BOS if the tokenizer or the chat template adds another."""
    bos = tokenizer.bos_token_id
    doubled: list[UnencodedRow] = []
    num_prompts = 0
    for row, tokens in zip(rows, encoded, strict=True):
        if tokens is None or row[1] is None:
            continue
        num_prompts += 1
        if (tokens[0][:2] + tokens[1][:2])[:2] == [bos, bos]:
            doubled.append(row)
    if doubled:
        adds = "the tokenizer" if isinstance(doubled[0][1], str) else "the chat template"
        count = f"{len(doubled)} of {num_prompts} texts start with {tokenizer.bos_token!r} twice"
        text = f"{count}: they contain one, and {adds} adds another"
        terminal.warn("T03", text, where=reader.source.shown(), hint=f"remove {tokenizer.bos_token} from the texts")


def _has_prompt(reader: DatasetReader, location: RowLocation, ids: list[int]) -> bool:
    if not ids:
        reader.note(location, BadRow("D08", "the tokenizer returns no tokens for the prompt"))
    return bool(ids)


def _has_response(reader: DatasetReader, location: RowLocation, column: str, ids: list[int]) -> bool:
    if len(ids) <= 1:
        reader.note(location, BadRow("D09", f'"{column}" has no tokens besides the stop token'))
    return len(ids) > 1


def _fits(
    reader: DatasetReader, location: RowLocation, length: int, max_length: int | None, on_long: str, rows: int = 1
) -> bool:
    reader.longest = max(reader.longest, length)
    if max_length is None or length <= max_length:
        reader.longest_usable = max(reader.longest_usable, length)
        return True
    if on_long == "drop":
        reader.drop(location, "D10", f"longer than {max_length} tokens", rows)
    else:
        hint = "set data.on_long: drop, or raise the token limit"
        reader.note(location, BadRow("D10", f"{length} tokens; the limit is {max_length}", hint))
    return False


def _finish_rows(
    reader: DatasetReader,
    rows: list[Row],
    prompts: Sequence[str | Conversation],
    *,
    kept: int | None = None,
    stride: int = 1,
) -> Rows[Row]:
    kept = len(rows) if kept is None else kept
    reader.finish(kept)
    return Rows(rows, reader, prompts, kept=kept, stride=stride)
