"""The trainer's own update, watched: what goes in, for the naive one to start from, and every number that comes out."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlhf_cli.commands.verify import reference, reference_scores, reference_state
from rlhf_cli.models.batch import Rollout
from rlhf_cli.models.forward import ValueHead
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.function import FunctionReward, call_reward_fn
from rlhf_cli.rewards.model import EnsembleReward, ModelReward, RetokenizingReward
from rlhf_cli.rewards.source import RewardFn


@contextmanager
def everything() -> Iterator[None]:
    """Within, whatever would make or cast to float32 makes float64: transformers' norms, rotary angles and softmax, and
    scores, which PPO keeps in float32. Two ways of calculating then differ by some 1e-13 where both are right.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def suspended() -> Iterator[None]:
    """Within, inside `everything`, float32 is float32 again: for code of the user's, whose models are in it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        torch.set_default_dtype(before)


class _Float64(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.float:
            return args[0].double()
        wide = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return function(*map(_wide, args), **wide)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


Weights = dict[str, dict[str, Tensor]]  # model -> parameter -> its weights, float64 on the CPU
Numbers = dict[str, Tensor]  # quantity -> its numbers, float64 on the CPU, one dimension
FROZEN = "frozen weights, change"
BY_TOKEN = ("logprobs", "ref_logprobs", "values", "kl", "rewards", "advantages", "returns")


def observe(trainer: PPOTrainer, rollout: Rollout) -> tuple[Numbers, dict[str, float]]:
    """Judge a rollout and learn from it, as `PPOTrainer.step` does; all numbers, and the update's metrics as they are.

    The trainer is one update further afterwards.
    """
    before = frozen(trainer)
    trainer.experience = experience = trainer.make_experience(rollout)
    steps: list[dict[str, float]] = []
    plain = trainer._train_minibatch

    def learn(*arguments: Any) -> dict[str, float]:
        steps.append(plain(*arguments))
        return steps[-1]

    vars(trainer)["_train_minibatch"] = learn  # in front of the class's own
    try:
        stats = trainer.update(experience)
    finally:
        del vars(trainer)["_train_minibatch"]
    mask = experience.mask
    score_result = experience.score_result
    stats_so_far = score_result.stats
    names = dict.fromkeys(name for step in steps for name in step)
    found = {
        "response tokens": rollout.ids[:, rollout.prompt_width :][mask.to(rollout.ids.device)],
        "response tokens unexplained": [0.0],
        **{name: getattr(experience, name)[mask] for name in BY_TOKEN},
        **{f"score {name}": raw for name, raw in score_result.raw.items()},
        "scores": experience.scores,
        "running scores": [stats_so_far.count, stats_so_far.mean, stats_so_far.squares],
        **{f"{name}, each step": [step[name] for step in steps if name in step] for name in names},
        **{name: [number] for name, number in stats.items()},
        "next kl_coef": [trainer.kl_coef],
        FROZEN: frozen(trainer) - before,
    }
    return {name: numbers(x) for name, x in found.items()}, stats


def numbers(values: Any) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().to("cpu", torch.float64).reshape(-1)
    return torch.tensor(values, dtype=torch.float64)


def weights(policy: nn.Module, value: nn.Module) -> Weights:
    """A copy of the weights that learn as they are now, in float64."""
    return {
        name: {
            key: p.detach().to("cpu", torch.float64, copy=True)
            for key, p in model.named_parameters()
            if p.requires_grad
        }
        for name, model in (("policy", policy), ("value", value))
    }


def frozen(trainer: PPOTrainer) -> Tensor:
    """A copy of all weights that no update may change: the reference's, and the reward models'."""
    scorers = [scorer for scorers in scorers_of(trainer).values() for scorer in scorers.values()]
    models = [trainer.ref, *(scorer.model for scorer in scorers if isinstance(scorer, ModelReward))]
    return torch.cat([numbers(p) for model in models for p in model.parameters()])


def changes(before: Weights, after: Weights) -> Numbers:
    """What an update did to each weight of policy and value."""
    return {
        f"{name} weights, change": torch.cat(
            [(after[name][key] - before[name][key]).reshape(-1) for key in before[name]]
        )
        for name in before
    }


def start_of(
    trainer: PPOTrainer, rollout: Rollout, *, updates: int, stop_token_id: int | None, near_tie: float = 1e-3
) -> reference_state.Start:
    """What the trainer's next update, of `updates` in all, starts from, for the naive one: copies, in float64."""
    scorers = {
        source: {each: scorer.model for each, scorer in said.items() if isinstance(scorer, ModelReward)}
        for source, said in scorers_of(trainer).items()
    }
    # All at once: what two models share, the copies share.
    copies = copy.deepcopy({"policy": trainer.policy, "ref": trainer.ref, "value": trainer.value, "scorers": scorers})
    scorer_copies = copies.pop("scorers")
    for model in (*copies.values(), *(model for models in scorer_copies.values() for model in models.values())):
        model.double()
    score_stats = trainer.score_stats
    return reference_state.Start(
        settings=trainer.settings,
        seed=trainer.seed,
        update=trainer.updates,
        updates=updates,
        kl_coef=trainer.kl_coef,
        scores_so_far=(score_stats.count, score_stats.mean, score_stats.squares),
        policy=copies["policy"],
        ref=copies["ref"],
        value=copies["value"],
        value_is_head=isinstance(trainer.value, ValueHead),
        sources={name: _source(trainer, name, scorer_copies[name]) for name in trainer.rewards},
        adam={
            "policy": _adam(trainer.policy, trainer.optimizer),
            "value": _adam(trainer.value, trainer.optimizer),
        },
        ptx=trainer.ptx,
        prompts=[rollout.prompt_tokens(row) for row in range(len(rollout))],
        responses=[rollout.response_tokens(row) for row in range(len(rollout))],
        stop_token_id=stop_token_id,
        near_tie=near_tie,
    )


@dataclass
class Remembered:
    """A reward function that is asked once for the same texts, and outside of the world without float32.

    What it answers is no arithmetic of ours; it may be slow, or far away, or answer otherwise each time.
    """

    function: RewardFn
    answers: dict[str, list[float]] = field(default_factory=dict)

    def __call__(self, prompts: list[str], responses: list[str]) -> list[float]:
        key = repr((prompts, responses))
        if key not in self.answers:
            with suspended():
                self.answers[key] = call_reward_fn(self.function, prompts, responses)
        return self.answers[key]


def remember(trainer: PPOTrainer) -> None:
    """Put every reward function of the trainer behind a `Remembered`."""
    for source in trainer.rewards.values():
        if isinstance(source, FunctionReward):
            source.function = Remembered(source.function)


def scorers_of(trainer: PPOTrainer) -> dict[str, dict[str, ModelReward | FunctionReward]]:
    """Source -> its one scorer, or an ensemble's, by name."""
    found: dict[str, dict[str, ModelReward | FunctionReward]] = {}
    for name, source in trainer.rewards.items():
        assert isinstance(source, ModelReward | FunctionReward | EnsembleReward), f"{name} cannot be replayed"
        found[name] = {**source.members} if isinstance(source, EnsembleReward) else {name: source}
    return found


def _source(trainer: PPOTrainer, name: str, models: dict[str, Any]) -> reference_state.Source:
    """A reward source for the naive update; `models` are copies of its models."""

    def scorer(each: str, said: ModelReward | FunctionReward) -> reference_state.Scorer:
        if isinstance(said, ModelReward):
            if isinstance(said, RetokenizingReward):
                return lambda prompts, responses: reference_scores.model_scores(
                    models[each], *said.retokenize(prompts, responses)
                )
            return partial(reference_scores.model_scores, models[each])
        return partial(reference_scores.function_scores, said.function, said.tokenizer)

    source = trainer.rewards[name]
    how = (source.combine, source.std_coef) if isinstance(source, EnsembleReward) else (None, 1.0)
    scorers = {each: scorer(each, said) for each, said in scorers_of(trainer)[name].items()}
    return reference_state.Source(scorers, trainer.weights[name], trainer.clips.get(name), *how)


def _adam(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, reference_state.Adam]:
    found = {name: optimizer.state[p] for name, p in model.named_parameters() if optimizer.state.get(p)}
    return {
        name: reference_state.Adam(_copied(state["exp_avg"]), _copied(state["exp_avg_sq"]), int(state["step"]))
        for name, state in found.items()
    }


def _copied(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64, copy=True)


def widen(trainer: PPOTrainer) -> None:
    """Turn a trainer into float64, models and optimizer, without autocast. Widening is exact.

    Nor are activations recomputed: a backward pass would make them in a world with float32.
    """
    state = copy.deepcopy(trainer.state_dict())
    for model in (trainer.policy, trainer.ref, trainer.value):
        model.double()
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False
    for scorer in [scorer for scorers in scorers_of(trainer).values() for scorer in scorers.values()]:
        if isinstance(scorer, ModelReward):
            scorer.model.double()
    trainer.settings = trainer.settings.model_copy(update={"bf16": False})
    trainer.load_state_dict(state)  # the optimizer's moments take the format of their parameters


def in_float64(
    trainer: PPOTrainer,
    rollout: Rollout,
    *,
    updates: int,
    stop_token_id: int | None,
    near_tie: float = 1e-3,
    tick: Callable[[], None] = lambda: None,
) -> tuple[Numbers, Numbers]:
    """What an update does with a rollout, by the trainer's code and by the naive one, both in float64.

    The trainer is in float64 and one update further afterwards.
    """
    widen(trainer)
    before = weights(trainer.policy, trainer.value)
    start = start_of(trainer, rollout, updates=updates, stop_token_id=stop_token_id, near_tie=near_tie)
    drawn = reference_state.draws(start, tick)  # its noise is float32, here as in the run
    with everything():
        theirs = {name: numbers(values) for name, values in (drawn | reference.update(start, tick)).items()}
        theirs |= changes(before, weights(start.policy, start.value))
        ours = observe(trainer, rollout)[0] | changes(before, weights(trainer.policy, trainer.value))
    theirs[FROZEN] = torch.zeros_like(ours[FROZEN], dtype=torch.float64)
    return ours, theirs
