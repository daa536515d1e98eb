"""States on disk: exact, each tensor by itself, and written without a second copy of all weights in memory."""

from pathlib import Path

import pytest
import torch

from rlhf_cli.models import save


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    tree = {"a": [weight, weight, weight.T], 3: (weight[1], None), "n": [1, 0.1, "x", True]}
    save.save_tree(tmp_path, tree)
    back = save.load_tree(tmp_path)
    assert [each.tolist() for each in back["a"]] == [each.tolist() for each in tree["a"]]
    assert back[3][0].tolist() == [3, 4, 5] and back[3][1] is None and back["n"] == [1, 0.1, "x", True]
    back["a"][0][:] = 0
    assert back["a"][1].tolist() == weight.tolist()  # shared no more


def test_only_what_is_shared_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = torch.ones(3), torch.zeros(2)
    written: list[torch.Tensor] = []
    monkeypatch.setattr(save, "save_file", lambda tensors, path: written.extend(tensors.values()))
    save.save_tree(tmp_path, [one, other, one])
    places = [tensor.data_ptr() for tensor in written]
    assert places[:2] == [one.data_ptr(), other.data_ptr()] and places[2] not in places[:2]
