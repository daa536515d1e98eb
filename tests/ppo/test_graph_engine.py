"""`models.engine: graph`: the tokens of hf in steps of fixed shapes, which wait for nothing."""

from typing import Any

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_cli.ppo.graph_engine import GraphEngine, reason_against, row_bucket
from rlhf_cli.ppo.rollout import HFEngine, row_keys
from tests.ppo.test_engines import LONG, engine
from tests.ppo.test_rollout import responses, seeded

STATIC = [family for family in tiny.FAMILIES if reason_against(tiny.causal(family)) is None]


@pytest.mark.full
@pytest.mark.parametrize("family", STATIC)
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_the_tokens_of_fixed_shapes_are_those_of_hf(family, temperature):
    """Twice: the second rollout uses the caches of the first."""
    plain, subject = (engine(kind, family, temperature=temperature) for kind in (HFEngine, GraphEngine))
    for seed, rows in ((0, 12), (1, 11)):
        prompts = seeded(tiny.prompts(rows, seed=seed), length=LONG, step=seed)
        one, other = plain.generate(prompts), subject.generate(prompts)
        assert torch.equal(one.ids, other.ids) and torch.equal(one.mask, other.mask)
        assert torch.equal(one.response_mask, other.response_mask) and torch.equal(one.ended, other.ended)
        assert torch.allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_rows_that_have_ended_leave_the_batch():
    subject = engine(GraphEngine, stop=tuple(range(3, tiny.VOCABULARY, 4)))
    plain = engine(HFEngine, stop=subject.stop_token_id)
    for step in range(30):  # until some rows of a draw end before the first read, and not all
        prompts = seeded(tiny.prompts(16), length=LONG, step=step)
        assert responses(subject.generate(prompts)) == responses(plain.generate(prompts))
        batches = {rows for rows, _ in subject.steps}
        subject.release_memory()
        assert not subject.steps and max(batches) == 16
        if len(batches) > 1:
            break
    assert len(batches) > 1


def test_a_wider_step_frees_the_narrower_ones():
    """Callers that draw rows by length need no longer keep the caches of the shorter ones."""
    subject = engine(GraphEngine)
    subject._step(4, 60)
    subject._step(2, 60)
    subject._step(4, 100)
    assert set(subject.steps) == {(4, 128)}
    subject._step(4, 60)
    assert set(subject.steps) == {(4, 128), (4, 64)}


class Watch(TorchDispatchMode):
    """Records operations that wait for the device, and the shapes of all results."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "bincount")

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[str] = []
        self.shapes: list[Any] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = str(operation), operation(*args, **(kwargs or {}))
        by_mask = "index" in name and any(
            isinstance(each, torch.Tensor) and each.dtype == torch.bool
            for each in (args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ())
        )
        if by_mask or any(word in name for word in self.WAITING):
            self.waiting.append(name)
        if isinstance(result, torch.Tensor):
            self.shapes.append((name, tuple(result.shape), result.dtype))
        return result


@pytest.mark.full
@pytest.mark.parametrize("family", STATIC)
def test_a_step_neither_waits_for_the_device_nor_changes_a_shape(family):
    subject, prompts = engine(GraphEngine, family), seeded(tiny.prompts(6), length=LONG)
    with torch.no_grad():
        step = subject._step(6, 60)
        step.start(subject._prefill(prompts), row_keys(prompts.seeds, subject.model.device))
        watched = []
        for _ in range(3):
            with Watch() as watch:
                step()
            watched.append(watch)
        with Watch() as plain:
            subject.generate(prompts)
    assert plain.waiting  # the watch sees what it looks for
    assert [watch.waiting for watch in watched] == [[], [], []]
    assert watched[0].shapes == watched[1].shapes == watched[2].shapes


def test_models_without_fixed_shapes_are_named():
    assert set(STATIC) >= {"llama", "qwen2", "gpt2"} and "mistral" not in STATIC
    assert "sliding windows" in str(reason_against(tiny.causal("mistral")))
    eager = tiny.causal("llama")
    eager.config._attn_implementation = "eager"
    assert "not by sdpa" in str(reason_against(eager))


def test_row_buckets():
    assert [row_bucket(rows) for rows in (1, 2, 3, 4, 5, 6, 7, 9, 64, 65, 97)] == [1, 2, 3, 4, 6, 6, 8, 12, 64, 96, 128]
