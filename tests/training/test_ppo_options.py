"""Keys of `ppo:` that only divide or bound the work, and what no key changes: writing out a default changes no bit.

tests/cli/test_verify.py compares the options that change numbers with an independent implementation.
"""

import re
from pathlib import Path

import pytest
import tiny
import torch

from rlhf_cli.config.ppo_options import PPOSettings


def test_every_key_is_covered_here():
    """A new key needs a case of test_verify.py, or a test in this file, its neighbours, or the tests of the stage."""
    tests = Path(__file__).parents[1]
    paths = [*tests.rglob("test_ppo_options*.py"), *tests.rglob("test_stage_ppo*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in (*paths, tests / "distributed/test_group_fsdp.py"))
    text += (tests / "cli/test_verify.py").read_text(encoding="utf-8").partition("CASES: ")[2].partition('""")')[0]
    assert [key for key in PPOSettings.model_fields if not re.search(rf"\b{key}\b", text)] == []


@pytest.fixture(scope="module")
def plain_step():
    return tiny.one_step()


@pytest.mark.parametrize("key", sorted(set(PPOSettings.model_fields) - {"total_episodes", "num_train_epochs"}))
def test_writing_out_a_default_leaves_the_run_bit_identical(key, plain_step):
    trainer, stats = tiny.one_step(**{key: tiny.settings().model_dump()[key]})
    assert torch.equal(tiny.weights(plain_step[0].policy), tiny.weights(trainer.policy)) and plain_step[1] == stats


# How much


def test_batch_arithmetic():
    sizes = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "num_samples_per_prompt": 4}
    settings = PPOSettings(total_episodes=200, **sizes)
    assert (settings.episodes_per_update, settings.prompts_per_update, settings.num_updates()) == (64, 16, 4)
    assert PPOSettings(num_train_epochs=2.0, **sizes).num_updates(prompt_count=40) == 5
    with pytest.raises(ValueError, match="number of prompts"):
        PPOSettings(num_train_epochs=2.0).num_updates()


@pytest.mark.parametrize("minibatches,epochs", [(1, 4), (2, 3), (4, 1)])
def test_num_mini_batches_and_num_ppo_epochs_make_the_optimizer_steps(minibatches, epochs):
    trainer = tiny.trainer(num_mini_batches=minibatches, num_ppo_epochs=epochs)
    steps: list[int] = []
    trainer.optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    trainer.step(tiny.prompts())
    assert len(steps) == minibatches * epochs


def test_num_samples_per_prompt_gives_adjacent_rows_with_different_responses():
    rollout = tiny.trainer(num_samples_per_prompt=4).generate(tiny.prompts(2))
    assert len(rollout) == 8 and [rollout.prompt_tokens(row) for row in range(4)] == [rollout.prompt_tokens(0)] * 4
    assert len({tuple(rollout.response_tokens(row)) for row in range(4)}) > 1


@pytest.mark.parametrize("tokens,packing", [("auto", False), (12, False), (12, True)])
def test_micro_batch_tokens_bounds_the_forward_passes(tokens, packing, monkeypatch):
    trainer = tiny.trainer(micro_batch_tokens=tokens, num_ppo_epochs=2, packing=packing, response_length=3)
    shapes = tiny.spy_on_shapes(monkeypatch)
    experience = trainer.make_experience(trainer.generate(tiny.prompts()), torch.zeros(8))
    trainer.update(experience)
    micro_batches = experience.minibatches[0]
    assert len(shapes) == 7 * len(micro_batches), "scoring: policy, value and reference; two models in two epochs"
    assert all(len(rows) <= 4 for rows in micro_batches)
    assert all(rows * width <= 12 or rows == 1 for rows, width in shapes) is (tokens == 12)
    if packing:
        assert {rows for rows, _ in shapes} == {1} and max(width for _, width in shapes) <= 12
        assert max(len(rows) for rows in micro_batches) > 1


# Rollouts


def test_response_length_range_is_sampled_for_each_update():
    assert tiny.trainer(response_length=5, stop_token="none").generate(tiny.prompts()).response_mask.shape == (8, 5)
    trainer, widths = tiny.trainer(response_length={"min": 2, "max": 6}, stop_token="none"), []
    for step in range(12):
        trainer.updates = step
        widths.append(trainer.generate(tiny.prompts()).response_mask.shape[1])
    assert set(widths) <= set(range(2, 7)) and len(set(widths)) > 2


# Precision


def test_bf16_changes_the_numbers_a_little_and_keeps_the_weights_float32():
    (_, a), (half, b) = tiny.one_step(), tiny.one_step(bf16=True)
    assert all(p.dtype == torch.float32 for p in half.policy.parameters())
    assert a["objective/entropy"] != b["objective/entropy"]
    assert b["objective/entropy"] == pytest.approx(a["objective/entropy"], rel=0.05)
