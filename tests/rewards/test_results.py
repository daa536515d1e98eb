"""What a reward function returned: scores in all forms, and in none."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_cli.errors import RLHFError
from rlhf_cli.rewards.function import score_texts
from rlhf_cli.rewards.signature import TextRows


@pytest.mark.parametrize(
    ("result", "scores"),
    [
        ([True, False], [1.0, 0.0]),
        ([np.True_, np.float32(0.5)], [1.0, 0.5]),
        (np.array([1, 2]), [1.0, 2.0]),
        ([torch.tensor(1.5), torch.tensor([2])], [1.5, 2.0]),
        (torch.tensor([1.0, -2.0], dtype=torch.bfloat16, requires_grad=True), [1.0, -2.0]),
        (torch.tensor([True, False]), [1.0, 0.0]),
        (torch.tensor([[1.0], [2.0]]), [1.0, 2.0]),
        ({"rewards": torch.ones(2), "scores": torch.zeros(2)}, [1.0, 1.0]),
        ({"rewards": [torch.tensor(1), None]}, [1.0, None]),
        ((each for each in (1, None)), [1.0, None]),
    ],
)
def test_scores_in_all_forms_that_grpo_and_openrlhf_take(result: Any, scores: list[float | None]) -> None:
    found = score_texts("mine", lambda x, y: result, TextRows(["p", "p"], ["a", "b"]), every_row=False)
    assert found == scores and all(score is None or type(score) is float for score in found)


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ({0: 1.0, 1: 2.0}, "returned a dict without `rewards`; its keys: 0, 1\nhint: .* OpenRLHF's dict"),
        (1, "returned 1, one number for all rows"),
        (torch.tensor(2.0), "returned 2.0, one number for all rows"),
        ({"rewards": np.float64(3)}, "returned 3.0, one number for all rows"),
        (torch.ones(2, 2), r"returned \[1.0, 1.0\] for row 0"),
        (torch.ones(1, 2), "returned 1 scores for 2 responses"),
        ("ab", "returned 'ab'"),
        (torch.ones(3), "returned 3 scores for 2 responses"),
        (torch.tensor([1.0, math.nan]), "returned nan for row 1"),
        ([1.0, torch.tensor(math.inf)], "returned inf for row 1"),
        ([1.0, "2"], "returned '2' for row 1"),
        ([1.0, np.array([1, 2])], r"returned \[1, 2\] for row 1"),
    ],
)
def test_r05_scores_in_no_form(result: Any, says: str) -> None:
    with pytest.raises(RLHFError, match=f"R05.*reward `mine` {says}"):
        score_texts("mine", lambda x, y: result, TextRows(["p", "p"], ["a", "b"]))
