"""The forms that rows of a data file may have, and what is wrong with those that have none."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.errors import Problem, RLHFError, nearest, shown
from rlhf_cli.rows import read_jsonl

SHOWN_ROWS = 5
Form = tuple[str, ...]
TEXT, CONVERSATION = "text", "a conversation"


class BadRow(Exception):
    """Something is wrong with one row."""

    def __init__(self, code: str, text: str, hint: str | None = None) -> None:
        super().__init__(text)
        self.code, self.text, self.hint = code, text, hint


class DataFile:
    """The rows of a file under our column names, and the book of what is wrong with them and what was left out."""

    def __init__(self, path: Path | str, columns: Mapping[str, str], forms: tuple[Form, ...], where: str | None):
        self.path, self.columns, self.forms, self.where = Path(path), columns, forms, where
        self.read = 0
        self.problems: list[Problem] = []
        self.dropped: dict[str, list[int]] = {}
        known = sorted({name for form in forms for name in form} | {"margin"})
        for name in columns:
            if name not in known:
                near = nearest(name, known)
                text = f'data.columns names "{name}", which is none of our columns ({", ".join(known)})'
                raise RLHFError("D02", text, where=where, hint=f"did you mean {near}?" if near else None)

    def rows(self) -> Iterator[tuple[int, Form, dict[str, Any]]]:
        """(line, form, row) of each row that is like the first one; the others are noted as problems."""
        first: tuple[int, Form, dict[str, str]] | None = None
        for line, raw in read_jsonl(self.path, where_key=self.where):
            self.read += 1
            row = {name: value for name, value in raw.items() if name not in self.columns}
            row |= {ours: raw[theirs] for ours, theirs in self.columns.items() if theirs in raw}
            try:
                if first is None:
                    form = self._form(raw, row)
                    first = (line, form, {name: _kind(row[name], self._theirs(name)) for name in form})
                self._check_like(first, row)
            except BadRow as bad:
                self.note(line, bad)
                if first is None:
                    break  # without a form nothing can be said of the rows that follow
                continue
            yield line, first[1], row

    def note(self, line: int, bad: BadRow) -> None:
        self.problems.append(Problem(bad.code, bad.text, self.place(line), bad.hint))

    def place(self, line: int) -> str:
        return f"{shown(self.path)}:{line}"

    def drop(self, line: int, reason: str) -> None:
        self.dropped.setdefault(reason, []).append(line)

    def finish(self, usable: int) -> None:
        """Raises what is wrong with the rows, the first five in full; D05 where none of them is usable."""
        if self.problems:
            raise RLHFError.of(self._told())
        if usable == 0:
            lost = ", ".join(f"{len(lines)} {reason}" for reason, lines in self.dropped.items())
            text = f"no usable row: {self.read} read" + (f", {lost}" if lost else "")
            raise RLHFError("D05", text, where=shown(self.path), hint=self.where and f"see {self.where}")

    def warn_dropped(self, code: str, reason: str, hint: str) -> None:
        """Says how many rows were left out for `reason`, and where the first one stands."""
        if lines := self.dropped.get(reason):
            text = f"{len(lines)} of {self.read} rows left out: {reason} (first: line {lines[0]})"
            terminal.warn(code, text, where=shown(self.path), hint=hint)

    def _told(self) -> list[Problem]:
        told, hints = [], set()
        for problem in self.problems[:SHOWN_ROWS]:
            hint = None if problem.hint in hints else problem.hint
            hints.add(problem.hint)
            told.append(Problem(problem.code, problem.text, problem.where, hint))
        if len(self.problems) > SHOWN_ROWS:
            last = self.problems[-1]
            text = f"{len(self.problems)} of {self.read} rows are bad; the first {SHOWN_ROWS} are shown"
            told.append(Problem(last.code, text, shown(self.path)))
        return told

    def _form(self, raw: dict[str, Any], row: dict[str, Any]) -> Form:
        for form in self.forms:
            if all(name in row for name in form):
                return form
        wanted = " or ".join("{" + ", ".join(form) + "}" for form in self.forms)
        absent = next((name for name in self.forms[0] if name not in row), self.forms[0][0])
        near = nearest(absent, raw) or next(iter(raw), "NAME")
        text = f"the row needs {wanted}; columns found: {', '.join(raw) or 'none'}"
        raise BadRow("D02", text, f"name the file's columns, for example data.columns: {{{absent}: {near}}}")

    def _check_like(self, first: tuple[int, Form, dict[str, str]], row: dict[str, Any]) -> None:
        line, form, kinds = first
        for name in form:
            if name not in row:
                raise BadRow("D12", f'no column "{self._theirs(name)}"; line {line} has one')
            kind = _kind(row[name], self._theirs(name))
            if kind != kinds[name]:
                raise BadRow("D12", f'"{self._theirs(name)}" is {kind} here, {kinds[name]} in line {line}')
            if kind == CONVERSATION:
                _check_conversation(row[name], self._theirs(name))

    def _theirs(self, name: str) -> str:
        return self.columns.get(name, name)


def _kind(value: Any, column: str) -> str:
    if isinstance(value, str):
        return TEXT
    if isinstance(value, list):
        return CONVERSATION
    raise BadRow("D06", f'"{column}" is {_described(value)}, text or a list of messages is needed')


def _check_conversation(messages: list[Any], column: str) -> None:
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise BadRow("D06", f'message {number} of "{column}" is {_described(message)}, not {{role, content}}')
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                value = _described(message.get(key)) if key in message else "missing"
                raise BadRow("D06", f'{key} of message {number} of "{column}" is {value}, text is needed')


def _described(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return f"the number {value}"
    return "text" if isinstance(value, str) else "a list" if isinstance(value, list) else "an object"
