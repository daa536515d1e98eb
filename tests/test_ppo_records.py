import pytest
import torch

from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.models.batch import Prompts, Rollout, micro_batches


def test_rollout_from_lists_table():
    rollout = Rollout.from_lists([[7, 8], [9]], [[3], [4, 2]], stop_token_id=2)
    assert rollout.ids.tolist() == [[7, 8, 3, 0], [0, 9, 4, 2]]
    assert rollout.mask.int().tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]
    assert rollout.response_mask.int().tolist() == [[1, 0], [1, 1]]
    assert rollout.ended.tolist() == [False, True]
    assert rollout.prompt_tokens(1) == [9] and rollout.response_tokens(1) == [4, 2]


def test_response_masks_leave_the_model_its_tokens():
    """A masked response token is read by the models, but takes no part in the loss."""
    rollout = Rollout.from_lists([[7]], [[3, 4, 5]], [[True, False, True]])
    micro = rollout.micro_batch(torch.tensor([0]))
    assert (
        micro.ids.tolist() == [[7, 3, 4, 5]]
        and micro.targets.tolist() == [3, 5]
        and micro.logit_position.tolist() == [0, 2]
    )


def test_micro_batch_is_flush_left():
    rollout = Rollout.from_lists([[7, 8, 9], [6]], [[3], [4, 2]])
    micro = rollout.micro_batch(torch.tensor([1, 0]))
    assert micro.ids.tolist() == [[6, 4, 2, 0], [7, 8, 9, 3]]
    assert micro.lengths.tolist() == [3, 4]
    assert micro.targets.tolist() == [4, 2, 3]
    scattered = torch.zeros(2, 2)
    scattered[micro.response_index] = torch.tensor([1.0, 2.0, 3.0])
    assert scattered.tolist() == [[3.0, 0.0], [1.0, 2.0]]


def test_lists_of_tensors_are_lists_too():
    plain = Rollout.from_lists([[7, 8], [9]], [[3], [4, 2]], [[1], [1, 0]])
    tensors = Rollout.from_lists(
        [torch.tensor([7, 8]), torch.tensor([9])],
        [torch.tensor([3]), torch.tensor([4, 2])],
        [torch.tensor([1]), torch.tensor([1, 0])],
    )
    assert torch.equal(plain.ids, tensors.ids) and torch.equal(plain.response_mask, tensors.response_mask)
    with pytest.raises(ValueError, match="token that counts"):
        Rollout.from_lists([[1]], [[2]], [[0]])


@pytest.mark.parametrize("bad", [([], []), ([[1]], [[]]), ([[]], [[1]]), ([[1], [2]], [[1]])])
def test_what_does_not_match_is_refused(bad):
    with pytest.raises(ValueError):
        Rollout.from_lists(*bad)
    with pytest.raises(ValueError):
        Prompts.from_lists([[1], []])


def test_micro_batches_keep_the_budget_and_lose_no_row():
    lengths = torch.tensor([9, 3, 5, 30, 4, 5, 2])
    batches = micro_batches(lengths, torch.arange(7), max_rows=3, max_tokens=20)
    assert [batch.tolist() for batch in batches] == [[3], [0, 2], [5, 4, 1], [6]]
    for batch in batches:
        assert len(batch) == 1 or len(batch) * int(lengths[batch].max()) <= 20
    assert [batch.tolist() for batch in micro_batches(lengths, torch.arange(7), max_rows=4)] == [
        [3, 0, 2, 5],
        [4, 1, 6],
    ]


def test_seeds_depend_on_every_part():
    keys = [
        (0, "sample", 1, 2),
        (1, "sample", 1, 2),
        (0, "shuffle", 1, 2),
        (0, "sample", 2, 2),
        (0, "sample", 1, 3),
        (0, "sample", 12),
    ]
    seeds = {derive_seed(*key) for key in keys}
    assert len(seeds) == len(keys) and all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(0, "sample", 1, 2) == derive_seed(0, "sample", 1, 2)
