"""Models that `rlhf ppo` loads: four on one base, a whole reward model beside them, and a named base."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folder import run, some_ids
from bad_inputs import replace, rlhf
from safetensors.torch import load_file

from rlhf_cli import runs
from rlhf_cli.config.loading import load
from rlhf_cli.models import save
from rlhf_cli.models.batch import Prompts
from rlhf_cli.models.load import load_causal_lm, load_reward_model
from rlhf_cli.planning import fits
from rlhf_cli.planning.target import Target
from tests.stages.common.test_shared_base import LORA, four, loaded, weights_of

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_page")]


def trainable(model: Any) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("value", ["reward", "policy_head"])
def test_only_adapters_and_the_value_head_are_trained(adapters_copy: Path, value: str) -> None:
    parts = loaded(adapters_copy, f"models.value={value}", "ppo.learning_rate=1e-2", "ppo.num_ppo_epochs=1")
    models, trainer = four(parts), parts.trainer
    before = {
        role: {name: weight.detach().clone() for name, weight in model.named_parameters()}
        for role, model in models.items()
    }
    heads = {"score.modules_to_save.default.weight", "score.weight"}
    assert trainable(models["ref"]) == trainable(models["reward"]) == set()
    assert len(trainable(models["policy"])) == 2 * 7 * 2 and all(".lora_" in n for n in trainable(models["policy"]))
    assert len(trainable(models["value"]) & heads) == 1
    assert len(trainable(models["value"]) - heads) == (0 if value == "policy_head" else 2 * 7 * 2)
    optimized = {id(weight) for group in trainer.optimizer.param_groups for weight in group["params"]}
    for name in ("policy", "value"):
        groups = [each for each in trainer.optimizer.param_groups if each["name"].startswith(name)]
        expected = {id(weight) for weight in models[name].parameters() if weight.requires_grad}
        assert {id(weight) for group in groups for weight in group["params"]} == expected
    assert len(optimized) == len(trainable(models["policy"])) + len(trainable(models["value"]))
    for _ in range(2):  # at the first step A has no gradient: B is zero
        trainer.step(Prompts.from_lists([prompt.ids for prompt in parts.prompts[:8]]))
    for role, model in models.items():
        for name, weight in model.named_parameters():
            is_trained = name in trainable(model)
            assert torch.equal(weight, before[role][name]) != is_trained, name


def test_a_reward_model_without_adapters_takes_more_memory_and_is_reported(adapters_copy: Path) -> None:
    replace("reward.yaml", ", adapters: {kind: lora, r: 4}", "")
    run(adapters_copy, "reward", "--fresh")
    result = rlhf("ppo", *LORA)
    assert result.exit_code == 0 and result.stderr.count("is a full model: 117.5 kB of additional memory") == 1
    settings = json.loads(Path("ppo/value/adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["r"]) == ("../../reward/model", 3)
    parts = loaded(adapters_copy)
    models = four(parts)
    assert weights_of([models["value"], models["reward"]]) < 1.3 * weights_of([models["reward"]])
    ids = some_ids()
    with torch.no_grad():
        assert torch.equal(models["value"](input_ids=ids).logits, models["reward"](input_ids=ids).logits)
        parts.trainer.load_state_dict(save.load_tree(runs.state_at(Path("ppo/state"), 2))["trainer"])
        read = load_reward_model("ppo/value").eval()(input_ids=ids).logits
        assert torch.allclose(models["value"](input_ids=ids).logits, read, atol=1e-5)
        assert not torch.allclose(read, models["reward"](input_ids=ids).logits, atol=1e-3)
    size = sum(tensor.nbytes for tensor in load_file("model/model.safetensors").values())
    config = load("ppo", adapters_copy / "ppo.yaml", LORA[1::2])
    fixed = fits._fixed_memory(config, runs.open_parents(config), Target.of(None, 1))
    assert fixed.kinds["weights"] == pytest.approx(2 * size, rel=0.25)


def test_ppo_without_an_sft_stage_uses_the_named_base(adapters_copy: Path) -> None:
    """As configs/instruct: reward adapters, an ensemble and the policy on an external model."""
    replace("reward.yaml", "path: sft", "path: model")
    run(adapters_copy, "reward", "--fresh")
    shutil.copytree("reward", "second")
    changes = ["models.sft=model", "models.value=second", "rewards={both: {models: {a: reward, b: second}}}"]
    words = [text for change in changes for text in ("-s", change)]
    manifest = run(adapters_copy, "ppo", *LORA, *words)
    assert manifest["parents"]["models.sft"]["stage"] == "foreign"
    assert json.loads(Path("ppo/model/adapter_config.json").read_text())["base_model_name_or_path"] == "../../model"
    trainer = loaded(adapters_copy, *changes).trainer
    members = [member.model for member in trainer.rewards["both"].members.values()]
    assert members[0] is not members[1]
    one, all_five = weights_of([trainer.ref]), weights_of([trainer.ref, trainer.policy, trainer.value, *members])
    adapters = sum(
        weight.nbytes
        for model in (trainer.policy, trainer.value, *members)
        for name, weight in model.named_parameters()
        if ".lora_" in name or "score" in name
    )
    assert all_five == one + adapters
    assert load_causal_lm("ppo/model").num_parameters() == trainer.ref.num_parameters()
