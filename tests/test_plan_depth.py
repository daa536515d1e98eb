"""Plans of deep models, made from shallow ones: to the byte those of counting all layers."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_plan import GPU, counted_anew, found, three  # noqa: F401  (a fixture)

from rlhf_cli.commands.plan import estimate, measure
from rlhf_cli.commands.plan.memory import Phase
from rlhf_cli.config.loading import load
from rlhf_cli.models import build

LAYERS = 10
SMALLER = ("ppo.response_length=4", "ppo.per_device_train_batch_size=4", "ppo.gradient_accumulation_steps=2")
CASES = {
    "ppo": ("ppo.yaml", *SMALLER, "ppo.bf16=true", "ppo.gradient_checkpointing=true", *GPU),
    "ppo on one base": ("ppo.yaml", *SMALLER, "--mode", "one-base"),
    "ppo cut up": ("ppo.yaml", *SMALLER, "ppo.fsdp=true", "ppo.offload=true", *GPU, "--nproc", "4"),
    "sft, where gradients grow as activations go": ("sft.yaml", "sft.gradient_accumulation_steps=1"),
    "sft": ("sft.yaml", "sft.gradient_checkpointing=true", "sft.bf16=true"),
    "reward": ("reward.yaml", "reward.bf16=true"),
}


@pytest.fixture
def deep(three: Path, monkeypatch: pytest.MonkeyPatch) -> set[int]:  # noqa: F811
    """Models of LAYERS layers, no weights of which are there; the depths of those that plans are counted on."""
    for name in ("model", "scorer"):
        body = json.loads((three / name / "config.json").read_text())
        (three / name / "config.json").write_text(json.dumps({**body, "num_hidden_layers": LAYERS}))
    seen = set()
    plain = build._from_config

    def made(kind: Any, body: Any, *rest: Any) -> Any:
        if kind is not build.AutoModel:
            seen.add(body.get_text_config().num_hidden_layers)
        return plain(kind, body, *rest)

    monkeypatch.setattr(build, "_from_config", made)
    monkeypatch.setattr(estimate, "MIN_EXTRAPOLATED_UNITS", LAYERS)
    return seen


# The slow ones are counted by the same code as "ppo".
SLOW = {"ppo on one base", "ppo cut up"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES]
)
def test_a_deep_model_is_counted_on_shallow_ones(case: str, deep: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn_on = counted_anew(*CASES[case], "--prompt-length", "9")
    assert deep == {2, 3, 4}
    deep.clear()
    monkeypatch.setattr(estimate, "MIN_EXTRAPOLATED_UNITS", 1000)
    whole = counted_anew(*CASES[case], "--prompt-length", "9")
    assert deep == {LAYERS}
    for stage, told in whole.items():
        assert told["parameters"] == drawn_on[stage]["parameters"] and told["steps"] == drawn_on[stage]["steps"]
        for one, other in zip(told["phases"], drawn_on[stage]["phases"], strict=True):
            assert one["total"] == other["total"] and one["flops"] == pytest.approx(other["flops"], rel=1e-9)
            assert Counter(one["bytes"]) == Counter(other["bytes"])  # 0 where there is none


def test_what_an_operation_makes_is_remembered_by_its_shapes(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    remembered = {stage: told["phases"] for stage, told in found(".").items()}
    monkeypatch.setattr(measure, "cached_op", lambda call, args, kwargs, given: call(*args, **kwargs))
    assert {stage: told["phases"] for stage, told in counted_anew(".").items()} == remembered


def test_only_what_is_new_and_of_the_same_shapes_is_remembered() -> None:
    """Bytes that are another tensor's stay so, and 1 is not 1.0."""
    with measure.MemoryCounter([], 0) as seen:
        x = torch.zeros(4, 6, device="meta")
        for _ in range(2):
            before = seen.live.total()
            _views = x.view(6, 4), torch.ops.aten._unsafe_view(x, [24]), x.t(), x.add_(1)
            assert seen.live.total() == before
            assert (x.long() + 1).dtype == torch.int64 and (x.long() + 1.0).dtype == torch.float32
            assert (x.t() * 2).stride() == (1, 6) and (x * 2).stride() == (6, 1)


class Counted:
    """Stands for the counting of a stage: how deep its models were, and what was shared."""

    def __init__(self, *moments: Any) -> None:
        self.moments, self.seen = moments, []

    def __call__(self, config: Any, bodies: dict[str, Any]) -> Any:
        layers = [body.get_text_config().num_hidden_layers for body in bodies.values()]
        self.seen.append((*layers, config.ppo.num_shared_layers))
        held = {number: {"weights": moment(layers[0])} for number, moment in enumerate(self.moments)}
        return {"policy": 7 + 5 * layers[0]}, [Phase("judge", 1, held, 3.0 * layers[0])]


def count(counted: Counted, *, family: str = "llama", layers: tuple[int, ...] = (40, 40), shared: int = 0) -> Any:
    config = load("ppo", Path("ppo.yaml"), [f"ppo.num_shared_layers={shared}"] if shared else [])
    name = "n_layer" if family == "gpt2" else "num_hidden_layers"
    bodies = {str(number): tiny.config(family, **{name: count}) for number, count in enumerate(layers)}
    return estimate.extrapolate_depth(counted, config, bodies)


def test_the_fullest_moment_may_be_another_than_that_of_the_shallow_ones(three: Path) -> None:  # noqa: F811
    counted = Counted(lambda layers: 100 + layers, lambda layers: 10 + 5 * layers)
    parameters, (phase,) = count(counted)
    assert counted.seen == [(2, 2, None), (3, 3, None), (4, 4, None)]
    assert (parameters, phase.bytes, phase.work) == ({"policy": 207}, {"weights": 210}, 120)


@pytest.mark.parametrize(
    "moments",
    [
        [lambda layers: layers**2],
        [lambda layers: 100 + layers, lambda layers: 0 if layers < 4 else 1000],
        [lambda layers: 100 if layers == 2 else 5 * layers],
    ],
)
def test_what_is_on_no_line_is_counted_whole(moments: Any, three: Path) -> None:  # noqa: F811
    counted = Counted(*moments)
    _, (phase,) = count(counted)
    assert counted.seen[-1][0] == 40 and phase.total == max(moment(40) for moment in moments)


@pytest.mark.parametrize(
    ("like", "seen"),
    [
        ({"family": "gemma2"}, [(40, 40, None)]),  # every other layer looks back a window
        ({"layers": (19, 19)}, [(19, 19, None)]),  # not worth it
        ({"layers": (40, 20)}, [(4, 2, None), (6, 3, None), (8, 4, None)]),
        ({"layers": (40, 21)}, [(40, 21, None)]),
        ({"shared": 20}, [(4, 4, 2), (6, 6, 3), (8, 8, 4)]),
        ({"shared": 7}, [(40, 40, 7)]),
        ({"shared": 40}, [(40, 40, 40)]),  # too many: said of the true numbers
        ({"family": "gpt2"}, [(2, 2, None), (3, 3, None), (4, 4, None)]),
        ({"family": "qwen2"}, [(2, 2, None), (3, 3, None), (4, 4, None)]),
    ],
)
def test_models_are_cut_where_their_layers_are_alike(like: Any, seen: Any, three: Path) -> None:  # noqa: F811
    counted = Counted(lambda layers: layers)
    count(counted, **like)
    assert counted.seen == seen


def test_a_model_whose_layers_are_not_found_is_counted_whole(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def odd(model: Any) -> Any:
        raise ValueError("no list of 40 layers in an Odd")

    estimate._layers_identical.cache_clear()
    monkeypatch.setattr(estimate.sharding, "decoder_layers", odd)
    counted = Counted(lambda layers: layers)
    count(counted)
    estimate._layers_identical.cache_clear()
    assert counted.seen == [(40, 40, None)]
