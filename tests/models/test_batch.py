"""Rollouts and micro-batches by worked tables."""

import pytest
import torch

from rlhf_cli.models.batch import Prompts, Rollout, split_into_micro_batches


def test_rollout_from_lists_table():
    rollout = Rollout.from_lists([[7, 8], [9]], [[3], [4, 2]], stop_token_id=2)
    assert rollout.ids.tolist() == [[7, 8, 3, 0], [0, 9, 4, 2]]
    assert rollout.mask.int().tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]
    assert rollout.response_mask.int().tolist() == [[1, 0], [1, 1]]
    assert rollout.ended.tolist() == [False, True]
    assert rollout.prompt_tokens(1) == [9] and rollout.response_tokens(1) == [4, 2]
    lists = [[7, 8], [9]], [[3], [4, 2]], [[1], [1, 0]]
    plain, tensors = (Rollout.from_lists(*rows) for rows in (lists, [list(map(torch.tensor, rows)) for rows in lists]))
    assert torch.equal(plain.ids, tensors.ids) and torch.equal(plain.response_mask, tensors.response_mask)


def test_micro_batches_have_no_left_padding_and_read_tokens_that_are_not_trained():
    micro = Rollout.from_lists([[7]], [[3, 4, 5]], [[True, False, True]]).micro_batch(torch.tensor([0]))
    assert micro.ids.tolist() == [[7, 3, 4, 5]]
    assert micro.response_ids.tolist() == [3, 5] and micro.logit_position.tolist() == [0, 2]
    micro = Rollout.from_lists([[7, 8, 9], [6]], [[3], [4, 2]]).micro_batch(torch.tensor([1, 0]))
    assert micro.ids.tolist() == [[6, 4, 2, 0], [7, 8, 9, 3]]
    assert micro.lengths.tolist() == [3, 4] and micro.response_ids.tolist() == [4, 2, 3]
    scattered = torch.zeros(2, 2)
    scattered[micro.response_index] = torch.tensor([1.0, 2.0, 3.0])
    assert scattered.tolist() == [[3.0, 0.0], [1.0, 2.0]]


@pytest.mark.parametrize("bad", [([], []), ([[1]], [[]]), ([[]], [[1]]), ([[1], [2]], [[1]]), ([[1]], [[2]], [[0]])])
def test_lists_that_do_not_match_are_rejected(bad):
    with pytest.raises(ValueError):
        Rollout.from_lists(*bad)
    with pytest.raises(ValueError):
        Prompts.from_lists([[1], []])


@pytest.mark.parametrize(
    "limits,expected",
    [
        ({"max_rows": 3, "max_tokens": 20}, [[3], [0, 2], [5, 4, 1], [6]]),
        ({"max_rows": 4}, [[3, 0, 2, 5], [4, 1, 6]]),
        ({"max_rows": 2, "packed": True}, [[3, 0, 2, 5, 4, 1, 6]]),
        ({"max_rows": 2, "max_tokens": 31, "packed": True}, [[3], [0, 2, 5, 4, 1, 6]]),
    ],
)
def test_micro_batches_keep_the_limits_and_lose_no_row(limits, expected):
    """Padded, rows times the longest count; packed, the sum does, up to that of max_rows of the longest."""
    lengths = torch.tensor([9, 3, 5, 30, 4, 5, 2])
    assert [batch.tolist() for batch in split_into_micro_batches(lengths, torch.arange(7), **limits)] == expected
