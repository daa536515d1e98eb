"""Defects found in other PPO trainers, which ours does not have (docs/results/guarantees.md has further tests)."""

import json
from pathlib import Path

import ppo_folder as stage
import pytest
import tiny
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_cli import config
from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import save
from rlhf_cli.ppo.trainer import PPOTrainer

ROOT = Path(__file__).parents[2]
full = pytest.mark.full


# TRL


@pytest.mark.parametrize("model", ["policy", "value"])
def test_trl_02_gradient_checkpointing_recomputes_every_layer_of_policy_and_value(model):
    """In the update, a layer's forward pass runs once, or twice if it is recomputed."""
    passes = {}
    for on in (False, True):
        trainer, experience = tiny.trainer_and_experience(gradient_checkpointing=on, num_ppo_epochs=1)
        assert len(experience.minibatches[0]) == 1, "one micro-batch"
        calls: list[int] = []
        for layer in getattr(trainer, model).model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        trainer.update(experience)
        passes[on] = len(calls)
    assert passes == {False: 2, True: 4}, "two layers"


@full
def test_trl_04_an_update_that_crosses_the_end_of_a_pass_makes_all_steps(run_folder, monkeypatch):
    """20 prompts, 8 per update: the third and the fifth update cross the end of a pass."""
    steps: list[int] = []  # of the optimizer, in each update
    update, step = PPOTrainer.update, torch.optim.AdamW.step

    def counted(*args, **kwargs):
        steps[-1] += 1
        return step(*args, **kwargs)

    monkeypatch.setattr(PPOTrainer, "update", lambda *args: (steps.append(0), update(*args))[1])
    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    stage.write(run_folder, "ppo", {**stage.PPO, "ppo": {**stage.PPO["ppo"], "total_episodes": None}})
    chosen = stage.settings("num_train_epochs=2.0", "num_mini_batches=2", "num_ppo_epochs=1")
    assert stage.ppo(run_folder, *chosen).exit_code == 0
    assert steps == [2] * 5
    rows = stage.lines(run_folder / "ppo/metrics.jsonl")
    assert [row["episode"] for row in rows] == [8, 16, 24, 32, 40]


@full
def test_trl_06_the_value_model_is_saved_and_loads_as_the_one_that_was_trained(trained_once):
    run_folder, classifier = trained_once[0], AutoModelForSequenceClassification
    saved, report = classifier.from_pretrained(run_folder / "ppo/value", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    trained = save.load_tree(run_folder / "ppo/state/step_000004")["trainer"]
    assert {"policy", "value", "optimizer", "scheduler", "kl_coef", "moments", "updates"} <= set(trained)
    assert all(torch.equal(saved.state_dict()[name], tensor) for name, tensor in trained["value"].items())
    start = classifier.from_pretrained(run_folder / "reward_model")
    assert not torch.equal(tiny.weights(saved), tiny.weights(start))


# verl


def test_verl_12_the_defaults_have_a_kl_term():
    """In both recipes and in every preset."""
    for recipe in ("classic", "reasoning"):
        assert PPOSettings(total_episodes=64, recipe=recipe).kl_coef > 0
    for path in ROOT.glob("configs/*/ppo.yaml"):
        assert yaml.safe_load(path.read_text())["ppo"].get("kl_coef", 0.05) > 0, path


# NeMo-RL


@pytest.mark.parametrize("name", config.CONFIGS)
def test_nemo_14_an_unknown_key_is_rejected_in_every_section(folder, name):
    (folder / "dpo.yaml").write_text("data: {train: pairs.jsonl}\n")
    (folder / "eval.yaml").write_text(
        "data: {prompts: prompts.jsonl}\nmodels: {sft: model, ppo: model, reward: scorer}\n"
    )
    sections = {f"{key.rpartition('.')[0]}.".removeprefix(".") for key in config.keys(name)}
    assert "" in sections and len(sections) > 4
    any_field = {"model.new.", "data.train.NUMBER."}  # of any architecture; of a list, which no option writes into
    for section in sections - any_field:
        with pytest.raises(RLHFError) as caught:
            config.load(name, folder / f"{name}.yaml", [f"{section}zzzz=1"])
        problems = [each for each in caught.value.problems if f"{section}zzzz" in each.text + str(each.where)]
        assert problems and problems[0].code in ("C01", "C02"), caught.value


# DeepSpeed-Chat


@full
def test_deepspeed_15_generation_config_does_not_make_training_greedy(trained_folder):
    plain = (trained_folder / "ppo/samples.jsonl").read_bytes()
    path = trained_folder / "sft_model/generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "do_sample": False, "temperature": None, "top_k": 1}))
    assert stage.ppo(trained_folder, "--fresh").exit_code == 0
    assert (trained_folder / "ppo/samples.jsonl").read_bytes() == plain


# ms-swift


@full
def test_ms_swift_16_policy_and_reward_model_are_each_read_once(run_folder, monkeypatch):
    """The reference, the value model and a second use of the reward model are made from what is loaded."""
    reads = []
    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        plain = kind.from_pretrained.__func__

        def read(cls, folder, *args, plain=plain, **kwargs):
            reads.append(Path(folder).name)
            return plain(cls, folder, *args, **kwargs)

        monkeypatch.setattr(kind, "from_pretrained", classmethod(read))
    again = {"reward": None, "again": {"model": "reward_model", "weight": 0.5}}
    stage.write(run_folder, "ppo", {**stage.PPO, "rewards": again})
    assert stage.ppo(run_folder, stage.ONE).exit_code == 0
    assert sorted(reads) == ["reward_model", "sft_model"]
