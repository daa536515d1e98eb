"""docs/library.md: its program learns; torch, transformers and pydantic are enough."""

import re
import sys

import pytest
import tiny
from run_cli import ROOT
from without_packages import python

from rlhf_cli import ppo

MODEL = ROOT.parent / "shared/models/stories260K"
PAGE = (ROOT / "docs/library.md").read_text(encoding="utf-8")
PROGRAM, CALLS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.full
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
    documented = set(re.findall(r"^\| `(\w+)", PAGE, re.MULTILINE))
    exported = {"formulas", "PPOSettings", "Experience", "Rollout", "FunctionReward"}
    assert len(documented) > 5 and all(hasattr(ppo, name) for name in documented | exported)
    imports = [line for line in PROGRAM.splitlines() if line.startswith(("import ", "from "))]
    assert len(set(imports)) == len(imports)


@pytest.mark.full
def test_an_update_without_the_rest_of_the_house_and_settings_without_torch() -> None:
    code = """
import tiny
from rlhf_cli.ppo import PPOTrainer, PPOSettings, formulas, Rollout
trainer = tiny.trainer()
stats = trainer.step(tiny.prompts())
assert stats['objective/kl'] == 0.0 and formulas.approx_kl
rollout = Rollout.from_lists([[5], [6, 7]], [[3, 2], [4]], [[1, 1], [1]], stop_token_id=2)
experience = trainer.make_experience(rollout, scores=__import__('torch').ones(2))
trainer.update(experience)
"""
    python(code, {"trl", "datasets", "accelerate", "peft", "bitsandbytes", "tensorboard", "wandb", "trackio"})
    python("from rlhf_cli.ppo import PPOSettings; PPOSettings(total_episodes=8)", {"torch", "transformers", "numpy"})
