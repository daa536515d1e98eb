"""Run an update of the trainer and of the float64 reference from the same state, and record every quantity."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlhf_cli.commands.verify import reference, reference_update
from rlhf_cli.models.batch import Rollout, StopTokenId, stop_ids
from rlhf_cli.models.forward import ValueHead
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.function import FunctionReward, awaited, call_reward_fn
from rlhf_cli.rewards.model import EnsembleReward, ModelReward, RetokenizingReward
from rlhf_cli.rewards.signature import RewardFn, TextRows


@contextmanager
def float64_only() -> Iterator[None]:
    """Replace float32 with float64: in transformers' norms, rotary angles and softmax, and in PPO's scores.

    Two correct implementations then differ by about 1e-13.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(before)


class _Float64(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            return args[0].double()
        kwargs = {name: _float64_dtype(value) for name, value in (kwargs or {}).items()}
        return function(*map(_float64_dtype, args), **kwargs)


def _float64_dtype(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


Weights = dict[str, dict[str, Tensor]]  # model or "average" -> parameter name -> weights, float64 on the CPU
Quantities = dict[str, Tensor]  # name -> values, 1-D, float64 on the CPU
FROZEN = "frozen weights, change"
BY_TOKEN = ("logprobs", "ref_logprobs", "values", "kl", "rewards", "advantages", "returns")


def run_update(trainer: PPOTrainer, rollout: Rollout) -> Quantities:
    """Score a rollout and train on it, as `PPOTrainer.step` does; return all quantities, the metrics among them.

    Advances the trainer by one update.
    """
    before = _frozen_weights(trainer)
    trainer.experience = experience = trainer.make_experience(rollout)
    steps: list[dict[str, float]] = []
    train_minibatch = trainer._train_minibatch

    def recorded(*arguments: Any) -> dict[str, float]:
        steps.append(train_minibatch(*arguments))
        return steps[-1]

    with patch.object(trainer, "_train_minibatch", recorded):
        stats = trainer.update(experience)
    mask, score_result = experience.mask, experience.score_result
    moments = score_result.moments
    names = dict.fromkeys(name for step in steps for name in step)
    quantities = {
        "response tokens": rollout.ids[:, rollout.prompt_width :][mask.to(rollout.ids.device)],
        "response tokens unexplained": [0.0],
        **{name: values[mask] for name in BY_TOKEN if (values := getattr(experience, name)) is not None},
        **{f"score {name}": raw for name, raw in score_result.scored.items()},
        "scores": experience.scores,
        "running scores": [moments.count, moments.mean, moments.squares],
        **{f"{name}, each step": [step[name] for step in steps if name in step] for name in names},
        **{name: [value] for name, value in stats.items()},
        "next kl_coef": [trainer.kl_coef],
        FROZEN: _frozen_weights(trainer) - before,
    }
    return {name: as_float64(values) for name, values in quantities.items()}


def as_float64(values: Any) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().to("cpu", torch.float64).reshape(-1)
    return torch.tensor(values, dtype=torch.float64)


def weights_of(trainer: PPOTrainer) -> Weights:
    """Return a float64 copy of the trainable weights of policy and value, and of the policy's average if it has one."""
    return copy_weights(trainer.trained_models, _average(trainer))


def _average(trainer: PPOTrainer) -> dict[str, Tensor]:
    return trainer.average.state_dict() if trainer.average else {}


def copy_weights(models: Mapping[str, nn.Module], average: Mapping[str, Tensor]) -> Weights:
    copies = {
        name: {
            key: p.detach().to("cpu", torch.float64, copy=True)
            for key, p in model.named_parameters()
            if p.requires_grad
        }
        for name, model in models.items()
    }
    if average:
        copies["average"] = {key: value.to(torch.float64, copy=True) for key, value in average.items()}
    return copies


def _frozen_weights(trainer: PPOTrainer) -> Tensor:
    """Return a copy of the weights that no update may change: of the reference policy and the reward models."""
    return torch.cat([as_float64(p) for model in (trainer.ref, *_reward_models(trainer)) for p in model.parameters()])


def weight_changes(before: Weights, after: Weights) -> Quantities:
    """Return the change of each weight of policy, value and average."""
    return {
        f"{name} weights, change": torch.cat([(after[name][key] - old).reshape(-1) for key, old in weights.items()])
        for name, weights in before.items()
    }


def reference_state_of(
    trainer: PPOTrainer, rollout: Rollout, *, updates: int, stop_token_id: StopTokenId, near_tie: float = 1e-3
) -> reference.ReferenceState:
    """Return a copy of the trainer's state before its next update, of `updates` in total."""
    # One deepcopy, so that weights shared between models stay shared.
    policy, ref, value, sources = copy.deepcopy((trainer.policy, trainer.ref, trainer.value, _scorers(trainer)))
    score_moments, optimizer = trainer.score_moments, trainer.optimizer
    drawn, lengths = rollout.logprobs, rollout.response_lengths.tolist()
    return reference.ReferenceState(
        settings=trainer.settings,
        seed=trainer.seed,
        update=trainer.updates,
        updates=updates,
        kl_coef=trainer.kl_coef,
        score_moments=(score_moments.count, score_moments.mean, score_moments.squares),
        policy=policy,
        ref=ref,
        value=value,
        value_is_head=isinstance(trainer.value, ValueHead),
        sources={name: _reference_source(trainer, name, scorers, rollout) for name, scorers in sources.items()},
        adam={name: _adam(model, optimizer) for name, model in trainer.trained_models.items()},
        ptx=trainer.ptx,
        prompts=[rollout.prompt_tokens(row) for row in range(len(rollout))],
        responses=[rollout.response_tokens(row) for row in range(len(rollout))],
        drawn_logprobs=[] if drawn is None else [as_float64(drawn[row, :length]) for row, length in enumerate(lengths)],
        stop_token_ids=frozenset(stop_ids(stop_token_id)),
        average=copy.deepcopy(_average(trainer)),
        near_tie=near_tie,
    )


def cache_reward_fns(trainer: PPOTrainer) -> None:
    """Let each reward function score a batch of texts once: it may be slow, remote or nondeterministic."""
    for source in trainer.rewards.values():
        if isinstance(source, FunctionReward):
            source.function = _cached(source.function)


def _cached(function: RewardFn) -> RewardFn:
    scores: dict[str, list[Any]] = {}

    @wraps(function)  # with its signature
    def cached(*arguments: Any, **named: Any) -> list[Any]:
        key = repr((arguments, named))
        if key not in scores:
            scores[key] = awaited(function(*arguments, **named))
        return scores[key]

    return cached


def _scorers(trainer: PPOTrainer) -> dict[str, dict[str, Any]]:
    """Return the scorers of each source: several for an ensemble, otherwise one."""
    return {
        name: {**source.members} if isinstance(source, EnsembleReward) else {name: source}
        for name, source in trainer.rewards.items()
    }


def _reward_models(trainer: PPOTrainer) -> list[Any]:
    scorers = [scorer for source in _scorers(trainer).values() for scorer in source.values()]
    return [scorer.model for scorer in scorers if isinstance(scorer, ModelReward)]


def _reference_source(
    trainer: PPOTrainer, name: str, scorers: dict[str, Any], rollout: Rollout
) -> reference.ReferenceReward:
    """Return a reward source for the reference, with copies of its scorers."""

    def score_fn(scorer: Any) -> reference.Scorer:
        if isinstance(scorer, FunctionReward):

            def score(prompts: list[str], responses: list[str], ids: list[list[int]]) -> list[Any]:
                rows = TextRows.of(rollout, scorer.tokenizer)
                rows = replace(rows, prompts=prompts, responses=responses, completion_ids=ids)
                return call_reward_fn(scorer.function, rows)

            return partial(reference.function_scores, score, scorer.tokenizer)
        model_scores = partial(reference.model_scores, scorer.model, scorer.end_token_ids, scorer.closing_ids)
        if isinstance(scorer, RetokenizingReward):
            return lambda *rows: model_scores(*scorer.retokenize(*rows))
        return model_scores

    source = trainer.rewards[name]
    combination = (source.combine, source.std_coef) if isinstance(source, EnsembleReward) else (None, 1.0)
    score_fns = {member: score_fn(scorer) for member, scorer in scorers.items()}
    return reference.ReferenceReward(
        score_fns, trainer.reward_weights[name], trainer.reward_clips.get(name), *combination
    )


def _adam(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, reference.Adam]:
    adam = {}
    for name, parameter in model.named_parameters():
        if state := optimizer.state.get(parameter):
            first, second = (state[moment].to(torch.float64, copy=True) for moment in ("exp_avg", "exp_avg_sq"))
            adam[name] = reference.Adam(first, second, int(state["step"]))
    return adam


def to_float64(trainer: PPOTrainer) -> None:
    """Convert a trainer's models and optimizer to float64, which is exact, and turn autocast off.

    Also turns off gradient checkpointing, whose recomputation would run with float32 again, and max_logprob_gap: the
    engine drew in the run's dtype.
    """
    state = copy.deepcopy(trainer.state_dict())
    for model in (*trainer.trained_models.values(), trainer.ref, *_reward_models(trainer)):
        model.double()
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False
    trainer.settings = trainer.settings.model_copy(update={"bf16": False, "max_logprob_gap": math.inf})
    trainer.load_state_dict(state)  # the optimizer moments take the dtype of their parameters


def run_in_float64(
    trainer: PPOTrainer,
    rollout: Rollout,
    *,
    updates: int,
    stop_token_id: StopTokenId,
    near_tie: float = 1e-3,
    tick: Callable[[], None] = lambda: None,
) -> tuple[Quantities, Quantities]:
    """Run an update on a rollout with the trainer and with the reference, both in float64; return their quantities.

    Converts the trainer to float64 and advances it by one update.
    """
    to_float64(trainer)
    before = weights_of(trainer)
    state = reference_state_of(trainer, rollout, updates=updates, stop_token_id=stop_token_id, near_tie=near_tie)
    values = reference.check_sampling(state, tick)  # outside float64_only: its noise is float32, as in the run
    with float64_only():
        values |= reference_update.update(state, tick)
        quantities = run_update(trainer, rollout)
    expected = {name: as_float64(each) for name, each in values.items()}
    expected |= weight_changes(before, copy_weights(state.models, state.average))
    expected[FROZEN] = torch.zeros_like(quantities[FROZEN])
    return quantities | weight_changes(before, weights_of(trainer)), expected
