"""Models are loaded, created and saved; weights that do not fit their config (M13) are refused before training."""

import json
import platform
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from bad_inputs import check, foreign_scorer, refused, rlhf
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXForCausalLM,
    Llama4Config,
    Llama4ForConditionalGeneration,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from rlhf_cli.errors import RLHFError
from rlhf_cli.models import devices, lora, save, tokenizers
from rlhf_cli.models import load as loading
from rlhf_cli.models.load import (
    init_reward_model,
    init_reward_model_on,
    load_causal_lm,
    load_classifier,
    load_reward_model,
)
from rlhf_cli.stages.common import model_loading
from tests.conftest import SIZES, World

LOADERS = (load_causal_lm, loading.read_causal_lm_config, init_reward_model, loading.read_init_config)
REWARD_LOADERS = (load_reward_model, loading.read_reward_model_config, loading.read_classifier_config)
Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], Tensors]


def change(folder: Path, tensors: Change | Tensors | None = None, **fields: Any) -> Path:
    """Change or add tensors of a model's folder, and fields of its config.json."""
    path, settings = folder / "model.safetensors", folder / "config.json"
    if tensors:
        stored = load_file(path)
        save_file(tensors(stored) if callable(tensors) else stored | tensors, path, metadata={"format": "pt"})
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **fields}))
    return folder


def refusal(call: Callable[..., Any], folder: Path) -> str:
    with pytest.raises(RLHFError) as caught:
        call(folder)
    assert caught.value.exit_code == 2 and len(caught.value.problems) == 1
    return str(caught.value)


def new_weights(model: Any, folder: Path) -> list[str]:
    """Return the names of weights that equal no tensor of the folder's file, whose names may differ."""
    stored = load_file(folder / "model.safetensors").values()
    return [name for name, weight in model.named_parameters() if not any(torch.equal(weight, one) for one in stored)]


@pytest.fixture
def causal(world: World, tmp_path: Path) -> Path:
    return Path(shutil.copytree(world.base, tmp_path / "model"))


def test_a_classifier_of_another_form_is_not_built_on_a_causal_lm(
    causal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M10 without a linear `score`; None with another backbone or custom code."""
    other = tiny.causal("modernbert-decoder", cls_token_id=1, sep_token_id=1)
    other.save_pretrained(tmp_path / "other")
    assert "error[M10]" in refusal(partial(init_reward_model_on, other), tmp_path / "other")
    assert init_reward_model_on(other, causal) is None
    config = loading.read_init_config(causal)
    config.auto_map = {"AutoModelForSequenceClassification": "own.Classifier"}
    monkeypatch.setattr(loading, "read_init_config", lambda *_: config)
    assert init_reward_model_on(load_causal_lm(causal), causal) is None


def write_family(name: str, folder: Path) -> None:
    """Write a tiny causal LM of a family, with random weights."""
    if name in families.FAMILIES:
        families.write_causal(folder, name, ["Tell me of the sun. It is bright."])
    else:
        tiny.causal(name).save_pretrained(folder)


@pytest.mark.full
@pytest.mark.parametrize("name", [*families.FAMILIES, *tiny.FAMILIES])
def test_every_family_loads_with_its_own_weights(name: str, tmp_path: Path) -> None:
    """As a language model, as the start of a reward model, and as the reward model."""
    write_family(name, tmp_path)
    assert not new_weights(load_causal_lm(tmp_path), tmp_path)
    causal_lm = load_causal_lm(tmp_path)
    torch.manual_seed(0)
    on_causal_lm = init_reward_model_on(causal_lm, tmp_path)
    torch.manual_seed(0)
    model = init_reward_model(tmp_path)
    assert new_weights(model, tmp_path) == ["score.weight"] and model.score.weight.abs().sum() > 0
    assert tiny.description(on_causal_lm) == tiny.description(model)
    assert all(map(torch.equal, on_causal_lm.state_dict().values(), model.state_dict().values()))
    assert on_causal_lm.base_model is causal_lm.base_model
    model.save_pretrained(tmp_path / "reward")
    assert torch.equal(load_reward_model(tmp_path / "reward").score.weight, model.score.weight)
    for load, folder in ((load_causal_lm, tmp_path), (load_reward_model, tmp_path / "reward")):
        full, empty = load(folder), load(folder, empty=True)
        assert tiny.description(full) == tiny.description(empty)
        assert {tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers())} == {True}


def prefixed(tensors: Tensors) -> Tensors:
    return {f"transformer.{name}": tensor for name, tensor in tensors.items()}


def without(removed: str) -> Change:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name != removed}


def renamed(old: str, new: str) -> Change:
    return lambda tensors: {(new if name == old else name): tensor for name, tensor in tensors.items()}


@pytest.mark.full
@pytest.mark.parametrize(
    ("tensors", "fields", "text"),
    [
        (prefixed, {}, "20 not in the model (transformer.model.embed_tokens.weight"),
        (None, {"num_hidden_layers": 1}, "9 not in the model (model.layers.1.input_layernorm.weight"),
        (None, {"num_hidden_layers": 4}, "18 missing (model.layers.2.input_layernorm.weight"),
        (None, {"vocab_size": 5000}, "32], not [5000, 32]"),
        (None, {"vocab_size": 10**12}, "of another shape (model.embed_tokens.weight"),
        (None, {"hidden_size": 64}, "20 of another shape (model.embed_tokens.weight"),
        (None, {"attention_bias": True}, "8 missing (model.layers.0.self_attn.k_proj.bias"),
        (without("model.layers.1.mlp.up_proj.weight"), {}, "1 missing (model.layers.1.mlp.up_proj.weight)"),
        ({"model.layers.1.mlp.up_proj.bias": torch.zeros(64)}, {},
         "1 not in the model (model.layers.1.mlp.up_proj.bias)"),
        ({"model.norm.weight": torch.ones(31)}, {}, "1 of another shape (model.norm.weight [31], not [32])"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("load", LOADERS)
def test_m13_names_the_weights_that_do_not_fit(
    load: Any, tensors: Any, fields: dict[str, Any], text: str, causal: Path
) -> None:
    message = refusal(load, change(causal, tensors, **fields))
    assert message.startswith("error[M13]: ") and text in message, message


def test_m13_a_separate_head_of_a_model_with_tied_embeddings(causal: Path) -> None:
    """transformers keeps both matrices until the embeddings grow, and then drops one."""
    embeddings = load_file(causal / "model.safetensors")["model.embed_tokens.weight"]
    assert "tie_word_embeddings" in refusal(load_causal_lm, change(causal, {"lm_head.weight": embeddings + 1}))
    change(causal, {"lm_head.weight": embeddings.clone()})
    assert load_causal_lm(causal).lm_head.weight.shape == (336, 32)


@pytest.mark.full
@pytest.mark.parametrize(
    ("tensors", "fields", "code"),
    [
        (None, {"num_hidden_layers": 1}, "M13"),
        (prefixed, {}, "M13"),
        (renamed("score.weight", "reward_head"), {}, "M13"),
        (without("score.weight"), {}, "M02"),
    ],
)
@pytest.mark.parametrize("load", REWARD_LOADERS)
def test_m13_of_a_reward_model_and_m02_without_its_head(
    load: Any, tensors: Any, fields: dict[str, Any], code: str, causal: Path, tmp_path: Path
) -> None:
    init_reward_model(causal).save_pretrained(tmp_path / "reward")
    message = refusal(load, change(tmp_path / "reward", tensors, **fields))
    assert message.startswith(f"error[{code}]: ") and ("score.weight" in message or "layers.1" in message), message


def test_weights_of_other_tasks_are_ignored(causal: Path, tmp_path: Path) -> None:
    """A language model's head in a reward model, TRL's value head, buffers of old checkpoints, an encoder's pooler."""
    change(causal, {"v_head.summary.weight": torch.zeros(1, 32)})
    change(causal, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    assert load_causal_lm(causal).config.vocab_size == 336
    init_reward_model(causal).save_pretrained(tmp_path / "reward")
    load_reward_model(change(tmp_path / "reward", {"lm_head.weight": torch.zeros(336, 32)}))
    old, layer = tmp_path / "pythia", "gpt_neox.layers.0.attention"
    tiny.causal("gpt_neox").save_pretrained(old)
    buffers = {f"{layer}.bias": torch.ones(1, 1, 64, 64), f"{layer}.masked_bias": torch.tensor(-1e9)}
    change(old, {**buffers, f"{layer}.rotary_emb.inv_freq": torch.zeros(4)})
    assert isinstance(load_causal_lm(old), GPTNeoXForCausalLM)
    assert "embed_out.weight" in load_file(old / "model.safetensors")  # Pythia's name of the head
    assert init_reward_model(old).num_labels == 1
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    encoder = RobertaForSequenceClassification(RobertaConfig(vocab_size=64, num_labels=3, **sizes))
    encoder.save_pretrained(tmp_path / "encoder")
    tensors = load_file(tmp_path / "encoder/model.safetensors")
    extra = {"roberta.pooler.dense.weight": torch.ones(16, 16), "lm_head.bias": torch.ones(64)}
    loaded = load_classifier(change(tmp_path / "encoder", extra))
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in tensors.items())
    RobertaForSequenceClassification(RobertaConfig(num_labels=1, **sizes)).save_pretrained(tmp_path / "one")
    with pytest.raises(RLHFError, match=r"M10.*\(roberta\) does not score the last token by one matrix"):
        load_reward_model(tmp_path / "one")


def test_other_towers_of_a_composite_checkpoint_are_ignored(tmp_path: Path) -> None:
    """Only Llama 4's text model is loaded; a tensor that belongs to no part is still refused."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": 64, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2,
            "intermediate_size_mlp": 64, "max_position_embeddings": 64}  # fmt: skip
    vision = {"image_size": 16, "patch_size": 8, "vision_output_dim": 32, "projector_input_dim": 32,
              "projector_output_dim": 32}  # fmt: skip
    config = Llama4Config(text_config={**sizes, **text}, vision_config={**sizes, **vision})
    Llama4ForConditionalGeneration(config).save_pretrained(tmp_path)
    assert any(name.startswith("vision_model.") for name in load_file(tmp_path / "model.safetensors"))
    assert load_causal_lm(tmp_path).config.model_type == "llama4_text"
    change(tmp_path, {"model.audio.weight": torch.zeros(2)})
    assert "1 not in the model (model.audio.weight)" in refusal(load_causal_lm, tmp_path)


def test_reading_a_config_uses_no_random_numbers_and_ignores_dangling_links(causal: Path) -> None:
    (causal / "preprocessor_config.json").symlink_to(causal / "nowhere")
    torch.manual_seed(7)
    loading.read_init_config(change(causal, num_attention_heads=4))
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)))


@pytest.mark.full
@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_m13_in_every_command_before_anything_trains(stage: str, folder: Path) -> None:
    """In `rlhf check`, too, which reads no weights."""
    foreign_scorer(folder)
    change(folder / "model", prefixed)
    for result in (check(f"{stage}.yaml"), check(f"{stage}.yaml", "--deep")):
        assert f"error[M13]: {stage}.yaml:1: model: the weights do not fit" in result.stderr and result.exit_code == 2
    assert refused(rlhf(stage), "M13", f"{stage}.yaml:1: ", "20 not in the model (transformer.model.embed", "hint:")
    assert not list((folder / stage).glob("*/model*")) and not (folder / stage / "metrics.jsonl").exists()


# --- loading and saving


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_saved_models_are_plain_folders_with_all_their_weights(world: World, tmp_path: Path) -> None:
    names = {path.name for path in world.base.iterdir()}
    assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "README.md"} <= names
    generation = json.loads((world.base / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (1, 0)
    ids = torch.tensor([[5, 6, 7]])
    plain = AutoModelForCausalLM.from_pretrained(world.base)
    assert torch.equal(plain(ids).logits, load_causal_lm(world.base).eval()(ids).logits)
    save.save_model(init_reward_model(world.base), world.tokenizer(), tmp_path, "A reward model.")
    model, causal = load_reward_model(tmp_path), load_causal_lm(world.base)
    assert model.num_labels == 1 and model.score.weight.abs().sum() > 0
    assert same_weights(model.model, causal.model)
    assert torch.equal(init_reward_model(tmp_path).score.weight, model.score.weight)


@pytest.mark.full
@pytest.mark.parametrize("name", [*families.FAMILIES, *tiny.FAMILIES])
def test_a_frozen_base_stored_in_bf16_never_has_its_matrices_in_float32(name: str, tmp_path: Path) -> None:
    """It equals the base that was loaded in float32 and stored for autocast later, in each weight and buffer."""
    write_family(name, tmp_path)
    load_causal_lm(tmp_path, dtype="bfloat16").save_pretrained(tmp_path)
    wide, narrow = load_causal_lm(tmp_path), load_causal_lm(tmp_path, bf16_matrices=True)
    has_other_buffers = [
        key for key, each in wide.named_buffers() if "inv_freq" not in key and each.is_floating_point()
    ]
    assert lora.has_bf16_matrices(narrow) is not bool(has_other_buffers)
    for model in (wide, narrow):
        lora.autocast_matrices(model.requires_grad_(False))
    assert tiny.description(wide) == tiny.description(narrow) and wide.config.to_dict() == narrow.config.to_dict()
    for one, other in zip(
        (*wide.parameters(), *wide.buffers()), (*narrow.parameters(), *narrow.buffers()), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.skipif(platform.system() != "Linux", reason="the list of mapped files is Linux's")
def test_a_file_whose_matrices_were_converted_to_bf16_does_not_stay_in_memory(causal: Path) -> None:
    def is_mapped() -> bool:
        return str(causal / "model.safetensors") in Path("/proc/self/maps").read_text()

    model = load_causal_lm(causal)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    assert is_mapped()
    model_loading.place_frozen(model, bf16=True)
    assert not is_mapped() and lora.has_bf16_matrices(model)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name].to(weight.dtype)), name


def test_one_float32_weight_in_a_file_is_not_rounded(causal: Path) -> None:
    load_causal_lm(causal, dtype="bfloat16").save_pretrained(causal)
    assert lora.has_bf16_matrices(load_causal_lm(causal, bf16_matrices=True))
    exact = torch.full((SIZES["hidden_size"],), 1 + 2**-12)
    change(causal, {"model.norm.weight": exact})
    loaded = load_causal_lm(causal, bf16_matrices=True)
    assert torch.equal(loaded.model.norm.weight, exact) and not lora.has_bf16_matrices(loaded)


def test_eager_attention_is_logged_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.causal("gemma2").save_pretrained(tmp_path)
    load_causal_lm(tmp_path)
    monkeypatch.setattr(devices, "device", lambda: torch.device("cuda"))
    load_causal_lm(tmp_path, attn_implementation="eager")
    assert "eager" not in capsys.readouterr().err, "chosen, or on a CPU"
    load_causal_lm(tmp_path)
    load_causal_lm(tmp_path)
    assert capsys.readouterr().err.count("the attention of gemma2 by `eager`: (rows, heads, length, length)") == 1


@pytest.mark.parametrize(("rows", "grown"), [(336, 337), (320, 384), (384, 384)])
def test_a_multiple_of_64_rows_stays_one(world: World, rows: int, grown: int) -> None:
    tokenizer, model = world.tokenizer(), tiny.causal("llama", vocab_size=rows)
    tokenizer.add_special_tokens({"pad_token": tokenizers.PAD})
    assert len(tokenizer) == 337 and tokenizers.vocabulary_size(tokenizer, rows) == grown
    tokenizers.resize_to_tokenizer(model, tokenizer)
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == grown


def test_an_added_token_changes_no_other_logit_and_has_no_large_one(world: World) -> None:
    tokenizer, model = world.tokenizer(), load_causal_lm(world.base).eval()
    ids = torch.arange(2, 20)[None]
    before = model(ids).logits
    tokenizer.add_special_tokens({"pad_token": tokenizers.PAD})
    tokenizers.resize_to_tokenizer(model, tokenizer)
    after = model(ids).logits
    assert after.shape[-1] == before.shape[-1] + 1 == model.config.vocab_size
    assert torch.allclose(after[..., :-1], before, atol=1e-5)
    assert (after[..., -1] < before.amax(-1)).all()


def test_a_saved_tree_is_loaded_exactly_and_shares_no_tensor(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    tree = {"a": [weight, weight, weight.T], 3: (weight[1], None), "n": [1, 0.1, "x", True]}
    save.save_tree(tmp_path, tree)
    loaded = save.load_tree(tmp_path)
    assert [each.tolist() for each in loaded["a"]] == [each.tolist() for each in tree["a"]]
    assert loaded[3][0].tolist() == [3, 4, 5] and loaded[3][1] is None and loaded["n"] == [1, 0.1, "x", True]
    loaded["a"][0][:] = 0
    assert loaded["a"][1].tolist() == weight.tolist()
