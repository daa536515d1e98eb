"""Read the rows of a source under rlhf's column names; the first row is the schema of the others.

Rows of ShareGPT and Alpaca become conversations and pairs: {messages} or {prompt, chosen, rejected}.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.config.sources import DataSource, suffix
from rlhf_cli.data import texts
from rlhf_cli.data.readers import TABLES, BadRow, RowLocation, describe_value, format_columns
from rlhf_cli.data.sources import read_rows
from rlhf_cli.data.texts import Form
from rlhf_cli.errors import Problem, RLHFError, closest_match, did_you_mean, shell_word

ROLE_ALIASES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    "system": "system",
}
TURN_COLUMNS = ("conversations", "conversation", "messages")
MESSAGES_FORM: Form = ("messages",)
PAIR_FORM: Form = ("prompt", "chosen", "rejected")
Row = dict[str, Any]


def must_convert(row: Row, own: Form | None) -> bool:
    """Return True for a row of ShareGPT or Alpaca, if `own`, the form that its columns have, is not complete."""
    if "prompt" in row or (target := target_form(row)) is None:
        return False
    return own is None or (own == MESSAGES_FORM and bool(_turns(row))) or (target == PAIR_FORM and "prompt" not in own)


def target_form(row: Row) -> Form | None:
    """Return the columns of the row that `convert_row` would return, or None for an unknown format."""
    has_pair = all(isinstance(row.get(name), str) or _is_turn(row.get(name)) for name in ("chosen", "rejected"))
    if has_pair and _is_full_dialogue(row):
        return None  # full dialogues need no separate prompt
    if not _turns(row) and not (isinstance(row.get("instruction"), str) and (has_pair or "output" in row)):
        return None
    return PAIR_FORM if has_pair else MESSAGES_FORM


def convert_row(row: Row) -> Row:
    """Convert a row. Raises BadRow D12 (unknown format), D06 (not text)."""
    columns = target_form(row)
    if columns is None:
        raise BadRow("D12", f"columns {', '.join(row)} match neither ShareGPT nor Alpaca")
    turns = _turns(row)
    messages = list(map(_message, turns) if turns else _alpaca_messages(row))
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": _text(row["system"], "system")})
    if columns == PAIR_FORM:
        chosen, rejected = (_answer(row[name], name) for name in ("chosen", "rejected"))
        pair = {"prompt": messages, "chosen": [chosen], "rejected": [rejected]}
        return pair | ({"margin": row["margin"]} if "margin" in row else {})
    return {"messages": messages if turns else [*messages, _answer(row["output"], "output")]}


def _is_full_dialogue(row: Row) -> bool:
    """Return True if the answers are full dialogues: transcripts, or texts whose common prefix has the question."""
    chosen, rejected = row["chosen"], row["rejected"]
    if not (isinstance(chosen, str) and isinstance(rejected, str)):
        return False
    users = [turn for turn in _turns(row) if _is_turn(turn) and ROLE_ALIASES.get(str(turn["from"])) != "assistant"]
    question = str((users[-1]["value"] if users else row.get("instruction") or row.get("input")) or "").strip()
    in_prefix = question in chosen and rejected.startswith(chosen[: chosen.index(question) + len(question)])
    return in_prefix or (texts.is_transcript(chosen) and texts.is_transcript(rejected))


def _alpaca_messages(row: Row) -> Iterator[Row]:
    history = row.get("history") or []
    if not (isinstance(history, list) and all(isinstance(turn, list) and len(turn) == 2 for turn in history)):
        raise BadRow("D12", f'"history" is not a list of [question, answer]: `{history!r:.60}`')
    for question, answer in history:
        yield from ({"role": "user", "content": _text(question, "history")}, _answer(answer, "history"))
    parts = [_text(row[name], name) for name in ("instruction", "input") if row.get(name) is not None]
    yield {"role": "user", "content": "\n\n".join(filter(None, parts))}


def _turns(row: Row) -> list[Any]:
    """Return the list in the first column that has a ShareGPT turn, or []."""
    lists = (row[name] for name in TURN_COLUMNS if isinstance(row.get(name), list))
    return next((turns for turns in lists if any(map(_is_turn, turns))), [])


def _is_turn(value: Any) -> bool:
    return isinstance(value, dict) and {"from", "value"} <= value.keys()


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise BadRow("D06", f'"{column}" is {describe_value(value)}; expected text')
    return value


def _message(turn: Any) -> Row:
    if not _is_turn(turn) or str(turn["from"]) not in ROLE_ALIASES:
        raise BadRow("D12", f"`{turn!r:.60}` is not a turn of {', '.join(ROLE_ALIASES)}")
    return {"role": ROLE_ALIASES[turn["from"]], "content": _text(turn["value"], "value")}


def _answer(value: Any, column: str) -> Row:
    return _message(value) if _is_turn(value) else {"role": "assistant", "content": _text(value, column)}


MAX_SHOWN_PROBLEMS = 5
TEXT, CONVERSATION = "text", "a conversation"
ANSWER_COLUMNS = {"completion", "chosen"}  # answers of one kind can serve as the other
# Faults of the whole file (D02, D14), and faults with an option (data.on_identical, data.on_long).
NOT_DROPPED_BY_ON_BAD = ("D02", "D14", "D07", "D10")
HINTS = {
    "D07": "remove the rows from the file",
    "D10": "raise the token limit, or shorten the rows; data.on_long: error lists them",
    "other": "set data.on_bad: error to list them",
}


@dataclass
class DroppedRows:
    """Number of rows dropped with one error code; message and location are those of the first."""

    first: RowLocation
    text: str
    rows: int = 0
    same_text: bool = True

    def __str__(self) -> str:
        return f"{self.text}{'' if self.same_text else '; the others are similar'}"


class DatasetReader:
    """Reader of a source's rows; it collects problems and counts dropped rows."""

    def __init__(self, source: DataSource | Path | str, forms: tuple[Form, ...]) -> None:
        self.source, self.forms = DataSource.of(source), forms
        self.columns = self.source.columns
        self.num_read = 0
        self.longest = self.longest_usable = 0  # tokens, with and without rows dropped as too long
        # Of the first row, which all others must match: its short location, columns, and types of their values.
        self.first, self._first_row = "", RowLocation(Path(), 0)
        self.form: Form = ()
        self.kinds: dict[str, str] = {}
        self.transcripts = False  # if True, texts are dialogues and are converted to conversations
        self.converts = False  # if True, rows are of ShareGPT or Alpaca and are converted
        self.problems: list[Problem] = []
        self.dropped: dict[str, DroppedRows] = {}  # by code
        self._reading = False  # rows are being read and have not been assigned to a split yet
        self._known = {name for form in forms for name in form}
        self._refuse_unknown_columns()

    def rows(self) -> Iterator[tuple[RowLocation, Form, dict[str, Any]]]:
        """Yield (location, form, row) of each row that matches the first one; note the others as problems."""
        self._reading = True
        for location, raw in read_rows(self.source):
            self.num_read += 1
            try:
                # the row with the names of data.columns
                row = {name: value for name, value in raw.items() if name not in self.columns} | self._mapped(raw)
                if not self.first:
                    self._check_columns(raw)
                    self.converts = must_convert(row, self._own_form(row))
                if self.converts:
                    raw, further = convert_row(row), {n: v for n, v in row.items() if n not in self._known}
                    row = further | raw | self._mapped(raw)
                if not self.first:
                    self._infer_schema(location, raw, row)
                    if self.converts:
                        columns = ", ".join(self.form)
                        terminal.log_once(f"data     {self.source.shown()}: ShareGPT or Alpaca, read as {{{columns}}}")
                self._check_row(row)
                form = self.form
                if self.transcripts:
                    form, row = self._parse_transcripts(form, row)
            except BadRow as bad:
                self.note(location, bad)
                if not self.first and self.problems:
                    break  # without a form the following rows cannot be checked
                continue
            yield location, form, row
        self._reading = False

    def _mapped(self, raw: dict[str, Any]) -> dict[str, Any]:
        return {name: raw[column] for name, column in self.columns.items() if column in raw}

    def _own_form(self, row: dict[str, Any]) -> Form | None:
        return next((form for form in self.forms if all(name in row for name in form)), None)

    def note(self, location: RowLocation, bad: BadRow, rows: int = 1) -> None:
        """Record the first fault of a row as a problem, or drop the row if data.on_bad says so."""
        droppable = bad.code not in NOT_DROPPED_BY_ON_BAD
        if self.source.on_bad == "drop" and droppable:
            if self._reading and location == self._first_row:
                self.first = ""  # the next row becomes the schema
            self.drop(location, bad.code, bad.text, rows)
        elif not self.problems or self.problems[-1].where != str(location):
            hint = bad.hint or ("correct the row, or set data.on_bad: drop" if droppable else None)
            self.problems.append(Problem(bad.code, bad.text, str(location), hint))

    def drop(self, location: RowLocation, code: str, text: str, rows: int = 1) -> None:
        """Count `rows` dropped rows: those of a prompt, or a single one.

        Unreadable rows have no prompt to split by; their location decides which part of a split counts them.
        """
        share = self.source.share
        if self._reading and share is not None and not share.contains(location.short):
            return
        dropped = self.dropped.setdefault(code, DroppedRows(location, text))
        dropped.rows += rows
        dropped.same_text = dropped.same_text and text == dropped.text

    @property
    def num_dropped(self) -> int:
        return sum(dropped.rows for dropped in self.dropped.values())

    def require_no_problems(self) -> None:
        """Raise RLHFError with the first five problems, if there are any."""
        if not self.problems:
            return
        first = self.problems[:MAX_SHOWN_PROBLEMS]
        hints = [problem.hint for problem in first]
        shown = [replace(each, hint=None) if each.hint in hints[:i] else each for i, each in enumerate(first)]
        if len(self.problems) > MAX_SHOWN_PROBLEMS:
            last = self.problems[-1]
            text = f"{len(self.problems)} of {self.num_read} rows are bad; the first {MAX_SHOWN_PROBLEMS} are shown"
            text += f"; the longest has {self.longest} tokens" if last.code == "D10" else ""
            can_drop = any(problem.code not in NOT_DROPPED_BY_ON_BAD for problem in self.problems)
            hint = "set data.on_bad: drop" if can_drop else None
            shown.append(Problem(last.code, text, self.source.shown(), hint))
        raise RLHFError.from_problems(shown)

    def finish(self, usable: int, hints: Mapping[str, str] = HINTS) -> None:
        """Raise RLHFError with the problems, or D05 without a usable row; warn about dropped rows."""
        self.require_no_problems()
        if usable == 0:
            reasons = "; ".join(f"{dropped.rows} {dropped}" for dropped in self.dropped.values())
            text = f"no usable row: {self.num_read} read" + (f", dropped {reasons}" if reasons else "")
            share, where = self.source.share, (self.source.where or "").removeprefix("--data")
            if share and self.num_read and not reasons:
                text += f", none of them in the part selected by data.eval_fraction {share.fraction:g}"
            first = next((str(dropped.first) for dropped in self.dropped.values()), None)
            hint = "correct the row, and those like it" if first else where and f"see {where}"
            raise RLHFError("D05", text, where=first or self.source.shown(), hint=hint)
        for code, dropped in self.dropped.items():
            rows = f"{dropped.rows} of {usable + self.num_dropped} rows"
            text = f"{rows} dropped: {dropped} (first: {dropped.first.short})"
            text += f"; the longest has {self.longest}" if code == "D10" else ""
            terminal.warn(code, text, where=self.source.shown(), hint=hints.get(code, hints["other"]))

    def _check_columns(self, raw: dict[str, Any]) -> None:
        for name, file_column in self.columns.items():
            if file_column not in raw:
                text = f'no column "{file_column}" (mapped to {name}); columns found: {format_columns(raw) or "none"}'
                raise BadRow("D02", text, did_you_mean(file_column, raw))

    def _infer_schema(self, location: RowLocation, raw: dict[str, Any], row: dict[str, Any]) -> None:
        """Set the schema from the first row, and detect transcripts. Raises BadRow D02, D06, D12."""
        self.form = form = self._form(location, raw, row)
        self.kinds = {name: _kind(row[name], self._file_column(name)) for name in form}
        dialogues = ("prompt",) if "prompt" in form else form  # columns that may contain them
        may_be = self.source.format != "plain" and set(self.kinds.values()) == {TEXT}
        self.transcripts = may_be and all(texts.is_transcript(row[name]) for name in dialogues)
        if self.source.format == "transcripts" and not self.transcripts:
            text = f"{' and '.join(dialogues)} must be dialogues with alternating Human: and Assistant: turns"
            raise BadRow("D12", text, "remove data.format")
        self.first, self._first_row = location.short, location

    def _form(self, location: RowLocation, raw: dict[str, Any], row: dict[str, Any]) -> Form:
        if form := self._own_form(row):
            return form
        forms = " or ".join("{" + ", ".join(form) + "}" for form in self.forms)
        missing = next((name for name in self.forms[0] if name not in row), self.forms[0][0])
        # Never suggest a column that another column of rlhf uses: prompts could be trained on as answers.
        other = {name for name, value in raw.items() if isinstance(value, list) and _conversation_fault(value, name)}
        used = self._known - ANSWER_COLUMNS | {*self.forms[0], *self.columns.values()} | other
        free = [name for name in raw if name not in used]
        near = closest_match(missing, free) or next((name for name in free if name in ANSWER_COLUMNS), None)
        hint = f"map the columns, e.g. {self._column_mapping(missing, near or next(iter(free), 'NAME'))}"
        if len(raw) == 1 and {*";\t"} & {*"".join(raw)}:
            hint = "separate the columns by commas, or by tabs in a .tsv file"
        elif other and not free:
            hint = f"write each row as a separate object, with the column {missing}"
        elif suffix(location.path) in TABLES and not near and not self._known & raw.keys():
            hint = f"does the first line name the columns? if so, {hint}"
        if self.converts and "messages" in raw:
            hint = "each row has one answer, but a pair needs two; use these rows for sft"
        raise BadRow("D02", f"the row needs {forms}; columns found: {format_columns(raw) or 'none'}", hint)

    def _parse_transcripts(self, form: Form, row: dict[str, Any]) -> tuple[Form, dict[str, Any]]:
        if form == ("text",):
            return ("messages",), {"messages": texts.parse_transcript(row["text"], self._file_column("text"))}
        if "prompt" not in form:
            return form, row | {name: texts.parse_transcript(row[name], self._file_column(name)) for name in form}
        answers = {name: [{"role": "assistant", "content": row[name].strip()}] for name in form if name != "prompt"}
        prompt = texts.parse_transcript_prompt(row["prompt"], self._file_column("prompt"))
        return form, {**row, **answers, "prompt": prompt}

    def _check_row(self, row: dict[str, Any]) -> None:
        """Raise BadRow D06 or D12 if a row differs from the first one."""
        for name, first_kind in self.kinds.items():
            column = self._file_column(name)
            if name not in row:
                raise BadRow("D12", f'no column "{column}"; {self.first} has one')
            if (kind := _kind(row[name], column)) != first_kind:
                raise BadRow("D12", f'"{column}" is {kind} here, {first_kind} in {self.first}')
            if kind == CONVERSATION and (fault := _conversation_fault(row[name], column)):
                raise BadRow("D06", fault)

    def _refuse_unknown_columns(self) -> None:
        known = sorted(self._known | {"margin"})
        for name, file_column in self.columns.items():
            if name in known:
                continue
            hint = did_you_mean(name, known)
            if file_column in known and not closest_match(name, known, cutoff=0.8):  # not a typo
                hint = f"swap the two: {self._column_mapping(file_column, name)}?"
            option = "--column" if self.source.where == "--data" else "data.columns"
            text = f'{option} names "{name}"; known columns: {", ".join(known)}'
            raise RLHFError("D02", text, where=self.source.where, hint=hint)

    def _column_mapping(self, name: str, file_column: str) -> str:
        """Return a column mapping as the user writes it, in a config or as an option of `rlhf init`."""
        option = f"--column {shell_word(f'{name}={file_column}')}"
        return option if self.source.where == "--data" else f"data.columns: {{{name}: {file_column}}}"

    def _file_column(self, name: str) -> str:
        return self.columns.get(name, name)


def _kind(value: Any, column: str) -> str:
    if isinstance(value, str):
        return TEXT
    if isinstance(value, list):
        return CONVERSATION
    raise BadRow("D06", f'"{column}" is {describe_value(value)}; expected text or a list of messages')


def _conversation_fault(messages: list[Any], column: str) -> str | None:
    """Describe the first message that is not {role: text, content: text}."""
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            return f'message {number} of "{column}" is {describe_value(message)}, not {{role, content}}'
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                value = describe_value(message[key]) if key in message else "missing"
                return f'{key} of message {number} of "{column}" is {value}; expected text'
    return None
