"""Read and tokenise data: examples for SFT, pairs for the reward model, prompts for PPO and evaluation."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from rlhf_cli import terminal
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data import texts
from rlhf_cli.data.formats import DatasetReader, by_frequency, dropped_causes
from rlhf_cli.data.label_noise import label_noise
from rlhf_cli.data.readers import BadRow, RowLocation
from rlhf_cli.data.rendering import check_rendering, rendered_rows
from rlhf_cli.data.texts import Example, Form, Pair
from rlhf_cli.data.tokens import (
    Answer,
    Encoded,
    PromptText,
    as_answer,
    encode_cached,
    encode_many,
    has_thought,
    header_of_answers,
    speaks_in_turns,
    variables_hint,
)
from rlhf_cli.errors import RLHFError

SFT_FORMS = (("prompt", "completion"), ("messages",), ("text",))
PAIR_FORMS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
# Messages come first: of a row with both, as UltraChat's, SFT reads the conversation, too.
PROMPT_FORMS = (*PAIR_FORMS, ("messages",), ("prompt",))
PromptForm = Literal["text", "conversation", "transcript"]  # how a data file writes prompts
Source = DataSource | Path | str
Parse = Callable[[RowLocation, Form, dict[str, Any]], Sequence[Example]]
Item = TypeVar("Item")
NewItem = TypeVar("NewItem")


class UnencodedRow(NamedTuple):
    """A prompt, None if it is encoded in another row, and a response to it, None if there is none."""

    location: RowLocation
    prompt: PromptText | None
    response: Answer | None


@dataclass(frozen=True)
class Prompt:
    """Prompt: token ids, the original text or conversation, and its location."""

    ids: list[int]
    text: PromptText
    location: RowLocation
    columns: dict[str, Any] = field(default_factory=dict)  # of its row; the first row's of a prompt with several pairs

    @property
    def record(self) -> dict[str, Any]:
        """The row as reward functions get it."""
        return {**self.columns, "prompt": self.text}


class Rows(list[Item]):
    """Usable rows of a source, with counts of rows read and dropped; without tokens if read without a tokenizer.

    `kept` is the number of file rows they represent, as several pairs may have one prompt. With a `stride` above 1 they
    are a sample of every stride-th row.
    """

    def __init__(
        self, rows: Iterable[Item], reader: DatasetReader, prompts: Sequence[PromptText], kept: int, stride: int
    ) -> None:
        super().__init__(rows)
        self.num_read = reader.num_read
        self.dropped = by_frequency(reader.dropped)
        self.num_dropped = reader.num_dropped
        self.num_expected = kept + reader.num_dropped
        self.longest = reader.longest_usable  # tokens; 0 without a tokenizer
        self.longest_read = reader.longest  # including rows dropped as too long
        self.stride = stride
        self.source = reader.source
        self.form = reader.form_text()
        self.columns = reader.columns_text()
        self.sources: list[dict[str, Any]] = []  # of a list of sources, how often the rows of each are used
        self.prompt_form = _prompt_form(prompts[0], transcripts=reader.transcripts)
        self.prompts = frozenset(map(texts.prompt_key, prompts))

    @property
    def dropped_share(self) -> float:
        """Return the dropped share of this part of the source; a conversation has one row per assistant turn."""
        return self.num_dropped / self.num_expected if self.num_expected else 0.0

    def dropped_text(self) -> str:
        """Return the counts of dropped rows for a message, empty if there are none."""
        if not self.num_dropped:
            return ""
        return f"{self.num_dropped} of {self.num_expected} dropped ({self.dropped_share:.1%})"

    def with_rows(self, rows: Iterable[NewItem]) -> "Rows[NewItem]":
        """Return a copy with `rows`, one converted row for each of these."""
        converted: Rows[Any] = copy(self)
        converted[:] = rows
        return converted


def _prompt_form(prompt: PromptText, *, transcripts: bool) -> PromptForm:
    if transcripts:
        return "transcript"
    return "text" if isinstance(prompt, str) else "conversation"


def is_plain_text(source: Source) -> bool:
    """Return True if the first row of SFT data is {text}, without a prompt. Raises RLHFError D01-D06, D12."""
    parts = DataSource.of(source).each()
    return all(_first_row(DatasetReader(part, SFT_FORMS))[0] == ("text",) for part in parts)


def prompt_form(source: Source, *, in_turns: bool | None = False) -> PromptForm:
    """Return the format of the prompt in the first row of any stage's data, as it is read.

    `in_turns`: texts become turns, for a model that `speaks_in_turns`. Raises RLHFError D01-D06, D12.
    """
    first, *_ = DataSource.of(source).each()  # the others of a list have the same
    reader = DatasetReader(first, (*SFT_FORMS, *PROMPT_FORMS), in_turns=in_turns)
    form, row = _first_row(reader)
    return _prompt_form(row[form[0]], transcripts=reader.transcripts)


def _first_row(reader: DatasetReader) -> tuple[Form, dict[str, Any]]:
    first = next(reader.rows(), None)
    if first is None:
        reader.finish(usable=0)
    assert first, "finish() must raise"
    return first[1:]


def sft_rows(
    source: Source, tokenizer: Any, *, max_length: int | None, on_long: str = "drop", sample: int | None = None
) -> Rows[dict[str, list[int]]]:
    """Return {input_ids, completion_mask} of each example; the mask is 1 on the tokens to train on.

    Accepts {prompt, completion}, {text} (all of it is completion) and {messages} (one example per assistant turn).
    See `_tokenised` for the options. Raises RLHFError D01-D10, D12, D14 with file and line.
    """

    def make_row(example: Example, prompt: list[int], responses: list[list[int]]) -> dict[str, list[int]]:
        (response,) = responses
        return {"input_ids": prompt + response, "completion_mask": [0] * len(prompt) + [1] * len(response)}

    reader = DatasetReader(source, SFT_FORMS, in_turns=speaks_in_turns(tokenizer))
    examples = list(_read(reader, texts.parse_sft_row))
    return _tokenised(reader, examples, make_row, tokenizer, max_length, on_long, sample)


def preference_rows(
    source: Source,
    tokenizer: Any,
    *,
    max_length: int | None,
    on_long: str = "drop",
    on_identical: str = "error",
    margins: bool = True,
    sample: int | None = None,
) -> Rows[dict[str, Any]]:
    """Return {prompt_ids, chosen_ids, rejected_ids[, margin]} of each pair; chosen_ids is the prompt and the response.

    Accepts {prompt, chosen, rejected}, and {chosen, rejected} with the prompt as common prefix.
    `margins` False: for a loss without them. See `_tokenised` for the options.
    Raises RLHFError D01-D10, D12, D14 with file and line.
    """

    def make_row(pair: Example, prompt: list[int], responses: list[list[int]]) -> dict[str, Any]:
        chosen, rejected = responses
        row = {"prompt_ids": prompt, "chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected}
        return {**row, "margin": pair.margin} if margins and pair.margin is not None else row

    if not margins:
        source = replace(DataSource.of(source), margin_per_point=0.0)
    reader = DatasetReader(source, PAIR_FORMS, in_turns=speaks_in_turns(tokenizer))
    pairs = _read_pairs(reader, on_identical)
    _warn_repeated(reader, pairs)
    return _tokenised(reader, pairs, make_row, tokenizer, max_length, on_long, sample)


def prompt_rows(
    source: Source, tokenizer: Any, *, max_length: int | None, on_long: str = "drop", sample: int | None = None
) -> Rows[Prompt]:
    """Return the prompts of a file: {prompt}, {messages} up to the last assistant turn, or distinct prompts of pairs.

    All have the same columns, None where their row has none.
    See `_tokenised` for the options. Raises RLHFError D01-D06, D08, D10, D12, D14 with file and line.
    """

    def make_row(example: Example, prompt: list[int], responses: list[list[int]]) -> Prompt:
        return Prompt(prompt, example.prompt, example.location, example.columns)

    reader = DatasetReader(source, PROMPT_FORMS, in_turns=speaks_in_turns(tokenizer))
    prompts = list(_distinct_prompts(reader))
    rows = _tokenised(reader, prompts, make_row, tokenizer, max_length, on_long, sample)
    _warn_texts_beside_template(reader.source, rows, tokenizer)
    names = dict.fromkeys(chain.from_iterable(row.columns for row in rows))
    return rows.with_rows(replace(row, columns={name: row.columns.get(name) for name in names}) for row in rows)


def _warn_texts_beside_template(source: DataSource, prompts: Sequence[Prompt], tokenizer: Any) -> None:
    """Warn (T10) about texts for a model of another program that may be a chat model: it has a chat template."""
    are_meant = source.format == "plain" or source.first_words
    if are_meant or tokenizer is None or not tokenizer.chat_template:
        return
    if speaks_in_turns(tokenizer) is not None:
        return
    if any(isinstance(prompt.text, str) for prompt in prompts):
        text = "the prompts are texts, which the model gets as they are, although it has a chat template"
        hint = "set data.format: turns for a chat model, or data.format: plain for a model that continues texts"
        terminal.warn("T10", text, where=source.shown(), hint=hint)


@dataclass(frozen=True)
class PairFile:
    """The distinct usable pairs of a file, and how it was read."""

    pairs: list[Pair]
    num_read: int  # rows
    num_dropped: int  # of them, but for repeated pairs
    dropped: str  # the reasons, for a message
    transcripts: bool
    columns: str  # which were read as what, and which were not
    ratings: str  # the column or field that decided the pairs; "" without one


def preference_pairs(source: Source, *, reads_system_texts: bool) -> PairFile:
    """Read the distinct usable pairs of a file; the texts of a system column, too. Raises RLHFError D01-D05, D12."""
    reader = DatasetReader(source, PAIR_FORMS, reads_system_texts=reads_system_texts)
    pairs: dict[str, Example] = {}
    for pair in _read_pairs(reader, "drop"):
        key = repr((pair.system, pair.prompt, *pair.responses.values()))
        if not all(isinstance(answer, str) for answer in pair.responses.values()):
            text = "an answer has its thought or tool calls beside the content; write them into it"
            reader.drop(pair.location, "D06", text)
        elif pairs.setdefault(key, pair) is not pair:
            reader.drop(pair.location, "D15", "duplicate of an earlier pair")
    hints = {
        "D15": "each pair is counted once",
        "D07": "identical answers have no preference",
        "other": "the other rows are used",
    }
    reader.finish(len(pairs), hints)
    bad = {code: dropped for code, dropped in reader.dropped.items() if code != "D15"}
    return PairFile(
        pairs=[_text_pair(pair) for pair in pairs.values()],
        num_read=reader.num_read,
        num_dropped=sum(dropped.rows for dropped in bad.values()),
        dropped=dropped_causes(bad),
        transcripts=reader.transcripts,
        columns=reader.columns_text(),
        ratings=reader.ratings,
    )


def _text_pair(example: Example) -> Pair:
    """Return a pair whose answers are texts."""
    chosen, rejected = (str(text) for text in example.responses.values())
    return Pair(example.location, example.prompt, chosen, rejected, example.margin, system=example.system)


def _read(reader: DatasetReader, parse: Parse, on_identical: str = "error") -> Iterator[Example]:
    """Yield the examples of the selected split; note problems with other rows in the reader, or drop them."""
    share = reader.source.share
    for location, form, row in reader.rows():
        try:
            examples = parse(location, form, row)
        except BadRow as bad:
            if bad.code == "D07" and on_identical == "drop":
                reader.drop(location, "D07", bad.text)
            else:
                reader.note(location, bad)
            continue
        if share is None or share.contains(texts.split_key(examples[-1].first_text)):  # its first user message
            yield from examples


def _read_pairs(reader: DatasetReader, on_identical: str) -> list[Example]:
    first: Example | None = None

    def parse(location: RowLocation, form: Form, row: dict[str, Any]) -> list[Example]:
        nonlocal first
        (pair,) = texts.parse_pair_row(location, form, row)
        first = first or pair
        if (pair.margin is None) != (first.margin is None):
            raise BadRow("D12", f'"margin" occurs only in some rows; compare {first.location.short}')
        return [pair]

    return list(_read(reader, parse, on_identical))


def _distinct_prompts(reader: DatasetReader) -> Iterator[Example]:
    """Yield the prompts of a source, cut to their first words.

    Pairs with the same prompt give one, with their number of rows.
    """
    distinct: dict[object, Example] = {}
    for example in _read(reader, texts.parse_prompt_row, on_identical="drop"):
        key = repr(example.prompt) if "chosen" in reader.form else example.location
        first = distinct.setdefault(key, example)
        first.rows += first is not example

    words = reader.source.first_words
    if not words:
        yield from distinct.values()
        return
    for example in distinct.values():
        try:
            yield replace(example, prompt=texts.first_words(example.prompt, words))
        except BadRow as bad:
            reader.note(example.location, bad, example.rows)


def _warn_repeated(reader: DatasetReader, pairs: list[Example]) -> None:
    """Warn (D15) about duplicate pairs, and about pairs with swapped answers, which show the noise of the labels."""
    seen: dict[bytes, RowLocation] = {}
    duplicates: list[str] = []
    swapped: list[str] = []
    labels: list[tuple[bytes, bytes]] = []
    for pair in pairs:
        chosen, rejected = pair.responses.values()
        key = _digest(pair.prompt, chosen, rejected)
        swapped_key = _digest(pair.prompt, rejected, chosen)
        labels.append((key, swapped_key))
        if key in seen:
            duplicates.append(f"{seen[key].short} and {pair.location.short}")
            continue
        if swapped_key in seen:
            swapped.append(f"{seen[swapped_key].short} and {pair.location.short}")
        seen[key] = pair.location

    descriptions = {
        "occur twice in the file": duplicates,
        "contradict another pair, with chosen and rejected swapped": swapped,
    }
    for description, places in descriptions.items():
        if places:
            text = f"{len(places)} of {len(pairs)} pairs {description} (first: {places[0]})"
            noise = label_noise(labels) if places is swapped else None
            terminal.warn("D15", f"{text}; {noise}" if noise else text, where=reader.source.shown())


def _digest(*values: Any) -> bytes:
    return blake2b(repr(values).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _tokenised(
    reader: DatasetReader,
    examples: list[Example],
    make_row: Callable[[Example, list[int], list[list[int]]], Item],
    tokenizer: Any,
    max_length: int | None,
    on_long: str,
    sample: int | None,
) -> Rows[Item]:
    """Return the row of each usable example: `make_row(example, prompt ids, ids of each response)`.

    Without a tokenizer only the texts are checked, and rows have no tokens; at most `sample` examples are tokenised.
    """
    prompts = [example.first_text for example in examples]
    if tokenizer is None:
        untokenised: list[Any] = [{} if each.responses else make_row(each, [], []) for each in examples]
        kept = sum(example.rows for example in examples)
        reader.finish(kept)
        return Rows(untokenised, reader, prompts, kept, stride=1)

    # A sample is every stride-th row, so that one of a sorted file is representative.
    stride = max(1, math.ceil(len(examples) / sample)) if sample else 1
    for dropped in reader.dropped.values():
        dropped.rows = math.ceil(dropped.rows / stride)
    examples = examples[::stride]
    if reader.transcripts and not tokenizer.chat_template:
        examples = [example.as_text() for example in examples]
    _check_rendering(reader, tokenizer, examples)

    rows = []
    kept = 0
    for example, prompt, responses in _encode(reader, tokenizer, examples):
        length = len(prompt) + max(map(len, responses), default=0)
        bad = _token_fault(example, prompt, responses)
        if bad:
            reader.note(example.location, bad)
        elif _fits(reader, example, length, max_length, on_long):
            rows.append(make_row(example, prompt, responses))
            kept += example.rows
    reader.finish(kept)
    return Rows(rows, reader, prompts, kept, stride)


def _check_rendering(reader: DatasetReader, tokenizer: Any, examples: list[Example]) -> None:
    """Warn D18, and raise RLHFError T08, as `check_rendering`."""
    if not tokenizer.chat_template:
        return
    rows = rendered_rows((each.location, each.prompt, each.answers()) for each in examples)
    check_rendering(rows, tokenizer, where=reader.source.shown())


def _encode(
    reader: DatasetReader, tokenizer: Any, examples: list[Example]
) -> Iterator[tuple[Example, list[int], list[list[int]]]]:
    """Yield (example, prompt ids, ids of each response); rows that the chat template rejects are noted as problems.

    All rows are encoded together, and one by one if that fails. A prompt is encoded with its first response.
    """
    reader.require_no_problems()
    columns = list(examples[0].responses) if examples else []
    rows: list[UnencodedRow] = []
    for number, column in enumerate(columns or [""]):
        for each in examples:
            answer = as_answer(each.prompt, each.responses.get(column))
            rows.append(UnencodedRow(each.location, None if number else each.prompt, answer))
    encoded: Sequence[Encoded | None]
    try:
        encoded = encode_cached(tokenizer, [row.prompt for row in rows], [row.response for row in rows])
    except RLHFError:
        encoded = _encode_row_by_row(reader, tokenizer, rows)
    _warn_double_bos(reader, tokenizer, rows, encoded)
    _warn_header_in_answers(reader, tokenizer, rows)

    for number, example in enumerate(examples):
        parts = [part for part in encoded[number :: len(examples)] if part is not None]
        if len(parts) == max(1, len(columns)):
            prompt = parts[0][0]
            responses = [response for _, response in parts]
            yield example, prompt, responses if columns else []


def _encode_row_by_row(reader: DatasetReader, tokenizer: Any, rows: list[UnencodedRow]) -> list[Encoded | None]:
    encoded: list[Encoded | None] = []
    for row in rows:
        try:
            encoded += encode_many(tokenizer, [row.prompt], [row.response])
        except RLHFError as error:
            problem = error.problems[0]
            if problem.code not in ("D06", "T09"):  # a fault of the tokenizer, the same in every row
                problem = replace(problem, where=str(row.location))
                raise RLHFError.from_problems([problem]) from error
            reader.note(row.location, BadRow(problem.code, problem.text, problem.hint))
            encoded.append(None)
    reader.require_no_problems()
    return encoded


def _warn_double_bos(
    reader: DatasetReader, tokenizer: Any, rows: list[UnencodedRow], encoded: Sequence[Encoded | None]
) -> None:
    """Warn (T03) about texts that start with BOS if the tokenizer or the chat template adds another."""
    twice = [tokenizer.bos_token_id] * 2
    num_texts = 0
    doubled = []
    for row, ids in zip(rows, encoded, strict=True):
        if ids is None or row.prompt is None:
            continue
        prompt, response = ids
        num_texts += 1
        if (prompt[:2] + response[:2])[:2] == twice:
            doubled.append(row.prompt)
    if doubled:
        adds = "the tokenizer" if isinstance(doubled[0], str) else "the chat template"
        count = f"{len(doubled)} of {num_texts} texts start with {tokenizer.bos_token!r} twice"
        text = f"{count}: they contain one, and {adds} adds another"
        terminal.warn("T03", text, where=reader.source.shown(), hint=f"remove {tokenizer.bos_token} from the texts")


def _warn_header_in_answers(reader: DatasetReader, tokenizer: Any, rows: list[UnencodedRow]) -> None:
    """Warn (T09) if answers without a thought begin with text that the chat template writes before them."""
    has_plain = any(isinstance(row.response, dict) and not has_thought(row.response) for row in rows)
    header = header_of_answers(tokenizer).strip() if has_plain else ""
    if header:
        text = f"the chat template writes {header!r} before an answer: it is trained as a part of the answers"
        hint = f"{variables_hint(tokenizer, thoughts=False)}, and it stands in the prompts"
        terminal.warn("T09", text, where=reader.source.shown(), hint=hint)


def _token_fault(example: Example, prompt: list[int], responses: list[list[int]]) -> BadRow | None:
    if example.prompt and not prompt:
        return BadRow("D08", "the tokenizer returns no tokens for the prompt")
    for column, response in zip(example.responses, responses, strict=True):
        if len(response) <= 1:
            return BadRow("D09", f'"{column}" has no tokens besides the stop token')
    return None


def _fits(reader: DatasetReader, example: Example, length: int, max_length: int | None, on_long: str) -> bool:
    reader.longest = max(reader.longest, length)
    if max_length is None or length <= max_length:
        reader.longest_usable = max(reader.longest_usable, length)
        return True
    if on_long == "drop":
        reader.drop(example.location, "D10", f"longer than {max_length} tokens", example.rows)
    else:
        hint = "set data.on_long: drop, or raise the token limit"
        reader.note(example.location, BadRow("D10", f"{length} tokens; the limit is {max_length}", hint))
    return False


def warn_shared(training: Rows[Any], evaluation: Rows[Any], *, where: str | None) -> None:
    """Warn (D13) at `where` about evaluation prompts in the training data, unless all training prompts are the same."""
    if len(training.prompts) == 1 < len(training):
        return
    num_shared = len(training.prompts & evaluation.prompts)
    if num_shared:
        text = f"{num_shared} of {len(evaluation.prompts)} evaluation prompts also occur in {training.source.shown()}"
        hint = "remove them from one of the files, or hold out prompts with data.eval_fraction"
        terminal.warn("D13", text, where=where, hint=hint)


def as_dataset(rows: list[dict[str, Any]]) -> Any:
    """Return a `datasets.Dataset` of the rows (at least one) for TRL's trainers, with the first row's columns."""
    import datasets  # half a second; only SFT and reward need it

    datasets.disable_progress_bars()
    return datasets.Dataset.from_dict({name: [row[name] for row in rows] for name in rows[0]})
