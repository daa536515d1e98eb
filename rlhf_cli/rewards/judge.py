"""`openai:`: a language model compares each response with the SFT model's answer to the same prompt.

The SFT model's answers are the `baseline`: all processes draw them, then the first one asks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rlhf_cli.config.judges import OpenAIJudge
from rlhf_cli.config.ppo import RewardSourceSettings
from rlhf_cli.data.texts import joined
from rlhf_cli.data.tokens import PromptText
from rlhf_cli.judges.endpoint import api_key, require_package
from rlhf_cli.judges.pairwise import Comparison, Pair, PairwiseJudge
from rlhf_cli.judges.question import shown_prompt
from rlhf_cli.rewards.function import FunctionReward, RewardContext

if TYPE_CHECKING:
    from rlhf_cli.models.batch import Rollout


class Baseline(Protocol):
    """The answers that responses are compared with."""

    def draw(self, rollout: "Rollout") -> None:
        """Draw the answers to the rollout's prompts that have none; called on all processes."""
        ...

    def answer(self, prompt: PromptText) -> str:
        """Return the answer to a prompt of that rollout."""
        ...


@dataclass
class PairwiseScores:
    """A reward function: 1 if a response wins over the baseline's answer in both orders, -1 if it loses, else 0.

    None for a pair that is too long for the judge. The file of answers is opened by the process that asks.
    """

    name: str
    settings: OpenAIJudge
    run: Path
    where: Callable[[str], str]
    baseline: Baseline | None = None  # set once the models are loaded
    consistent: list[bool] = field(default_factory=list)  # of each pair that was asked: whether both orders agree

    @cached_property
    def judge(self) -> PairwiseJudge:
        """Open the judge. Raises RLHFError as PairwiseJudge does."""
        return PairwiseJudge.of(self.name, self.settings, self.run, self.where)

    def __call__(self, prompts: list[PromptText], completions: list[PromptText]) -> list[float | None]:
        assert self.baseline is not None
        pairs = []
        for prompt, completion in zip(prompts, completions, strict=True):
            baseline = self.baseline.answer(prompt)
            pairs.append(Pair(shown_prompt(prompt), joined(completion).strip(), baseline.strip()))
        comparisons = self.judge.compare(pairs)
        self.consistent += [each.is_consistent for each in comparisons if each.winner]
        return [_score(comparison) for comparison in comparisons]


def _score(comparison: Comparison) -> float | None:
    """Return twice the points less one, so that SFT's own answers have 0 on average."""
    return None if comparison.is_too_long else 2 * comparison.points - 1


@dataclass
class JudgeReward(FunctionReward):
    """The source of PairwiseScores."""

    function: PairwiseScores

    def prepare(self, rollout: "Rollout") -> None:
        """Draw the baseline's answers."""
        assert self.function.baseline is not None
        self.function.baseline.draw(rollout)


def make(section: RewardSourceSettings, context: RewardContext) -> PairwiseScores:
    """Build the reward of `openai:` without asking. Raises RLHFError C17 without the key, E09 without the package."""
    settings = section.openai
    assert settings is not None

    def where(key: str) -> str:
        return context.where(f"openai.{key}".removesuffix("."))

    require_package(where(""))
    api_key(settings, where)
    return PairwiseScores(context.name, settings, context.run, where)
