"""`rlhf_cli.ppo` as a library: torch, transformers and pydantic are enough, and the settings alone need no torch."""

from without_packages import python


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
