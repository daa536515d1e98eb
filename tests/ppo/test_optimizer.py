"""The average of the weights."""

import copy

import pytest
import torch
from torch import nn

from rlhf_cli.ppo.optimizer import WeightAverage


def fill(model, numbers):
    for weight, number in zip(model.parameters(), numbers, strict=True):
        nn.init.constant_(weight, number)


def test_an_average_by_hand():
    """Decay 3/4: 6, 0 and 4 weigh 1, 2 and 3, the eighth a quarter. A tied weight is one, a frozen one none."""
    model = nn.Sequential(*(nn.Linear(2, 1, bias=False) for _ in range(3)))
    model[2].weight, model[1].weight.requires_grad = model[0].weight, False
    fill(model, (8, 5))
    average = WeightAverage(model, 0.75)
    for update, number, expected in ((1, 6.0, 6.0), (2, 0.0, 2.0), (3, 4.0, 3.0), (8, 7.0, 4.0)):
        fill(model, (number, 5))
        average.update(update)
        assert average.state_dict().keys() == {"0.weight"}
        assert average.state_dict()["0.weight"].tolist() == [[pytest.approx(expected)] * 2]
    with average.in_model():
        assert model[2].weight.tolist() == [[4.0] * 2] and model[1].weight.tolist() == [[5.0] * 2]


def test_bfloat16_weights_are_averaged_in_float32_and_return_bit_for_bit():
    model = nn.Linear(40, 40, dtype=torch.bfloat16)
    average, own = WeightAverage(model, 0.999), copy.deepcopy(model.state_dict())
    fill(model, (2.0, 0.3))
    average.update(5000)
    moved = torch.lerp(own["weight"].float(), torch.tensor(2.0), 0.001)
    torch.testing.assert_close(average.state_dict()["weight"], moved, rtol=1e-6, atol=0)
    model.load_state_dict(own)
    with pytest.raises(KeyboardInterrupt), average.in_model():
        assert torch.equal(model.weight, moved.bfloat16())
        raise KeyboardInterrupt
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
