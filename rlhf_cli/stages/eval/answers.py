"""Responses of the policies to held-out prompts, and what every judge says of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlhf_cli import data
from rlhf_cli.checkpoints import Parent
from rlhf_cli.config import EvalConfig, Options
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.inputs import eval as inputs
from rlhf_cli.inputs import models
from rlhf_cli.models import devices, reading
from rlhf_cli.models.batch import Prompts, Rollout, micro_batches
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup
from rlhf_cli.ppo import losses
from rlhf_cli.ppo.rewards import ModelReward, call_text_reward
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.progress import Progress, counted

T = TypeVar("T")
NEAR_GREEDY = 0.01  # the temperature of TRL 1.12's evaluation generations
Judge = Callable[[list[str], list[str]], list[float]]  # of prompts and responses


@dataclass(frozen=True)
class Answers:
    """One policy's responses to all prompts in one mode, judged."""

    model: str  # sft, ppo, base, best_of_N, or ppo_step_NNNNNN for a snapshot
    mode: str  # sampled or greedy
    prompts: list[str]
    responses: list[str]
    ended: list[bool]
    lengths: list[int]
    scores: dict[str, list[float]]  # judge -> score of each row
    kl: list[float] | None  # nats, sum over the response; None for near-greedy responses
    step: int | None = None  # PPO's updates up to this policy, where it is a point of the frontier


def collect(
    config: EvalConfig,
    options: Options,
    parents: Mapping[str, Parent],
    tokenizer: Any,
    prompts: list[data.Prompt],
    how: inputs.Sampling,
    trail: inputs.Trail,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> list[Answers]:
    """Everything generated and scored: each policy in each mode, PPO's snapshots, then best-of-n of the SFT policy.

    Beside the SFT policy one other is in memory at a time. Each rank takes a part of the prompts.
    """
    writing = models.Writing(parents["models.sft"], tokenizer, how.stop_token_id, prompts)
    desk = _Desk(config, tokenizer, prompts, how, _judges(config, options, parents, writing), process_group)
    asked, draws = _asked(config, parents, trail), max(config.eval.best_of, default=0)
    found: list[Answers] = []
    best: list[Answers] = []

    def load(parent: Parent) -> Any:
        return models.causal(config, options, parent, tokenizer).to(devices.device()).eval()

    sft = load(parents["models.sft"])
    with Progress("eval", sum(len(each.modes) for each in asked) + draws, "round") as bar:

        def ask(policy: Any, each: _Asked) -> None:
            for mode in each.modes:
                found.append(replace(desk.answer(each.name, mode, policy, sft), step=each.step))
                bar.advance(note=f"{each.name} {mode}")

        for each in asked:
            ask(sft if each.name == "sft" else load(each.parent), each)
        for draw in range(draws):
            best.append(desk.answer("sft", "sampled", sft, sft, draw=draw + 1))
            bar.advance(note=f"best of {draw + 1}")
    return found + [best_of(best[:n]) for n in config.eval.best_of]


@dataclass(frozen=True)
class _Asked:
    """A policy, and how it is asked."""

    name: str
    parent: Parent
    modes: Sequence[str]
    step: int | None = None


def _asked(config: EvalConfig, parents: Mapping[str, Parent], trail: inputs.Trail) -> list[_Asked]:
    names = [name for name in ("base", "sft", "ppo") if f"models.{name}" in parents]
    found = [
        _Asked(name, parents[f"models.{name}"], config.eval.modes, trail.step if name == "ppo" else None)
        for name in names
    ]
    for step, path in trail.snapshots.items():
        found.append(_Asked(f"ppo_{path.name}", replace(parents["models.ppo"], model=path), ["sampled"], step))
    return found


def _judges(
    config: EvalConfig, options: Options, parents: Mapping[str, Parent], writing: models.Writing
) -> dict[str, Judge | ModelReward]:
    """Name -> judge: a reward model, or what is asked of texts. `reward` is what PPO was trained on."""

    def by_model(parent: Parent) -> ModelReward:
        theirs = models.own_tokenizer(config, options, writing.sft, parent)
        model = models.scorer(config, options, parent, theirs or writing.tokenizer).to(devices.device()).eval()
        return models.reward(config, parent.key, writing, model, theirs, rows=config.eval.per_device_batch_size)

    def by_function(name: str) -> Judge:
        return partial(call_text_reward, name, functions[name])

    functions = inputs.functions(config)
    judges: dict[str, Judge | ModelReward]
    judges = {"reward": by_model(parents["models.reward"])} if "models.reward" in parents else {}
    for name in config.judges:
        judges[name] = by_function(name) if name in functions else by_model(parents[f"judges.{name}"])
    return judges


@dataclass
class _Desk:
    """Takes a policy, hands out its judged answers."""

    config: EvalConfig
    tokenizer: Any
    prompts: list[data.Prompt]
    how: inputs.Sampling
    judges: dict[str, Judge | ModelReward]
    process_group: ProcessGroup

    def answer(self, name: str, mode: str, policy: Any, sft: Any, draw: int = 0) -> Answers:
        """The draws are keyed by (seed, mode, draw, row): the same for every policy, so that comparisons are paired.

        Models score what this rank wrote; functions are asked once, by the first rank, of all.
        """
        temperature = self.how.temperature if mode == "sampled" else NEAR_GREEDY
        seeds = tuple(derive_seed(self.config.seed, f"eval/{mode}", draw, row) for row in range(len(self.prompts)))
        asked = replace(
            Prompts.from_lists([p.ids for p in self.prompts]), seeds=seeds, response_length=self.how.response_length
        )
        whole = joined(
            self.process_group.map_rows(
                len(asked),
                lambda part: self._written(name, mode, policy, sft, asked.rows(part), temperature),
            )
        )
        scores = {
            judge: whole.scores[judge]
            if isinstance(ask, ModelReward)
            else self.process_group.run_on_main(partial(ask, whole.prompts, whole.responses))
            for judge, ask in self.judges.items()
        }
        return replace(whole, scores=scores)

    def _written(self, name: str, mode: str, policy: Any, sft: Any, asked: Prompts, temperature: float) -> Answers:
        """Answers, with the scores of those judges that are models."""
        size = self.config.eval.per_device_batch_size
        engine = HFEngine(policy, self.how.stop_token_id, self.tokenizer.pad_token_id or 0, temperature, size)
        rollout = engine.generate(asked)
        prompts, responses = rollout.texts(self.tokenizer)
        kl = None
        if mode == "sampled":
            kl = (
                [0.0] * len(prompts) if policy is sft else sequence_kl(policy, sft, rollout, temperature, max_rows=size)
            )
        scores = {judge: ask(rollout).tolist() for judge, ask in self.judges.items() if isinstance(ask, ModelReward)}
        return Answers(
            name, mode, prompts, responses, rollout.ended.tolist(), rollout.response_lengths.tolist(), scores, kl
        )


def joined(parts: Sequence[Answers]) -> Answers:
    """Answers to one part of the prompts after the other."""
    return replace(
        parts[0],
        prompts=_chained(part.prompts for part in parts),
        responses=_chained(part.responses for part in parts),
        ended=_chained(part.ended for part in parts),
        lengths=_chained(part.lengths for part in parts),
        scores={judge: _chained(part.scores[judge] for part in parts) for judge in parts[0].scores},
        kl=None if parts[0].kl is None else _chained(part.kl or [] for part in parts),
    )


def _chained(columns: Iterable[list[T]]) -> list[T]:
    return list(chain.from_iterable(columns))


@torch.no_grad()
def sequence_kl(policy: Any, ref: Any, rollout: Rollout, temperature: float, *, max_rows: int) -> list[float]:
    """Sum over each response's tokens of log pi - log ref, nats.

    Its mean over rows estimates KL(pi || ref) on pi's own samples.
    """
    totals: Tensor = torch.zeros(len(rollout), dtype=torch.float64, device=rollout.ids.device)
    every = torch.arange(len(rollout), device=rollout.ids.device)
    for rows in counted("kl: micro-batch", micro_batches(rollout.lengths, every, max_rows=max_rows)):
        micro = rollout.micro_batch(rows)
        ours, theirs = (
            losses.token_logprobs(reading.response_logits(model, micro), micro.targets, temperature)
            for model in (policy, ref)
        )
        totals.index_add_(0, micro.response_index[0], (ours - theirs).double())
    return totals.tolist()


def best_of(draws: list[Answers]) -> Answers:
    """Of each prompt's draws the one that the reward model likes most."""
    picks = [
        max(range(len(draws)), key=lambda k: draws[k].scores["reward"][row]) for row in range(len(draws[0].responses))
    ]

    def pick(columns: list[list]) -> list:
        return [columns[k][row] for row, k in enumerate(picks)]

    scores = {judge: pick([draw.scores[judge] for draw in draws]) for judge in draws[0].scores}
    return Answers(
        f"best_of_{len(draws)}",
        "sampled",
        draws[0].prompts,
        pick([draw.responses for draw in draws]),
        pick([draw.ended for draw in draws]),
        pick([draw.lengths for draw in draws]),
        scores,
        None,
    )
