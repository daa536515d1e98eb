"""examples/ppo_loop.py: its update is the trainer's, and the script runs."""

import copy
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import tiny
import torch

SCRIPT = Path(__file__).parents[2] / "examples/ppo_loop.py"


@pytest.fixture(scope="module")
def loop():
    spec = spec_from_file_location("ppo_loop", SCRIPT)
    module = module_from_spec(spec)
    sys.modules["ppo_loop"] = module  # where dataclasses look up annotations
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
@pytest.mark.parametrize("epochs", [1, 3])
def test_an_update_is_that_of_the_trainer(loop, epochs: int) -> None:
    """Two updates of the same rollouts give the same advantages and the same weights, in float64."""
    rewards = {"length": lambda rollout: 0.25 * rollout.response_lengths}
    trainer = tiny.trainer(
        dtype=torch.float64, rewards=rewards, num_ppo_epochs=epochs, policy_seed=3, ratio_threshold=None
    )
    policy, value = copy.deepcopy(trainer.policy), copy.deepcopy(trainer.value)
    names = {name: getattr(trainer.settings, name) for name in loop.Settings.__dataclass_fields__ if name != "episodes"}
    settings = loop.Settings(**names)
    loop.END = tiny.EOS

    def reward(row) -> float:
        return 0.25 * len(row.response)

    optimizer = torch.optim.AdamW([*policy.parameters(), *value.parameters()], settings.learning_rate, weight_decay=0)

    for seed in range(2):
        rollout = trainer.generate(tiny.prompts(8, seed=seed))
        experience = trainer.make_experience(rollout)
        rows = [loop.Row(prompt, response) for prompt, response in zip(*lists_of(rollout), strict=True)]
        plain = loop.make_experience(policy, trainer.ref, value, reward, rows, settings)
        for index, each in enumerate(plain):
            length = len(each.row.response)
            for name in ("logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns"):
                expected = getattr(experience, name)[index, :length]
                torch.testing.assert_close(getattr(each, name), expected, rtol=1e-6, atol=1e-7)

        trainer.update(experience)
        loop.update(policy, value, optimizer, plain, settings)
        for ours, theirs in ((policy, trainer.policy), (value, trainer.value)):
            torch.testing.assert_close(tiny.weights(ours), tiny.weights(theirs), rtol=1e-5, atol=1e-6)


def lists_of(rollout) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts and responses of a rollout as token ids."""
    width = rollout.prompt_width
    prompts = [ids[mask].tolist() for ids, mask in zip(rollout.ids[:, :width], rollout.mask[:, :width], strict=True)]
    responses = [ids[mask].tolist() for ids, mask in zip(rollout.ids[:, width:], rollout.response_mask, strict=True)]
    return prompts, responses


@pytest.mark.full
def test_the_script_runs(loop, capsys: pytest.CaptureFixture[str]) -> None:
    """A few steps of each stage; the whole script takes a minute."""
    loop.main(sft_steps=2, reward_steps=2, updates=1)
    printed = capsys.readouterr().out
    assert "update  1  reward" in printed and "quality of an answer" in printed
