"""What a judge costs: calls and tokens before it is asked, and after it was."""

from dataclasses import dataclass
from pathlib import Path

from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.judges import OpenAIJudge
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import RLHFError
from rlhf_cli.judges import probe
from rlhf_cli.judges.answers import answers_path, describe_paid, paid_calls
from rlhf_cli.judges.pairwise import PairwiseJudge
from rlhf_cli.judges.question import FORM, RUBRIC

CHARACTERS_A_TOKEN = 4  # of English
ANSWER_TOKENS = 10  # {"winner": "1"}


@dataclass(frozen=True)
class MostCost:
    """What a judge costs at most without an answer on disk; the fields are keys of `rlhf plan --json`."""

    calls: int
    tokens: int  # about
    paid: int  # calls that the answers on disk took
    max_calls: int
    concurrency: int

    @classmethod
    def of(
        cls, settings: OpenAIJudge, num_pairs: int, prompt_tokens: float, *, response_tokens: float, paid: int = 0
    ) -> "MostCost":
        """Return the cost of asking about pairs, for an average prompt and responses of this length."""
        calls = most_calls(settings, num_pairs)
        rubric_tokens = len((settings.rubric or RUBRIC) + FORM) / CHARACTERS_A_TOKEN
        tokens_of_call = rubric_tokens + prompt_tokens + 2 * response_tokens + ANSWER_TOKENS
        return cls(calls, round(calls * tokens_of_call), paid, settings.max_calls, concurrency=settings.concurrency)

    def __str__(self) -> str:
        tokens = f"{self.tokens / 1e6:.1f} million"
        if self.tokens < 1e6:
            tokens = f"{max(1, round(self.tokens / 1e3)):,} thousand"

        text = f"at most {self.calls:,} calls, about {tokens} tokens"
        if self.paid:
            text += f"; {describe_paid(self.paid, self.max_calls)}"
        if self.paid + self.calls > self.max_calls:
            text += f"; max_calls: {self.paid + self.calls} is enough if all answers are new"
        return text


def most_costs(
    config: PPOConfig | EvalConfig, num_pairs: int, *, prompt_tokens: float, response_tokens: float
) -> dict[str, MostCost]:
    """Return what each judge of a stage costs at most. Raises RLHFError D03, D12 for its file of answers."""
    judges = config.reward_judges if isinstance(config, PPOConfig) else config.pairwise_judges
    found = {}
    for name, settings in judges.items():
        paid = paid_calls(answers_path(Path(config.run), name))
        found[name] = MostCost.of(settings, num_pairs, prompt_tokens, response_tokens=response_tokens, paid=paid)
    return found


def most_calls(settings: OpenAIJudge, num_pairs: int) -> int:
    """Return the calls for these pairs without any answer on disk."""
    return 2 * num_pairs + (probe.NUM_CALLS if settings.probe else 0)


def check_calls(key: str, settings: OpenAIJudge, num_pairs: int, *, pairs: str, lower: str, where: str) -> None:
    """Raise RLHFError C17 if asking about all pairs exceeds max_calls. `pairs`, `lower`: words of the message."""
    calls = most_calls(settings, num_pairs)
    if calls <= settings.max_calls:
        return
    probing = f" and {probe.NUM_CALLS} of the probe" if settings.probe else ""
    text = f"{key}: {pairs} in both orders{probing} are {calls:,} calls, and max_calls is {settings.max_calls:,}"
    hint = f"set max_calls: {calls}, or lower {lower}; a reply that names no winner costs one call more"
    raise RLHFError("C17", text, where=where, hint=hint)


def describe_cost(judge: PairwiseJudge) -> str:
    """Return what the answers cost as text."""
    cost = judge.cost
    text = f"judge {judge.name}: {cost.asked:,} calls now"
    if cost.kept:
        text += f", {cost.kept:,} answers were on disk"
    if cost.too_long:
        text += f", {cost.too_long:,} too long for it"

    tokens = cost.prompt_tokens + cost.completion_tokens
    if tokens:
        text += f"; all answers together took {tokens:,} tokens"
    return f"{text}; {describe_paid(judge.paid_calls, judge.settings.max_calls)}"
