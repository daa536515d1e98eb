"""Adapters that are refused: each message says code, place and fix, and nothing is trained."""

from pathlib import Path

import pytest
import run_cli
import torch
from adapter_folder import run, write
from bad_inputs import check, refused, replace, rlhf
from safetensors.torch import load_file, save_file

from rlhf_cli.errors import RLHFError
from rlhf_cli.models import build, save
from rlhf_cli.models.load import load_causal_lm
from tests.conftest import World

pytestmark = pytest.mark.full


# Bases


def test_m04_the_base_is_missing(adapters_copy: Path) -> None:
    (adapters_copy / "model").rename(adapters_copy / "elsewhere")
    says = ("sft holds an adapter, but its base model does not exist", "hint: put it back there; or train the adapter")
    assert refused(rlhf("ppo"), "M04", "ppo.yaml", *says) and not (adapters_copy / "ppo").exists()
    seen = check("ppo.yaml")
    assert seen.exit_code == 2 and "error[M04]" in seen.stdout + seen.stderr
    with pytest.raises(RLHFError, match="M04"):
        load_causal_lm(adapters_copy / "sft/model")


def test_m04_the_base_has_changed_since(adapters_copy: Path) -> None:
    tensors = load_file("model/model.safetensors")
    save_file({name: tensor + 1e-3 for name, tensor in tensors.items()}, "model/model.safetensors", {"format": "pt"})
    says = ("sft holds an adapter, and its base model has changed since (", "hint: restore the old base, or train")
    assert refused(rlhf("ppo"), "M04", "ppo.yaml", *says)
    given = run_cli.rlhf("run", ".", "--dry-run")  # which makes it all again
    assert given.exit_code == 0 and "stale: model.path: other weights" in given.stdout


def test_m04_the_sft_stage_below_a_reward_adapter_was_trained_again(adapters_copy: Path) -> None:
    run(adapters_copy, "sft", "--fresh", "-s", "seed=1")
    says = ("reward holds an adapter, and its base sft has changed since (", "--fresh")
    assert refused(rlhf("ppo"), "M04", "ppo.yaml", *says)


def test_m10_a_flipped_bit_in_an_adapter_or_in_the_one_below(adapters_copy: Path) -> None:
    for stage in ("sft", "reward"):
        path = adapters_copy / stage / "model/adapter_model.safetensors"
        good = path.read_bytes()
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        says = (f"{stage} is damaged: model/adapter_model.safetensors: its content is not what was written",)
        # The base of the reward model alone is compared with its hash too.
        assert refused(rlhf("ppo", "-s", "models.sft=model"), "M10", "", *says)
        path.write_bytes(good)


def test_m01_an_adapter_of_another_model(adapters_copy: Path) -> None:
    tensors = load_file("sft/model/adapter_model.safetensors")
    for changed in (
        {"base_model.model.model.layers.9.x.lora_A.weight": torch.zeros(4, 4)},
        {next(iter(tensors)): None},
    ):
        kept = {name: tensor for name, tensor in {**tensors, **changed}.items() if tensor is not None}
        save_file(kept, "sft/model/adapter_model.safetensors")
        with pytest.raises(RLHFError, match="does not fit its base"):
            load_causal_lm("sft/model")


# Settings


def test_c07_a_layer_that_the_model_does_not_have(adapters_copy: Path) -> None:
    replace("sft.yaml", "r: 4", "target_modules: [q_prj]")
    replace("reward.yaml", "r: 4", "target_modules: [lm_head]")
    replace("ppo.yaml", "data:", "models: {adapters: {kind: lora, target_modules: [q_prj]}}\ndata:")
    for stage, key, name in (("sft", "model", "q_prj"), ("reward", "model", "lm_head"), ("ppo", "models", "q_prj")):
        result = check(f"{stage}.yaml")
        text = f"{key}.adapters.target_modules: no linear layer inside of the model is called {name}"
        assert result.exit_code == 2 and text in result.stderr
    for stage, options in (("ppo", []), ("sft", ["--fresh"])):
        assert refused(rlhf(stage, *options), "C07", f"{stage}.yaml:1: ", "hint: did you mean q_proj?")


def test_c17_a_model_of_which_4_bits_can_hold_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write(tmp_path / "run", world))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = build.new_causal_lm(sizes, world.tokenizer())
    save.save_model(model, world.tokenizer(), Path("model"), "A narrow base model.")
    says = ("4 bits hold layers of a width that 64 divides, and the model has none", "hint: set it to lora")
    result = rlhf("sft", "-s", "model.adapters.kind=qlora")
    assert result.exit_code == 2 and "error[C17]" in result.stderr and all(text in result.stderr for text in says)


def test_c17_a_template_with_tokens_that_adapters_would_not_train(adapters_copy: Path) -> None:
    replace("sft.yaml", "path: model,", "path: model, chat_template: chatml,")
    says = ("adds <|im_start|> and <|im_end|>, whose embeddings adapters do not train", "hint: take a template of")
    assert refused(rlhf("sft", "--fresh"), "C17", "sft.yaml:1: ", *says)
    assert "adds <|im_start|>" in check("sft.yaml").stdout + check("sft.yaml").stderr


def test_c17_a_push_of_adapters_whose_base_is_a_folder_here(
    adapters_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    given = ("-s", "models.adapters={kind: lora}", "-s", "ppo.push_to_hub_if_best=some/where")
    says = (
        "only adapters would be pushed to some/where, and their base, models.sft, is a local folder",
        "hint: remove",
    )
    assert refused(rlhf("ppo", *given), "C17", "--set ppo.push_to_hub_if_best", *says)
    assert not (adapters_copy / "ppo/model").exists()


def test_m04_the_base_below_a_policy_of_adapters(adapters_copy: Path) -> None:
    run(adapters_copy, "ppo", "-s", "models.adapters={kind: lora, r: 2}")
    run(adapters_copy, "sft", "--fresh", "-s", "seed=1")
    says = ("ppo holds an adapter, and its base sft has changed since (", "hint: restore the old base, or train")
    result = rlhf("eval")
    assert result.exit_code == 2 and "error[M04]: eval.yaml" in result.stderr
    assert all(text in result.stderr for text in says), result.stderr
