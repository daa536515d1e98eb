"""Every key of `ppo:` has an effect: by direction, or by the exact value; and writing out a default changes no bit."""

import re
from pathlib import Path

import pytest
import tiny
import torch

from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.models import forward
from rlhf_cli.ppo import losses


def test_every_key_is_covered_here():
    """A new key needs a test in this file, its neighbours, or the tests of the stage; fsdp needs several processes."""
    tests = Path(__file__).parents[1]
    paths = [*tests.rglob("test_ppo_options*.py"), *tests.rglob("test_stage_ppo*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in (*paths, tests / "distributed/test_group_fsdp.py"))
    assert [key for key in PPOSettings.model_fields if not re.search(rf"\b{key}\b", text)] == []


@pytest.fixture(scope="module")
def plain_step():
    return tiny.one_step()


@pytest.mark.parametrize("key", sorted(set(PPOSettings.model_fields) - {"total_episodes", "num_train_epochs"}))
def test_writing_out_a_default_leaves_the_run_bit_identical(key, plain_step):
    trainer, stats = tiny.one_step(**{key: tiny.settings().model_dump()[key]})
    assert torch.equal(tiny.weights(plain_step[0].policy), tiny.weights(trainer.policy)) and plain_step[1] == stats


# How much


def test_batch_arithmetic():
    sizes = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "num_samples_per_prompt": 4}
    settings = PPOSettings(total_episodes=200, **sizes)
    assert (settings.episodes_per_update, settings.prompts_per_update, settings.num_updates()) == (64, 16, 4)
    assert PPOSettings(num_train_epochs=2.0, **sizes).num_updates(prompt_count=40) == 5
    with pytest.raises(ValueError, match="number of prompts"):
        PPOSettings(num_train_epochs=2.0).num_updates()


@pytest.mark.parametrize("minibatches,epochs", [(1, 4), (2, 3), (4, 1)])
def test_num_mini_batches_and_num_ppo_epochs_make_the_optimizer_steps(minibatches, epochs):
    trainer = tiny.trainer(num_mini_batches=minibatches, num_ppo_epochs=epochs)
    steps: list[int] = []
    trainer.optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    trainer.step(tiny.prompts())
    assert len(steps) == minibatches * epochs


def test_num_samples_per_prompt_gives_adjacent_rows_with_different_responses():
    rollout = tiny.trainer(num_samples_per_prompt=4).generate(tiny.prompts(2))
    assert len(rollout) == 8 and [rollout.prompt_tokens(row) for row in range(4)] == [rollout.prompt_tokens(0)] * 4
    assert len({tuple(rollout.response_tokens(row)) for row in range(4)}) > 1


@pytest.mark.parametrize("tokens,packing", [("auto", False), (12, False), (12, True)])
def test_micro_batch_tokens_bounds_the_forward_passes(tokens, packing, monkeypatch):
    trainer = tiny.trainer(micro_batch_tokens=tokens, num_ppo_epochs=2, packing=packing, response_length=3)
    shapes = tiny.spy_on_shapes(monkeypatch)
    experience = trainer.make_experience(trainer.generate(tiny.prompts()), torch.zeros(8))
    trainer.update(experience)
    micro_batches = experience.minibatches[0]
    assert len(shapes) == 7 * len(micro_batches), "scoring: policy, value and reference; two models in two epochs"
    assert all(len(rows) <= 4 for rows in micro_batches)
    assert all(rows * width <= 12 or rows == 1 for rows, width in shapes) is (tokens == 12)
    if packing:
        assert {rows for rows, _ in shapes} == {1} and max(width for _, width in shapes) <= 12
        assert max(len(rows) for rows in micro_batches) > 1


# Rollouts


def test_response_length_range_is_sampled_for_each_update():
    assert tiny.trainer(response_length=5, stop_token="none").generate(tiny.prompts()).response_mask.shape == (8, 5)
    trainer, widths = tiny.trainer(response_length={"min": 2, "max": 6}, stop_token="none"), []
    for step in range(12):
        trainer.updates = step
        widths.append(trainer.generate(tiny.prompts()).response_mask.shape[1])
    assert set(widths) <= set(range(2, 7)) and len(set(widths)) > 2


# Scores and rewards


def test_missing_eos_penalty_by_value():
    plain, charged, endless = (
        tiny.trainer(**changes).make_experience(tiny.rollout()).scores
        for changes in (
            {"missing_eos_penalty": None},
            {"missing_eos_penalty": 0.75},
            {"missing_eos_penalty": 0.75, "stop_token": "none"},
        )
    )
    assert (plain - charged).tolist() == pytest.approx([0, 0, 0.75, 0]) and torch.equal(plain, endless)


def test_kl_coef_by_value():
    (_, free), (_, charged) = tiny.trainer_and_experience(kl_coef=0.0), tiny.trainer_and_experience(kl_coef=0.5)
    difference = (free.rewards - charged.rewards)[free.mask]
    torch.testing.assert_close(difference, 0.5 * free.log_ratio[free.mask], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs", "full"])
def test_kl_estimator_in_the_reward(kind):
    trainer, experience = tiny.trainer_and_experience(kl_estimator=kind, kl_coef=1.0)
    mask = experience.mask
    if kind == "full":
        micro = experience.rollout.micro_batch(torch.arange(4))
        logp, ref = (
            torch.log_softmax(forward.response_logits(m, micro).detach() / 0.7, -1)
            for m in (trainer.policy, trainer.ref)
        )
        expected = torch.zeros(mask.shape)
        expected[micro.response_index] = (logp.exp() * (logp - ref)).sum(-1)
    else:
        r = experience.ref_logprobs - experience.logprobs
        expected = {"k1": -r, "k2": r * r / 2, "k3": r.exp() - 1 - r, "abs": r.abs()}[kind]
    torch.testing.assert_close(experience.kl[mask], expected[mask], atol=1e-5, rtol=1e-5)
    placed = losses.compute_token_rewards(experience.scores, experience.kl, mask)
    torch.testing.assert_close(experience.rewards, placed)


@pytest.mark.parametrize("kind", ["full", "k2", "k3"])
def test_kl_in_the_loss_leaves_the_rewards_alone_and_pulls_back(kind):
    _, experience = tiny.trainer_and_experience(kl_in="loss", kl_estimator=kind, kl_coef=1.0)
    assert experience.rewards.sum(1).tolist() == pytest.approx([1.0, -1.0, 0.5, 2.0])
    distance = {}
    for coef in (0.0, 5.0):
        options = {"kl_in": "loss", "kl_estimator": kind, "kl_coef": coef}
        trainer, experience = tiny.trainer_and_experience(**options, learning_rate=3e-3, num_ppo_epochs=8)
        trainer.update(experience)
        after = trainer.make_experience(tiny.rollout(), scores=torch.zeros(4))
        distance[coef] = losses.masked_mean(after.log_ratio**2, after.mask).item()
    assert distance[5.0] < 0.8 * distance[0.0]
    assert tiny.one_step(kl_in="loss", kl_estimator=kind)[1]["objective/non_score_reward"] == 0.0


def test_whiten_rewards_gives_unit_variance_and_keeps_the_mean():
    (_, plain), (_, white) = tiny.trainer_and_experience(), tiny.trainer_and_experience(whiten_rewards=True)
    mask = plain.mask
    assert losses.masked_var(white.rewards, mask).item() == pytest.approx(1.0, abs=1e-4)
    means = [losses.masked_mean(experience.rewards, mask).item() for experience in (plain, white)]
    assert means[0] == pytest.approx(means[1], abs=1e-5)


def test_advantage_norm_none_leaves_advantages_raw():
    (_, raw), (_, white) = tiny.trainer_and_experience(advantage_norm="none"), tiny.trainer_and_experience()
    torch.testing.assert_close(raw.advantages + raw.values.masked_fill(~raw.mask, 0), raw.returns)
    torch.testing.assert_close(losses.masked_whiten(raw.advantages, raw.mask), white.advantages)


# The objective


def test_cliprange_and_cliprange_value_clip():
    wide, tight = (tiny.one_step(cliprange=c, num_ppo_epochs=6, ratio_threshold=None)[1] for c in (0.9, 0.01))
    assert tight["policy/clipfrac_avg"] > wide["policy/clipfrac_avg"]
    wide, tight = (tiny.one_step(cliprange_value=c, num_ppo_epochs=6, ratio_threshold=None)[1] for c in (10.0, 0.001))
    assert wide["val/clipfrac_avg"] == 0.0 < tight["val/clipfrac_avg"]


def test_vf_coef_scales_the_value_gradient_exactly():
    norms = [tiny.one_step(vf_coef=c, num_ppo_epochs=1)[1] for c in (0.1, 0.4)]
    assert norms[1]["value/grad_norm"] / norms[0]["value/grad_norm"] == pytest.approx(4.0, rel=1e-4)
    assert norms[1]["policy/grad_norm"] == norms[0]["policy/grad_norm"]


def test_gamma_and_lam_by_value():
    (_, one), (_, other) = (
        tiny.trainer_and_experience(gamma=0.5, lam=1.0, kl_coef=0.0),
        tiny.trainer_and_experience(gamma=1.0, lam=1.0, kl_coef=0.0),
    )
    assert other.returns[1].tolist() == pytest.approx([-1.0] * 5, abs=1e-5)
    assert one.returns[1].tolist() == pytest.approx([-(0.5**4), -(0.5**3), -(0.5**2), -0.5, -1.0], abs=1e-5)
    _, zero = tiny.trainer_and_experience(lam=0.0, kl_coef=0.0)
    v = zero.values[1].tolist()
    assert zero.returns[1].tolist() == pytest.approx([v[1], v[2], v[3], v[4], -1.0], abs=1e-5)


# The optimizer


def test_bf16_changes_the_numbers_a_little_and_keeps_the_weights_float32():
    (_, a), (half, b) = tiny.one_step(), tiny.one_step(bf16=True)
    assert all(p.dtype == torch.float32 for p in half.policy.parameters())
    assert a["objective/entropy"] != b["objective/entropy"]
    assert b["objective/entropy"] == pytest.approx(a["objective/entropy"], rel=0.05)


def test_adam_options_reach_the_optimizer():
    trainer = tiny.trainer(adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6, weight_decay=0.1)
    groups = {group["name"]: group for group in trainer.optimizer.param_groups}
    assert set(groups) == {"policy", "policy/no_decay", "value", "value/no_decay"}
    assert all(group["betas"] == (0.8, 0.9) and group["eps"] == 1e-6 for group in groups.values())
    assert groups["policy"]["weight_decay"] == 0.1 and groups["policy/no_decay"]["weight_decay"] == 0.0
    covered = sum(len(group["params"]) for group in groups.values())
    assert covered == len([*trainer.policy.parameters(), *trainer.value.parameters()])
