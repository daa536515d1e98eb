"""Weights that do not fit their config are refused by name (M13) before anything trains; what is meant so passes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from bad_inputs import check, foreign_scorer, refused, rlhf
from conftest import World
from safetensors.torch import load_file, save_file
from transformers import (
    GPTNeoXForCausalLM,
    Llama4Config,
    Llama4ForConditionalGeneration,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from rlhf_cli.errors import RLHFError
from rlhf_cli.models.load import (
    init_reward_model,
    load_causal_lm,
    load_classifier,
    load_reward_model,
    read_causal_lm_config,
    read_classifier_config,
    read_init_config,
    read_reward_model_config,
)

LOADERS = (load_causal_lm, read_causal_lm_config, init_reward_model, read_init_config)
Tensors = dict[str, torch.Tensor]


def change(folder: Path, how: Callable[[Tensors], Tensors] | None = None, **fields: Any) -> Path:
    """Other tensors, or other fields of config.json."""
    path, settings = folder / "model.safetensors", folder / "config.json"
    if how:
        save_file(how(load_file(path)), path, metadata={"format": "pt"})
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **fields}))
    return folder


def refusal(call: Callable[..., Any], folder: Path) -> str:
    with pytest.raises(RLHFError) as caught:
        call(folder)
    assert caught.value.exit_code == 2 and len(caught.value.problems) == 1
    return str(caught.value)


def strangers(model: Any, folder: Path) -> list[str]:
    """Names of weights that equal no tensor of the folder's file, where names may be others."""
    there = load_file(folder / "model.safetensors").values()
    return [name for name, weight in model.named_parameters() if not any(torch.equal(weight, one) for one in there)]


@pytest.fixture
def causal(world: World, tmp_path: Path) -> Path:
    return Path(shutil.copytree(world.base, tmp_path / "model"))


@pytest.mark.parametrize("name", [*families.FAMILIES, *tiny.FAMILIES])
def test_an_untouched_copy_passes_with_its_own_weights(name: str, tmp_path: Path) -> None:
    """As a language model, as the start of a reward model, and as the reward model itself."""
    if name in families.FAMILIES:
        families.write_causal(tmp_path, name, ["Tell me of the sun. It is bright."])
    else:
        tiny.causal(name).save_pretrained(tmp_path)
    assert not strangers(load_causal_lm(tmp_path), tmp_path)
    scorer = init_reward_model(tmp_path)
    assert strangers(scorer, tmp_path) == ["score.weight"] and scorer.score.weight.abs().sum() > 0
    scorer.save_pretrained(tmp_path / "scorer")
    assert torch.equal(load_reward_model(tmp_path / "scorer").score.weight, scorer.score.weight)


def test_an_untouched_classifier_of_texts_passes(tmp_path: Path) -> None:
    families.write_sentiment_classifier(tmp_path, ["Tell me of the sun."])
    assert not strangers(load_classifier(tmp_path), tmp_path)


def prefixed(tensors: Tensors) -> Tensors:
    return {f"transformer.{name}": tensor for name, tensor in tensors.items()}


def without_one(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != "model.layers.1.mlp.up_proj.weight"}


def with_one_more(tensors: Tensors) -> Tensors:
    return {**tensors, "model.layers.1.mlp.up_proj.bias": torch.zeros(64)}


def narrower(tensors: Tensors) -> Tensors:
    return {**tensors, "model.norm.weight": torch.ones(31)}


@pytest.mark.parametrize(
    ("how", "fields", "says"),
    [
        (prefixed, {}, ("missing (", "20 not in the model (transformer.model.embed_tokens.weight")),
        (None, {"num_hidden_layers": 1}, ("9 not in the model (model.layers.1.input_layernorm.weight",)),
        (None, {"num_hidden_layers": 4}, ("18 missing (model.layers.2.input_layernorm.weight",)),
        (None, {"vocab_size": 5000}, ("32], not [5000, 32]",)),
        (None, {"vocab_size": 10**12}, ("of another shape (model.embed_tokens.weight",)),
        (None, {"hidden_size": 64}, ("20 of another shape (model.embed_tokens.weight",)),
        (None, {"attention_bias": True}, ("8 missing (model.layers.0.self_attn.k_proj.bias",)),
        (without_one, {}, ("1 missing (model.layers.1.mlp.up_proj.weight)",)),
        (with_one_more, {}, ("1 not in the model (model.layers.1.mlp.up_proj.bias)",)),
        (narrower, {}, ("1 of another shape (model.norm.weight [31], not [32])",)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("load", LOADERS)
def test_m13_says_which_weights_do_not_fit(
    load: Any, how: Any, fields: dict[str, Any], says: tuple[str, ...], causal: Path
) -> None:
    said = refusal(load, change(causal, how, **fields))
    assert said.startswith("error[M13]: ") and all(text in said for text in says), said


def test_m13_two_matrices_where_one_is_meant(causal: Path) -> None:
    """transformers keeps both until embeddings grow, and one of them is gone then."""
    change(causal, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    assert "tie_word_embeddings" in refusal(load_causal_lm, causal)
    change(causal, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert load_causal_lm(causal).lm_head.weight.shape == (336, 32)


def test_m13_of_a_reward_model_and_m02_of_a_head_that_is_not_there(causal: Path, tmp_path: Path) -> None:
    init_reward_model(causal).save_pretrained(tmp_path / "whole")
    for call in (load_reward_model, read_reward_model_config, read_classifier_config):
        for number, (how, fields, code) in enumerate(
            [
                (None, {"num_hidden_layers": 1}, "M13"),
                (prefixed, {}, "M13"),
                (lambda t: {("reward_head" if n == "score.weight" else n): x for n, x in t.items()}, {}, "M13"),
                (lambda t: {n: x for n, x in t.items() if n != "score.weight"}, {}, "M02"),
            ]
        ):
            copy = Path(shutil.copytree(tmp_path / "whole", tmp_path / f"{call.__name__}-{number}"))
            said = refusal(call, change(copy, how, **fields))
            assert said.startswith(f"error[{code}]: ") and ("score.weight" in said or "layers.1" in said), said


def test_what_another_task_left_is_set_aside(causal: Path, tmp_path: Path) -> None:
    """A language model's head under a scorer, a value head of TRL's, and the buffers of old checkpoints."""
    head = torch.zeros(336, 32)
    change(causal, lambda tensors: {**tensors, "v_head.summary.weight": torch.zeros(1, 32)})
    change(causal, lambda tensors: {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    assert load_causal_lm(causal).config.vocab_size == 336
    init_reward_model(causal).save_pretrained(tmp_path / "scorer")
    load_reward_model(change(tmp_path / "scorer", lambda tensors: {**tensors, "lm_head.weight": head}))
    old, layer = tmp_path / "pythia", "gpt_neox.layers.0.attention"
    tiny.causal("gpt_neox").save_pretrained(old)
    buffers = {f"{layer}.bias": torch.ones(1, 1, 64, 64), f"{layer}.masked_bias": torch.tensor(-1e9)}
    change(old, lambda tensors: {**tensors, **buffers, f"{layer}.rotary_emb.inv_freq": torch.zeros(4)})
    assert isinstance(load_causal_lm(old), GPTNeoXForCausalLM)
    assert "embed_out.weight" in load_file(old / "model.safetensors")  # Pythia's name of the head
    assert init_reward_model(old).num_labels == 1


def test_the_towers_of_a_composite_checkpoint_are_set_aside(tmp_path: Path) -> None:
    """Llama 4's text model is loaded alone; a tensor that is of no part is still refused."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": 64, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2,
            "intermediate_size_mlp": 64, "max_position_embeddings": 64}  # fmt: skip
    sees = {"image_size": 16, "patch_size": 8, "vision_output_dim": 32, "projector_input_dim": 32,
            "projector_output_dim": 32}  # fmt: skip
    config = Llama4Config(text_config={**sizes, **text}, vision_config={**sizes, **sees})
    Llama4ForConditionalGeneration(config).save_pretrained(tmp_path)
    assert any(name.startswith("vision_model.") for name in load_file(tmp_path / "model.safetensors"))
    assert load_causal_lm(tmp_path).config.model_type == "llama4_text"
    change(tmp_path, lambda tensors: {**tensors, "model.audio.weight": torch.zeros(2)})
    assert "1 not in the model (model.audio.weight)" in refusal(load_causal_lm, tmp_path)


def test_looking_at_the_weights_draws_no_random_number(causal: Path) -> None:
    torch.manual_seed(7)
    read_init_config(change(causal, num_attention_heads=4))
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)))


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_m13_in_every_command_before_anything_trains(stage: str, folder: Path) -> None:
    """In the plain check too, which reads no weights."""
    foreign_scorer(folder)
    change(folder / "model", prefixed)
    for result in (check(f"{stage}.yaml"), check(f"{stage}.yaml", "--deep")):
        assert f"error[M13]: {stage}.yaml:1: model: the weights do not fit" in result.stderr and result.exit_code == 2
    assert refused(rlhf(stage), "M13", f"{stage}.yaml:1: ", "20 not in the model (transformer.model.embed", "hint:")
    assert not list((folder / stage).glob("*/model*")) and not (folder / stage / "metrics.jsonl").exists()


def test_m13_of_half_a_reward_model_in_ppo(folder: Path) -> None:
    foreign_scorer(folder)
    change(folder / "scorer", num_hidden_layers=1)
    assert refused(rlhf("ppo"), "M13", "ppo.yaml:1: ", "scorer: ", "9 not in the model (model.layers.1.")
    assert "error[M13]: ppo.yaml:1: scorer: " in check("ppo.yaml").stderr


def test_a_classifier_with_parts_of_another_task_loads(tmp_path: Path) -> None:
    """Encoders on the hub keep the pooler and the heads of their pretraining beside the classifier."""
    config = RobertaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3
    )
    model = RobertaForSequenceClassification(config)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"roberta.pooler.dense.weight": torch.ones(16, 16), "lm_head.bias": torch.ones(64)}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load_classifier(tmp_path)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in tensors.items())


def test_a_file_that_no_loader_reads_may_be_gone(tmp_path: Path) -> None:
    tiny.causal().save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").symlink_to(tmp_path / "nowhere")
    load_causal_lm(tmp_path)
