"""The forms that rows of a data file may have, and what is wrong with those that have none."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data import other_formats
from rlhf_cli.data.bad_row import BadRow, described
from rlhf_cli.data.readers import Place, lacks_header, told
from rlhf_cli.data.sources import read_rows
from rlhf_cli.errors import Problem, RLHFError, closest_match

SHOWN_ROWS = 5
Form = tuple[str, ...]
TEXT, CONVERSATION = "text", "a conversation"
ANSWERS = {"completion", "chosen"}  # one may well be read as the other
OF_THE_FILE = ("D02", "D14")  # wrong in every row: leaving rows out would not help
OF_OTHER_KEYS = ("D07", "D10")  # data.on_identical and data.on_long decide
HINTS = {
    "D07": "remove the rows from the file",
    "D10": "raise the token limit, or shorten the rows; data.on_long: error lists them",
}
DROP = "correct the row, or set data.on_bad: drop"


@dataclass(frozen=True)
class First:
    """The first usable row: where it stands, and what all others have to be like."""

    place: Place
    form: Form
    kinds: dict[str, str]


@dataclass
class Lost:
    """Rows left out for faults of one code, told by the first of them."""

    first: Place
    text: str
    rows: int = 0
    alike: bool = True

    def __str__(self) -> str:
        return f"{self.text}{'' if self.alike else '; the others are similar'}"


class DataFile:
    """The rows of a source under our column names, and the book of what is wrong with them and what was left out."""

    def __init__(self, source: DataSource | Path | str, forms: tuple[Form, ...]):
        self.source, self.forms = DataSource.of(source), forms
        self.columns, self.where = self.source.columns, self.source.where
        self.read = 0
        self.longest = self.longest_usable = 0  # tokens, with and without the rows that were left out for it
        self.transcripts = False  # whether the texts are dialogues, which the rows then hold as conversations
        self.problems: list[Problem] = []
        self.dropped: dict[str, Lost] = {}  # by code
        self._reading = False  # whether rows are still read, and none has been split from the others
        known = sorted({name for form in forms for name in form} | {"margin"})
        for name in self.columns:
            if name not in known:
                text = f'{self._key} names "{name}"; known columns: {", ".join(known)}'
                raise RLHFError("D02", text, where=self.where, hint=self._meant(name, known))

    def rows(self) -> Iterator[tuple[Place, Form, dict[str, Any]]]:
        """(place, form, row) of each row that is like the first one; the others are noted as problems."""
        first: First | None = None
        self._reading = True
        for place, raw in read_rows(self.source):
            self.read += 1
            row = raw
            if self.columns:
                row = {name: value for name, value in raw.items() if name not in self.columns}
                row |= {ours: raw[theirs] for ours, theirs in self.columns.items() if theirs in raw}
            try:
                if first is None:
                    first = self._first(place, raw, row)
                self._check_like(first, row)
                form = first.form
                if self.transcripts:
                    form, row = self._turns(form, row)
            except BadRow as bad:
                self.note(place, bad)
                if first is None and self.problems:
                    break  # without a form nothing can be said of the rows that follow
                continue
            yield place, form, row
        self._reading = False

    def note(self, place: Place, bad: BadRow, rows: int = 1) -> None:
        """A row that cannot be used: an error in the end, or one to leave out. Its first fault counts."""
        if self.source.on_bad == "drop" and bad.code not in OF_THE_FILE + OF_OTHER_KEYS:
            self.drop(place, bad.code, bad.text, rows)
        elif not self.problems or self.problems[-1].where != str(place):
            hint = bad.hint or (DROP if bad.code not in OF_THE_FILE + OF_OTHER_KEYS else None)
            self.problems.append(Problem(bad.code, bad.text, str(place), hint))

    def drop(self, place: Place, code: str, text: str, rows: int = 1) -> None:
        """A row that is left out, and counted; a prompt stands for all `rows` that have it.

        A row that could not be read has no prompt by which a split takes it: its place decides which part counts it.
        """
        share = self.source.share
        if self._reading and share is not None and not share.contains(place.short):
            return
        lost = self.dropped.setdefault(code, Lost(place, text))
        lost.rows, lost.alike = lost.rows + rows, lost.alike and text == lost.text

    @property
    def left_out(self) -> int:
        return sum(lost.rows for lost in self.dropped.values())

    def finish(
        self,
        usable: int,
        hints: Mapping[str, str] = HINTS,
        otherwise: str = "set data.on_bad: error to list them",
    ) -> None:
        """Raises what is wrong with the rows, the first five in full; D05 where none of them is usable.

        Warns of the rows that were left out: how many of the usable rows and them, for which fault, where the first one
        stands, and a hint by code.
        """
        if self.problems:
            raise RLHFError.from_problems(self._told())
        if usable == 0:
            told = "; ".join(f"{lost.rows} {lost}" for lost in self.dropped.values())
            text = f"no usable row: {self.read} read" + (f", dropped {told}" if told else "")
            share = self.source.share
            if share and self.read and not told:
                text += f", none of them in the part selected by data.eval_fraction {share.fraction:g}"
            raise RLHFError("D05", text, where=self.source.shown(), hint=self.where and f"see {self.where}")
        for code, lost in self.dropped.items():
            text = f"{lost.rows} of {usable + self.left_out} rows dropped: {lost} (first: {lost.first.short})"
            text += f"; the longest has {self.longest}" if code == "D10" else ""
            terminal.warn(code, text, where=self.source.shown(), hint=hints.get(code, otherwise))

    def _told(self) -> list[Problem]:
        told, hints = [], set()
        for problem in self.problems[:SHOWN_ROWS]:
            hint = None if problem.hint in hints else problem.hint
            hints.add(problem.hint)
            told.append(Problem(problem.code, problem.text, problem.where, hint))
        if len(self.problems) > SHOWN_ROWS:
            last = self.problems[-1]
            text = f"{len(self.problems)} of {self.read} rows are bad; the first {SHOWN_ROWS} are shown"
            text += f"; the longest has {self.longest} tokens" if last.code == "D10" else ""
            can_go = any(problem.code not in OF_THE_FILE + OF_OTHER_KEYS for problem in self.problems)
            hint = "set data.on_bad: drop" if can_go else None
            told.append(Problem(last.code, text, self.source.shown(), hint))
        return told

    def _form(self, place: Place, raw: dict[str, Any], row: dict[str, Any]) -> Form:
        # Pairs whose prompt stands in columns of another system's names are no pairs without a prompt.
        theirs = other_formats.form(row) if "prompt" not in row else None
        for form in self.forms:
            if all(name in row for name in form) and not (theirs == other_formats.PAIR and "prompt" not in form):
                return form
        wanted = " or ".join("{" + ", ".join(form) + "}" for form in self.forms)
        absent = next((name for name in self.forms[0] if name not in row), self.forms[0][0])
        # Never one that stands for another of our columns: answers would be learnt from prompts.
        ours = {name for form in self.forms for name in form} - ANSWERS | set(self.forms[0])
        free = [name for name in raw if name not in ours]
        near = closest_match(absent, free) or next((name for name in free if name in ANSWERS), next(iter(free), "NAME"))
        text = f"the row needs {wanted}; columns found: {told(raw) or 'none'}"
        if hint := self._converting(raw) or self._header_hint(place, raw):
            raise BadRow("D02", text, hint)
        raise BadRow("D02", text, f"map the columns, e.g. {self._naming(absent, near)}")

    def _converting(self, raw: dict[str, Any]) -> str | None:
        """What to do with rows of another system's form."""
        made = other_formats.form(raw)
        if made is None:
            return None
        wanted = {name for form in self.forms for name in form}
        command = other_formats.command(self.source)
        if made in self.forms or (made == ("messages",) and "messages" in wanted):
            return f"run `{command}` to convert them to {{{', '.join(made)}}}, and set that file"
        if "chosen" in made and "completion" in wanted:
            columns = self._naming("completion", "chosen")
            return f"run `{command}` to convert them to pairs, and set that file with {columns}"
        return "each row has one answer, but a pair needs two; use these rows for sft"

    @property
    def _key(self) -> str:
        """What names columns: the key of a config, or the option of `rlhf init`."""
        return "--column" if self.where == "--data" else "data.columns"

    def _naming(self, ours: str, theirs: str) -> str:
        """A column of ours by its name in the file, as it is written."""
        return f"--column {ours}={theirs}" if self.where == "--data" else f"data.columns: {{{ours}: {theirs}}}"

    def _meant(self, name: str, known: Collection[str]) -> str | None:
        """What was meant by a column that is none of ours."""
        theirs = self.columns[name]
        if theirs in known and not closest_match(name, known, cutoff=0.8):  # no slip of the pen
            return f"swap the two: {self._naming(theirs, name)}?"
        near = closest_match(name, known)
        return f"did you mean {near}?" if near else None

    def _header_hint(self, place: Place, raw: dict[str, Any]) -> str | None:
        """A hint where a table's first row was taken for the names of its columns."""
        known = {name for form in self.forms for name in form}
        if known & raw.keys():
            return None
        wanted = next((form for form in self.forms if len(form) == len(raw)), self.forms[0])
        return lacks_header(place.path, raw, [self._theirs(name) for name in wanted])

    def _first(self, place: Place, raw: dict[str, Any], row: dict[str, Any]) -> First:
        """What the first row says of all of them; switches the reading of transcripts on."""
        for ours, theirs in self.columns.items():
            if theirs not in raw:
                near = closest_match(theirs, raw)
                text = f'no column "{theirs}" (mapped to {ours}); columns found: {told(raw) or "none"}'
                hint = self._header_hint(place, raw) or (f"did you mean {near}?" if near else None)
                raise BadRow("D02", text, hint)
        form = self._form(place, raw, row)
        kinds = {name: _kind(row[name], self._theirs(name)) for name in form}
        dialogues = ("prompt",) if "prompt" in form else form  # the columns that would hold one
        if self.source.format != "plain" and set(kinds.values()) == {TEXT}:
            self.transcripts = all(other_formats.looks_like_one(row[name]) for name in dialogues)
        if self.source.format == "transcripts" and not self.transcripts:
            text = f"{' and '.join(dialogues)} must be dialogues with alternating Human: and Assistant: turns"
            raise BadRow("D12", text, "remove data.format")
        return First(place, form, kinds)

    def _turns(self, form: Form, row: dict[str, Any]) -> tuple[Form, dict[str, Any]]:
        """Form and row with each dialogue as a conversation."""
        if form == ("text",):
            return ("messages",), {"messages": other_formats.parse(row["text"], self._theirs("text"))}
        if "prompt" not in form:
            return form, {**row, **{name: other_formats.parse(row[name], self._theirs(name)) for name in form}}
        answers = {name: [{"role": "assistant", "content": row[name].strip()}] for name in form if name != "prompt"}
        return form, {**row, **answers, "prompt": other_formats.parse_prompt(row["prompt"], self._theirs("prompt"))}

    def _check_like(self, first: First, row: dict[str, Any]) -> None:
        for name in first.form:
            if name not in row:
                raise BadRow("D12", f'no column "{self._theirs(name)}"; {first.place.short} has one')
            kind = _kind(row[name], self._theirs(name))
            if kind != first.kinds[name]:
                text = f'"{self._theirs(name)}" is {kind} here, {first.kinds[name]} in {first.place.short}'
                raise BadRow("D12", text)
            if kind == CONVERSATION:
                try:
                    _check_conversation(row[name], self._theirs(name))
                except BadRow as bad:
                    bad.hint = self._converting({"messages": row[name]}) if name == "messages" else None
                    raise

    def _theirs(self, name: str) -> str:
        return self.columns.get(name, name)


def _kind(value: Any, column: str) -> str:
    if isinstance(value, str):
        return TEXT
    if isinstance(value, list):
        return CONVERSATION
    raise BadRow("D06", f'"{column}" is {described(value)}; expected text or a list of messages')


def _check_conversation(messages: list[Any], column: str) -> None:
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise BadRow("D06", f'message {number} of "{column}" is {described(message)}, not {{role, content}}')
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                value = described(message.get(key)) if key in message else "missing"
                raise BadRow("D06", f'{key} of message {number} of "{column}" is {value}; expected text')
