"""`--by JUDGE`: a judge of the run's eval.yaml, or a function, labels in place of people."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, Protocol

from rlhf_cli import data, runs, terminal
from rlhf_cli.commands.label.candidates import scores_of
from rlhf_cli.commands.label.inputs import LabelInputs
from rlhf_cli.commands.label.prompts import evaluation
from rlhf_cli.commands.label.session import LabelSession, Shown
from rlhf_cli.config.base import Options
from rlhf_cli.config.machinery.paths import FUNCTION
from rlhf_cli.config.ppo import PPOConfig, RewardSourceSettings
from rlhf_cli.errors import RLHFError, did_you_mean, shown
from rlhf_cli.judges.costs import MostCost, check_calls, describe_cost
from rlhf_cli.judges.pairwise import Pair, PairwiseJudge
from rlhf_cli.judges.question import shown_prompt
from rlhf_cli.models import load
from rlhf_cli.models.batch import Rollout
from rlhf_cli.models.devices import device
from rlhf_cli.progress import Progress
from rlhf_cli.rewards.function import RolloutReward
from rlhf_cli.rewards.signature import check_columns
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages.common import scoring
from rlhf_cli.stages.eval.pairwise_judges import judge_location
from rlhf_cli.stages.ppo import reward_sources, setup

BATCH_PAIRS = 32  # scored together


class PairJudge(Protocol):
    """Labels pairs."""

    def choices(self, pairs: Sequence[Shown]) -> list[str]:
        """Return the slot of the better answer of each pair: 1, 2, tie, or skip if it cannot be told."""
        ...


@dataclass(frozen=True)
class ComparingJudge:
    """Asks a language model about both answers of a pair, in both orders."""

    judge: PairwiseJudge
    prompts: Sequence[data.Prompt]

    def choices(self, pairs: Sequence[Shown]) -> list[str]:
        """Return the slot of the better answer of each pair: 1, 2, tie, or skip if it is too long for the judge."""
        asked = []
        for each in pairs:
            first, second = each.answers
            prompt = shown_prompt(self.prompts[_prompt_row(each)].text)
            asked.append(Pair(prompt, first.strip(), second.strip()))

        slots = []
        for comparison in self.judge.compare(asked):
            slots.append("skip" if comparison.is_too_long else _slot(comparison.points, 0.5))
        return slots


@dataclass(frozen=True)
class ScoringJudge:
    """Scores both answers of a pair, and prefers the one with the higher score."""

    source: RolloutReward
    inputs: LabelInputs
    stop_token_id: Any

    def choices(self, pairs: Sequence[Shown]) -> list[str]:
        """Return the slot of the better answer of each pair: 1, 2, tie, or skip if one has no score."""
        scores = self._scores(pairs)
        return [_slot(scores[i], scores[i + 1]) for i in range(0, len(scores), 2)]

    def _scores(self, pairs: Sequence[Shown]) -> list[float]:
        """Return the scores of the answers in the order shown, both of a pair behind each other."""
        prompt_ids: list[list[int]] = []
        response_ids: list[list[int]] = []
        records: list[dict[str, Any]] = []
        for each in pairs:
            for answer, ended in zip(each.answers, each.ended, strict=True):
                prompt, response = data.encode_answer(self.inputs.tokenizer, each.pair.prompt, answer, ended=ended)
                prompt_ids.append(prompt)
                response_ids.append(response)
                records.append(self.inputs.prompts[_prompt_row(each)].record)
        rollout = Rollout.from_lists(prompt_ids, response_ids, stop_token_id=self.stop_token_id)
        return scores_of(self.source, replace(rollout, records=tuple(records)).to(device()))


def _prompt_row(shown_pair: Shown) -> int:
    return int(shown_pair.pair.name.partition(":")[0])


def _slot(first: float, second: float) -> str:
    if math.isnan(first) or math.isnan(second):
        return "skip"
    if first == second:
        return "tie"
    return "1" if first > second else "2"


def label_by_judge(session: LabelSession, judge: PairJudge) -> None:
    """Label all pairs. A killed command continues behind the last label that is on disk."""
    (name,) = session.annotators
    pending = list(session.pending(name))
    with Progress("label", session.total, "label", done=session.done) as bar:
        for start in range(0, len(pending), BATCH_PAIRS):
            began = time.monotonic()
            batch = pending[start : start + BATCH_PAIRS]
            choices = judge.choices(batch)
            seconds = (time.monotonic() - began) / len(batch)
            for each, slot in zip(batch, choices, strict=True):
                session.choose(name, each.pair.name, slot, seconds=seconds)
            bar.advance(len(batch))
    if isinstance(judge, ComparingJudge):
        terminal.say(f"label    {describe_cost(judge.judge)}")


def load_judge(name: str, inputs: LabelInputs, num_pairs: int, options: Options) -> PairJudge:
    """Load a judge by its name in eval.yaml, `reward` for the run's reward model, or by `module:function`.

    `num_pairs` are labelled at most. Raises RLHFError C07 for an unknown name, C17, D02 for a function, M01-M10 for a
    model.
    """
    asked = _pairwise_judge(name, inputs, num_pairs)
    if asked is not None:
        return asked
    source = _judge_source(name, inputs)
    config = inputs.config.model_copy(update={"rewards": {"judge": source}})
    policy = inputs.policies[0].parent
    vocab_size = load.read_config(policy.model, options.trust_remote_code).get_text_config().vocab_size
    stop_token_id = setup.stop_token_id(config, inputs.tokenizer, policy, vocab_size)

    parents = _parents(config, name)
    functions = reward_sources.build_reward_fns(config, options, parents)
    check_columns(functions, inputs.prompts, inputs.prompts.source.shown(), lambda _: f"--by {name}")
    policy_text = scoring.PolicyText(policy, inputs.tokenizer, stop_token_id, inputs.prompts)
    cache = reward_sources.RewardModelCache(config, options, parents, policy_text)
    built = reward_sources.build_reward_sources(config, functions, cache)
    return ScoringJudge(built["judge"], inputs, stop_token_id)


def _pairwise_judge(name: str, inputs: LabelInputs, num_pairs: int) -> ComparingJudge | None:
    """Return the language model of this name in eval.yaml, after its probe; None for another name.

    Says what it costs at most. Raises RLHFError C17, E09, and J01-J04 as PairwiseJudge.
    """
    if FUNCTION.fullmatch(name) or not (inputs.run / "eval.yaml").is_file():
        return None
    config = evaluation(inputs.run)
    settings = config.pairwise_judges.get(name)
    if settings is None:
        return None

    where = partial(judge_location, config, name)
    num_pairs = min(num_pairs, len(inputs.rows) * math.comb(inputs.answers, 2))
    pairs = f"{num_pairs} pairs"
    check_calls(f"judges.{name}", settings, num_pairs, pairs=pairs, lower="--n", where=where("max_calls"))

    judge = PairwiseJudge.of(name, settings, inputs.run, where)
    prompt_tokens = fmean(len(inputs.prompts[row].ids) for row in inputs.rows)
    cost = MostCost.of(settings, num_pairs, prompt_tokens, response_tokens=inputs.config.ppo.max_response_length)
    terminal.say(f"label    judge {name}: {cost}")
    judge.pass_probe()
    return ComparingJudge(judge, inputs.prompts)


def _judge_source(name: str, inputs: LabelInputs) -> RewardSourceSettings:
    """Return the judge as a reward source."""
    if FUNCTION.fullmatch(name):
        return RewardSourceSettings(function=name)
    if not (inputs.run / "eval.yaml").is_file():
        text = f"--by {name}: {shown(inputs.run)} has no eval.yaml that names judges"
        raise RLHFError("C07", text, hint="name a function: --by module:function")
    config = evaluation(inputs.run)
    judges: dict[str, Any] = dict(config.judges)
    for people in config.people_judges:
        del judges[people]
    if config.models.reward is not None:
        judges.setdefault("reward", config.models.reward)
    if name not in judges:
        hint = did_you_mean(name, judges) or "name a function: --by module:function"
        raise RLHFError("C07", f"--by {name}: not one of {', '.join(judges)}", hint=hint)

    judge = judges[name]
    if not isinstance(judge, str):
        return RewardSourceSettings(builtin=judge.builtin, parameters=judge.parameters)
    if FUNCTION.fullmatch(judge):
        return RewardSourceSettings(function=judge)
    return RewardSourceSettings(model=judge)


def _parents(config: PPOConfig, name: str) -> dict[str, Parent]:
    """Open the reward model that judges, if it is one."""
    path = config.rewards["judge"].model
    if path is None:
        return {}
    key = "rewards.judge.model"
    return {key: runs.open_parent(path, expect=("reward",), key=key, where=f"--by {name}")}
