"""Models of a trainer before its first step: no dropout, what is trained, shared layers."""

import pytest
import tiny
import torch

from rlhf_cli.models import forward


def test_dropout_of_the_models_is_switched_off():
    policy, ids = tiny.causal(attention_dropout=0.5).train(), torch.tensor([[5, 6, 7, 8]])
    tiny.trainer_of(policy, tiny.settings())
    assert torch.equal(policy.train()(input_ids=ids).logits, policy(input_ids=ids).logits)


def test_a_value_model_that_is_a_copy_of_a_frozen_one_is_trained():
    """copy.deepcopy of a reward model copies that it is frozen."""
    trainer = tiny.trainer_of(tiny.causal(), tiny.settings(), value=tiny.scorer().requires_grad_(False))
    before = tiny.weights(trainer.value)
    trainer.step(tiny.prompts())
    assert not torch.equal(before, tiny.weights(trainer.value))


def steps(trainer, count: int):
    return [trainer.step(tiny.prompts(seed=step)) for step in range(count)]


def logits(model) -> torch.Tensor:
    return forward.response_logits(model, tiny.rollout().micro_batch(torch.arange(4)))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=1e-5)  # kernels differ by the alignment of memory


@pytest.mark.full
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_num_shared_layers_freezes_and_shares_and_the_rest_trains(family):
    depth = {"n_layer": 3} if family == "gpt2" else {"num_hidden_layers": 3}
    policy, ref, alone = (tiny.causal(family, **depth) for _ in range(3))
    trainer = tiny.trainer_of(policy, tiny.settings(num_shared_layers=2), ref=ref, value=tiny.scorer(family))
    assert same(logits(trainer.ref), logits(alone)), "sharing changed the reference"
    ours, theirs = (dict(model.named_parameters()) for model in (trainer.policy, trainer.ref))
    shared = {name for name in ours if ours[name] is theirs[name]}
    assert shared == {name for name in ours if not ours[name].requires_grad}
    assert any(".0." in name for name in shared) and any(".1." in name for name in shared)
    assert any("embed" in name or "wte" in name for name in shared) and not any(".2." in name for name in shared)
    before = {name: p.detach().clone() for name, p in ours.items()}
    (first,) = steps(trainer, 1)
    assert first["objective/kl"] == 0.0 and first["policy/first_ratio_error"] == 0.0
    for name, parameter in trainer.policy.named_parameters():
        assert torch.equal(parameter, before[name]) is (name in shared), name
    assert same(logits(trainer.ref), logits(alone)), "training changed the reference"


def test_num_shared_layers_with_tied_embeddings_ties_the_references_head_too():
    policy, ref, alone = (tiny.causal(tie_word_embeddings=True) for _ in range(3))
    trainer = tiny.trainer_of(policy, tiny.settings(num_shared_layers=1), ref=ref)
    assert ref.lm_head.weight is ref.model.embed_tokens.weight is policy.lm_head.weight
    steps(trainer, 2)
    assert same(logits(ref), logits(alone))


@pytest.mark.parametrize(
    ("policy_seed", "layers", "says"),
    [(0, 2, "2 of 2 layers leaves none to train"), (0, 3, "3 of 2 layers leaves none"), (3, 1, "differ")],
)
def test_num_shared_layers_leaves_a_layer_to_train_and_changes_no_reference(policy_seed, layers, says):
    with pytest.raises(ValueError, match=says):
        tiny.trainer(policy_seed=policy_seed, num_shared_layers=layers)
