"""What a judge costs: calls and tokens before it is asked, and after it was."""

from rlhf_cli.config.judges import OpenAIJudge
from rlhf_cli.errors import RLHFError
from rlhf_cli.judges import probe
from rlhf_cli.judges.pairwise import Cost
from rlhf_cli.judges.question import FORM, RUBRIC

CHARACTERS_A_TOKEN = 4  # of English
ANSWER_TOKENS = 10  # {"winner": "1"}


def check_calls(key: str, settings: OpenAIJudge, num_pairs: int, *, pairs: str, lower: str, where: str) -> None:
    """Raise RLHFError C17 if asking about all pairs exceeds max_calls. `pairs`, `lower`: words of the message."""
    calls = most_calls(settings, num_pairs)
    if calls > settings.max_calls:
        probing = f" and {probe.NUM_CALLS} of the probe" if settings.probe else ""
        text = f"{key}: {pairs} in both orders{probing} are {calls:,} calls"
        hint = f"set max_calls: {calls}, or lower {lower}; a reply that names no winner costs one call more"
        raise RLHFError("C17", f"{text}, and max_calls is {settings.max_calls:,}", where=where, hint=hint)


def most_calls(settings: OpenAIJudge, num_pairs: int) -> int:
    """Return the calls for these pairs without any answer on disk."""
    return 2 * num_pairs + (probe.NUM_CALLS if settings.probe else 0)


def most_tokens(settings: OpenAIJudge, num_pairs: int, prompt_tokens: float, response_tokens: float) -> int:
    """Return about how many tokens these calls have, for an average prompt and responses of this length."""
    rubric_tokens = len((settings.rubric or RUBRIC) + FORM) / CHARACTERS_A_TOKEN
    tokens_of_call = rubric_tokens + prompt_tokens + 2 * response_tokens + ANSWER_TOKENS
    return round(most_calls(settings, num_pairs) * tokens_of_call)


def describe_most(calls: int, tokens: int) -> str:
    """Return the calls and tokens before they are made as text; answers that are on disk cost nothing."""
    shown = f"{tokens / 1e6:.1f} million" if tokens >= 1e6 else f"{max(1, round(tokens / 1e3)):,} thousand"
    return f"at most {calls:,} calls, about {shown} tokens"


def describe_cost(name: str, cost: Cost) -> str:
    """Return what the answers cost as text."""
    tokens = cost.prompt_tokens + cost.completion_tokens
    text = f"judge {name}: {cost.asked:,} calls now"
    if cost.kept:
        text += f", {cost.kept:,} answers were on disk"
    if cost.too_long:
        text += f", {cost.too_long:,} too long for it"
    return f"{text}; all answers together took {tokens:,} tokens" if tokens else text
