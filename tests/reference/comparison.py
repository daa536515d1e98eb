"""The trainer beside the reference: one update of both, in float64 from the same state, quantity by quantity."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlhf_cli.commands import verify
from rlhf_cli.config.base import Options
from rlhf_cli.models.batch import Rollout, StopTokenId, stop_ids
from rlhf_cli.models.forward import ValueHead
from rlhf_cli.ppo.forward_backward import StepResult
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.function import FunctionReward, call_reward_fn
from rlhf_cli.rewards.model import EnsembleReward, ModelReward, RetokenizingReward
from rlhf_cli.rewards.signature import TextRows
from tests.reference.sampling import count_unexplained
from tests.reference.scores import function_scores, model_scores
from tests.reference.state import Adam, Reward, Scorer, State
from tests.reference.update import update

TOLERANCE = 1e-6  # of a quantity's size
FLOOR = 1e-3  # least denominator of a relative difference
ZERO = 1e-9  # smaller values are rounding errors
NEAR_TIE = 1e-3  # rounding error to expect of a sampled token, in nats
NEAR_TIE_BF16 = 0.5
BY_TOKEN = ("logprobs", "ref_logprobs", "kl", "values", "rewards", "advantages", "returns")
FROZEN = "frozen weights, change"

Values = dict[str, Tensor]  # quantity -> values, 1-D, float64 on the CPU
Weights = dict[str, dict[str, Tensor]]  # model or "average" -> parameter name -> weights, float64 on the CPU


@dataclass(frozen=True)
class Quantity:
    """A quantity of the update, and how far the trainer is from the reference."""

    name: str
    largest: float  # absolute value
    error: float | None  # largest difference, relative to `largest`; None if it is not compared


def compare_run(folder: Path, step: int | None = None) -> list[Quantity]:
    """Compare an update of a run, by default the newest that `rlhf verify` can repeat."""
    run = verify.open_run(folder)
    components, prompts = verify.load_before(run, run.choose_step(step), Options())
    trainer = components.trainer
    rollout = trainer.generate(prompts)
    return compare_update(trainer, rollout, updates=components.num_updates, stop_token_id=components.stop_token_id)


def compare_update(
    trainer: PPOTrainer, rollout: Rollout, *, updates: int, stop_token_id: StopTokenId
) -> list[Quantity]:
    """Compare the trainer's next update, of `updates` in total, on a rollout.

    Converts the trainer to float64 and advances it by one update.
    """
    near_tie = NEAR_TIE_BF16 if trainer.settings.bf16 else NEAR_TIE
    to_float64(trainer)
    before = copy_weights(trainer.trained_models, average_of(trainer))
    state = copy_state(trainer, rollout, updates=updates, stop_token_id=stop_token_id, near_tie=near_tie)
    with float64_only():
        expected = {"response tokens unexplained": as_float64([count_unexplained(state)])}
        expected |= {name: as_float64(values) for name, values in update(state).items()}
        found = {"response tokens unexplained": torch.zeros(1)} | run_trainer(trainer, rollout)

    expected |= weight_changes(before, copy_weights(state.models, state.average))
    expected[FROZEN] = torch.zeros_like(found[FROZEN])
    found |= weight_changes(before, copy_weights(trainer.trained_models, average_of(trainer)))
    return compare(found, expected)


def disagreements(quantities: list[Quantity], limit: float = TOLERANCE) -> dict[str, float]:
    """Return the errors above `limit`, in the order in which an update computes the quantities."""
    return {each.name: each.error for each in quantities if each.error is not None and each.error > limit}


# The comparison


def compare(found: Values, expected: Values) -> list[Quantity]:
    """Compare all quantities, in the order in which an update computes them.

    Not compared are those that only one side has, and those of `only_rounding`.
    """
    uncompared = (found.keys() ^ expected.keys()) | only_rounding(expected)
    quantities = []
    for name, values in (expected | found | expected).items():
        error = None if name in uncompared else relative_difference(name, found[name], expected[name])
        quantities.append(Quantity(name, largest(values), error))
    return quantities


def relative_difference(name: str, values: Tensor, expected: Tensor) -> float:
    """Return the largest difference, over the largest expected value or FLOOR; inf for nan or different shapes.

    Changes of weights may be small, so they have no FLOOR.
    """
    if values.shape != expected.shape:
        return math.inf
    difference = largest((values - expected).nan_to_num(nan=math.inf))
    scale = largest(expected)
    if not name.endswith(", change"):
        scale = max(scale, FLOOR)
    if not scale:
        return math.inf if difference else 0.0
    return difference / scale


def largest(values: Tensor) -> float:
    return float(values.abs().max()) if len(values) else 0.0


def only_rounding(expected: Values) -> set[str]:
    """Return the quantities determined only by rounding in this update: two correct implementations may differ."""
    names = set()
    returns = expected.get("returns")
    if returns is not None and returns.std(unbiased=False) <= ZERO * largest(returns):
        names.add("val/explained_variance")
    if largest(expected["advantages"]) < ZERO:
        names |= {"policy/clipfrac_avg", "policy/clipfrac_avg, each step"}
        norms = expected.get("policy/grad_norm")
        if norms is not None and largest(norms) < ZERO:  # no other term of the loss moves the policy either
            prefixes = ("policy", "average", "loss/policy", "val/ratio", "ratio_")
            names |= {name for name in expected if name.startswith(prefixes)}
    return names


def as_float64(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64, device="cpu").detach().reshape(-1)


# The trainer's update


def run_trainer(trainer: PPOTrainer, rollout: Rollout) -> Values:
    """Score a rollout and train on it, as `PPOTrainer.step` does; return all quantities, the metrics among them."""
    frozen = frozen_weights(trainer)
    experience = trainer.make_experience(rollout)
    steps: list[dict[str, float]] = []
    train_minibatch = trainer._train_minibatch

    def recorded(*arguments: Any) -> StepResult:
        step = train_minibatch(*arguments)
        steps.append({**step.metrics, "ratio_error": step.max_ratio_error, "skipped": float(step.skipped)})
        return step

    with patch.object(trainer, "_train_minibatch", recorded):
        stats = trainer.update(experience)

    tokens = {name: getattr(experience, name) for name in BY_TOKEN}
    moments = experience.score_result.moments
    names = dict.fromkeys(name for step in steps for name in step)
    quantities = {
        **{name: values[experience.mask] for name, values in tokens.items() if values is not None},
        **{f"score {name}": scores for name, scores in experience.score_result.scored.items()},
        "scores": experience.scores,
        "running scores": [moments.count, moments.mean, moments.squares],
        **{f"{name}, each step": [step[name] for step in steps if name in step] for name in names},
        **{name: [value] for name, value in stats.items()},
        "next kl_coef": [trainer.kl_coef],
        FROZEN: frozen_weights(trainer) - frozen,
    }
    return {name: as_float64(values) for name, values in quantities.items()}


def frozen_weights(trainer: PPOTrainer) -> Tensor:
    """Return a copy of the weights that no update may change: of the reference policy and the reward models."""
    models = [trainer.ref, *reward_models(trainer)]
    return torch.cat([as_float64(p.detach()) for model in models for p in model.parameters()])


def copy_weights(models: dict[str, Any], average: dict[str, Tensor]) -> Weights:
    """Return a copy of the trainable weights, and of the policy's average if it has one."""
    copies: Weights = {}
    for name, model in models.items():
        trained = {key: p.detach() for key, p in model.named_parameters() if p.requires_grad}
        copies[name] = {key: as_float64(p).clone() for key, p in trained.items()}
    if average:
        copies["average"] = {key: as_float64(value).clone() for key, value in average.items()}
    return copies


def weight_changes(before: Weights, after: Weights) -> Values:
    """Return the change of each weight of policy, value and average."""
    return {
        f"{name} weights, change": torch.cat([after[name][key] - old for key, old in weights.items()])
        for name, weights in before.items()
    }


def average_of(trainer: PPOTrainer) -> dict[str, Tensor]:
    return trainer.weight_average.state_dict() if trainer.weight_average else {}


# The state that both start from


def copy_state(
    trainer: PPOTrainer,
    rollout: Rollout,
    *,
    updates: int,
    stop_token_id: StopTokenId,
    near_tie: float = NEAR_TIE,
) -> State:
    """Return a copy of the trainer's state before its next update, of `updates` in total."""
    # One deepcopy, so that weights shared between models stay shared.
    policy, ref, value, scorers = copy.deepcopy((trainer.policy, trainer.ref, trainer.value, scorers_of(trainer)))
    moments = trainer.score_moments
    drawn = []
    if rollout.logprobs is not None:
        drawn = [
            as_float64(logprobs[mask]) for logprobs, mask in zip(rollout.logprobs, rollout.response_mask, strict=True)
        ]
    return State(
        settings=trainer.settings,
        seed=trainer.seed,
        update=trainer.updates,
        updates=updates,
        kl_coef=trainer.kl_coef,
        score_moments=(moments.count, moments.mean, moments.squares),
        policy=policy,
        ref=ref,
        value=value,
        value_is_head=isinstance(trainer.value, ValueHead),
        sources={name: copy_reward(trainer, name, members, rollout) for name, members in scorers.items()},
        adam={name: copy_adam(model, trainer.optimizer) for name, model in trainer.trained_models.items()},
        average=copy.deepcopy(average_of(trainer)),
        ptx=trainer.ptx,
        prompts=[rollout.prompt_tokens(row) for row in range(len(rollout))],
        responses=[rollout.response_tokens(row) for row in range(len(rollout))],
        drawn_logprobs=drawn,
        stop_token_ids=frozenset(stop_ids(stop_token_id)),
        near_tie=near_tie,
    )


def scorers_of(trainer: PPOTrainer) -> dict[str, dict[str, Any]]:
    """Return the scorers of each source: several for an ensemble, otherwise one."""
    return {
        name: {**source.members} if isinstance(source, EnsembleReward) else {name: source}
        for name, source in trainer.rewards.items()
    }


def reward_models(trainer: PPOTrainer) -> list[Any]:
    scorers = [scorer for members in scorers_of(trainer).values() for scorer in members.values()]
    return [scorer.model for scorer in scorers if isinstance(scorer, ModelReward)]


def copy_reward(trainer: PPOTrainer, name: str, scorers: dict[str, Any], rollout: Rollout) -> Reward:
    """Return a reward source for the reference, with copies of its scorers."""
    source = trainer.rewards[name]
    reward = Reward(
        scorers={member: as_scorer(scorer, rollout) for member, scorer in scorers.items()},
        weight=trainer.reward_weights[name],
        clip=trainer.reward_clips.get(name),
    )
    if isinstance(source, EnsembleReward):
        return replace(reward, combine=source.combine, std_coef=source.std_coef)
    return reward


def as_scorer(scorer: Any, rollout: Rollout) -> Scorer:
    """Return a scorer for the reference. A function gets the columns of the rollout's rows."""
    if isinstance(scorer, FunctionReward):

        def score(prompts: list[str], responses: list[str], ids: list[list[int]]) -> list[Any]:
            rows = TextRows.of(rollout, scorer.tokenizer)
            rows = replace(rows, prompts=prompts, responses=responses, completion_ids=ids)
            return call_reward_fn(scorer.function, rows)

        return partial(function_scores, score, scorer.tokenizer)

    by_model = partial(model_scores, scorer.model, scorer.end_token_ids, scorer.closing_ids)
    if isinstance(scorer, RetokenizingReward):
        return lambda prompts, responses: by_model(*scorer.retokenize(prompts, responses))
    return by_model


def copy_adam(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Adam]:
    adam = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter)
        if state:
            first = state["exp_avg"].to(torch.float64, copy=True)
            second = state["exp_avg_sq"].to(torch.float64, copy=True)
            adam[name] = Adam(first, second, updates=int(state["step"]))
    return adam


# float64


def to_float64(trainer: PPOTrainer) -> None:
    """Convert a trainer's models and optimizer to float64, which is exact, and turn autocast off.

    Also turns off gradient checkpointing, whose recomputation would run with float32 again, and max_logprob_gap: the
    engine drew in the run's dtype.
    """
    state = copy.deepcopy(trainer.state_dict())
    for model in (*trainer.trained_models.values(), trainer.ref, *reward_models(trainer)):
        model.double()
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False
    trainer.settings = trainer.settings.model_copy(update={"bf16": False, "max_logprob_gap": math.inf})
    trainer.load_state_dict(state)  # the optimizer moments take the dtype of their parameters


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
        args = [_float64_dtype(value) for value in args]
        kwargs = {name: _float64_dtype(value) for name, value in (kwargs or {}).items()}
        return function(*args, **kwargs)


def _float64_dtype(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
