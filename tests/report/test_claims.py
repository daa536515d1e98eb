"""Every sentence that claims an effect appears in at most 6.5 % of 1000 simulated runs without the effect, and in runs
with the effect: in the report, in the terminal output and in comparisons.

One that appears in at most 4 % of the first 400 is seen to be rarer: of 6.5 %, that would be two standard errors less.
"""

import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_worlds as worlds

from rlhf_cli import statistics
from rlhf_cli.evaluation import reward_model
from rlhf_cli.evaluation.reward_probes import PROBE_LABELS
from rlhf_cli.report.rules import RULES

pytestmark = pytest.mark.full
RUNS, MOST = 1000, 0.065
FIRST, FEW = 400, 0.04
EFFECTS, LEAST = 40, 0.2  # runs with an effect, and the share that states it: some have only 32 prompts
World = tuple[Callable[..., Iterator[str]], dict[str, Any]]


@dataclass(frozen=True)
class Claim:
    """A sentence that claims an effect: its text in the code, and worlds without the effect and with it."""

    text: str
    without: World
    having: World
    pattern: str = ""  # where the text alone would not find it

    @property
    def regex(self) -> str:
        return self.pattern or re.escape(self.text).replace(r"\{\}", ".*?")


TEXTS = tomllib.loads(Path(__file__).with_name("claims.toml").read_text(encoding="utf-8"))
CLAIMS = [
    *(
        Claim(each["text"], (getattr(worlds, each["world"]), each.get("without", {})),
              (getattr(worlds, each["world"]), each["having"]))
        for each in TEXTS["claims"]
    ),
    *(
        Claim("{} scores above the chosen answer for {} of ", (worlds.rewarded, {}),
              (worlds.rewarded, {"probe": 0.4}), f"{name} scores above the chosen answer")
        for name in PROBE_LABELS.values()
    ),
    *(
        Claim("{}, and still outside at the end.", (worlds.updated, {}), (worlds.updated, {"beyond": 1.0}),
              f"{re.escape(rule.title)}.*still outside at the end")
        for rule in RULES if rule.has_range
    ),
    Claim("{}, and beyond the alarm limit at update {}.", (worlds.updated, {}),
          (worlds.evaluation, {"ill": True}), "beyond the alarm limit"),
    Claim("PPO beats SFT by {}", (worlds.evaluation, {"gold": None}),
          (worlds.evaluation, {"gold": None, "reward": 1.0}), "PPO beats SFT by the reward that"),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def fast() -> Iterator[None]:
    """With fewer resamples than in a run, which makes claims more likely."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reward_model, "NUM_RESAMPLES", 100)
        patch.setattr(statistics, "RESAMPLES", 400)
        yield


@cache
def statements(world: Callable[..., Iterator[str]], options: tuple[tuple[str, Any], ...], *seeds: int) -> str:
    """All statements about a run of a world."""
    return "\n".join(world(np.random.default_rng(seeds), **dict(options)))


def share(one: Claim, world: World, runs: int, of: int) -> float:
    """Share of the first `runs` of a world's `of` runs that make the claim."""
    pattern, options = re.compile(one.regex, re.MULTILINE), tuple(sorted(world[1].items()))
    return sum(bool(pattern.search(statements(world[0], options, seed, of))) for seed in range(runs)) / runs


@pytest.mark.parametrize("one", CLAIMS, ids=lambda one: (one.pattern or one.text)[:40])
def test_a_claim_depends_on_its_effect(one: Claim) -> None:
    assert share(one, one.without, FIRST, RUNS) <= FEW or share(one, one.without, RUNS, RUNS) <= MOST
    assert share(one, one.having, EFFECTS, EFFECTS) >= LEAST
