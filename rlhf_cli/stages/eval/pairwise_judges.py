"""Judges of an evaluation that compare the answers of PPO and SFT: opened, counted, probed and asked.

They judge the sampled answers of `ppo_vs_sft` alone: each further comparison would cost as many calls.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rlhf_cli import config as configs
from rlhf_cli import data, terminal
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.errors import collect_errors
from rlhf_cli.evaluation.pairwise import pairwise_win_rates
from rlhf_cli.evaluation.responses import EvalResponses
from rlhf_cli.judges.costs import check_calls, describe_cost
from rlhf_cli.judges.endpoint import api_key, require_package
from rlhf_cli.judges.pairwise import Pair, PairwiseJudge
from rlhf_cli.judges.question import shown_prompt
from rlhf_cli.runs.report import PPO_OVER_SFT, JudgeCost, Report


def check_judges(config: EvalConfig, num_prompts: int) -> None:
    """Check what asking needs, without a call. Raises RLHFError C17 and E09, for all judges at once. Warns C18."""
    checks = [partial(_check_judge, config, name, num_prompts) for name in config.pairwise_judges]
    collect_errors(*checks)
    _warn_of_rewards(config)


def _warn_of_rewards(config: EvalConfig) -> None:
    """Warn (C18) of a judge that PPO was trained on."""
    file = Path(config.models.ppo) / "config.yaml"
    if not config.pairwise_judges or not file.is_file():
        return
    of_ppo = configs.load("ppo", file)
    trained_on = [
        (each.model, each.rubric) for name, each in of_ppo.reward_judges.items() if name not in of_ppo.held_out
    ]
    for name, settings in config.pairwise_judges.items():
        if (settings.model, settings.rubric) in trained_on:
            text = f"judges.{name}: PPO was trained on the choices of this judge, so winning by it proves little"
            hint = "add a judge that PPO never saw: another model family, people, or a rule"
            terminal.warn("C18", text, where=config.where(f"judges.{name}"), hint=hint)


def _check_judge(config: EvalConfig, name: str, num_prompts: int) -> None:
    settings = config.pairwise_judges[name]
    require_package(config.where(f"judges.{name}.openai"))
    api_key(settings, partial(judge_location, config, name))
    where = judge_location(config, name, "max_calls")
    pairs = f"{num_prompts} prompts"
    check_calls(f"judges.{name}", settings, num_prompts, pairs=pairs, lower="eval.n", where=where)


def judge_location(config: EvalConfig, name: str, key: str) -> str:
    """Return where a key of a judge stands in eval.yaml, for messages; "": where the judge does."""
    return config.where(f"judges.{name}.openai.{key}".removesuffix("."))


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
    pairs = [Pair(shown_prompt(prompt.text), ours.strip(), theirs.strip()) for prompt, ours, theirs in rows]

    compared = {name: judge.compare(pairs) for name, judge in judges.items()}
    for name, judge in judges.items():
        terminal.say(f"eval     {describe_cost(judge)}")
        judge.require_few_too_long(compared[name])
    rates = {**report.win_rate[PPO_OVER_SFT], **pairwise_win_rates(compared, ppo, sft)}
    return report.with_changes(
        win_rate={**report.win_rate, PPO_OVER_SFT: rates},
        judge_costs={name: _cost(judge) for name, judge in judges.items()},
    )


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
