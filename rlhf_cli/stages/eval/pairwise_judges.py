"""Judges of an evaluation that compare the answers of PPO and SFT: opened, counted, probed and asked.

They judge the sampled answers of `ppo_vs_sft` alone: each further comparison would cost as many calls.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rlhf_cli import data, terminal
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.judges import OpenAIJudge
from rlhf_cli.data.texts import joined, joined_with_roles
from rlhf_cli.errors import RLHFError, collect_errors
from rlhf_cli.evaluation.pairwise import pairwise_win_rates
from rlhf_cli.evaluation.responses import EvalResponses
from rlhf_cli.judges import probe
from rlhf_cli.judges.endpoint import api_key, require_package
from rlhf_cli.judges.pairwise import Cost, Pair, PairwiseJudge
from rlhf_cli.judges.question import FORM, RUBRIC
from rlhf_cli.runs.report import PPO_OVER_SFT, JudgeCost, Report

CHARACTERS_A_TOKEN = 4  # of English
ANSWER_TOKENS = 10  # {"winner": "1"}


def check_judges(config: EvalConfig, num_prompts: int) -> None:
    """Check what asking needs, without a call. Raises RLHFError C17 and E09, for all judges at once."""
    checks = [partial(_check_judge, config, name, num_prompts) for name in config.pairwise_judges]
    collect_errors(*checks)


def _check_judge(config: EvalConfig, name: str, num_prompts: int) -> None:
    settings = config.pairwise_judges[name]
    require_package(config.where(f"judges.{name}.openai"))
    api_key(settings, partial(judge_location, config, name))
    where = judge_location(config, name, "max_calls")
    check_calls(name, settings, num_prompts, pairs=f"{num_prompts} prompts", lower="eval.n", where=where)


def check_calls(name: str, settings: OpenAIJudge, num_pairs: int, *, pairs: str, lower: str, where: str) -> None:
    """Raise RLHFError C17 if asking about all pairs exceeds max_calls. `pairs`, `lower`: words of the message."""
    calls = most_calls(settings, num_pairs)
    if calls > settings.max_calls:
        probing = f" and {probe.NUM_CALLS} of the probe" if settings.probe else ""
        text = f"judges.{name}: {pairs} in both orders{probing} are {calls:,} calls"
        hint = f"set max_calls: {calls}, or lower {lower}; a reply that names no winner costs one call more"
        raise RLHFError("C17", f"{text}, and max_calls is {settings.max_calls:,}", where=where, hint=hint)


def judge_location(config: EvalConfig, name: str, key: str) -> str:
    """Return where a key of a judge stands in eval.yaml, for messages; "": where the judge does."""
    return config.where(f"judges.{name}.openai.{key}".removesuffix("."))


# Costs


def most_calls(settings: OpenAIJudge, num_prompts: int) -> int:
    """Return the calls of an evaluation without any answer on disk."""
    return 2 * num_prompts + (probe.NUM_CALLS if settings.probe else 0)


def most_tokens(settings: OpenAIJudge, num_prompts: int, prompt_tokens: float, response_tokens: float) -> int:
    """Return about how many tokens these calls have, for an average prompt and responses of this length."""
    rubric_tokens = len((settings.rubric or RUBRIC) + FORM) / CHARACTERS_A_TOKEN
    tokens_of_call = rubric_tokens + prompt_tokens + 2 * response_tokens + ANSWER_TOKENS
    return round(most_calls(settings, num_prompts) * tokens_of_call)


def describe_most(calls: int, tokens: int) -> str:
    """Return the calls and tokens before an evaluation as text; answers that are on disk cost nothing."""
    shown = f"{tokens / 1e6:.1f} million" if tokens >= 1e6 else f"{max(1, round(tokens / 1e3)):,} thousand"
    return f"at most {calls:,} calls, about {shown} tokens"


def describe_cost(name: str, cost: Cost) -> str:
    """Return what an evaluation cost as text."""
    tokens = cost.prompt_tokens + cost.completion_tokens
    text = f"judge {name}: {cost.asked:,} calls now"
    if cost.kept:
        text += f", {cost.kept:,} answers were on disk"
    if cost.too_long:
        text += f", {cost.too_long:,} pairs were too long for it"
    return f"{text}; all answers together took {tokens:,} tokens" if tokens else text


# Asking


def open_judges(config: EvalConfig, num_prompts: int) -> dict[str, PairwiseJudge]:
    """Return the judges, after their probes: one that fails costs no sampling."""
    check_judges(config, num_prompts)
    judges = {}
    for name, settings in config.pairwise_judges.items():
        judge = PairwiseJudge.of(name, settings, Path(config.run), partial(judge_location, config, name))
        judge.pass_probe()
        judges[name] = judge
    return judges


def add_win_rates(
    report: Report,
    judges: Mapping[str, PairwiseJudge],
    prompts: Sequence[data.Prompt],
    evaluated: Sequence[EvalResponses],
) -> Report:
    """Let the judges compare PPO's sampled answers with SFT's; return the report with their win rates and costs."""
    if not judges:
        return report
    sampled = {each.model: each for each in evaluated if each.mode == "sampled"}
    ppo, sft = sampled["ppo"], sampled["sft"]
    rows = zip(prompts, ppo.responses, sft.responses, strict=True)
    pairs = [Pair(shown_prompt(prompt), ours.strip(), theirs.strip()) for prompt, ours, theirs in rows]

    compared = {name: judge.compare(pairs) for name, judge in judges.items()}
    for name, judge in judges.items():
        terminal.say(f"eval     {describe_cost(name, judge.cost)}")
        judge.require_few_too_long(compared[name])
    rates = {**report.win_rate[PPO_OVER_SFT], **pairwise_win_rates(compared, ppo, sft)}
    return report.with_changes(
        win_rate={**report.win_rate, PPO_OVER_SFT: rates},
        judge_costs={name: _cost(judge) for name, judge in judges.items()},
    )


def shown_prompt(prompt: data.Prompt) -> str:
    """Return what the judge is shown of a prompt: of a conversation with several messages, with their roles."""
    if isinstance(prompt.text, str) or len(prompt.text) == 1:
        return joined(prompt.text)
    return joined_with_roles(prompt.text)


def _cost(judge: PairwiseJudge) -> JudgeCost:
    cost = judge.cost
    return JudgeCost(
        model=judge.settings.model,
        answers=cost.answers,
        calls=cost.calls,
        prompt_tokens=cost.prompt_tokens,
        completion_tokens=cost.completion_tokens,
        too_long=cost.too_long or None,
    )
