"""Models cut up by DeepSpeed's ZeRO-3 (Rajbhandari et al. 2020, arXiv 1910.02054), which `trainer.deepspeed` asks for.

DeepSpeed leaves empty weights in the model, and each process's part of them as their `ds_tensor`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


def is_sharded(model: Any) -> bool:
    """Whether DeepSpeed has cut the model up."""
    return any(hasattr(weight, "ds_tensor") for weight in model.parameters())


def own_part(weight: Tensor) -> Tensor:
    """What this process holds of a weight; all of one that is not cut up."""
    return getattr(weight, "ds_tensor", weight)


def whole_state(model: Any) -> dict[str, Tensor]:
    """All weights on the CPU, for which all processes must ask: they come together one at a time."""
    import deepspeed  # where the user has installed it

    state = model.state_dict(keep_vars=True)
    whole: dict[int, Tensor] = {}
    for tensor in state.values():
        if id(tensor) not in whole:  # tied weights stay one tensor
            with deepspeed.zero.GatheredParameters([tensor], enabled=hasattr(tensor, "ds_tensor")):
                whole[id(tensor)] = tensor.detach().to("cpu", copy=True)
    return {name: whole[id(tensor)] for name, tensor in state.items()}


def end() -> None:
    """Have transformers cut no further model up: what is read from here on is whole, in every process."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config  # most of a second

    unset_hf_deepspeed_config()


@contextmanager
def not_cutting() -> Iterator[None]:
    """Within, transformers loads whole models, though `trainer.deepspeed` may ask for parts of them."""
    from transformers.integrations import deepspeed  # most of a second

    before = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = before
