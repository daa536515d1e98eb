"""Read the rows of a source under rlhf's column names; the first row is the schema of the others."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from rlhf_cli import terminal
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data import columns, conversions, texts
from rlhf_cli.data.column_hints import ColumnHints, form_text
from rlhf_cli.data.grades import GradedPairs, JudgedPairs
from rlhf_cli.data.ratings import RatedAnswers
from rlhf_cli.data.readers import BadRow, Row, RowIterator, RowLocation, format_columns
from rlhf_cli.data.sources import raw_rows
from rlhf_cli.data.texts import Form
from rlhf_cli.data.values import CONVERSATION, TEXT, kind_of, require_messages
from rlhf_cli.errors import Problem, RLHFError, did_you_mean

MAX_SHOWN_PROBLEMS = 5
HEAD_ROWS = 100  # that decide whether answers repeat their prompt: a single one may do so by chance
ANSWERS = ("completion", "chosen", "rejected")
# Faults of the whole file (D02, D14, D19), and faults with an option (data.on_identical, data.on_long).
NOT_DROPPED_BY_ON_BAD = ("D02", "D14", "D19", "D07", "D10")
HINTS = {
    "D07": "remove the rows from the file",
    "D10": "raise the token limit, or shorten the rows; data.on_long: error lists them",
    "other": "set data.on_bad: error to list them",
}
NO_PAIR_HINT = "a pair needs a better and a worse answer to one prompt; good answers alone are data of SFT"


@dataclass
class DroppedRows:
    """Number of rows dropped with one error code; message and location are those of the first."""

    first: RowLocation
    text: str
    rows: int = 0
    same_text: bool = True

    def __str__(self) -> str:
        return self.text if self.same_text else f"{self.text}; the others are similar"


def by_frequency(dropped: Mapping[str, DroppedRows]) -> dict[str, DroppedRows]:
    """Return the dropped rows by code, the most frequent code first."""
    return dict(sorted(dropped.items(), key=lambda item: -item[1].rows))


def dropped_causes(dropped: Mapping[str, DroppedRows]) -> str:
    """Return the counts of dropped rows by code, for a message."""
    return ", ".join(f"{each.rows} by {code} ({each})" for code, each in dropped.items())


class DatasetReader:
    """Reader of a source's rows; it collects problems and counts dropped rows."""

    def __init__(
        self,
        source: DataSource | Path | str,
        forms: tuple[Form, ...],
        *,
        reads_system_texts: bool = False,
        in_turns: bool | None = False,
    ) -> None:
        """`reads_system_texts`: the caller uses a system column beside prompts that are texts.

        `in_turns`: prompts and answers that are texts become turns of a user and the assistant.
        """
        self.source = DataSource.of(source)
        self.forms = forms
        self.columns = self.source.columns
        self.reads_system_texts = reads_system_texts
        self.in_turns = bool(in_turns)
        if self.source.format in ("plain", "turns"):
            self.in_turns = self.source.format == "turns"
        self.num_read = 0
        self.longest = 0  # tokens
        self.longest_usable = 0  # without rows dropped as too long
        # Of the first row, which all others must match: its location, columns, and types of their values.
        self.first: RowLocation | None = None
        self.form: Form = ()
        self.kinds: dict[str, str] = {}
        self._values: Row = {}  # the first value of each column of the file
        # How rows are converted, by the first row.
        self.stored: list[str] = []  # columns whose text is a list of messages
        self.judged: JudgedPairs | None = None  # if rows are rated answers or graded pairs
        self.other_format = ""  # its name, if rows are of one that is converted
        self.renamed_roles: dict[str, None] = {}  # in their order
        self.joins_parts = False  # contents of messages are lists of text parts
        self.whole_dialogues = False  # chosen and rejected are transcripts that contain the prompt beside them
        self.repeating: list[str] = []  # columns of answers that begin with the prompt
        self.transcripts = False  # texts are dialogues and become conversations
        self.problems: list[Problem] = []
        self.dropped: dict[str, DroppedRows] = {}  # by code
        self._rows: RowIterator = iter(())
        self._head: list[Row] = []  # the first rows, once they are needed
        self._reading = False  # rows are being read and have not been assigned to a split yet
        self._hints = ColumnHints(self.source, forms)
        self._known = self._hints.known
        self._hints.refuse_unknown()

    def rows(self) -> Iterator[tuple[RowLocation, Form, Row]]:
        """Yield (location, form, row) of each row that matches the first one; note the others as problems."""
        self._reading = True
        self._rows = self._judged_pairs(self._counted())
        while (located := next(self._rows, None)) is not None:
            location, raw = located
            if not raw.keys() <= self._values.keys():
                self._values = {**raw, **self._values}
            try:
                form, row = self._convert(location, raw)
            except BadRow as bad:
                self.note(location, bad)
                if not self.first and self.problems:
                    break  # without a form the following rows cannot be checked
                continue
            yield location, form, row
        self._reading = False

    def _counted(self) -> RowIterator:
        for located in raw_rows(self.source):
            self.num_read += 1
            yield located

    def _judged_pairs(self, rows: RowIterator) -> RowIterator:
        """Yield the rows; of rated answers their pairs, and graded pairs with their margins.

        Raises RLHFError D22 without a pair.
        """
        first = next(rows, None)
        if first is None:
            return
        rows = chain([first], rows)
        if "chosen" in self._known:
            rows = self._judge(rows, self._rename(first[1]))
        yield from rows

        reason = self.judged.why_no_pair() if self.judged else None
        if reason and not self.problems:
            raise RLHFError("D22", reason, where=self.source.shown(), hint=NO_PAIR_HINT)

    def _judge(self, rows: RowIterator, first: Row) -> RowIterator:
        """Return the rows as pairs if the first one is a rated answer or a graded pair; prompts need no pairs."""
        if self._own_form(first) is not None:
            if self._are_prompts:
                return rows
            self.judged = GradedPairs.of(first, self.source)
            return self.judged.pairs(rows, self.note) if self.judged else rows

        rated = RatedAnswers.of(first, self.source)
        if not rated:
            return rows
        if self._are_prompts:
            self.columns = {**self.columns, "prompt": rated.prompt}
            return rows
        self.judged = rated
        columns = self.columns
        self.columns = {}  # the pairs have rlhf's names
        return rated.pairs(_renamed(rows, columns), self.note)

    def _convert(self, location: RowLocation, raw: Row) -> tuple[Form, Row]:
        """Return the form and the row under rlhf's names; the first row decides how all are converted."""
        row = self._rename(raw)
        if not self.first:
            self._check_columns(raw)
            self.stored = self._stored_columns(row)
        for name in self.stored:
            row[name] = conversions.parse_stored_messages(row.get(name), name)

        if not self.first:
            self.other_format = conversions.other_format(row, self._own_form(row))
        row = self._to_own_columns(row)

        if not self.first:
            self._infer_schema(location, raw, row)
        self._check_row(row)
        return self._to_prompt_and_answers(row)

    def _rename(self, raw: Row) -> Row:
        """Return the row with the names of data.columns."""
        return _renamed_row(raw, self.columns)

    def _stored_columns(self, row: Row) -> list[str]:
        """Return the columns whose texts are lists of messages."""
        if self.source.format == "plain":
            return []
        return conversions.stored_messages(row, self._known.union(conversions.TURN_COLUMNS))

    def _to_own_columns(self, row: Row) -> Row:
        """Convert a row of another format, and the names of roles."""
        if self.other_format:
            converted = conversions.convert_row(row)
            further = {name: value for name, value in row.items() if name not in self._known}
            row = further | converted | _mapped(converted, self.columns)

        for name, messages in row.items():
            if name not in self._known or not isinstance(messages, list):
                continue
            roles = conversions.other_roles(messages)
            self.renamed_roles |= dict.fromkeys(roles)
            self.joins_parts = self.joins_parts or conversions.have_parts(messages)
            row[name] = conversions.with_standard_names(messages)
        return row

    def _to_prompt_and_answers(self, row: Row) -> tuple[Form, Row]:
        """Return the form and the row, with all that comes before the answers in its prompt alone."""
        form = self.form
        if self.whole_dialogues:
            conversions.require_prompt_in_dialogues(row, _answers(form))
        if self.repeating:
            row = conversions.without_prompt(row, self.repeating)
        if self.transcripts:
            form, row = self._parse_transcripts(form, row)
        if self.texts_are_turns:
            row = conversions.as_turns(row, form)
        if self._has_messages:
            columns.refuse_template_variables(row)
            row = conversions.with_prompt_as_turn(row, form)
            if not self.other_format:
                row = conversions.with_system_message(row, form)
        if self._reads_tools:
            row = conversions.with_tools(row, form)
        return form, row

    @property
    def _has_messages(self) -> bool:
        return self.transcripts or self.texts_are_turns or CONVERSATION in self.kinds.values()

    @property
    def _reads_tools(self) -> bool:
        return self._has_messages and not self.transcripts  # which may stay texts, without a chat template

    @property
    def texts_are_turns(self) -> bool:
        """Return True if the texts of the rows become turns."""
        is_text = set(self.kinds.values()) == {TEXT} and "prompt" in self.form
        return self.in_turns and is_text and not self.transcripts

    def _own_form(self, row: Row) -> Form | None:
        for form in self.forms:
            if row.keys() >= set(form):
                return form
        return None

    def note(self, location: RowLocation, bad: BadRow, rows: int = 1) -> None:
        """Record the first fault of a row as a problem, or drop the row if data.on_bad says so."""
        is_droppable = bad.code not in NOT_DROPPED_BY_ON_BAD
        if is_droppable and self.source.on_bad == "drop":
            if self._reading and location == self.first:
                self.first = None  # the next row becomes the schema
            self.drop(location, bad.code, bad.text, rows)
            return

        where = str(location)
        if self.problems and self.problems[-1].where == where:
            return
        hint = bad.hint
        if is_droppable and not hint:
            hint = "correct the row, or set data.on_bad: drop"
        problem = Problem(bad.code, bad.text, where, hint)
        self.problems.append(problem)

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
        shown: list[Problem] = []
        hints: set[str | None] = set()
        for problem in self.problems[:MAX_SHOWN_PROBLEMS]:
            is_repeated = problem.hint in hints
            hints.add(problem.hint)
            shown.append(replace(problem, hint=None) if is_repeated else problem)

        if len(self.problems) > MAX_SHOWN_PROBLEMS:
            shown.append(self._number_of_problems())
        raise RLHFError.from_problems(shown)

    def _number_of_problems(self) -> Problem:
        """Return how many rows are bad, as a last problem."""
        last = self.problems[-1]
        count = len(self.problems)
        text = f"{count} of {self.num_read} rows are bad; the first {MAX_SHOWN_PROBLEMS} are shown"
        if last.code == "D10":
            text += f"; the longest has {self.longest} tokens"

        codes = {problem.code for problem in self.problems}
        can_drop = not codes.issubset(NOT_DROPPED_BY_ON_BAD)
        hint = "set data.on_bad: drop" if can_drop else None
        return Problem(last.code, text, self.source.shown(), hint)

    def finish(self, usable: int, hints: Mapping[str, str] = HINTS) -> None:
        """Raise RLHFError with the problems, or D05 without a usable row; warn about dropped rows."""
        self.require_no_problems()
        if usable == 0:
            raise self._no_usable_row()

        name = self.source.shown()
        for text in self._conversion_texts():
            terminal.log_once(f"data     {name}: {text}")
        self._report_unread()

        total = usable + self.num_dropped
        for code, dropped in self.dropped.items():
            first = dropped.first.short
            text = f"{dropped.rows} of {total} rows dropped: {dropped} (first: {first})"
            if code == "D10":
                text += f"; the longest has {self.longest}"
            hint = hints.get(code, hints["other"])
            terminal.warn(code, text, where=name, hint=hint)

    def _no_usable_row(self) -> RLHFError:
        text = f"no usable row: {self.num_read} read"
        dropped = list(self.dropped.values())
        if dropped:
            reasons = "; ".join(f"{each.rows} {each}" for each in dropped)
            text += f", dropped {reasons}"
            first = str(dropped[0].first)
            return RLHFError("D05", text, where=first, hint="correct the row, and those like it")

        share = self.source.share
        if share and self.num_read:
            text += f", none of them in the part selected by data.eval_fraction {share.fraction:g}"
        key = self.source.where
        hint = f"see {key}" if key and key != "--data" else None
        return RLHFError("D05", text, where=self.source.shown(), hint=hint)

    def _report_unread(self) -> None:
        """Warn (D17) about unread columns that are meant for the model, and list the others once."""
        name = self.source.shown()
        unread = self._unread_columns()
        meant = [column for column in unread if column in columns.MEANT_FOR_THE_MODEL]
        if self._are_prompts and "context" in meant:
            meant.remove("context")  # a reward function may read it
        if meant:
            text = f"not read: {format_columns(meant)}, which may be meant for the model"
            hint = "write prompts as lists of messages with a system message, or put the text into the prompt"
            terminal.warn("D17", text, where=name, hint=hint)

        labels: list[str] = []
        if "completion" in self._known:
            labels = [column for column in columns.label_columns(self._values) if column in unread]
        if labels:
            text = f"not read: {format_columns(labels)}, which may say which answers are bad"
            hint = "keep only the rows that the model is to learn, without it"
            terminal.warn("D17", text, where=name, hint=hint)

        others = [column for column in unread if column not in (*meant, *labels)]
        if others and not self._are_prompts:
            terminal.log_once(f"data     {name}: not read: {format_columns(others)}")

    @property
    def _are_prompts(self) -> bool:
        """Return True for data of prompts, whose further columns are for reward functions."""
        return ("prompt",) in self.forms

    def _conversion_texts(self) -> Iterator[str]:
        if self.judged:
            yield self.judged.summary()
        if self.stored:
            stored = ", ".join(self.stored)
            yield f"{stored}: lists of messages stored as text, parsed"
        if self.other_format:
            yield f"{self.other_format}, read as {form_text(self.form)}"
        if self.texts_are_turns and self.source.format != "turns":
            text = "texts become turns of a user and the assistant, on which the model was trained"
            yield f"{text}; data.format: plain keeps them"
        if self.renamed_roles:
            renamed = [f"{role} is {conversions.ROLE_ALIASES[role]}" for role in self.renamed_roles]
            roles = ", ".join(renamed)
            yield f"roles of messages: {roles}"
        if self.joins_parts:
            yield "contents of messages that are lists of text parts: joined"
        if self.whole_dialogues:
            yield "the answers are whole dialogues, of which all but the last turn is the prompt"
        if self.repeating:
            repeating = " and ".join(self.repeating)
            text = f"the prompt is taken off the beginning of {repeating}"
            if self.source.where != "--data":
                text += "; data.format: plain keeps it"
            yield text

    def _check_columns(self, raw: Row) -> None:
        for name, file_column in self.columns.items():
            if file_column in raw:
                continue
            found = format_columns(raw) or "none"
            text = f'no column "{file_column}" (mapped to {name}); columns found: {found}'
            raise BadRow("D02", text, did_you_mean(file_column, raw))

    def _infer_schema(self, location: RowLocation, raw: Row, row: Row) -> None:
        """Set the schema from the first row, and what its texts hold. Raises BadRow D02, D06, D12."""
        self.form = self._form(location, raw, row)
        self.kinds = {name: kind_of(row[name], self._file_column(name)) for name in self.form}
        is_text = set(self.kinds.values()) == {TEXT}
        self.whole_dialogues = False
        self.repeating = []
        self.transcripts = False
        if is_text and self.source.format != "plain":
            self._look_into_texts(row)

        names = " and ".join(self.form)
        if self.source.format == "transcripts" and not self.transcripts:
            dialogues = "prompt" if "prompt" in self.form else names
            text = f"{dialogues} must be dialogues with alternating Human: and Assistant: turns"
            raise BadRow("D12", text, "remove data.format")

        become_turns = self.transcripts or self.texts_are_turns
        if self.source.format == "turns" and is_text and not become_turns:
            text = f"data.format: turns needs a prompt beside {names}"
            raise BadRow("D12", text, "add a prompt column, or remove data.format")
        self.first = location

    def _look_into_texts(self, row: Row) -> None:
        """Set whether the texts of the first row are dialogues, or answers that repeat their prompt."""
        if "prompt" not in self.form:
            self.transcripts = all(texts.is_transcript(row[name]) for name in self.form)
            return

        self.transcripts = texts.is_transcript(row["prompt"])
        answers = _answers(self.form)
        if not answers:
            return
        if all(texts.is_transcript(row[name]) for name in answers):
            self.whole_dialogues = True
            self.transcripts = True
            if "chosen" in self.form:
                self.form = ("chosen", "rejected")
        elif conversions.answers_repeat_prompt(self._first_rows(row), answers):
            self.repeating = answers

    def _first_rows(self, row: Row) -> list[Row]:
        """Return this row and the next ones, or those of an earlier call."""
        if not self._head:
            head = list(islice(self._rows, HEAD_ROWS))
            self._rows = chain(head, self._rows)
            renamed = [self._rename(raw) for _, raw in head]
            self._head = [row, *renamed]
        return self._head

    def _columns_beside(self) -> list[str]:
        """Return the columns of the file that are read beside those of the form."""
        has_own_margin = "chosen" in self.form and not (self.judged and self.judged.margin_per_point)
        beside = ["margin"] if has_own_margin else []
        if self._has_messages or self.reads_system_texts:
            beside += columns.SYSTEM_COLUMNS
        if self._reads_tools:
            beside.append("tools")
        if self.whole_dialogues:
            beside.append("prompt")
        if self.other_format:
            beside += conversions.FOREIGN_COLUMNS

        read = {self._file_column(name) for name in beside}
        read -= self._columns_of_form()
        return [column for column in self._values if column in read]

    def _columns_of_form(self) -> set[str]:
        of_form = map(self._file_column, self.form)
        return {*self.columns.values(), *of_form}

    def _unread_columns(self) -> list[str]:
        beside = self._columns_beside()
        read = self._columns_of_form().union(beside)
        if self.judged:
            read.update(("margin", self.judged.column))
        return [name for name in self._values if name not in read]

    @property
    def ratings(self) -> str:
        """The column or field of ratings or grades that decided the pairs; "" without one."""
        return self.judged.column if self.judged else ""

    def form_text(self) -> str:
        """Return the form of the rows in the file."""
        if self.judged and self.judged.form_name:
            return f"{self.judged.form_name} by {self.judged.column}"
        return self.other_format or form_text(self.form)

    def columns_text(self) -> str:
        """Return which columns were read as what, and which were not."""
        own = form_text(self.form)
        found = self.form_text()
        parts = [f"{own} from {found}"]
        if found == own:
            parts = [self._column_text(name) for name in self.form]
        if self.judged and self.judged.margin_per_point:
            parts.append(f"margin from {self.judged.column}")
        elif self.judged and found == own:
            parts.append(f"ties from {self.judged.column}")
        parts += self._columns_beside()

        text = ", ".join(parts)
        unread = self._unread_columns()
        if not unread:
            return text
        use = "for reward functions" if self._are_prompts else "not read"
        names = format_columns(unread)
        return f"{text}; {use}: {names}"

    def _column_text(self, name: str) -> str:
        """Return a column of rlhf, and that of the file if it has another name."""
        column = self._file_column(name)
        return name if name == column else f"{name} from {column}"

    def _form(self, location: RowLocation, raw: Row, row: Row) -> Form:
        form = self._own_form(row)
        if form is None:
            raise self._hints.no_form(location, raw, row, self.other_format)
        if form == ("chosen", "rejected"):
            self._refuse_texts_beside_answers(row)
        return form

    def _refuse_texts_beside_answers(self, row: Row) -> None:
        """Raise BadRow D02 for columns that may be the prompt of answers without one."""
        others = conversions.prompt_candidates(self._first_rows(row))
        if not others:
            return
        text = f'no column "prompt", and beside chosen and rejected there are other texts: {format_columns(others)}'
        free = {name: self._values.get(name) or "" for name in others}
        hint = self._hints.mapping(["prompt"], free)
        raise BadRow("D02", text, f"{hint}; or remove them, if both answers begin with their prompt")

    def _parse_transcripts(self, form: Form, row: Row) -> tuple[Form, Row]:
        """Return the form and the row with its dialogues as messages."""
        if form == ("text",):
            turns = self._turns(row, "text")
            return ("messages",), {"messages": turns}
        if "prompt" not in form:
            dialogues = {name: self._turns(row, name) for name in form}
            return form, row | dialogues
        if self.whole_dialogues:
            *prompt, answer = self._turns(row, "completion")
            return form, {**row, "prompt": prompt, "completion": [answer]}

        column = self._file_column("prompt")
        prompt = texts.parse_transcript_prompt(row["prompt"], column)
        answers = conversions.answers_as_turns(row, form)
        return form, {**row, **answers, "prompt": prompt}

    def _turns(self, row: Row, name: str) -> texts.Conversation:
        return texts.parse_transcript(row[name], self._file_column(name))

    def _check_row(self, row: Row) -> None:
        """Raise BadRow D06 or D12 if a row differs from the first one."""
        first = self.first
        assert first
        for name, first_kind in self.kinds.items():
            column = self._file_column(name)
            if name not in row:
                raise BadRow("D12", f'no column "{column}"; {first.short} has one')
            value = row[name]
            kind = kind_of(value, column)
            if kind != first_kind:
                text = f'"{column}" is {kind} here, {first_kind} in {first.short}'
                raise BadRow("D12", text)
            if kind == CONVERSATION:
                require_messages(value, column)
                continue

            may_be_stored = name in ANSWERS and self.source.format != "plain"
            if may_be_stored and conversions.STORED_MESSAGES.match(value):
                text = f'"{column}" is a list of messages stored as text here, another text in {first.short}'
                raise BadRow("D12", text)

    def _file_column(self, name: str) -> str:
        return self.columns.get(name, name)


def _renamed_row(raw: Row, names: Mapping[str, str]) -> Row:
    """Return a row with the names of rlhf, given the file's column of each."""
    kept = {name: value for name, value in raw.items() if name not in names}
    return kept | _mapped(raw, names)


def _mapped(raw: Row, names: Mapping[str, str]) -> Row:
    """Return the columns that have another name in the file; ratings keep theirs."""
    found = {name: column for name, column in names.items() if name != "rating" and column in raw}
    return {name: raw[column] for name, column in found.items()}


def _renamed(rows: RowIterator, names: Mapping[str, str]) -> RowIterator:
    for location, raw in rows:
        yield location, _renamed_row(raw, names)


def _answers(form: Form) -> list[str]:
    return [name for name in form if name in ANSWERS]
