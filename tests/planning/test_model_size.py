"""The size of a model, compared with real models and with torch's MemTracker."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from rlhf_cli.models import build, forward
from rlhf_cli.models.load import read_config
from rlhf_cli.planning import memory, model_size
from rlhf_cli.planning.model_size import ModelSize


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize(
    ("make", "from_config"),
    [(tiny.causal, build.causal_lm_from_config), (tiny.scorer, build.reward_model_from_config)],
)
def test_parameters_are_those_of_the_files(make: Any, from_config: Any, family: str, tmp_path: Path) -> None:
    make(family).save_pretrained(tmp_path)
    model = from_config(read_config(tmp_path))
    assert model.num_parameters() == sum(w.numel() for w in load_file(tmp_path / "model.safetensors").values())
    assert all(weight.device == build.META for weight in model.parameters())


@pytest.mark.full
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_activations_are_what_autograd_keeps(family: str, bf16: bool) -> None:
    """Bytes kept by tensors without content, compared with those that a real forward pass keeps."""
    model, storages = tiny.causal(family), dict[int, int]()
    forward.disable_dropout(model)
    weights = {weight.untyped_storage().data_ptr() for weight in [*model.parameters(), *model.buffers()]}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        _states = model.base_model(input_ids=torch.zeros(4, 48, dtype=torch.int64), use_cache=False)
    real = sum(size for place, size in storages.items() if place not in weights)
    kept = model_size.kept_bytes(model.config, 48, bf16=bf16)
    assert 4 * kept.row + kept.copies == pytest.approx(real, rel=0.05)


def test_a_llama_layer_keeps_the_bytes_of_the_formula() -> None:
    """4 L (8 H + 2 H K / A + 4 I): the difference between three layers and two."""
    length, hidden, intermediate = 40, 32, 64
    two, three = (model_size.kept_bytes(tiny.config("llama", num_hidden_layers=n), length).row for n in (2, 3))
    numbers = 8 * hidden + 2 * hidden * 2 // 4 + 4 * intermediate
    assert three - two == pytest.approx(4 * length * numbers, rel=0.02)


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_step_takes_what_torch_s_tracker_counts(family: str) -> None:
    """The peak of a forward and backward pass with logits, on tensors without content."""
    rows, length = 4, 48
    config = tiny.config(family)
    with FakeTensorMode():
        model = build.causal_lm_from_config(config, device=torch.device("cpu"))
        forward.disable_dropout(model)
        ids = torch.zeros(rows, length, dtype=torch.int64)
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[..., 0].sum().backward()
    (counted,) = tracker.get_tracker_snapshot("peak").values()

    size = ModelSize.of(config, "auto", None, scorer=False)
    logits = 3 * 4 * rows * length * size.shape.vocabulary  # logits, log-probs, their gradient
    step = memory.peak({"weights": size.weights}, *memory.training_moments(size, rows, length, logits))
    assert 0.9 <= sum(step.values()) / counted["Total"] <= 1.2
