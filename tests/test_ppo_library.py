"""`rlhf_cli.ppo` as a library: torch, transformers and pydantic are enough, and the settings alone need no torch."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The packages are not to be found, as on a machine without them. What transformers itself imports (yaml, through
# huggingface_hub) is refused to our own modules only.
BLOCK = """
import builtins, importlib.machinery, sys
plain, find = builtins.__import__, importlib.machinery.PathFinder.find_spec
refused_to_us = {{"yaml", "rich", "typer", "scipy"}}
def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    ours = (globals or {{}}).get("__name__", "").startswith("rlhf_cli")
    if ours and level == 0 and name.partition(".")[0] in refused_to_us:
        raise ImportError(name + " is not installed here")
    return plain(name, globals, locals, fromlist, level)
builtins.__import__ = guarded
class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {blocked!r} else find(name, path, target)
sys.meta_path = [Finder if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
"""


def python(code: str, blocked: set[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCK.format(blocked=blocked) + code],
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": ""},
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_update_without_the_rest_of_the_house():
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


def test_the_settings_need_no_torch():
    python("from rlhf_cli.ppo import PPOSettings; PPOSettings(total_episodes=8)", {"torch", "transformers", "numpy"})
