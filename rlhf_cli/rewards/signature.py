"""What a reward function is given by its parameters, and the columns of the data among them."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from rlhf_cli.data.datasets import PROMPT_FORMS, Prompt
from rlhf_cli.data.readers import format_columns
from rlhf_cli.errors import Problem, RLHFError, did_you_mean

if TYPE_CHECKING:
    from rlhf_cli.models.batch import Record, Rollout

# (prompts, responses) or TRL's (prompts=, completions=, completion_ids=, **columns) -> one score, or None, per row.
# May be async.
RewardFn = Callable[..., Any]
OWN_COLUMNS = set(chain.from_iterable(PROMPT_FORMS))  # functions do not get them as columns
TYPE_NAMES = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class TextRows:
    """The B rows that a reward function scores."""

    prompts: list[str]  # decoded without special tokens
    responses: list[str]  # decoded without special tokens
    completion_ids: Sequence[list[int]] = ()  # the responses' tokens, the stop token included
    records: "Sequence[Record]" = ()  # of the prompts; empty if they are of no data
    marked: Sequence[tuple[str, str]] = ()  # prompt and response with a chat template's special tokens; empty: as above

    @classmethod
    def of(cls, rollout: "Rollout", tokenizer: Any) -> "TextRows":
        """Decode the rows of a rollout."""
        rollout = rollout.to("cpu")
        prompts = [rollout.prompt_tokens(row) for row in range(len(rollout))]
        responses = [rollout.response_tokens(row) for row in range(len(rollout))]
        return cls.from_tokens(tokenizer, prompts, responses, rollout.records)

    @classmethod
    def from_tokens(
        cls, tokenizer: Any, prompts: Sequence[list[int]], responses: Sequence[list[int]], records: "Sequence[Record]"
    ) -> "TextRows":
        """Decode the tokens of prompts and responses."""

        def texts(rows: Sequence[list[int]], *, special: bool) -> list[str]:
            return [tokenizer.decode(ids, skip_special_tokens=not special) for ids in rows]

        marked: list[tuple[str, str]] = []
        if getattr(tokenizer, "chat_template", None):
            marked = list(zip(texts(prompts, special=True), texts(responses, special=True), strict=True))
        return cls(texts(prompts, special=False), texts(responses, special=False), responses, records, marked)

    @property
    def conversations(self) -> bool:
        """Return True if the prompts of the data are conversations."""
        return bool(self.records) and isinstance(self.records[0]["prompt"], list)

    def first(self) -> "TextRows":
        """Return the first row."""
        return TextRows(
            prompts=self.prompts[:1],
            responses=self.responses[:1],
            completion_ids=self.completion_ids[:1],
            records=self.records[:1],
            marked=self.marked[:1],
        )

    def in_other_form(self) -> "TextRows":
        """Return one row with its prompt as a text if it is a conversation, else as a conversation."""
        prompt = self.prompts[0]
        record = self.records[0] if self.records else {}
        other = prompt if self.conversations else [{"role": "user", "content": prompt}]
        return replace(self, records=[{**record, "prompt": other}])


# Parameters that get the rows themselves, by the form of the function. All others are columns of the data.
GIVEN = {
    "places": ("prompts", "responses", "completion_ids"),  # prompts and responses also under any two names
    "responses": ("prompts", "queries", "responses", "completion_ids"),
    "TRL": ("prompts", "completions", "completion_ids"),  # of GRPOTrainer
    "OpenRLHF": ("queries", "prompts", "responses", "completion_ids"),
    "trlx": ("samples", "prompts", "outputs"),
}
KEYWORD_FORMS = ("TRL", "trlx")  # these systems call by keyword, so that **kwargs gets what a function does not name
PLACES: tuple[str, ...] = ("prompts", "responses")


@dataclass(frozen=True)
class Signature:
    """The parameters of a reward function, which decide how it is called.

    The form is that of `form_of`. In "places" the first two parameters get prompts and responses as texts, whatever
    their names, but see `_by_place`. In all other forms a parameter gets what its name says, as the system passes it:
    TRL the prompts as in the data and `completions` as lists of one message for conversations and as texts otherwise;
    OpenRLHF `queries`, prompt + response, with the special tokens of a chat template; trlx `samples`, the same without
    them. Every further parameter is a column of the data, which may be missing if the parameter has a default.
    `**kwargs` gets the other columns.
    """

    form: str  # a key of GIVEN
    by_place: tuple[str, ...]  # what is passed by position, by its name in GIVEN
    named: Mapping[str, bool]  # parameters passed by keyword -> required
    takes_all: bool  # has **kwargs
    placed: tuple[str, ...] = ()  # the parameters passed by position, which are no columns

    @classmethod
    def of(cls, function: RewardFn) -> "Signature":
        """Read the signature of a function."""
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # of some functions written in C
            return cls("places", PLACES, {}, False)

        kinds = {each.kind for each in parameters}
        any_place = inspect.Parameter.VAR_POSITIONAL in kinds
        takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        places = [each.name for each in named if each.kind is not each.KEYWORD_ONLY]
        form = form_of({each.name for each in named}, two_places=len(places) >= 2 or any_place)

        if form == "places":
            placed = tuple(places[:2])
            form, by_place = _by_place(placed)
            # A wrapper with (*args, **kwargs) may pass on two arguments only.
            takes_all = takes_all and not any_place
        else:
            placed = tuple(each.name for each in named if each.kind is each.POSITIONAL_ONLY)
            by_place = tuple(name for name in placed if name in GIVEN[form])
        required = {each.name: each.default is each.empty for each in named if each.name not in placed}
        return cls(form, by_place, required, takes_all, placed)

    @property
    def columns(self) -> dict[str, bool]:
        """Return the columns that the function names -> required."""
        return {name: required for name, required in self.named.items() if name not in GIVEN[self.form]}

    def call(self, function: RewardFn, rows: TextRows) -> Any:
        """Call the function; return its result, of a coroutine function a coroutine."""
        arguments, named = self.arguments(rows)
        return function(*arguments, **named)

    def arguments(self, rows: TextRows) -> tuple[list[Any], dict[str, list[Any]]]:
        """Return what the function is called with, by position and by keyword: one list of B values each.

        All values are copies: a function may change them.
        """
        given = self._given(rows)
        takes_given = self.takes_all and self.form in KEYWORD_FORMS
        named = self._column_values(rows.records)
        for name, value in given.items():
            if takes_given or name in self.named:
                named[name] = value
        return [given[name] for name in self.by_place], named

    def _given(self, rows: TextRows) -> dict[str, list[Any]]:
        """Return the values of the form's names in GIVEN."""
        ids = [list(row) for row in rows.completion_ids]
        prompts = list(rows.prompts)
        responses = list(rows.responses)
        if self.form == "TRL":
            messages = [deepcopy(record["prompt"]) for record in rows.records] or prompts
            completions = list(map(_completion, messages, responses))
            return {"prompts": messages, "completions": completions, "completion_ids": ids}
        if self.form == "OpenRLHF" and rows.marked:
            prompts = [prompt for prompt, _ in rows.marked]
            responses = [response for _, response in rows.marked]
        whole = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        texts: dict[str, list[Any]] = {
            "prompts": prompts,
            "responses": responses,
            "outputs": responses,
            "samples": whole,
            "queries": prompts[:] if self.form == "responses" else whole,
            "completion_ids": ids,
        }
        return {name: texts[name] for name in GIVEN[self.form]}

    def _column_values(self, records: "Sequence[Record]") -> dict[str, list[Any]]:
        names = dict.fromkeys(chain.from_iterable(records))
        other = {"prompt", *self.placed}
        read = [name for name in names if name not in other and (self.takes_all or name in self.named)]
        return {name: [deepcopy(record.get(name)) for record in records] for name in read}


def form_of(names: Collection[str], *, two_places: bool) -> str:
    """Return the form of a function, a key of GIVEN, by the names of its parameters."""
    if "completions" in names:
        return "TRL"
    if "queries" in names and ("prompts" in names or "responses" not in names):
        return "OpenRLHF"
    if "responses" in names:
        return "responses"
    if "samples" in names:
        return "trlx"
    if "completion_ids" in names:
        return "TRL"
    return "places" if two_places else "TRL"


def _by_place(names: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the form of a function of two parameters, and what they get: a parameter `prompts` gets no responses."""
    if names[1:] not in (("prompt",), ("prompts",)):
        return "places", PLACES
    if names[0] == "query":
        return "OpenRLHF", ("queries", "prompts")
    return "places", ("responses", "prompts")


def _completion(prompt: Any, response: str) -> Any:
    return [{"role": "assistant", "content": response}] if isinstance(prompt, list) else response


def named_columns(functions: Iterable[RewardFn], prompts: Iterable[Prompt]) -> list[str]:
    """Return the columns that functions name by their parameters and the prompts have."""
    known = set(chain.from_iterable(prompt.columns for prompt in prompts))
    names = dict.fromkeys(chain.from_iterable(Signature.of(function).columns for function in functions))
    return [name for name in names if name in known]


def check_columns(
    functions: Mapping[str, RewardFn], rows: Sequence[Prompt], source: str, where: Callable[[str], str], scored: int = 0
) -> None:
    """Check the columns that reward functions name, in the rows of a `source`; `where`: function -> FILE:LINE.

    Raises RLHFError D02 for a required column that no row has, D12 for one whose values differ in type, D06 for a value
    that a verifier cannot read. None, the value of rows without the column, is of any type. The first `scored`
    rows must all have a score, so a verifier needs a value there (D06).
    """
    known = dict.fromkeys(chain.from_iterable(row.columns for row in rows))
    problems: list[Problem] = []
    for name, function in functions.items():
        for column, required in Signature.of(function).columns.items():
            if column in known:
                problems += _mixed_types(column, rows) or _unreadable(column, rows, function, scored)
            elif required:
                other = "set parameters.column" if hasattr(function, "check_value") else "give the parameter a default"
                hint = f"add the column, or {other}"
                if column == "labels":
                    hint = "OpenRLHF fills it from --label_key: call that column labels, or give the parameter its name"
                reader = f"the function of `{name}` takes"
                problems.append(missing_column(reader, column, known, source, where(name), hint))
    if problems:
        raise RLHFError.from_problems(list(dict.fromkeys(problems)))


def missing_column(
    reader: str, column: str, known: Collection[str], source: str, where: str, hint: str | None = None
) -> Problem:
    """Return D02 for a column that is not among the `known` ones of a `source`; `reader` is a subject and a verb."""
    if column in OWN_COLUMNS:
        reason = f"rlhf reads this column of {source} itself"
        hint = "copy it to a column of another name, and name that"
    else:
        reason = f"{source} has no such column"
        hint = did_you_mean(column, known) or hint
    text = f'{reader} "{column}", but {reason}; further columns: {format_columns(known) or "none"}'
    return Problem("D02", text, where, hint)


def _mixed_types(column: str, prompts: Sequence[Prompt]) -> list[Problem]:
    """Return a problem for the first row whose value has another type than those before it."""
    with_value = [prompt for prompt in prompts if prompt.columns.get(column) is not None]
    for prompt in with_value:
        first = with_value[0]
        kind = _type_name(prompt.columns[column])
        first_kind = _type_name(first.columns[column])
        if kind != first_kind:
            text = f'"{column}" is {kind} here, {first_kind} in {first.location.short}'
            return [Problem("D12", text, str(prompt.location), "a reward function reads it: give it one type")]
    return []


def _unreadable(column: str, prompts: Sequence[Prompt], function: RewardFn, scored: int) -> list[Problem]:
    """Return a problem for the first row whose value the function's own `check_value` refuses with a ValueError."""
    check_value: Callable[[Any], Any] | None = getattr(function, "check_value", None)
    if check_value is None:
        return []
    for number, prompt in enumerate(prompts):
        value = prompt.columns.get(column)
        try:
            if value is not None:
                check_value(value)
            elif number < scored:
                raise ValueError(f'"{column}" is null or missing, but a judge must score every row')
        except ValueError as error:
            hint = "correct it, or remove the row" if scored else "correct it; null stands for no value"
            return [Problem("D06", str(error), str(prompt.location), hint)]
    return []


def _type_name(value: Any) -> str:
    return TYPE_NAMES.get(type(value), type(value).__name__)
