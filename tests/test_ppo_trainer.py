"""The loop on tiny models: what must hold of any run, on the CPU in float32 unless said."""

import copy

import pytest
import tiny
import torch

from rlhf_cli.errors import RLHFError
from rlhf_cli.models.batch import Rollout
from rlhf_cli.ppo import losses
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.function import FunctionReward


def run(trainer, steps: int = 2):
    return [trainer.step(tiny.prompts(8, seed=step)) for step in range(steps)]


def untimed(stats):
    return {name: value for name, value in stats.items() if not name.endswith(("_s", "_per_s"))}


# 1. The first step starts where the rollout came from.


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_mini_batches": 2},
        {"micro_batch_tokens": 16},
        {"kl_estimator": "full"},
        {"gradient_checkpointing": True},
    ],
)
def test_first_ratio_is_one_and_first_kl_zero(changes):
    trainer = tiny.trainer(num_ppo_epochs=1, **changes)
    first = run(trainer, 1)[0]
    assert first["policy/first_ratio_error"] == 0.0
    assert (
        first["objective/kl"] == 0.0 and first["objective/kl_k1"] == 0.0 and first["objective/non_score_reward"] == 0.0
    )
    if "num_mini_batches" not in changes:
        assert first["val/ratio"] == 1.0 and first["policy/clipfrac_avg"] == 0.0 and first["policy/approxkl_avg"] == 0.0
        assert first["val/clipfrac_avg"] == 0.0


def test_another_partition_moves_the_ratio_by_float_noise_only():
    trainer = tiny.trainer(policy_seed=3)
    experience = trainer.make_experience(trainer.generate(tiny.prompts()))
    rows = [torch.tensor([row]) for row in range(8)]
    stats = trainer._train_minibatch(experience, tuple(rows))
    assert stats["ratio_error"] <= 1e-5


# 2. Scores, EOS, padding.


def test_score_is_placed_on_the_eos_and_the_eos_is_trained():
    trainer = tiny.trainer(kl_coef=0.0)
    rollout = Rollout.from_lists([[5, 6], [7]], [[3, tiny.EOS], [4, 8, 9]], stop_token_id=tiny.EOS)
    experience = trainer.make_experience(rollout, scores=torch.tensor([2.0, 3.0]))
    assert experience.rewards.tolist() == [[0.0, 2.0, 0.0], [0.0, 0.0, 3.0]]
    assert rollout.micro_batch(torch.arange(2)).targets.tolist()[1] == tiny.EOS


def test_padding_ids_change_nothing():
    queries, responses = [[5, 6], [7]], [[3, tiny.EOS], [4, 8, 9]]
    found = []
    for pad in (tiny.PAD, tiny.EOS, 11):
        trainer = tiny.trainer(policy_seed=3)
        experience = trainer.make_experience(Rollout.from_lists(queries, responses, stop_token_id=tiny.EOS, pad=pad))
        found.append((untimed(trainer.update(experience)), tiny.weights(trainer.policy)))
    assert found[0][0] == found[1][0] == found[2][0]
    assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[0][1], found[2][1])


def test_missing_eos_penalty_hits_those_that_never_end():
    rollout = Rollout.from_lists([[5], [7]], [[3, tiny.EOS], [4, 8]], stop_token_id=tiny.EOS)
    free, charged = (tiny.trainer(missing_eos_penalty=penalty).make_experience(rollout) for penalty in (None, 1.5))
    assert (free.scores - charged.scores).tolist() == pytest.approx([0.0, 1.5])
    endless = tiny.trainer(missing_eos_penalty=1.5, stop_token="none").make_experience(rollout)
    assert torch.equal(endless.scores, free.scores), "no stop token, nothing to miss"


# 3. The gradient does not depend on micro-batches.


@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_gradient_is_the_same_for_any_micro_batching(dtype, limit):
    grads = []
    sizes = (
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
        {"micro_batch_tokens": 20},
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "gradient_checkpointing": True},
    )
    for changes in sizes:
        trainer = tiny.trainer(dtype=dtype, policy_seed=3, max_grad_norm=1e9, **changes)
        rollout = Rollout.from_lists([[5, 6], [7], [8, 9, 4]] * 2, [[3, 2], [4, 8, 9, 5, 2], [6]] * 2, stop_token_id=2)
        experience = trainer.make_experience(rollout, scores=torch.tensor([1.0, -1.0, 0.5, 2.0, 0.0, 1.0], dtype=dtype))
        grads.append(tiny.gradient(trainer, experience))
    for other in grads[1:]:
        assert (grads[0] - other).norm() / grads[0].norm() <= limit


def test_losses_are_means_over_tokens():
    """Every response once more: the same means, the same gradient, up to the rounding of other batch shapes."""
    rows, scores = [[5, 6], [7]], torch.tensor([1.0, -1.0])
    found = []
    for times in (1, 2):
        trainer = tiny.trainer(policy_seed=3, max_grad_norm=1e9, advantage_norm="none")
        rollout = Rollout.from_lists(rows * times, [[3, 2], [4, 8, 9]] * times, stop_token_id=2)
        found.append(tiny.gradient(trainer, trainer.make_experience(rollout, scores=scores.repeat(times))))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_losses_weigh_tokens_not_rows():
    """Two rows of one and five tokens: the loss is the mean over six tokens."""
    trainer = tiny.trainer(advantage_norm="none", kl_coef=0.0, lam=1.0, num_ppo_epochs=1, learning_rate=0.0)
    rollout = Rollout.from_lists([[5], [7]], [[2], [4, 8, 9, 5, 2]], stop_token_id=2)
    experience = trainer.make_experience(rollout, scores=torch.tensor([6.0, 1.0]))
    errors = (experience.returns - experience.values)[rollout.response_mask] ** 2 / 2
    assert trainer.update(experience)["loss/value_avg"] == pytest.approx(errors.mean().item(), rel=1e-5)


# 5. What must not move, does not.


def test_learning_rate_zero_changes_no_weight():
    trainer = tiny.trainer(learning_rate=0.0, weight_decay=0.1)
    before = tiny.weights(trainer.policy), tiny.weights(trainer.value)
    run(trainer)
    assert torch.equal(before[0], tiny.weights(trainer.policy)) and torch.equal(before[1], tiny.weights(trainer.value))


def test_reference_and_reward_never_change_by_a_bit():
    trainer = tiny.trainer()
    reward = trainer.rewards["reward"].model
    before = tiny.weights(trainer.ref), tiny.weights(reward), tiny.weights(trainer.policy), tiny.weights(trainer.value)
    run(trainer)
    assert torch.equal(before[0], tiny.weights(trainer.ref)) and torch.equal(before[1], tiny.weights(reward))
    assert not torch.equal(before[2], tiny.weights(trainer.policy)) and not torch.equal(
        before[3], tiny.weights(trainer.value)
    )


# 6. The same seed, the same run.


def test_same_seed_same_run_bit_for_bit():
    runs = []
    for seed in (0, 0, 1):
        trainer = tiny.trainer(seed=seed)
        runs.append(([untimed(stats) for stats in run(trainer)], tiny.weights(trainer.policy)))
    assert runs[0][0] == runs[1][0] and torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][1], runs[2][1])


def test_extra_draws_in_between_change_no_training():
    plain, disturbed = tiny.trainer(), tiny.trainer()
    run(plain)
    disturbed.step(tiny.prompts(8, seed=0))
    torch.rand(100)
    disturbed.make_experience(disturbed.generate(tiny.prompts(3, seed=9), purpose="show"))
    disturbed.step(tiny.prompts(8, seed=1))
    assert torch.equal(tiny.weights(plain.policy), tiny.weights(disturbed.policy))


def test_resumed_run_is_the_straight_run():
    changes = {"lr_scheduler_type": "cosine", "warmup_steps": 1, "num_mini_batches": 2}
    straight = tiny.trainer(**changes)
    before = run(straight, 2)
    state = copy.deepcopy(straight.state_dict())
    rest = [untimed(straight.step(tiny.prompts(8, seed=step))) for step in (2, 3)]
    resumed = tiny.trainer(**changes)
    resumed.load_state_dict(state)
    again = [untimed(resumed.step(tiny.prompts(8, seed=step))) for step in (2, 3)]
    assert len(before) == 2 and rest == again
    assert torch.equal(tiny.weights(straight.policy), tiny.weights(resumed.policy))
    assert torch.equal(tiny.weights(straight.value), tiny.weights(resumed.value))


def test_a_state_of_another_seed_is_refused():
    with pytest.raises(ValueError, match="seed 1"):
        tiny.trainer(seed=0).load_state_dict(tiny.trainer(seed=1).state_dict())


def test_minibatches_are_shuffled_anew_for_each_epoch_and_update():
    trainer = tiny.trainer(num_mini_batches=4)
    rollout = trainer.generate(tiny.prompts())

    def order(epoch):
        plan = trainer._make_minibatches(rollout, epoch)
        return [sorted(row for rows in minibatch for row in rows.tolist()) for minibatch in plan]

    first, second = order(0), order(1)
    trainer.updates = 1
    third = order(0)
    assert all(sorted(row for rows in plan for row in rows) == list(range(8)) for plan in (first, second, third))
    assert first != second and first != third and first != [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_rollout_of_fewer_rows_than_minibatches_makes_a_step_of_each_row():
    """As a caller may hand one in; none of the minibatches is empty."""
    trainer, judged = tiny.judged(num_mini_batches=8, num_ppo_epochs=3, ratio_threshold=None)
    steps: list[int] = []
    trainer.optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    assert trainer.update(judged)["policy/epochs"] == 3 and len(steps) == 4 * 3


def test_the_same_prompt_draws_anew_in_each_update():
    trainer = tiny.trainer()
    first = trainer.generate(tiny.prompts())
    trainer.updates = 1
    assert not torch.equal(first.ids, trainer.generate(tiny.prompts()).ids)


def test_dropout_of_the_models_is_switched_off():
    policy, settings = tiny.causal(attention_dropout=0.5).train(), tiny.settings()
    engine = HFEngine(policy, tiny.EOS, tiny.PAD, settings.temperature)
    PPOTrainer(policy, tiny.causal(), tiny.scorer(), {}, engine, settings)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(policy.train()(input_ids=ids).logits, policy(input_ids=ids).logits)


def test_an_engine_of_another_temperature_is_refused():
    policy, settings = tiny.causal(), tiny.settings(temperature=1.0)
    with pytest.raises(AssertionError, match=r"samples at 0\.5"):
        PPOTrainer(policy, tiny.causal(), tiny.scorer(), {}, HFEngine(policy, 2, 0, 0.5), settings)


@pytest.mark.parametrize("scores", [torch.ones(1), torch.ones(8, 1), [1.0] * 7])
def test_scores_of_another_shape_are_refused(scores):
    trainer = tiny.trainer()
    rollout = trainer.generate(tiny.prompts())
    with pytest.raises(RLHFError) as caught:
        trainer.make_experience(rollout, scores=scores)
    assert caught.value.problems[0].code == "R05"
    assert trainer.make_experience(rollout, scores=[0.5] * 8).scores.tolist() == [0.5] * 8


# 7. Metrics are over response tokens only.


def test_metrics_by_hand():
    trainer = tiny.trainer(policy_seed=3, num_ppo_epochs=1, kl_coef=0.25, learning_rate=0.0)
    rollout = Rollout.from_lists([[5, 6], [7]], [[3, 2], [4, 8, 9]], stop_token_id=2)
    experience = trainer.make_experience(rollout, scores=torch.tensor([2.0, 3.0]))
    stats = trainer.update(experience)
    sums = []
    for row, (query, response) in enumerate(zip([[5, 6], [7]], [[3, 2], [4, 8, 9]], strict=True)):
        ids = torch.tensor([query + response])
        logp, ref = (
            torch.log_softmax(model(input_ids=ids).logits[0].detach() / 0.7, -1)
            for model in (trainer.policy, trainer.ref)
        )
        places = range(len(query) - 1, len(query) + len(response) - 1)
        chosen = [(float(logp[p, t]), float(ref[p, t])) for p, t in zip(places, response, strict=True)]
        entropies = [float(-(logp[p].exp() * logp[p]).sum()) for p in places]
        sums.append((sum(a - b for a, b in chosen), -sum(a for a, _ in chosen), sum(entropies)))
        torch.testing.assert_close(
            experience.logprobs[row, : len(response)], torch.tensor([a for a, _ in chosen]), atol=1e-5, rtol=1e-5
        )
    kl = (sums[0][0] + sums[1][0]) / 2
    assert stats["objective/kl"] == pytest.approx(kl, rel=1e-4) and stats["objective/kl_k1"] == pytest.approx(
        kl, rel=1e-4
    )
    assert stats["objective/entropy"] == pytest.approx((sums[0][1] + sums[1][1]) / 2, rel=1e-4)
    assert stats["policy/entropy_avg"] == pytest.approx((sums[0][2] + sums[1][2]) / 5, rel=1e-4)
    assert stats["objective/non_score_reward"] == pytest.approx(-0.25 * kl, rel=1e-4)
    assert stats["objective/scores"] == 2.5 and stats["objective/rlhf_reward"] == pytest.approx(
        2.5 - 0.25 * kl, rel=1e-4
    )
    assert (
        stats["objective/response_length"] == 2.5
        and stats["objective/eos_fraction"] == 0.5
        and stats["val/num_eos_tokens"] == 1
    )
    assert stats["tokens/real"] == 8 and stats["tokens/padded"] == 8 and stats["episode"] == 2
    assert trainer.update(experience)["episode"] == 4


def test_entropy_is_never_negative_and_numbers_are_finite():
    for stats in run(tiny.trainer(), 3):
        assert stats["policy/entropy_avg"] >= 0
        assert all(value == value and abs(value) < float("inf") for value in stats.values())


def test_ratio_variance_is_over_optimizer_steps():
    assert run(tiny.trainer(num_ppo_epochs=1), 1)[0]["val/ratio_var"] == 0.0
    assert run(tiny.trainer(num_ppo_epochs=3), 1)[0]["val/ratio_var"] > 0.0


# It learns, and refuses to learn from nonsense.


class Token:
    """Decodes token ids to themselves, so that a reward function sees them."""

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


def test_a_bandit_learns_to_say_seven_and_the_kl_penalty_holds_it_back():
    def sevens(prompts, responses):
        return [float(response.split().count("7")) for response in responses]

    fixed = {"stop_token": "none", "response_length": 6, "temperature": 1.0, "learning_rate": 2e-2}
    sizes = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    scores, kls = {}, {}
    for coef in (0.0, 5.0):
        source = FunctionReward("sevens", sevens, Token())
        trainer = tiny.trainer(rewards={"sevens": source}, kl_coef=coef, **fixed, **sizes)
        history = [trainer.step(tiny.prompts(16, seed=step)) for step in range(20)]
        scores[coef], kls[coef] = ([row[f"objective/{name}"] for row in history] for name in ("scores", "kl"))
    assert scores[0.0][0] < 1.5 and sum(scores[0.0][-3:]) / 3 > 4.5 and sum(scores[5.0][-3:]) / 3 < 1.5
    assert sum(kls[5.0][-5:]) < 0.7 * sum(kls[0.0][-5:])


def test_a_score_that_is_not_finite_stops_the_run_before_any_weight_moves():
    trainer = tiny.trainer()
    before, rollout = tiny.weights(trainer.policy), trainer.generate(tiny.prompts())
    trainer.rewards["reward"] = lambda rollout: torch.tensor([0.0, float("nan")] + [0.0] * 6)
    with pytest.raises(RLHFError) as caught:
        trainer.make_experience(rollout)
    assert caught.value.problems[0].code == "R01" and "row 1" in str(caught.value)
    assert torch.equal(before, tiny.weights(trainer.policy))


def test_a_gradient_that_is_not_finite_never_reaches_the_weights():
    trainer = tiny.trainer()
    experience = trainer.make_experience(trainer.generate(tiny.prompts()))
    experience.advantages[0, 0] = float("inf")
    before = tiny.weights(trainer.policy)
    with pytest.raises(RLHFError, match="step 1: loss is not finite in row 0"):
        trainer.update(experience)
    assert torch.equal(before, tiny.weights(trainer.policy))


@pytest.mark.parametrize("name", ["policy", "value"])
def test_a_gradient_of_a_finite_loss_that_is_not_finite_never_reaches_the_weights(name):
    trainer = tiny.trainer()
    experience = trainer.make_experience(trainer.generate(tiny.prompts()))
    next(getattr(trainer, name).parameters()).register_hook(lambda grad: grad * float("inf"))
    before = tiny.weights(trainer.policy), tiny.weights(trainer.value)
    with pytest.raises(RLHFError, match=f"step 1: {name} gradient is not finite"):
        trainer.update(experience)
    assert torch.equal(before[0], tiny.weights(trainer.policy)) and torch.equal(before[1], tiny.weights(trainer.value))


def test_weights_that_a_step_blew_up_are_told_before_anything_is_saved():
    trainer = tiny.trainer(max_grad_norm=1e38, num_ppo_epochs=1)
    next(trainer.policy.parameters()).register_hook(lambda grad: 1e4 * grad)
    trainer.optimizer = torch.optim.SGD(trainer.policy.parameters(), lr=3e38)
    trainer.scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer, 1.0)
    with pytest.raises(RLHFError, match="step 1: a weight of the policy model is not finite"):
        trainer.step(tiny.prompts())


def test_given_scores_stand_in_for_the_sources():
    trainer = tiny.trainer(kl_coef=0.0)
    experience = trainer.make_experience(trainer.generate(tiny.prompts()), scores=torch.arange(8.0))
    assert experience.scores.tolist() == list(range(8))
    assert experience.rewards.sum(1).tolist() == list(range(8))


def test_advantages_are_whitened_over_the_whole_update():
    trainer = tiny.trainer()
    experience = trainer.make_experience(trainer.generate(tiny.prompts()))
    assert losses.masked_mean(experience.advantages, experience.mask).item() == pytest.approx(0.0, abs=1e-6)
    assert losses.masked_var(experience.advantages, experience.mask).item() == pytest.approx(1.0, abs=1e-4)


def test_a_value_model_that_is_a_copy_of_a_frozen_one_learns():
    """copy.deepcopy of a reward model keeps that it is frozen."""
    plain = tiny.trainer()
    frozen = PPOTrainer(
        plain.policy, plain.ref, plain.value.requires_grad_(False), plain.rewards, plain.engine, plain.settings
    )
    before = tiny.weights(frozen.value)
    frozen.step(tiny.prompts())
    assert not torch.equal(before, tiny.weights(frozen.value))
