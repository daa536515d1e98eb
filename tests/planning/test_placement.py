"""The first placement of a run's models that fits a GPU, with the most rows."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import tiny

from rlhf_cli.commands.init.limits import TokenLimits
from rlhf_cli.commands.init.sizes import (
    learning_rate,
    memory_planner,
)
from rlhf_cli.errors import RLHFError
from rlhf_cli.planning import placement
from rlhf_cli.planning.placement import MAX_ROWS, OFFLOAD, PLACEMENTS, POLICY_HEAD, MemoryPlanner
from rlhf_cli.planning.target import MEMORY_MARGIN, Target

NEEDED: dict[tuple[Any, ...], int] = {}  # what MemoryPlanner.needed computed for its arguments


def planner(gib: float) -> MemoryPlanner:
    config = tiny.config("llama", hidden_size=512, intermediate_size=1024, num_hidden_layers=4)
    limits = TokenLimits(152, 152, 0.95, prompt_mean=20.0, answer_mean=50.0, row_mean=70.0, prompt_max=56)
    made = memory_planner(config, limits, Target.of(str(gib), 1), baselines=True)
    plain = made.needed

    def needed(stage: str, values: dict[str, Any], *, adapters: bool) -> int:
        key = (made.target.gpu, stage, str(values), adapters)
        if key not in NEEDED:
            NEEDED[key] = plain(stage, values, adapters=adapters)
        return NEEDED[key]

    made.needed = needed  # type: ignore[method-assign]
    return made


@pytest.mark.full
def test_the_first_placement_that_fits_is_taken_with_the_most_rows() -> None:
    """The same total of rows an update; less memory means fewer rows at once, then another placement."""
    seen = []
    for gib in (8.0, 1.0, 0.5, 0.4, 0.3, 0.2, 0.15, 0.02):
        try:
            placement, _ = planner(gib).choose("auto", hint="")
        except RLHFError as error:
            assert error.problems[0].code == "E03" and "and a GPU of" in error.problems[0].text
            assert "for it (85% of its memory)" in error.problems[0].text
            break
        assert placement.bytes <= (1 - MEMORY_MARGIN) * gib * 2**30
        seen.append(
            (PLACEMENTS.index(replace(placement, rows=None, rollout_rows=None, fullest="", bytes=0)), placement)
        )
    order = [index for index, _ in seen]
    assert order == sorted(order) and order[0] == 0 and len(set(order)) > 2 and len(seen) < 8
    assert seen[0][1].rows == MAX_ROWS
    for (index, one), (later, other) in pairwise(seen):
        assert index < later or all(one.rows[stage] >= other.rows[stage] for stage in MAX_ROWS)


@pytest.mark.full
def test_whole_weights_fit_in_less_memory_with_offload_then_with_a_head_on_the_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is taken where the one before does not fit; on a CPU offload, which has no effect there, is left out."""
    whole, planned = [each for each in PLACEMENTS if each.adapters is None], planner(8.0)
    assert [each.savings[2:] for each in whole] == [(), (), (), (OFFLOAD,), (POLICY_HEAD,), (OFFLOAD, POLICY_HEAD)]
    monkeypatch.setattr(placement, "MIN_ROWS", {"ppo": 1})
    planned.first = {"ppo": placement.FIRST["ppo"]}
    least = [planned.needed("ppo", planned.values("ppo", each, 1, 8), adapters=False) for each in whole]
    assert least == sorted(least, reverse=True) and len(set(least[2:])) == 4
    for place in range(2, 6):
        planned.usable = least[place]
        chosen, _ = planned.choose("none", hint="")
        assert chosen.savings == whole[place].savings
    planned.target, planned.usable = Target(False, 1, "the CPU"), 0
    with pytest.raises(RLHFError, match=r"(?s)8-bit AdamW and policy_head in PPO the.*hint: .*fewer weights; --gpu"):
        planned.choose("none", hint="fewer weights")


@pytest.mark.parametrize(("adapters", "kind"), [("none", None), ("lora", "lora"), ("qlora", "qlora")])
def test_adapters_can_be_chosen(adapters: str, kind: str | None) -> None:
    assert planner(8.0).choose(adapters, hint="")[0].adapters == kind
    rates = [learning_rate(stage, 10**9, kind) for stage in ("sft", "reward", "ppo")]
    assert rates == (["2e-4", "1e-4", "3e-5"] if kind else ["2e-5", "1e-5", "3e-6"])
