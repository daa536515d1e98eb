"""A judge that compares two answers in both orders: a language model, asked once for each text."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.config.judges import OpenAIJudge
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.http_client import excerpt
from rlhf_cli.judges import probe
from rlhf_cli.judges.answers import Answer, AnswerFile, answers_path, describe_paid
from rlhf_cli.judges.endpoint import Endpoint, Reply, TooLongError, api_key, require_package
from rlhf_cli.judges.question import RUBRIC, WINNERS, Question, Winner, read_winner
from rlhf_cli.progress import Progress

OTHER: dict[Winner, Winner] = {"1": "2", "2": "1", "tie": "tie"}
MAX_REPLIES = 2  # to one question, before it is given up
MAX_TOO_LONG = 0.1  # share of the pairs of an evaluation: the others would be a choice of short answers


@dataclass(frozen=True)
class Pair:
    """Two answers to a prompt."""

    prompt: str
    first: str
    second: str

    @property
    def is_equal(self) -> bool:
        """Return True if there is nothing to ask."""
        return self.first == self.second

    @property
    def orders(self) -> tuple[Question, Question]:
        """Return the questions in both orders."""
        return Question(self.prompt, self.first, self.second), Question(self.prompt, self.second, self.first)


@dataclass(frozen=True)
class Comparison:
    """What a judge says about a pair: the winner as shown, and as shown in the other order. None for equal answers.

    `Comparison("1", "2")`: the first answer wins in both orders. A pair that is too long for the judge has no result.
    """

    winner: Winner | None = None
    swapped_winner: Winner | None = None
    is_too_long: bool = False

    @property
    def is_consistent(self) -> bool:
        """Return True if both orders name the same answer, or both a tie."""
        return self.winner is not None and self.swapped_winner == OTHER[self.winner]

    @property
    def points(self) -> float:
        """Return 1 if the first answer wins in both orders, 0 if the second does, else 0.5: a disagreement is a tie."""
        if not self.is_consistent or self.winner == "tie":
            return 0.5
        return 1.0 if self.winner == "1" else 0.0

    @property
    def slots(self) -> list[float]:
        """Return 1 for each order in which the answer that is shown first wins, 0 for the other; none for a tie."""
        return [1.0 if winner == "1" else 0.0 for winner in (self.winner, self.swapped_winner) if winner in ("1", "2")]


@dataclass
class Cost:
    """What the answers of an evaluation cost, whenever they were given.

    `kept` of them were on disk; `asked` is the number of calls now. `too_long` pairs have no answer.
    """

    answers: int = 0
    kept: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    asked: int = 0
    too_long: int = 0

    def add(self, answer: Answer) -> None:
        """Count an answer that is used."""
        self.answers += 1
        self.calls += answer.calls
        self.prompt_tokens += answer.prompt_tokens
        self.completion_tokens += answer.completion_tokens


@dataclass
class PairwiseJudge:
    """Compares pairs of answers. Each answer of the model is on disk at once, and no text is asked about twice.

    A pair that the endpoint refuses as too long for its model is skipped, and asked about again the next time.
    Raises RLHFError J01 for a reply that names no winner, J02 for a judge that fails the probe, J03 as Endpoint, J04 if
    all commands of the run together would make more than `max_calls`, J05 if too many pairs are too long.
    """

    name: str
    settings: OpenAIJudge
    endpoint: Endpoint
    file: AnswerFile
    cost: Cost = field(default_factory=Cost)
    refusal: str = ""  # of the first text that was too long, in the endpoint's words

    @classmethod
    def of(cls, name: str, settings: OpenAIJudge, run: Path, where: Callable[[str], str]) -> "PairwiseJudge":
        """Open a judge of a run. Raises RLHFError C15, C17, E09, D03, S03."""
        require_package(where(""))
        endpoint = Endpoint(name, settings, api_key(settings, where))
        file = AnswerFile(answers_path(run, name))
        if file.paid_before:
            terminal.say(f"judge {name}: {describe_paid(file.paid_before, settings.max_calls)}")
        return cls(name, settings, endpoint, file)

    @property
    def rubric(self) -> str:
        """Return the rubric of the config, or else the default."""
        return self.settings.rubric or RUBRIC

    @property
    def paid_calls(self) -> int:
        """Return how many calls this run has made, this command's and those before it."""
        return self.file.paid_before + self.cost.asked

    def compare(self, pairs: Sequence[Pair]) -> list[Comparison]:
        """Compare the answers of each pair in both orders."""
        answers = self._ask([question for pair in pairs if not pair.is_equal for question in pair.orders], "order")
        comparisons = [_comparison(pair, answers) for pair in pairs]
        self.cost.too_long += sum(each.is_too_long for each in comparisons)
        return comparisons

    def require_few_too_long(self, comparisons: Sequence[Comparison]) -> None:
        """Raise RLHFError J05 if the pairs that were not too long are a selection of short answers."""
        too_long = sum(each.is_too_long for each in comparisons)
        if too_long > MAX_TOO_LONG * len(comparisons):
            raise self._too_long(f"{too_long} of {len(comparisons)} pairs are")

    def _too_long(self, pairs_are: str) -> RLHFError:
        text = f"judge {self.name}: {pairs_are} too long for {self.settings.model}: {self.refusal}"
        hint = "serve it with a longer context, or compare shorter answers; the answers so far are kept"
        return RLHFError("J05", text, hint=hint)

    def pass_probe(self) -> None:
        """Ask the pairs of the probe, unless it is turned off, and stop if too many answers are wrong."""
        if not self.settings.probe:
            return
        questions = [question for pair in probe.probe_pairs() for question, _ in probe.questions_of(pair)]
        answers = self._ask(questions, "probe")
        if len(answers) < probe.NUM_CALLS:
            raise self._too_long("even the short texts of the probe are")
        wrong = probe.num_wrong(answers)
        if wrong > probe.MAX_WRONG:
            text = f"judge {self.name}: {wrong} of {probe.NUM_PAIRS} pairs with a known result are wrong"
            hint = "use another model or rubric; probe: false if shuffled words may be better by this rubric"
            hint += f"; delete {shown(self.file.path)} if the model behind the name has changed"
            raise RLHFError("J02", f"{text}: its win rates would mean nothing", hint=hint)

    def _ask(self, questions: Iterable[Question], unit: str) -> dict[Question, Winner]:
        """Return the winner of each question that is not too long, from the file or from the model."""
        keys = {question: self._key(question) for question in dict.fromkeys(questions)}
        missing = [question for question, key in keys.items() if self.file.get(key) is None]
        self.cost.kept += len(keys) - len(missing)
        if missing:
            self._require_calls(len(missing))
            with Progress(f"judge {self.name}", len(keys), unit, done=len(keys) - len(missing)) as bar:
                asyncio.run(self._ask_all(missing, bar))

        winners = {}
        for question, key in keys.items():
            answer = self.file.get(key)
            if answer is not None and answer.winner is not None:
                self.cost.add(answer)
                winners[question] = answer.winner
        return winners

    def _key(self, question: Question) -> str:
        return question.key(self.settings.model, self.settings.parameters, self.rubric)

    async def _ask_all(self, questions: Sequence[Question], bar: Progress) -> None:
        """Ask the model, `concurrency` questions at a time; after an error no further one is asked."""
        remaining = iter(questions)
        async with self.endpoint.client() as client:

            async def work() -> None:
                for question in remaining:
                    await self._ask_one(client, question)
                    bar.advance()

            workers = [asyncio.create_task(work()) for _ in range(min(self.settings.concurrency, len(questions)))]
            try:
                for worker in asyncio.as_completed(workers):
                    await worker
            finally:
                for task in workers:
                    task.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _ask_one(self, client: Any, question: Question) -> None:
        """Write the model's answer to the file; one repeat for a reply that names no winner."""
        answer = Answer(winner=None, calls=0, prompt_tokens=0, completion_tokens=0)
        try:
            while answer.winner is None and answer.calls < MAX_REPLIES:
                self._require_calls(1)
                self.cost.asked += 1
                reply = await self.endpoint.ask(client, question.text(self.rubric))
                answer = _answer_with(answer, reply)
        except TooLongError as refusal:
            self._skip(str(refusal))
            return
        finally:
            if answer.calls:
                self.file.add(self._key(question), answer)
        if answer.winner is None:
            raise self._no_winner(reply.text)

    def _no_winner(self, reply: str) -> RLHFError:
        forms = ", ".join(f'{{"winner": "{winner}"}}' for winner in WINNERS)
        text = f"judge {self.name}: {self.settings.model} answers {excerpt(reply.encode())}, and not one of {forms}"
        hint = "use a model that follows instructions, or an endpoint with JSON Schema (response_format)"
        return RLHFError("J01", text, hint=f"{hint}; the answers so far are kept")

    def _skip(self, refusal: str) -> None:
        """Say once that pairs are skipped, which cost nothing."""
        self.cost.asked -= 1
        if not self.refusal:
            self.refusal = excerpt(refusal.encode())
            terminal.say(f"judge {self.name}: pairs that are too long for it are skipped: {self.refusal}")

    def _require_calls(self, count: int) -> None:
        """Raise RLHFError J04 if max_calls does not allow as many calls more."""
        paid = self.paid_calls
        if paid + count > self.settings.max_calls:
            needs = f"needs {count:,} calls more, and {paid:,} of this run are paid for"
            text = f"judge {self.name}: {needs}, which is above max_calls {self.settings.max_calls:,}"
            hint = f"set max_calls: {paid + count}; the answers so far are kept, and the same command continues"
            raise RLHFError("J04", text, hint=hint)


def _answer_with(answer: Answer, reply: Reply) -> Answer:
    """Return an answer with one reply more."""
    return Answer(
        read_winner(reply.text),
        calls=answer.calls + 1,
        prompt_tokens=answer.prompt_tokens + reply.prompt_tokens,
        completion_tokens=answer.completion_tokens + reply.completion_tokens,
    )


def _comparison(pair: Pair, answers: Mapping[Question, Winner]) -> Comparison:
    """Return what the answers say about a pair; one without both answers is too long."""
    if pair.is_equal:
        return Comparison()
    shown, swapped = pair.orders
    if shown in answers and swapped in answers:
        return Comparison(answers[shown], answers[swapped])
    return Comparison(is_too_long=True)
