"""Options of what is trained and how fast: learning rates, the value model's own ways, shared layers."""

import copy
import math
from dataclasses import replace

import pytest
import tiny
import torch

from rlhf_cli.models import forward
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer


def steps(made, count: int):
    return [made.step(tiny.prompts(seed=step)) for step in range(count)]


def both(made):
    return tiny.weights(made.policy), tiny.weights(made.value)


# Learning rates


def test_value_learning_rate_moves_the_value_model_alone():
    for policy_rate, value_rate in ((0.0, 1e-2), (1e-2, 0.0)):
        made = tiny.trainer(learning_rate=policy_rate, value_learning_rate=value_rate)
        before = both(made)
        stats = steps(made, 1)[0]
        assert torch.equal(before[0], tiny.weights(made.policy)) is (policy_rate == 0.0)
        assert torch.equal(before[1], tiny.weights(made.value)) is (value_rate == 0.0)
        assert (stats["lr"], stats["value/lr"]) == (policy_rate, value_rate)
    assert steps(tiny.trainer(), 1)[0]["value/lr"] == 1e-2


def test_value_learning_rate_by_the_size_of_adams_first_step():
    """AdamW's first step is the learning rate, whatever the gradient."""
    moves = {}
    for rate in (1e-3, 4e-3):
        made, judged = tiny.judged(value_learning_rate=rate, learning_rate=1e-4, num_ppo_epochs=1, adam_epsilon=1e-12)
        before = both(made)
        made.update(judged)
        moves[rate] = [(after - start).abs().max().item() for after, start in zip(both(made), before, strict=True)]
    assert moves[1e-3] == pytest.approx([1e-4, 1e-3], rel=1e-2)
    assert moves[4e-3] == pytest.approx([1e-4, 4e-3], rel=1e-2)


PEAK, UPDATES, WARM, VALUE_WARM = 1e-3, 10, 2, 5


def decay(name: str, k: int, warm: int) -> float:
    """The share of the peak at update k, as transformers documents each schedule."""
    if name == "constant":
        return 1.0
    if k < warm:
        return k / warm
    left = (UPDATES - k) / (UPDATES - warm)
    half_wave = 0.5 * (1 + math.cos(math.pi * (1 - left)))
    return {
        "linear": left,
        "cosine": half_wave,
        "constant_with_warmup": 1.0,
        "polynomial": left + 1e-7 / PEAK * (1 - left),  # power 1, down to 1e-7
        "inverse_sqrt": math.sqrt(warm / k) if k else 1.0,
        "cosine_with_min_lr": 0.1 + 0.9 * half_wave,
    }[name]


@pytest.mark.parametrize(
    "name",
    ["linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt", "cosine_with_min_lr"],
)
def test_every_lr_scheduler_type_with_a_value_warmup_of_its_own(name):
    warm = {} if name == "constant" else {"warmup_steps": WARM, "value_warmup_steps": VALUE_WARM}
    made = tiny.trainer(total_episodes=80, learning_rate=PEAK, lr_scheduler_type=name, num_ppo_epochs=1, **warm)
    judged = made.make_experience(tiny.rollout())
    seen = [made.update(judged) for _ in range(UPDATES)]
    assert [s["lr"] for s in seen] == pytest.approx([PEAK * decay(name, k, WARM) for k in range(UPDATES)], abs=1e-12)
    assert [s["value/lr"] for s in seen] == pytest.approx(
        [PEAK * decay(name, k, VALUE_WARM) for k in range(UPDATES)], abs=1e-12
    )


def test_value_warmup_steps_none_is_the_policys_and_zero_is_none():
    for value_warm, first in ((None, 0.0), (0, PEAK)):
        made = tiny.trainer(
            learning_rate=PEAK, lr_scheduler_type="linear", warmup_ratio=0.5, value_warmup_steps=value_warm
        )
        stats = steps(made, 1)[0]
        assert (stats["lr"], stats["value/lr"]) == (0.0, first)


@pytest.mark.parametrize("rate", [0.0, 1e-8])
@pytest.mark.parametrize("name", ["linear", "polynomial", "cosine_with_min_lr"])
def test_a_tiny_learning_rate_is_taken_as_it_is(name, rate):
    """transformers' polynomial schedule ends at 1e-7 and refuses to start below it."""
    made = tiny.trainer(learning_rate=rate, lr_scheduler_type=name)
    rates = [stats["lr"] for stats in steps(made, 2)]
    assert rates[0] == rate and 0 <= rates[1] <= rate


# The value model trained alone first


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("loss", [{}, {"kl_in": "loss", "kl_estimator": "full", "entropy_coef": 0.1}])
def test_value_only_updates_hold_the_policy_bit_by_bit(head, loss):
    made = tiny.trainer(value_only_updates=2, weight_decay=0.1, head=head, **loss)
    start = both(made)
    for step in range(2):
        before = both(made)
        stats = made.step(tiny.prompts(seed=step))
        assert torch.equal(start[0], tiny.weights(made.policy)) and stats["objective/kl"] == 0.0
        assert not torch.equal(before[1], tiny.weights(made.value)) and stats["policy/grad_norm"] == 0.0
        assert stats["policy/first_ratio_error"] == 0.0 and stats["val/ratio"] == 1.0
    made.step(tiny.prompts(seed=2))
    assert not torch.equal(start[0], tiny.weights(made.policy)), "then the policy moves"


def test_value_only_updates_leave_ptx_for_later():
    made = tiny.trainer(value_only_updates=1, ptx_coef=1.0, ptx=[([5], [6, 2])])
    before = tiny.weights(made.policy)
    assert "loss/ptx_avg" not in steps(made, 1)[0] and torch.equal(before, tiny.weights(made.policy))
    assert "loss/ptx_avg" in made.step(tiny.prompts(seed=1))


# A value head on the policy


def count_forwards(made) -> dict[str, int]:
    """Forward passes of policy, reference and value model from now on."""
    calls = dict.fromkeys(("policy", "ref", "value"), 0)
    for name in calls:

        def note(*_, name=name):
            calls[name] += 1

        getattr(made, name).register_forward_pre_hook(note)
    return calls


def test_a_value_head_costs_no_forward_pass_of_its_own():
    made, rows = tiny.trainer(head=True, num_ppo_epochs=3, micro_batch_tokens=12), tiny.rollout()
    parts = len(made._make_minibatches(rows, 0)[0])
    assert parts > 1
    calls = count_forwards(made)
    judged = made.make_experience(rows, scores=torch.tensor(tiny.SCORES))
    assert calls == {"policy": parts, "ref": parts, "value": parts}
    made.update(judged)
    assert calls == {"policy": 4 * parts, "ref": parts, "value": 4 * parts}
    assert [tuple(p.shape) for p in made.value.parameters()] == [(1, 32)], "one row of weights, and no copy of a model"


def test_a_value_head_starts_at_zero_and_learns():
    made = tiny.trainer(head=True)
    judged = made.make_experience(tiny.rollout(), scores=torch.tensor(tiny.SCORES))
    assert (judged.values == 0).all()
    first = made.update(judged)
    assert first["policy/first_ratio_error"] == 0.0 and first["val/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    later = [made.update(made.make_experience(tiny.rollout(), scores=torch.tensor(tiny.SCORES))) for _ in range(10)]
    assert later[-1]["loss/value_avg"] < 0.5 * first["loss/value_avg"]


def test_a_value_head_reads_what_the_output_head_reads():
    """Values by hand: the last hidden state before each response token, times the head."""
    made = tiny.trainer(head=True)
    torch.nn.init.normal_(made.value.score.weight)
    judged = made.make_experience(tiny.rollout(), scores=torch.zeros(4))
    for row, (query, response) in enumerate(zip(tiny.QUERIES, tiny.RESPONSES, strict=True)):
        with torch.no_grad():
            hidden = made.policy.model(input_ids=torch.tensor([query + response])).last_hidden_state[0]
        wanted = hidden[len(query) - 1 : -1] @ made.value.score.weight[0]
        torch.testing.assert_close(judged.values[row, : len(response)], wanted, atol=1e-5, rtol=1e-5)


def test_the_value_gradient_reaches_the_trunk():
    """From the second step on: a head of zeros hands nothing back."""
    made, judged = tiny.judged(head=True, vf_coef=1.0, max_grad_norm=1e9)
    flat = replace(judged, advantages=torch.zeros_like(judged.advantages))  # the policy itself has nothing to learn
    trunk = {}
    for scale in (0.0, 1.0):
        made.value.score.weight.data.fill_(scale)
        tiny.gradient(made, flat)
        trunk[scale] = torch.cat([p.grad.reshape(-1) for p in made.policy.model.parameters()]).norm().item()
        assert made.value.score.weight.grad.norm() > 1e-3
    assert trunk[0.0] == 0.0 and trunk[1.0] > 1e-3


def test_a_value_head_resumes_to_the_straight_run():
    straight = tiny.trainer(head=True)
    steps(straight, 2)
    resumed = tiny.trainer(head=True)
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    for made in (straight, resumed):
        made.step(tiny.prompts(seed=2))
    assert all(torch.equal(a, b) for a, b in zip(both(straight), both(resumed), strict=True))
    assert resumed.value.score.weight.abs().max() > 0


def test_a_value_head_with_gradient_checkpointing_is_the_same_run():
    runs = []
    for on in (False, True):
        made, judged = tiny.judged(head=True, gradient_checkpointing=on)
        assert made.update(judged)["policy/first_ratio_error"] == 0.0
        runs.append(both(made))
    for plain, recomputed in zip(*runs, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=0, atol=1e-6)


# Shared layers


def unlike(family: str, layers: int, **changes):
    """A trainer of a model of three layers and its reference, an equal copy."""
    chosen = tiny.settings(num_shared_layers=layers, **changes)
    depth = {"n_layer": 3} if family == "gpt2" else {"num_hidden_layers": 3}
    policy, ref = tiny.causal(family, **depth), tiny.causal(family, **depth)
    alone = tiny.causal(family, **depth)
    engine = HFEngine(policy, tiny.EOS, tiny.PAD, chosen.temperature)
    reward = {"r": lambda rollout: rollout.response_lengths.float()}
    return PPOTrainer(policy, ref, tiny.scorer(family), reward, engine, chosen), alone


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_num_shared_layers_freezes_and_shares_and_the_rest_trains(family):
    made, alone = unlike(family, 2)
    micro = tiny.rollout().micro_batch(torch.arange(4))
    wanted = forward.response_logits(alone, micro)
    found = forward.response_logits(made.ref, micro)  # not to the last bit: kernels differ by the alignment of memory
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5), "sharing changed the reference"
    ours, theirs = (dict(model.named_parameters()) for model in (made.policy, made.ref))
    shared = {name for name in ours if ours[name] is theirs[name]}
    assert shared == {name for name in ours if not ours[name].requires_grad}
    assert any(".0." in name for name in shared) and any(".1." in name for name in shared)
    assert any("embed" in name or "wte" in name for name in shared) and not any(".2." in name for name in shared)
    before = {name: p.detach().clone() for name, p in ours.items()}
    first, *_ = steps(made, 3)
    assert first["objective/kl"] == 0.0 and first["policy/first_ratio_error"] == 0.0
    for name, parameter in made.policy.named_parameters():
        assert torch.equal(parameter, before[name]) is (name in shared), name
    assert torch.allclose(forward.response_logits(made.ref, micro), found, rtol=0, atol=1e-5), (
        "training changed the reference"
    )


def test_num_shared_layers_with_tied_embeddings_ties_the_references_head_too():
    policy, ref, alone = (tiny.causal(tie_word_embeddings=True) for _ in range(3))
    chosen = tiny.settings(num_shared_layers=1)
    engine = HFEngine(policy, tiny.EOS, tiny.PAD, chosen.temperature)
    made = PPOTrainer(policy, ref, tiny.scorer(), {"r": lambda rollout: rollout.response_lengths}, engine, chosen)
    assert ref.lm_head.weight is ref.model.embed_tokens.weight is policy.lm_head.weight
    steps(made, 2)
    micro = tiny.rollout().micro_batch(torch.arange(4))
    found, wanted = forward.response_logits(ref, micro), forward.response_logits(alone, micro)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layers", [3, 4])
def test_num_shared_layers_leaves_a_layer_to_train(layers):
    with pytest.raises(ValueError, match=f"num_shared_layers {layers} of 3 layers leaves none to train"):
        unlike("llama", layers)


def test_num_shared_layers_of_models_that_differ_would_change_the_reference():
    with pytest.raises(ValueError, match="differ"):
        tiny.trainer(policy_seed=3, num_shared_layers=1)


def test_num_shared_layers_resumes_to_the_straight_run():
    changes = {"num_shared_layers": 1, "kl_in": "loss", "kl_estimator": "full", "gradient_checkpointing": True}
    straight, resumed = tiny.trainer(**changes), tiny.trainer(**changes)
    steps(straight, 1)
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    for made in (straight, resumed):
        made.step(tiny.prompts(seed=2))
    assert torch.equal(tiny.weights(straight.policy), tiny.weights(resumed.policy))
    assert torch.equal(tiny.weights(straight.ref), tiny.weights(resumed.ref))


def test_the_policys_schedule_begins_when_it_learns():
    """Six updates, two of them for the value model alone: warm-up and decay of the policy are over the other four."""
    trainer = tiny.trainer(
        total_episodes=48, value_only_updates=2, warmup_steps=1, lr_scheduler_type="linear", learning_rate=3e-3
    )
    seen = [trainer.step(tiny.prompts(8, seed=step)) for step in range(6)]
    assert [row["lr"] for row in seen] == pytest.approx([0, 0, 0, 3e-3, 2e-3, 1e-3])
    assert [row["value/lr"] for row in seen] == pytest.approx([0, 3e-3, 2.4e-3, 1.8e-3, 1.2e-3, 0.6e-3])


def test_the_kl_controller_waits_for_the_policy():
    trainer = tiny.trainer(total_episodes=32, value_only_updates=2, adap_kl_ctrl=True, horizon=100)
    coefs = [trainer.step(tiny.prompts(8, seed=step))["objective/kl_coef"] for step in range(4)]
    assert coefs[0] == coefs[1] == coefs[2] == 0.05 and coefs[3] == pytest.approx(0.05 * (1 - 0.2 * 8 / 100))


def test_responses_are_drawn_under_the_autocast_that_log_probs_are_read_under():
    trainer, seen = tiny.trainer(bf16=True), []
    trainer.policy.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    trainer.generate(tiny.prompts())
    assert seen and all(seen)
    with pytest.raises(AssertionError, match="bf16"):
        tiny.PPOTrainer(
            trainer.policy, trainer.ref, trainer.value, {}, tiny.HFEngine(trainer.policy, 2, 0, 0.7), trainer.settings
        )
