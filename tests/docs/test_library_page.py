"""docs/ppo.md, Use as a library: its program runs as it stands and learns; its three calls are there."""

import re
import sys
from pathlib import Path

import pytest
import tiny

from rlhf_cli import ppo

ROOT = Path(__file__).parents[2]
MODEL = ROOT.parent / "shared/models/stories260K"
PAGE = (ROOT / "docs/ppo.md").read_text(encoding="utf-8").partition("## Use as a library")[2]
PROGRAM, CALLS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.training
@pytest.mark.skipif(not MODEL.exists(), reason="../shared is not there")
def test_the_program_learns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its first six updates, in this process: the schedule is of 30, so that they are those of the page."""
    monkeypatch.setattr(sys, "argv", ["cheerful.py", str(MODEL)])
    exec(PROGRAM.replace("range(settings.num_updates())", "range(6)"), {"__name__": "__main__"})
    *updates, story = capsys.readouterr().out.splitlines()
    number, _, scores, _, kl = zip(*(line.split() for line in updates), strict=True)
    assert number == tuple(map(str, range(1, 7))) and kl[0] == "0.000"
    assert float(scores[0]) < 0.2 and float(scores[-1]) > 0.6
    assert len(PROGRAM.splitlines()) <= 40 and len(story) > 40


def test_the_three_calls_are_a_step() -> None:
    names = {"trainer": tiny.trainer(), "prompts": tiny.prompts()}
    exec(CALLS, names)
    straight = tiny.trainer()
    stats = straight.step(tiny.prompts())
    assert {name: stats[name] for name in names["stats"]} == names["stats"]


def test_every_part_is_exported() -> None:
    documented = set(re.findall(r"^\| `(\w+)", PAGE, re.MULTILINE)) | {
        "formulas",
        "PPOSettings",
        "Experience",
        "Rollout",
    }
    documented |= {"FunctionReward"}
    assert documented == set(ppo.__all__)
