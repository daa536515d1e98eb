"""The PPO loop on tiny models, on the CPU in float32 unless stated."""

import copy

import pytest
import tiny
import torch

from rlhf_cli.errors import RLHFError
from rlhf_cli.models.batch import Rollout
from rlhf_cli.rewards.function import FunctionReward


def run(trainer, steps: int = 2):
    return [untimed(trainer.step(tiny.prompts(8, seed=step))) for step in range(steps)]


def untimed(stats):
    return {name: value for name, value in stats.items() if not name.endswith(("_s", "_per_s"))}


def both_weights(trainer):
    return torch.cat([tiny.weights(model) for model in trainer.trained_models.values()])


def generated(trainer):
    return trainer.make_experience(trainer.generate(tiny.prompts()))


def test_another_partition_moves_the_ratio_by_float_noise_only():
    trainer = tiny.trainer(policy_seed=3)
    step = trainer._train_minibatch(generated(trainer), tuple(torch.tensor([row]) for row in range(8)), epoch=0)
    assert step.max_ratio_error <= 1e-5


# Scores, padding


def test_padding_ids_change_nothing():
    results = []
    for pad in (tiny.PAD, tiny.EOS, 11):
        trainer = tiny.trainer(policy_seed=3)
        rollout = Rollout.from_lists([[5, 6], [7]], [[3, tiny.EOS], [4, 8, 9]], stop_token_id=tiny.EOS, pad=pad)
        results.append((untimed(trainer.update(trainer.make_experience(rollout))), tiny.weights(trainer.policy)))
    for stats, weights in results[1:]:
        assert stats == results[0][0] and torch.equal(weights, results[0][1])


@pytest.mark.parametrize("scores", [torch.ones(1), torch.ones(8, 1), [1.0] * 7])
def test_scores_of_another_shape_are_rejected(scores):
    trainer = tiny.trainer()
    rollout = trainer.generate(tiny.prompts())
    with pytest.raises(RLHFError, match=r"^error\[R05\]"):
        trainer.make_experience(rollout, scores=scores)


def test_scores_of_the_caller_replace_the_sources():
    trainer = tiny.trainer(kl_coef=0.0)
    experience = trainer.make_experience(trainer.generate(tiny.prompts()), scores=list(range(8)))
    assert experience.scores.tolist() == experience.rewards.sum(1).tolist() == list(range(8))


# The same seed, the same run


@pytest.mark.full
def test_same_seed_same_run_bit_for_bit():
    (one, weights), (same, same_weights), (_, other_weights) = (
        (run(trainer), tiny.weights(trainer.policy)) for trainer in (tiny.trainer(seed=seed) for seed in (0, 0, 1))
    )
    assert one == same and torch.equal(weights, same_weights) and not torch.equal(weights, other_weights)
    plain, disturbed = tiny.trainer(), tiny.trainer()
    run(plain)
    disturbed.step(tiny.prompts(8, seed=0))
    torch.rand(100)
    disturbed.make_experience(disturbed.generate(tiny.prompts(3, seed=9), purpose="show"))
    disturbed.step(tiny.prompts(8, seed=1))
    assert torch.equal(tiny.weights(plain.policy), tiny.weights(disturbed.policy))


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {
            "lr_scheduler_type": "cosine", "warmup_steps": 1, "num_mini_batches": 2, "adap_kl_ctrl": True,
            "horizon": 50, "use_score_scaling": True,
        },
        {"head": True},
        {"advantage": "rloo", "num_samples_per_prompt": 2},
        {"num_shared_layers": 1, "kl_in": "loss", "kl_estimator": "full", "gradient_checkpointing": True},
    ],
    ids=["scheduler", "head", "no value model", "shared layers"],
)  # fmt: skip
def test_resumed_run_is_the_straight_run(changes):
    straight, resumed = tiny.trainer(**changes), tiny.trainer(**changes)
    run(straight, 2)
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    rest, again = ([untimed(each.step(tiny.prompts(8, seed=step))) for step in (2, 3)] for each in (straight, resumed))
    assert rest == again and torch.equal(both_weights(straight), both_weights(resumed))
    assert torch.equal(tiny.weights(straight.ref), tiny.weights(resumed.ref))


def test_a_state_of_another_seed_is_rejected():
    with pytest.raises(ValueError, match="seed 1"):
        tiny.trainer(seed=0).load_state_dict(tiny.trainer(seed=1).state_dict())


def test_minibatches_are_shuffled_for_each_epoch_and_update():
    trainer = tiny.trainer(num_mini_batches=4)
    rollout = trainer.generate(tiny.prompts())

    def order(epoch):
        minibatches = trainer._make_minibatches(rollout, epoch)
        return [sorted(torch.cat(minibatch).tolist()) for minibatch in minibatches]

    first, second = order(0), order(1)
    trainer.updates = 1
    third = order(0)
    assert all(sorted(row for rows in plan for row in rows) == list(range(8)) for plan in (first, second, third))
    assert first != second and first != third and first != [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert not torch.equal(rollout.ids, trainer.generate(tiny.prompts()).ids), "nor are the samples the same"


def test_a_rollout_of_fewer_rows_than_minibatches_makes_a_step_of_each_row():
    """As a caller may pass one; none of the minibatches is empty."""
    trainer, experience = tiny.trainer_and_experience(num_mini_batches=8, num_ppo_epochs=3, ratio_threshold=None)
    steps: list[int] = []
    trainer.optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    assert trainer.update(experience)["policy/epochs"] == 3 and len(steps) == 4 * 3


# An engine that the caller passes


@pytest.mark.parametrize("key,value", [("temperature", 0.5), ("bf16", True)])
def test_an_engine_that_samples_another_distribution_is_rejected(key, value):
    with pytest.raises(AssertionError, match=f"the engine samples with {key} {value}"):
        tiny.trainer_of(tiny.causal(), tiny.settings(), **{key: value})


# It learns, and refuses to learn from nonsense


@pytest.mark.full
def test_a_bandit_learns_to_say_seven_and_the_kl_penalty_limits_it():
    def sevens(prompts, responses):
        return [float(response.split().count("7")) for response in responses]

    fixed = {"stop_token": "none", "response_length": 6, "temperature": 1.0, "learning_rate": 5e-3}
    scores, kls = {}, {}
    for coef in (0.0, 5.0):
        source = FunctionReward("sevens", sevens, tiny.Words())
        trainer = tiny.trainer(rewards={"sevens": source}, kl_coef=coef, **fixed, **tiny.batch(16, 16))
        history = [trainer.step(tiny.prompts(16, seed=step)) for step in range(20)]
        scores[coef], kls[coef] = ([row[f"objective/{name}"] for row in history] for name in ("scores", "kl"))
    assert scores[0.0][0] < 1.5 and sum(scores[0.0][-3:]) / 3 > 3 and sum(scores[5.0][-3:]) / 3 < 1.5
    assert sum(kls[5.0][-5:]) < 0.7 * sum(kls[0.0][-5:])


def bad_score(trainer, experience):
    trainer.rewards["reward"] = lambda rollout: torch.tensor([0.0, float("nan")] + [0.0] * 6)
    trainer.make_experience(experience.rollout)


def bad_loss(trainer, experience):
    experience.advantages[0, 0] = float("inf")
    trainer.update(experience)


def bad_ratio(trainer, experience):
    """The mean ratio exceeds ratio_threshold, too."""
    experience.logprobs[0] -= 200
    experience.advantages[0] = -1
    trainer.update(experience)


def bad_gradient(name: str):
    def update(trainer, experience):
        next(getattr(trainer, name).parameters()).register_hook(lambda grad: grad * float("inf"))
        trainer.update(experience)

    return update


@pytest.mark.full
@pytest.mark.parametrize(
    "call,problem",
    [
        (bad_score, "score `reward` is not finite in row 1"),
        (bad_loss, "loss is not finite in row 0"),
        (bad_ratio, "loss is not finite in row 0"),
        (bad_gradient("policy"), "policy gradient is not finite"),
        (bad_gradient("value"), "value gradient is not finite"),
    ],
)
def test_a_number_that_is_not_finite_never_reaches_the_weights(call, problem):
    trainer = tiny.trainer()
    experience, before = generated(trainer), both_weights(trainer)
    with pytest.raises(RLHFError, match=f"R01.*step 1: {problem}"):
        call(trainer, experience)
    assert torch.equal(before, both_weights(trainer))


def test_weights_that_a_step_made_infinite_are_reported_before_they_are_saved():
    trainer = tiny.trainer(max_grad_norm=1e38, num_ppo_epochs=1)
    next(trainer.policy.parameters()).register_hook(lambda grad: 1e4 * grad)
    trainer.optimizer = torch.optim.SGD(trainer.policy.parameters(), lr=3e38)
    trainer.scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer, 1.0)
    with pytest.raises(RLHFError, match="step 1: a weight of the policy model is not finite"):
        trainer.step(tiny.prompts())


# The average of the weights


@pytest.mark.full
@pytest.mark.parametrize("changes", [{}, {"num_shared_layers": 1}, {"value_only_updates": 1, "head": True}])
def test_the_average_is_the_weighted_sum_of_the_policies_and_a_resumed_run_has_it(changes):
    """Training is that without an average. The engine gets the averaged weights, and then the trained ones again."""
    plain, ours, again = tiny.trainer(**changes), *(tiny.trainer(average=0.8, **changes) for _ in range(2))
    policies, syncs = [tiny.weights(ours.policy).double()], []
    ours.engine.update_weights = lambda update, policy: syncs.append(tiny.weights(policy))
    for step in range(3):
        for trainer in (plain, ours):
            trainer.step(tiny.prompts(seed=step))
        policies.append(tiny.weights(ours.policy).double())
        with ours.averaged_policy():
            ours.generate(tiny.prompts(), "headline")
            averaged = tiny.weights(ours.policy)
        with plain.averaged_policy():
            assert torch.equal(tiny.weights(plain.policy), tiny.weights(ours.policy))
        assert torch.equal(averaged, tiny.weights(ours.policy)) == (step == 0)
        if step == 1:
            again.load_state_dict(copy.deepcopy(ours.state_dict()))
    expected = (policies[1] + 2 * policies[2] + 3 * policies[3]) / 6
    torch.testing.assert_close(averaged.double(), expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(syncs.pop(), averaged) and [torch.equal(each, averaged) for each in syncs] == [False] * 5
    again.step(tiny.prompts(seed=2))
    with again.averaged_policy():
        assert torch.equal(tiny.weights(again.policy), averaged)
