"""Guarantees of every PPO run (docs/results/guarantees.md lists them with all their tests)."""

from dataclasses import replace

import pytest
import tiny
import torch

from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.models.batch import Rollout
from rlhf_cli.ppo import losses
from rlhf_cli.ppo.experience import estimate_advantages, kl_loss_coef
from rlhf_cli.ppo.forward_backward import policy_loss_and_metrics
from rlhf_cli.rewards.model import ModelReward

# 1. The first step.

EVERYTHING = {
    "kl_in": "loss",
    "kl_estimator": "full",
    "entropy_coef": 0.1,
    "ptx_coef": 0.5,
    "ptx": [([5, 6], [7, 8, 2]), ([9], [10, 2])],
    "cliprange_high": 0.3,
    "dual_clip": 3.0,
    "head": True,
    "use_score_scaling": True,
    "use_score_norm": True,
    "score_clip": 2.0,
    "overlong_penalty": {"tokens": 4, "factor": 0.5},
    "adap_kl_ctrl": True,
    "early_stopping": True,
    "whiten_rewards": True,
    "value_learning_rate": 3e-3,
}
OPTIONS = pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["defaults", "everything"])
PRECISION = pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-5), (torch.float64, 1e-12)])


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / one.norm())


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {"num_mini_batches": 2},
        {"logits_at_a_time": 2},
        {"packing": False},
        {"micro_batch_tokens": 16},
        {"gradient_checkpointing": True},
        {"head": True},
        {"head": True, "gradient_checkpointing": True, "micro_batch_tokens": 16},
        {"kl_in": "loss", "kl_estimator": "full"},
        {"kl_in": "both", "kl_estimator": "full"},
        {"kl_in": "loss", "kl_estimator": "k2"},
        {"kl_in": "loss", "kl_estimator": "k3", "num_mini_batches": 4},
        {"num_shared_layers": 1},
        {"num_samples_per_prompt": 2},
        {"stop_token": "none", "temperature": 1.3},
        {"response_length": {"min": 2, "max": 6}},
        {"value_only_updates": 1},
        EVERYTHING,
        *({"family": family} for family in tiny.FAMILIES),
    ],
    ids=lambda changes: "everything" if len(changes) > 4 else "-".join(map(str, changes.values())),
)
def test_the_first_step_is_exact_with_every_option(changes):
    trainer = tiny.trainer(**{"num_ppo_epochs": 1, **changes})
    stats = trainer.step(tiny.prompts(8 // trainer.settings.num_samples_per_prompt))
    assert stats["policy/first_ratio_error"] == 0.0
    assert stats["objective/kl"] == stats["objective/kl_k1"] == stats["objective/non_score_reward"] == 0.0
    if trainer.settings.num_mini_batches == 1:
        assert stats["val/ratio"] == 1.0 and stats["policy/approxkl_avg"] == 0.0
        assert stats["policy/clipfrac_avg"] == stats["val/clipfrac_avg"] == 0.0
    later = trainer.step(tiny.prompts(8 // trainer.settings.num_samples_per_prompt, seed=1))
    assert later["policy/first_ratio_error"] == 0.0


@pytest.mark.full
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_log_probs_are_those_of_a_left_padded_forward_with_a_mask(family):
    """As another engine would read them: all rows together, left-padded, with attention mask and positions."""
    trainer = tiny.trainer(family=family, policy_seed=3)
    rollout = trainer.generate(tiny.prompts())
    experience = trainer.make_experience(rollout, scores=torch.zeros(8))
    mask = rollout.mask.long()
    positions = {} if family == "opt" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        logits = trainer.policy(input_ids=rollout.ids, attention_mask=mask, **positions).logits / 0.7
    width = rollout.prompt_width
    read = torch.log_softmax(logits, -1)[:, width - 1 : -1].gather(-1, rollout.ids[:, width:, None])[..., 0]
    torch.testing.assert_close(experience.logprobs[experience.mask], read[experience.mask], atol=1e-5, rtol=1e-5)


# 2. Scores and the EOS.


def test_the_eos_is_trained_in_step_with_its_advantage():
    """An advantage at the EOS alone: up with it, up goes the EOS; down with it, down."""
    moves = {}
    for sign in (1.0, -1.0):
        trainer, experience = tiny.trainer_and_experience(num_ppo_epochs=1, vf_coef=0.0, learning_rate=1e-3)
        advantages = torch.zeros_like(experience.advantages)
        advantages[0, 1] = sign  # row 0 is [3, EOS]
        trainer.update(replace(experience, advantages=advantages))
        after = trainer.make_experience(tiny.rollout(), scores=torch.zeros(4))
        moves[sign] = (after.logprobs - experience.logprobs)[0, 1].item()
    assert moves[1.0] > 1e-3 and moves[-1.0] < -1e-3


def test_the_reward_model_is_fed_the_rollouts_own_ids():
    """Prompt and response with its EOS, flush left, nothing after; and the score is read at that last token."""
    model, seen = tiny.scorer(), []
    source = ModelReward(model, max_rows=1)
    model.model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    scores = source(tiny.rollout())
    rows = [query + response for query, response in zip(tiny.QUERIES, tiny.RESPONSES, strict=True)]
    assert sorted(ids[0].tolist() for ids in seen) == sorted(rows)
    for row, ids in enumerate(rows):
        with torch.no_grad():
            expected = model.score(model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1])
        assert scores[row].item() == pytest.approx(expected.item(), abs=1e-5)


# 3. Means over tokens.


@pytest.mark.full
@OPTIONS
@PRECISION
def test_gradient_is_the_same_for_any_micro_batching(options, dtype, limit):
    grads = []
    for rows, changes in ((8, {}), (8, {"gradient_checkpointing": True}), (1, {}), (4, {"micro_batch_tokens": 14})):
        trainer, experience = tiny.trainer_and_experience(
            **options, max_grad_norm=1e9, dtype=dtype, **tiny.batch(rows), **changes
        )
        if options:
            torch.nn.init.ones_(trainer.value.score.weight)
        weights = torch.linspace(0.5, 2.0, 20).reshape(4, 5) if options else None  # of rollout_correction
        experience = replace(experience, values=experience.values + 0.1, weights=weights)
        grads.append(tiny.gradient(trainer, experience))
    assert all(difference(grads[0], other) <= limit for other in grads[1:])


@PRECISION
def test_gradient_is_the_same_for_any_padding(dtype, limit):
    """Three more columns on either side; only the sums of whitening run over another shape."""
    rows, columns, pad = tiny.rollout(), torch.full((4, 3), 7), torch.nn.functional.pad
    wide = Rollout(
        torch.cat([columns, rows.ids, columns], 1), pad(rows.mask, (3, 3)), pad(rows.response_mask, (0, 3)), rows.ended
    )
    grads = []
    for rollout in (rows, wide):
        trainer = tiny.trainer(policy_seed=3, dtype=dtype, max_grad_norm=1e9)
        grads.append(tiny.gradient(trainer, trainer.make_experience(rollout, scores=torch.tensor(tiny.SCORES))))
    assert difference(*grads) <= limit


@pytest.mark.parametrize("kind,limit", [("SGD", 1e-6), ("AdamW", 1e-3)])
def test_weights_after_a_step_do_not_depend_on_micro_batches(kind, limit):
    rate, weights = 1e-2, []
    for rows in (8, 1):
        trainer, experience = tiny.trainer_and_experience(num_ppo_epochs=1, learning_rate=rate, **tiny.batch(rows))
        if kind == "SGD":
            trainer.optimizer = torch.optim.SGD([*trainer.policy.parameters(), *trainer.value.parameters()], lr=rate)
            trainer.scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer, 1.0)
        trainer.update(experience)
        weights.append(torch.cat([tiny.weights(trainer.policy), tiny.weights(trainer.value)]))
    assert (weights[0] - weights[1]).abs().max() <= limit


# 4. KL on three tokens, through the calls of a run.

PI, REF = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
OFF = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
EACH = Rollout.from_lists([[1]] * 3, [[0], [1], [2]])  # one response of one token for each token of the vocabulary
KL = float((PI * (PI / REF).log()).sum())
SLOPE = (PI * ((PI / REF).log() - KL)).tolist()  # of KL(pi || ref) by the logits of pi, on paper


def expected_gradient(experience, sampled, ref_logits=None, temperature=1.0, **changes) -> list[float]:
    """Of the policy loss by the logits of pi, for tokens sampled from `sampled`."""
    settings = PPOSettings(total_episodes=64, temperature=temperature, **changes)
    logits = (temperature * PI.log()).requires_grad_(True)
    tokens = experience.token_batch(EACH.micro_batch(torch.arange(3)))
    loss, _ = policy_loss_and_metrics(tokens, logits.expand(3, 3), ref_logits, experience.kl_loss_coef, settings)
    return torch.autograd.grad((sampled * loss).sum(), logits)[0].tolist()


def column(probabilities):
    return probabilities.log()[:, None]


@pytest.mark.parametrize("kind,exact", [("k1", True), ("k2", False), ("k3", False), ("abs", False)])
def test_kl_in_the_reward_through_the_whole_chain(kind, exact):
    """Penalty, reward, GAE, loss: the policy gradient of -coef x KL, only for k1."""
    kl = losses.token_kl(column(PI), column(REF), kind)
    rewards = losses.compute_token_rewards(torch.zeros(3).double(), 0.5 * kl, EACH.response_mask)
    advantages, _ = losses.gae(rewards, torch.zeros_like(rewards), EACH.response_mask, 1.0, 0.95)
    experience = tiny.experience(EACH, logprobs=column(PI), ref_logprobs=column(REF), advantages=advantages)
    found = expected_gradient(experience, PI)
    assert (found == pytest.approx([0.5 * slope for slope in SLOPE], abs=1e-9)) is exact
    assert exact or (torch.tensor(found) - 0.5 * torch.tensor(SLOPE)).abs().max() > 0.05


@pytest.mark.parametrize("kind", ["full", "k2", "k3"])
@pytest.mark.parametrize("sampled", [PI, OFF], ids=["on policy", "off policy"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_kl_in_the_loss_through_the_whole_chain(kind, sampled, temperature):
    """The KL's own gradient, also for samples of the policy as it was when the rollout was made."""
    experience = tiny.experience(EACH, 0.5, logprobs=column(sampled), ref_logprobs=column(REF))
    ref_logits = (temperature * REF.log()).expand(3, 3) if kind == "full" else None
    found = expected_gradient(experience, sampled, ref_logits, temperature, kl_in="loss", kl_estimator=kind)
    assert found == pytest.approx([0.5 * slope / temperature for slope in SLOPE], abs=1e-9)


PAIRS = Rollout.from_lists([[1]] * 9, [[first, second] for first in range(3) for second in range(3)])


@pytest.mark.parametrize("norm", ["batch", "none"])
@pytest.mark.parametrize("kl_in,exact", [("both", True), ("loss", False)])
def test_only_both_has_the_gradient_of_the_kl_of_whole_responses(kl_in, exact, norm):
    """Two tokens, all nine responses: score - kl_coef x KL. The loss alone ignores where a token leads."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 3, generator=draw).double().requires_grad_()  # of the first token, and after each
    ref_logp = torch.randn(4, 3, generator=draw).double().log_softmax(-1)
    scores = torch.randn(9, generator=draw).double()
    values = torch.randn(4, generator=draw).double()
    settings = PPOSettings(
        total_episodes=64, temperature=1.0, kl_coef=0.4, lam=1.0, kl_in=kl_in, kl_estimator="full", advantage_norm=norm
    )

    ids = PAIRS.ids[:, 1:]
    states = torch.stack([torch.zeros(9, dtype=torch.int64), 1 + ids[:, 0]], 1)  # rows of `logits`, (9, 2)
    row_logits = logits[states]
    row_ref_logp = ref_logp[states]
    logprobs = losses.token_logprobs(row_logits, ids, 1.0)
    ref_logprobs = losses.gather_logprobs(row_ref_logp, ids)

    probability = logprobs.sum(1).exp()
    kl_of_response = (logprobs - ref_logprobs).sum(1)
    objective = (probability * (scores - settings.kl_coef * kl_of_response)).sum()
    (wanted,) = torch.autograd.grad(-objective, logits, retain_graph=True)

    with torch.no_grad():
        kl = losses.exact_kl(row_logits, row_ref_logp, 1.0)
        penalty = settings.kl_coef * kl if settings.kl_in_reward else torch.zeros_like(kl)
        rewards = losses.compute_token_rewards(scores, penalty, PAIRS.response_mask)
        advantages, _, scale = estimate_advantages(PAIRS, rewards, values[states], settings)

    experience = tiny.experience(PAIRS, logprobs=logprobs.detach(), advantages=advantages)
    tokens = experience.token_batch(PAIRS.micro_batch(torch.arange(9)))
    coef = kl_loss_coef(settings.kl_coef, scale, settings)
    loss, _ = policy_loss_and_metrics(tokens, row_logits.flatten(0, 1), row_ref_logp.flatten(0, 1), coef, settings)
    loss_of_response = loss.view(9, 2).sum(1)
    (found,) = torch.autograd.grad((probability.detach() * loss_of_response).sum(), logits)
    assert torch.allclose(scale * found, wanted, atol=1e-9) is exact


# 5. What is frozen.


@pytest.mark.full
@OPTIONS
def test_nothing_frozen_moves(options):
    trainer = tiny.trainer(**options, num_shared_layers=1 if options else None, weight_decay=0.1)
    models = [trainer.ref, trainer.rewards["reward"].model, trainer.policy, trainer.value]
    before = list(map(tiny.weights, models))
    for step in range(3):
        trainer.step(tiny.prompts(seed=step))
    assert [torch.equal(old, tiny.weights(model)) for old, model in zip(before, models, strict=True)] == [1, 1, 0, 0]
    rates = {"learning_rate": 0.0, "value_learning_rate": 0.0, "weight_decay": 0.1}
    still = tiny.trainer(**{**options, **rates})
    before = tiny.weights(still.policy), tiny.weights(still.value)
    still.step(tiny.prompts())
    assert torch.equal(before[0], tiny.weights(still.policy)) and torch.equal(before[1], tiny.weights(still.value))


# 7. Response tokens only.


def test_junk_outside_the_responses_changes_no_bit():
    results = []
    for junk in (0.0, float("nan"), 1e30):
        trainer, experience = tiny.trainer_and_experience(
            ratio_threshold=None, kl_in="loss", kl_estimator="k3", entropy_coef=0.1
        )
        names = ("logprobs", "ref_logprobs", "values", "kl", "rewards", "advantages", "returns")
        spoilt = {name: torch.where(experience.mask, getattr(experience, name), junk) for name in names}
        stats = trainer.update(replace(experience, **spoilt))
        results.append((stats, tiny.weights(trainer.policy), tiny.weights(trainer.value)))
    for stats, policy, value in results[1:]:
        assert stats == results[0][0] and torch.equal(policy, results[0][1]) and torch.equal(value, results[0][2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e4])
def test_entropy_is_never_negative_however_sharp_the_logits(dtype, scale):
    logits = (scale * torch.randn(200, 50, generator=torch.Generator().manual_seed(0))).to(dtype)
    for temperature in (0.1, 0.7, 1.0):
        entropy = losses.entropy(losses.log_probs(logits, temperature))
        assert (entropy >= 0).all() and (entropy <= 3.9121).all()  # ln 50
