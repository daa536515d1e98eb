"""Preference pairs of rated answers: lists of scores, one rated answer a row, the better one of two, labels.

A further form of rows is an entry of FORMS: where it has its answers and ratings, and a function that reads a row.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, combinations
from statistics import fmean
from typing import Any, NamedTuple

from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.columns import system_text
from rlhf_cli.data.conversions import STORED_MESSAGES
from rlhf_cli.data.grades import GRADES, MARGIN_PER_GRADE, UNRATED, JudgedPairs, Note, grade_of
from rlhf_cli.data.readers import BadRow, Row, RowIterator, RowLocation, describe_value
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.data.scales import check_scales

PROMPTS = ("prompt", "instruction")
CONTEXT = "context"  # the prompt of HelpSteer3, if it is a list of messages
ASPECTS = "annotations"  # of UltraFeedback: {ASPECT: {Rating}}, rated by their mean
WORDS = {"true": True, "false": False}  # labels in a table


class RatedForm(NamedTuple):
    """A form of rows with rated answers, and how to read it."""

    name: str
    answers: tuple[str, ...]  # columns
    ratings: tuple[str, ...]  # columns that may hold the ratings, the usual one first
    read: Callable[[Row, "RatedForm", str], list[tuple[Any, Any]]]  # the answers of a row, each with its rating
    across_rows: bool = False  # answers in several rows are compared if they have the same prompt
    rates_inside: bool = False  # each answer is an object that holds its rating
    margin_per_point: float = 0.0  # unless data.margin_per_point sets it


def _of_lists(row: Row, form: RatedForm, rating: str) -> list[tuple[Any, Any]]:
    (column,) = form.answers
    answers = _list(row, column)
    ratings = _list(row, rating)
    count = len(answers)
    if len(ratings) != count:
        text = f'"{rating}" has {len(ratings)} values for {count} answers in "{column}"'
        raise BadRow("D21", text)
    return list(zip(answers, ratings, strict=True))


def _of_objects(row: Row, form: RatedForm, rating: str) -> list[tuple[Any, Any]]:
    (column,) = form.answers
    rated = []
    for number, answer in enumerate(_list(row, column), start=1):
        if not isinstance(answer, dict) or "response" not in answer:
            found = describe_value(answer)
            raise BadRow("D21", f'answer {number} of "{column}" is {found} without "response"')

        value = answer.get(rating)
        if rating == ASPECTS:
            value = _mean_of_aspects(value)
        rated.append((answer["response"], value))
    return rated


def _of_numbered(row: Row, form: RatedForm, rating: str) -> list[tuple[Any, Any]]:
    value = row[rating]
    better = rating_of(value, rating)
    if better is None:
        return []
    if better not in (0, 1) or isinstance(value, bool):
        text = f'"{rating}" is {value!r:.40}; expected 0 or 1, the number of the better answer'
        raise BadRow("D21", text)

    first, second = form.answers
    return [(row[first], 1 - better), (row[second], better)]


def _of_graded(row: Row, form: RatedForm, rating: str) -> list[tuple[Any, Any]]:
    grade = grade_of(row[rating], rating)
    if grade is None:
        return []

    first, second = form.answers
    return [(row[first], 0.0), (row[second], grade)]


def _of_one_answer(row: Row, form: RatedForm, rating: str) -> list[tuple[Any, Any]]:
    (column,) = form.answers
    return [(row[column], row[rating])]


SCORES = ("score", "rating", "helpfulness")
TWO_ANSWERS = ("response_0", "response_1")
BETTER_OF_TWO = ("better_response_id", "safer_response_id")
GRADED = "two answers and the grade of the preference"
FORMS = (
    RatedForm(
        "lists of answers and scores",
        ("responses",),
        ("scores",),
        _of_lists,
    ),
    RatedForm(
        "UltraFeedback",
        ("completions",),
        ("overall_score", "fine-grained_score", ASPECTS),
        _of_objects,
        rates_inside=True,
    ),
    RatedForm(
        "two answers and the number of the better one",
        TWO_ANSWERS,
        BETTER_OF_TWO,
        _of_numbered,
    ),
    RatedForm(
        GRADED,
        ("response_1", "response_2"),
        GRADES,
        _of_graded,
        margin_per_point=MARGIN_PER_GRADE,
    ),
    RatedForm(
        GRADED,
        ("response1", "response2"),
        GRADES,
        _of_graded,
        margin_per_point=MARGIN_PER_GRADE,
    ),
    RatedForm(
        "one rated answer a row",
        ("response",),
        (*SCORES, "label"),
        _of_one_answer,
        across_rows=True,
    ),
    RatedForm(
        "one rated answer a row",
        ("completion",),
        ("label", *SCORES),
        _of_one_answer,
        across_rows=True,
    ),
)
COLUMNS = frozenset({"rating"}.union(*(form.answers for form in FORMS)))  # names for data.columns


@dataclass
class Answer:
    """An answer with its rating, and the row that it comes from."""

    location: RowLocation
    text: Any
    rating: float
    row: Row


@dataclass
class PromptAnswers:
    """The answers that are compared: those to one prompt."""

    prompt: Any
    answers: list[Answer] = field(default_factory=list)


class RatedAnswers(JudgedPairs):
    """Collection of a source's rated answers, which become pairs once all rows are read."""

    def __init__(self, form: RatedForm, rating: str, prompt: str, source: DataSource) -> None:
        super().__init__(rating, source, form.margin_per_point)
        self.form = form
        self.form_name = form.name
        self.prompt = prompt
        self.prompts: dict[Any, PromptAnswers] = {}
        self.num_possible = 0
        self.num_with_pairs = 0
        self.first: RowLocation | None = None
        self.are_labels = False

    @classmethod
    def of(cls, row: Row, source: DataSource) -> "RatedAnswers | None":
        """Return an empty collection for rows like this one, None if it has no rated answers."""
        prompt = _prompt_column(row)
        if prompt is None:
            return None
        named = source.columns.get("rating")
        for form in FORMS:
            if not all(name in row for name in form.answers):
                continue
            rated = _columns_of_ratings(row, form)
            for rating in (named,) if named else form.ratings:
                if rating in rated:
                    return cls(form, rating, prompt, source)
        return None

    def pairs(self, rows: RowIterator, note: Note) -> RowIterator:
        """Yield (location of the better answer, pair) in the order of the prompts; `note` gets the bad rows.

        Raises RLHFError D21, or warns, as `scales.check_scales`.
        """
        for location, row in rows:
            try:
                self.add(location, row)
            except BadRow as bad:
                note(location, bad)

        groups = [group.answers for group in self.prompts.values()]
        gaps_count = bool(self.source.min_rating_gap or self.margin_per_point)
        check_scales(groups, self.column, gaps_count=gaps_count)

        for group in self.prompts.values():
            pairs = self._pairs_of(group)
            self.num_with_pairs += bool(pairs)
            self.num_pairs += len(pairs)
            for better, worse in pairs:
                yield better.location, self._row(group.prompt, better, worse)

    def add(self, location: RowLocation, row: Row) -> None:
        """Add the answers of a row. Raises BadRow D12 without its columns, D21 for ratings that do not fit."""
        needed = [self.prompt, *self.form.answers]
        if not self.form.rates_inside:
            needed.append(self.column)
        for name in needed:
            if name not in row:
                raise BadRow("D12", f'no column "{name}", which rows of {self.form.name} have')

        rated = []
        for text, value in self.form.read(row, self.form, self.column):
            rating = rating_of(value, self.column)
            if rating is None:
                self.omitted["answers without a rating"] += 1
                continue
            self._require_one_scale(location, value)
            rated.append(Answer(location, text, rating, row))
        prompt = row[self.prompt]
        key = repr((prompt, system_text(row))) if self.form.across_rows else location
        group = self.prompts.setdefault(key, PromptAnswers(prompt))
        group.answers += rated

    def _require_one_scale(self, location: RowLocation, value: Any) -> None:
        """Raise BadRow D21 for a label among numbers, or a number among labels: no scale has both."""
        is_label = isinstance(value, bool) or str(value).casefold() in WORDS
        if self.first is None:
            self.first = location
            self.are_labels = is_label
        if is_label != self.are_labels:
            kind = "a label" if self.are_labels else "a number"
            raise BadRow("D21", f'"{self.column}" is {value!r:.40} here, {kind} in {self.first.short}')

    def _row(self, prompt: Any, better: Answer, worse: Answer) -> Row:
        """Return a pair with the further columns of its better answer."""
        consumed = {self.prompt, self.column, *self.form.answers, *self.source.columns.values()}
        further = {name: value for name, value in better.row.items() if name not in consumed}
        pair = {
            "prompt": prompt,
            "chosen": better.text,
            "rejected": worse.text,
        }
        return further | pair | self.margin(better.rating - worse.rating)

    def _pairs_of(self, group: PromptAnswers) -> list[tuple[Answer, Answer]]:
        """Return the pairs of a prompt that data.pairs_per_prompt asks for, and count what is omitted.

        A prompt without a pair is counted itself, not its ties.
        """
        least = self.source.min_rating_gap
        possible = []
        omitted: Counter[str] = Counter()
        for better, worse in combinations(group.answers, 2):
            if worse.rating > better.rating:
                better, worse = worse, better
            gap = better.rating - worse.rating
            if gap == 0:
                omitted["ties"] += 1
            elif gap < least:
                omitted[f"pairs closer than {least:g}"] += 1
            else:
                possible.append((better, worse))

        if not possible:
            self.omitted[self._fault_of(group)] += 1
            return []
        self.omitted += omitted
        self.num_possible += len(possible)
        return possible if self.source.pairs_per_prompt == "all" else [_best_and_another(possible)]

    def _fault_of(self, group: PromptAnswers) -> str:
        """Return what a prompt without a pair is counted as."""
        ratings = [answer.rating for answer in group.answers]
        if not ratings:
            return "prompts without a rated answer"
        if len(ratings) == 1:
            return "prompts of one rated answer"
        if min(ratings) == max(ratings):
            return "prompts whose answers are rated alike"
        return f"prompts whose ratings differ by less than {self.source.min_rating_gap:g}"

    def made_of(self) -> str:
        """Return the number of pairs and what decided them."""
        text = f'{self.form.name}: {self.num_pairs} pairs of {self.num_with_pairs} prompts by "{self.column}"'
        if self.num_possible > self.num_pairs:
            text += f" (data.pairs_per_prompt: all gives {self.num_possible})"
        return text

    def why_no_pair(self) -> str | None:
        """Return why there is no pair, or None if there is one or no row was read."""
        if self.num_pairs or not self.prompts:
            return None
        groups = [group.answers for group in self.prompts.values()]
        ratings = [answer.rating for answer in chain.from_iterable(groups)]
        if len(set(ratings)) != 1:
            return f'no prompt has a better and a worse answer by "{self.column}": {self.omitted_text()}'

        value = f"{ratings[0]:g}"
        if self.are_labels:
            value = "true" if ratings[0] else "false"
        return f'"{self.column}" is {value} of all {len(ratings)} answers: none is better than another'


def _prompt_column(row: Row) -> str | None:
    """Return the column of the prompt, None without one."""
    for name in PROMPTS:
        if name in row:
            return name
    context = row.get(CONTEXT)
    is_stored = isinstance(context, str) and STORED_MESSAGES.match(context)
    return CONTEXT if isinstance(context, list) or is_stored else None


def rating_of(value: Any, column: str) -> float | None:
    """Return the number of a rating, 1 and 0 for true and false; None without one. Raises BadRow D21 for others."""
    rating = value
    if value is None or (isinstance(value, str) and value.strip() in UNRATED):
        return None
    if isinstance(value, str):
        rating = WORDS.get(value.strip().casefold(), value)
        with suppress(ValueError):
            rating = float(rating)
    if isinstance(rating, int | float) and abs(rating) <= 1e300 and math.isfinite(rating):
        return float(rating)
    raise BadRow("D21", f'"{column}" is {value!r:.40}; expected a finite number, true or false')


def _best_and_another(pairs: list[tuple[Answer, Answer]]) -> tuple[Answer, Answer]:
    """Return the pair of the best answer and one of the worse ones, drawn by a hash of their texts."""
    best, _ = max(pairs, key=lambda pair: pair[0].rating)
    worse = [second for first, second in pairs if first is best]

    texts = [answer.text for answer in worse]
    number = derive_seed(0, repr(texts)) % len(worse)
    return best, worse[number]


def _columns_of_ratings(row: Row, form: RatedForm) -> Mapping[str, Any]:
    """Return where the names of ratings are looked up: the row, or its first answer that is an object."""
    if not form.rates_inside:
        return row
    (column,) = form.answers
    answers = row[column]
    if not isinstance(answers, list):
        return {}
    objects = (answer for answer in answers if isinstance(answer, dict))
    return next(objects, {})


def _mean_of_aspects(aspects: Any) -> float | None:
    """Return the mean of UltraFeedback's ratings of an answer, without those that are not given."""
    if not isinstance(aspects, dict):
        return None
    known = []
    for aspect in aspects.values():
        value = aspect.get("Rating") if isinstance(aspect, dict) else None
        rating = rating_of(value, "Rating")
        if rating is not None:
            known.append(rating)
    return fmean(known) if known else None


def _list(row: Row, column: str) -> list[Any]:
    value = row[column]
    if not isinstance(value, list):
        raise BadRow("D21", f'"{column}" is {describe_value(value)}; expected a list')
    return value
