"""What a reward function is given by its parameters, and the columns of the data among them."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from rlhf_cli.data.datasets import PROMPT_FORMS, Prompt
from rlhf_cli.data.readers import format_columns
from rlhf_cli.errors import Problem, RLHFError, did_you_mean
from rlhf_cli.models.batch import Record, Rollout

# (prompts, responses) or TRL's (prompts=, completions=, completion_ids=, **columns) -> one score, or None, per row.
# May be async.
RewardFn = Callable[..., Any]
OWN_COLUMNS = {name for form in PROMPT_FORMS for name in form}  # functions do not get them as columns
TYPE_NAMES = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class TextRows:
    """The B rows that a reward function scores."""

    prompts: list[str]  # decoded without special tokens
    responses: list[str]  # decoded without special tokens
    completion_ids: Sequence[list[int]] = ()  # the responses' tokens, the stop token included
    records: Sequence[Record] = ()  # of the prompts; empty if they are of no data

    @classmethod
    def of(cls, rollout: Rollout, tokenizer: Any) -> "TextRows":
        """Decode the rows of a rollout."""
        rollout = rollout.to(torch.device("cpu"))
        ids = [rollout.response_tokens(row) for row in range(len(rollout))]
        return cls(*rollout.texts(tokenizer), ids, rollout.records)


@dataclass(frozen=True)
class Signature:
    """The parameters of a reward function, which decide how it is called.

    A function that names `responses` gets texts: `prompts` and `responses`, by keyword. One that names `completions` or
    `completion_ids`, or has `**kwargs` and fewer than two positional parameters, is called as by TRL's GRPOTrainer:
    `prompts` as in the data, `completions` as lists of one message for conversations and as texts otherwise, and
    `completion_ids`, lists of token ids. Any other function gets the texts in its first two parameters.
    Every further parameter is a column of the data, which may be missing if the parameter has a default. `**kwargs`
    gets the other columns, and in TRL's form also the others of its three.
    """

    texts: bool  # False: TRL's form
    positional: tuple[str, ...] | None  # names of the parameters of prompts and responses; None: passed by keyword
    named: Mapping[str, bool]  # parameters passed by keyword -> required
    takes_all: bool  # has **kwargs

    @classmethod
    def of(cls, function: RewardFn) -> "Signature":
        """Read the signature of a function."""
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # of some functions written in C
            return cls(True, (), {}, False)
        kinds = {each.kind for each in parameters}
        places = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        named = {
            each.name: each.default is each.empty
            for each in parameters
            if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        }
        any_place = inspect.Parameter.VAR_POSITIONAL in kinds
        by_place = "completion_ids" not in named and (len(places) >= 2 or any_place)
        texts = "completions" not in named and ("responses" in named or by_place)
        positional = tuple(places[:2]) if texts and "responses" not in named else None
        named = {name: required for name, required in named.items() if name not in (positional or ())}
        # A wrapper with (*args, **kwargs) may pass on two arguments only.
        return cls(texts, positional, named, inspect.Parameter.VAR_KEYWORD in kinds and not (texts and any_place))

    @property
    def columns(self) -> dict[str, bool]:
        """Return the columns that the function names -> required."""
        given = {"prompts", "completion_ids", "responses" if self.texts else "completions"}
        return {name: required for name, required in self.named.items() if name not in given}

    def call(self, function: RewardFn, rows: TextRows) -> Any:
        """Call the function; return its result, of a coroutine function a coroutine.

        All values are copies: a function may change them.
        """
        prompts, responses = list(rows.prompts), list(rows.responses)
        given: dict[str, Any] = {"completion_ids": list(map(list, rows.completion_ids))}
        if self.texts:
            given |= {"prompts": prompts, "responses": responses}
        else:
            prompts = [deepcopy(record["prompt"]) for record in rows.records] or prompts
            given |= {"prompts": prompts, "completions": list(map(_completion, prompts, responses))}
        takes_given = self.takes_all and not self.texts
        named = {name: value for name, value in given.items() if takes_given or name in self.named}
        arguments = () if self.positional is None else (prompts, responses)
        return function(*arguments, **(self._column_values(rows.records) | named))

    def _column_values(self, records: Sequence[Record]) -> dict[str, list[Any]]:
        names = dict.fromkeys(chain.from_iterable(records))
        other = {"prompt", *(self.positional or ())}
        read = [name for name in names if name not in other and (self.takes_all or name in self.named)]
        return {name: [deepcopy(record.get(name)) for record in records] for name in read}


def _completion(prompt: Any, response: str) -> Any:
    return [{"role": "assistant", "content": response}] if isinstance(prompt, list) else response


def named_columns(functions: Iterable[RewardFn], prompts: Iterable[Prompt]) -> list[str]:
    """Return the columns that functions name by their parameters and the prompts have."""
    known = {name for prompt in prompts for name in prompt.columns}
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
                reader, hint = f"the function of `{name}` takes", f"add the column, or {other}"
                problems.append(missing_column(reader, column, known, source, where(name), hint))
    if problems:
        raise RLHFError.from_problems(list(dict.fromkeys(problems)))


def missing_column(
    reader: str, column: str, known: Collection[str], source: str, where: str, hint: str | None = None
) -> Problem:
    """Return D02 for a column that is not among the `known` ones of a `source`; `reader` is a subject and a verb."""
    text, hint = f"{source} has no such column", did_you_mean(column, known) or hint
    if column in OWN_COLUMNS:
        text, hint = f"rlhf reads this column of {source} itself", "copy it to a column of another name, and name that"
    text = f'{reader} "{column}", but {text}; further columns: {format_columns(known) or "none"}'
    return Problem("D02", text, where, hint)


def _mixed_types(column: str, prompts: Sequence[Prompt]) -> list[Problem]:
    """Return a problem for the first row whose value has another type than those before it."""
    with_value = [prompt for prompt in prompts if prompt.columns.get(column) is not None]
    for prompt in with_value:
        kind, first = (_type_name(each.columns[column]) for each in (prompt, with_value[0]))
        if kind != first:
            text = f'"{column}" is {kind} here, {first} in {with_value[0].location.short}'
            return [Problem("D12", text, str(prompt.location), "a reward function reads it: give it one type")]
    return []


def _unreadable(column: str, prompts: Sequence[Prompt], function: RewardFn, scored: int) -> list[Problem]:
    """Return a problem for the first row whose value the function's own `check_value` refuses with a ValueError."""
    check_value: Callable[[Any], Any] | None = getattr(function, "check_value", None)
    for number, prompt in enumerate(prompts if check_value else ()):
        try:
            if (value := prompt.columns.get(column)) is not None and check_value:
                check_value(value)
            elif number < scored:
                raise ValueError(f'"{column}" is null or missing, but a judge must score every row')
        except ValueError as error:
            hint = "correct it, or remove the row" if scored else "correct it; null stands for no value"
            return [Problem("D06", str(error), str(prompt.location), hint)]
    return []


def _type_name(value: Any) -> str:
    return TYPE_NAMES.get(type(value), type(value).__name__)
