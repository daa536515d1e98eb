"""Reward sources that are language models: how often a run asks them at most, their probes, and what they cost."""

from collections.abc import Iterable
from functools import partial

from rlhf_cli import terminal
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import collect_errors
from rlhf_cli.judges.costs import check_calls, describe_cost
from rlhf_cli.rewards.function import RolloutReward
from rlhf_cli.rewards.judge import JudgeReward
from rlhf_cli.stages.ppo import sample_tables


def most_pairs(config: PPOConfig, num_prompts: int) -> int:
    """Return how many responses a run scores: of its updates, its sample tables and at last the finished policy."""
    updates = config.ppo.num_updates(num_prompts)
    shown = sample_tables.num_rows_scored(config, updates)
    finished = min(num_prompts, config.ppo.episodes_per_update)
    return updates * config.ppo.episodes_per_update + shown + finished


def check_calls_of_run(config: PPOConfig, num_prompts: int) -> None:
    """Raise RLHFError C17 for all judges that a run may ask more often than their max_calls."""
    count = most_pairs(config, num_prompts)
    checks = []
    for name, settings in config.reward_judges.items():
        key = f"rewards.{name}"
        where = config.where(f"{key}.openai.max_calls")
        pairs = f"{count:,} answers of the run"
        checks.append(partial(check_calls, key, settings, count, pairs=pairs, lower="ppo.total_episodes", where=where))
    collect_errors(*checks)


def pass_probes(sources: Iterable[RolloutReward]) -> None:
    """Open the judges and ask their probes. Raises RLHFError D03, S03, and J01-J05 as PairwiseJudge."""
    for source in sources:
        if isinstance(source, JudgeReward):
            source.function.judge.pass_probe()


def say_costs(sources: Iterable[RolloutReward]) -> None:
    """Print what the judges cost since the command began, and how often both orders of a pair agreed."""
    for source in sources:
        if isinstance(source, JudgeReward):
            consistent = source.function.consistent
            text = f"ppo      {describe_cost(source.function.judge)}"
            if consistent:
                share = sum(consistent) / len(consistent)
                text += f"; both orders agree on {share:.3f} of {len(consistent):,} pairs"
            terminal.say(text)
