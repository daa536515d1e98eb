"""Every key of `ppo:` has an effect: by direction, or by the exact value; and writing out a default changes no bit."""

import math
import re
from dataclasses import replace
from functools import wraps
from pathlib import Path

import pytest
import tiny
import torch
from pydantic import ValidationError

from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.models import forward
from rlhf_cli.models.batch import micro_batches
from rlhf_cli.ppo import losses
from rlhf_cli.ppo.rollout import HFEngine


def test_every_key_is_covered_here():
    """A new key without a line in this file or its neighbours fails; fsdp takes several processes."""
    here = Path(__file__).parent
    paths = [*here.glob("test_ppo_options*.py"), here / "test_group_fsdp.py"]
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    assert [key for key in PPOSettings.model_fields if not re.search(rf"\b{key}\b", text)] == []


@pytest.fixture(scope="module")
def plain_step():
    return tiny.one_step()


@pytest.mark.parametrize("key", sorted(set(PPOSettings.model_fields) - {"total_episodes", "num_train_epochs"}))
def test_writing_out_a_default_leaves_the_run_bit_identical(key, plain_step):
    default = PPOSettings(total_episodes=8).model_dump()[key]
    base = {k: v for k, v in tiny.settings().model_dump().items() if k == key}
    changes = {key: base[key] if base[key] != default else default}
    plain, said = plain_step, tiny.one_step(**changes)
    assert torch.equal(tiny.weights(plain[0].policy), tiny.weights(said[0].policy)) and plain[1] == said[1]


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


def test_num_samples_per_prompt_gives_neighbours_of_their_own():
    trainer = tiny.trainer(num_samples_per_prompt=4)
    found = trainer.generate(tiny.prompts(2))
    assert len(found) == 8 and [found.prompt_tokens(row) for row in range(4)] == [found.prompt_tokens(0)] * 4
    assert len({tuple(found.response_tokens(row)) for row in range(4)}) > 1


def test_micro_batch_tokens_bounds_the_forward_passes(monkeypatch):
    seen, body = [], type(tiny.causal().model)
    plain = body.forward

    @wraps(plain)
    def spy(model, input_ids, use_cache=False, **others):
        seen.extend([] if use_cache else [input_ids.shape])  # with a cache it generates
        return plain(model, input_ids=input_ids, use_cache=use_cache, **others)

    monkeypatch.setattr(body, "forward", spy)
    for tokens, packing in (("auto", False), (12, False), (12, True)):
        seen.clear()
        trainer = tiny.trainer(micro_batch_tokens=tokens, num_ppo_epochs=2, packing=packing, response_length=3)
        seen.clear()  # packing is tried at the start
        judged = trainer.make_experience(trainer.generate(tiny.prompts()), torch.zeros(8))
        trainer.update(judged)
        plan = judged.minibatches[0]
        assert len(seen) == 7 * len(plan), "judge: policy, value and reference; two models in two epochs"
        assert all(len(rows) <= 4 for rows in plan)
        assert all(rows * width <= 12 or rows == 1 for rows, width in seen) is (tokens == 12)
        if packing:
            assert {rows for rows, _ in seen} == {1} and max(width for _, width in seen) <= 12
            assert max(len(rows) for rows in plan) > 1


def test_local_rollout_forward_batch_size_bounds_generation():
    engine, rows = HFEngine(tiny.causal(), tiny.EOS, tiny.PAD, batch_size=3), []
    plain = engine._generate_ids
    engine._generate_ids = lambda prompts: (rows.append(len(prompts)), plain(prompts))[1]
    engine.generate(replace(tiny.prompts(8), seeds=tuple(range(8)), response_length=4))
    assert rows == [3, 3, 2]
    assert [len(batch) for batch in micro_batches(torch.ones(8, dtype=torch.int64), torch.arange(8), max_rows=3)] == [
        3,
        3,
        2,
    ]
    assert (
        PPOSettings(total_episodes=1, local_rollout_forward_batch_size=3).local_rollout_forward_batch_size == 3
    )  # stages.ppo hands it on


def test_num_sample_generations_is_held_by_the_stage_test():
    """tests/test_stage_ppo.py counts the tables in samples.jsonl."""
    assert PPOSettings(total_episodes=1).num_sample_generations == 10


# Rollouts


def test_response_length_bounds_the_response():
    assert tiny.trainer(response_length=5, stop_token="none").generate(tiny.prompts()).response_mask.shape == (8, 5)


def test_response_length_range_is_drawn_for_each_update():
    trainer = tiny.trainer(response_length={"min": 2, "max": 6}, stop_token="none", learning_rate=0.0)
    widths = []
    for step in range(12):
        widths.append(trainer.generate(tiny.prompts()).response_mask.shape[1])
        trainer.updates = step + 1
    assert set(widths) <= set(range(2, 7)) and len(set(widths)) > 2


def test_temperature_scales_the_log_probs_too():
    _, experience = tiny.judged(temperature=0.5)
    model, ids = tiny.causal(seed=3), torch.tensor([tiny.QUERIES[0] + tiny.RESPONSES[0]])
    wanted = torch.log_softmax(model(input_ids=ids).logits[0].detach() / 0.5, -1)
    torch.testing.assert_close(experience.logprobs[0, 0], wanted[1, 3], atol=1e-5, rtol=1e-5)


def test_stop_token_and_stop_token_id():
    assert tiny.trainer(stop_token="none").generate(tiny.prompts()).response_mask.all()
    chosen = tiny.settings(stop_token_id=5)
    assert chosen.stop_token_id == 5  # stages.ppo hands it to the engine
    asked = replace(tiny.prompts(64), seeds=tuple(range(64)), response_length=20)
    found = HFEngine(tiny.causal(), 5, tiny.PAD).generate(asked)
    assert any(found.response_tokens(row)[-1] == 5 for row in range(64))


def test_missing_eos_penalty_by_value():
    plain, charged = (tiny.trainer(missing_eos_penalty=p).make_experience(tiny.rollout()).scores for p in (0.0, 0.75))
    assert (plain - charged).tolist() == pytest.approx([0, 0, 0.75, 0])


# Rewards


def test_kl_coef_by_value():
    _, free = tiny.judged(kl_coef=0.0)
    _, charged = tiny.judged(kl_coef=0.5)
    mask = free.mask
    torch.testing.assert_close(
        free.rewards[mask] - charged.rewards[mask],
        0.5 * (free.logprobs - free.ref_logprobs)[mask],
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs", "full"])
def test_kl_estimator_in_the_reward(kind):
    trainer, experience = tiny.judged(kl_estimator=kind, kl_coef=1.0)
    mask = experience.mask
    if kind == "full":
        micro = experience.rollout.micro_batch(torch.arange(4))
        logp, ref = (
            torch.log_softmax(forward.response_logits(m, micro).detach() / 0.7, -1)
            for m in (trainer.policy, trainer.ref)
        )
        wanted = torch.zeros(mask.shape)
        wanted[micro.response_index] = (logp.exp() * (logp - ref)).sum(-1)
    else:
        r = experience.ref_logprobs - experience.logprobs
        wanted = {"k1": -r, "k2": r * r / 2, "k3": r.exp() - 1 - r, "abs": r.abs()}[kind]
    torch.testing.assert_close(experience.kl[mask], wanted[mask], atol=1e-5, rtol=1e-5)
    placed = losses.compute_token_rewards(experience.scores, experience.kl, mask)
    torch.testing.assert_close(experience.rewards, placed)


@pytest.mark.parametrize("kind", ["full", "k2", "k3"])
def test_kl_in_the_loss_leaves_the_rewards_alone_and_pulls_back(kind):
    _, experience = tiny.judged(kl_in="loss", kl_estimator=kind, kl_coef=1.0)
    assert experience.rewards.sum(1).tolist() == pytest.approx([1.0, -1.0, 0.5, 2.0])
    distance = {}
    for coef in (0.0, 5.0):
        trainer, experience = tiny.judged(
            kl_in="loss", kl_estimator=kind, kl_coef=coef, learning_rate=3e-3, num_ppo_epochs=8
        )
        trainer.update(experience)
        after = trainer.make_experience(tiny.rollout(), scores=torch.zeros(4))
        distance[coef] = losses.masked_mean((after.logprobs - after.ref_logprobs) ** 2, after.mask).item()
    assert distance[5.0] < 0.8 * distance[0.0]
    assert tiny.one_step(kl_in="loss", kl_estimator=kind)[1]["objective/non_score_reward"] == 0.0


def test_whiten_rewards_gives_unit_variance_and_keeps_the_mean():
    (_, plain), (_, white) = tiny.judged(), tiny.judged(whiten_rewards=True)
    mask = plain.mask
    assert losses.masked_var(white.rewards, mask).item() == pytest.approx(1.0, abs=1e-4)
    assert losses.masked_mean(white.rewards, mask).item() == pytest.approx(
        losses.masked_mean(plain.rewards, mask).item(), abs=1e-5
    )


def test_advantage_norm_none_leaves_advantages_raw():
    (_, raw), (_, white) = tiny.judged(advantage_norm="none"), tiny.judged()
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
    (_, one), (_, other) = tiny.judged(gamma=0.5, lam=1.0, kl_coef=0.0), tiny.judged(gamma=1.0, lam=1.0, kl_coef=0.0)
    assert other.returns[1].tolist() == pytest.approx([-1.0] * 5, abs=1e-5)
    assert one.returns[1].tolist() == pytest.approx([-(0.5**4), -(0.5**3), -(0.5**2), -0.5, -1.0], abs=1e-5)
    _, zero = tiny.judged(lam=0.0, kl_coef=0.0)
    v = zero.values[1].tolist()
    assert zero.returns[1].tolist() == pytest.approx([v[1], v[2], v[3], v[4], -1.0], abs=1e-5)


# The optimizer


def test_max_grad_norm_is_applied():
    """With SGD the step is the clipped gradient itself."""
    trainer, experience = tiny.judged(max_grad_norm=1e-3, num_ppo_epochs=1)
    trainer.optimizer = torch.optim.SGD([*trainer.policy.parameters(), *trainer.value.parameters()], lr=1.0)
    trainer.scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer, 1.0)
    before = tiny.weights(trainer.policy), tiny.weights(trainer.value)
    stats = trainer.update(experience)
    for moved, start, name in ((trainer.policy, before[0], "policy"), (trainer.value, before[1], "value")):
        assert stats[f"{name}/grad_norm"] > 1e-3
        assert (tiny.weights(moved) - start).norm().item() == pytest.approx(1e-3, rel=1e-2)


def test_gradient_checkpointing_recomputes_and_changes_nothing():
    calls: list[int] = []
    trainer = tiny.trainer(policy_seed=3, gradient_checkpointing=True)
    for layer in trainer.policy.model.layers:
        inner = layer._gradient_checkpointing_func
        layer._gradient_checkpointing_func = lambda *a, inner=inner, **k: (calls.append(1), inner(*a, **k))[1]
    experience = trainer.make_experience(tiny.rollout(), scores=torch.tensor([1.0, -1.0, 0.5, 2.0]))
    assert not calls, "nothing to recompute without gradients"
    trainer.update(experience)
    assert calls
    torch.testing.assert_close(tiny.weights(trainer.policy), tiny.weights(tiny.one_step()[0].policy), rtol=0, atol=1e-6)


def test_bf16_changes_the_numbers_a_little_and_keeps_the_weights_float32():
    (_, a), (half, b) = tiny.one_step(), tiny.one_step(bf16=True)
    assert all(p.dtype == torch.float32 for p in half.policy.parameters())
    assert a["objective/entropy"] != b["objective/entropy"]
    assert b["objective/entropy"] == pytest.approx(a["objective/entropy"], rel=0.05)


def test_learning_rate_scheduler_and_warmup():
    def rates(**changes):
        trainer = tiny.trainer(total_episodes=80, learning_rate=1.0e-3, num_ppo_epochs=1, **changes)
        experience = trainer.make_experience(tiny.rollout())
        return [trainer.update(experience)["lr"] for _ in range(10)]

    assert rates(lr_scheduler_type="constant") == [1e-3] * 10
    assert rates(lr_scheduler_type="linear") == pytest.approx([1e-3 * (1 - k / 10) for k in range(10)])
    assert rates(lr_scheduler_type="cosine") == pytest.approx(
        [5e-4 * (1 + math.cos(math.pi * k / 10)) for k in range(10)]
    )
    assert rates(lr_scheduler_type="constant_with_warmup", warmup_steps=4)[:5] == pytest.approx(
        [0, 2.5e-4, 5e-4, 7.5e-4, 1e-3]
    )
    assert rates(lr_scheduler_type="constant_with_warmup", warmup_ratio=0.4)[:5] == pytest.approx(
        [0, 2.5e-4, 5e-4, 7.5e-4, 1e-3]
    )
    assert rates(lr_scheduler_type="cosine_with_min_lr")[-1] > 1e-4


def test_adam_options_reach_the_optimizer():
    trainer = tiny.trainer(adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6, weight_decay=0.1)
    groups = {group["name"]: group for group in trainer.optimizer.param_groups}
    assert set(groups) == {"policy", "policy/no_decay", "value", "value/no_decay"}
    assert all(group["betas"] == (0.8, 0.9) and group["eps"] == 1e-6 for group in groups.values())
    assert groups["policy"]["weight_decay"] == 0.1 and groups["policy/no_decay"]["weight_decay"] == 0.0
    covered = sum(len(group["params"]) for group in groups.values())
    assert covered == len([*trainer.policy.parameters(), *trainer.value.parameters()])


# What is refused


@pytest.mark.parametrize(
    "changes,code,says",
    [
        ({"num_mini_batches": 3}, "C12", "16 x 4 = 64 episodes per update cannot be divided by num_mini_batches 3"),
        ({"num_samples_per_prompt": 5}, "C12", "num_samples_per_prompt 5"),
        ({"num_train_epochs": 1.0}, "C17", "one of total_episodes and num_train_epochs"),
        ({"stop_token": "none", "stop_token_id": 3}, "C17", "cannot be combined"),
        ({"warmup_steps": 1, "warmup_ratio": 0.1}, "C17", "cannot be combined"),
        ({"kl_in": "loss"}, "C17", "k1 in the loss"),
        ({"fp16": True}, "C17", "fp16"),
        ({"response_length": {"min": 5, "max": 3}}, "C06", "min is greater than max"),
    ],
)
def test_contradictions_are_refused(changes, code, says):
    with pytest.raises(ValidationError) as caught:
        PPOSettings(total_episodes=64, **changes)
    error = next(error for error in caught.value.errors() if error["type"] == code)
    assert says in error["msg"] and error["ctx"]["hint"]


@pytest.mark.parametrize(
    "changes",
    [
        {"kl_coef": -1},
        {"gamma": 1.5},
        {"temperature": 0},
        {"cliprange": 1.0},
        {"kl_coef": float("nan")},
        {"kl_coef": True},
        {"num_ppo_epochs": "4"},
        {"top_k": 5},
    ],
)
def test_bounds_and_types(changes):
    with pytest.raises(ValidationError):
        PPOSettings(total_episodes=64, **changes)
