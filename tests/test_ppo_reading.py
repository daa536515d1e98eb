"""Numbers read off models agree with the plain full forward, for every family."""

import pytest
import tiny
import torch

from rlhf_cli.models import forward
from rlhf_cli.models.batch import Rollout

QUERIES = [[5, 6, 7], [8], [9, 4, 5, 6]]
RESPONSES = [[3, 4, 2], [7, 8, 9, 10, 2], [2]]


def plain_outputs(model, row: int):
    """The model on one row alone, without any padding."""
    return model(input_ids=torch.tensor([QUERIES[row] + RESPONSES[row]]))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_response_logits_are_the_full_forwards(family):
    model, rollout = tiny.causal(family), Rollout.from_lists(QUERIES, RESPONSES)
    micro = rollout.micro_batch(torch.tensor([2, 0, 1]))
    logits = forward.response_logits(model, micro)
    for row in range(3):
        full, first = plain_outputs(model, row).logits[0], len(QUERIES[row]) - 1
        mine = logits[micro.rows[micro.row_index] == row]
        torch.testing.assert_close(mine, full[first : first + len(RESPONSES[row])], atol=1e-5, rtol=1e-5)
    assert micro.targets.tolist() == [2, 3, 4, 2, 7, 8, 9, 10, 2]


def test_soft_capping_stays_in_force():
    micro = Rollout.from_lists(QUERIES, RESPONSES).micro_batch(torch.arange(3))
    assert forward.response_logits(tiny.causal("gemma2"), micro).abs().max() <= 3.0


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_scores_are_the_pooled_ones(family):
    model, rollout = tiny.scorer(family), Rollout.from_lists(QUERIES, RESPONSES)
    scores = forward.rollout_scores(model, rollout, max_rows=2)
    pooled = torch.cat([plain_outputs(model, row).logits[0].detach() for row in range(3)])
    torch.testing.assert_close(scores, pooled, atol=1e-5, rtol=1e-5)


def test_a_foreign_scorer_whose_pad_is_its_eos_is_read_as_transformers_pools_it():
    """transformers looks for the last token that is not padding: with pad == eos, the one before the EOS."""
    model, rollout = tiny.scorer(pad_token_id=tiny.EOS), Rollout.from_lists(QUERIES, RESPONSES)
    pooled = torch.cat([plain_outputs(model, row).logits[0].detach() for row in range(3)])
    torch.testing.assert_close(forward.rollout_scores(model, rollout, max_rows=3), pooled, atol=1e-5, rtol=1e-5)
    at_the_end = forward.rollout_scores(tiny.scorer(), rollout, max_rows=3)
    assert (at_the_end - pooled).abs().min() > 1e-3


def test_values_end_where_the_score_begins():
    """The value before token t reads the state that predicts it; the score reads the state at the last token."""
    model, rollout = tiny.scorer(), Rollout.from_lists(QUERIES, RESPONSES)
    longer = Rollout.from_lists(QUERIES, [[*row, 3] for row in RESPONSES])
    micro = longer.micro_batch(torch.arange(3))
    last = torch.cat([micro.row_index[1:] != micro.row_index[:-1], torch.tensor([True])])
    torch.testing.assert_close(
        forward.response_values(model, micro)[last],
        forward.rollout_scores(model, rollout, max_rows=3),
        atol=1e-5,
        rtol=1e-5,
    )


def test_every_reader_shifts_and_scales():
    model, rollout = tiny.scorer(), Rollout.from_lists(QUERIES, RESPONSES)
    micro = rollout.micro_batch(torch.arange(3))
    raw = forward.pooled_scores(model, micro), forward.response_values(model, micro)
    model.config.reward_mean, model.config.reward_std = 2.0, 0.5
    for before, after in zip(
        raw, (forward.pooled_scores(model, micro), forward.response_values(model, micro)), strict=True
    ):
        torch.testing.assert_close(after, (before - 2.0) / 0.5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_dropout_is_off_even_in_training_mode(family):
    extra = {"llama": {"attention_dropout": 0.5}, "gpt2": {"resid_pdrop": 0.5}, "opt": {"dropout": 0.5}}[family]
    model, ids = tiny.causal(family, **extra), torch.tensor([[5, 6, 7, 8]])
    model.train()
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    forward.disable_dropout(model)
    model.train()
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    assert any(value == 0.5 for value in model.config.to_dict().values()), "what is saved keeps the dropout"


def test_recomputing_is_on_only_within():
    model = tiny.causal()
    forward.enable_gradient_checkpointing(model)
    with forward.gradient_checkpointing(model):
        assert [layer.training for layer in model.model.layers] == [True, True] and not model.model.layers[
            0
        ].mlp.training
    assert not any(module.training for module in model.modules())
