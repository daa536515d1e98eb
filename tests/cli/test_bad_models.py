"""Bad tokenizers and models through the real CLI: each says code, place and fix, and exits as promised."""

import json
from pathlib import Path
from typing import Any

import pytest
from bad_inputs import check, foreign_scorer, refused, replace, rlhf, warned
from tokenizers.processors import TemplateProcessing

from rlhf_cli import jsonl
from rlhf_cli.models import tokenizers

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]


@pytest.mark.training
def test_t01_pad_is_eos(folder: Path) -> None:
    """SFT adds a pad token, and says so; a foreign reward model is read where it was trained, and PPO says so."""
    settings = json.loads((folder / "model/tokenizer_config.json").read_text())
    (folder / "model/tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": settings["eos_token"]}))
    trained = rlhf("sft")
    assert trained.exit_code == 0 and "warning[T01]" in trained.stderr and "[PAD]" in trained.stderr
    assert json.loads((folder / "sft/manifest.json").read_text())["special_tokens"]["pad"] > 1
    foreign_scorer(folder, pad_token_id=1)
    small = (
        "-s",
        "ppo.total_episodes=8",
        "-s",
        "ppo.per_device_train_batch_size=8",
        "-s",
        "ppo.gradient_accumulation_steps=1",
    )
    scored = rlhf("ppo", *small, "-s", "ppo.response_length=8")
    assert (
        scored.exit_code == 0 and "warning[T01]: ppo.yaml:1: the reward model's pad token ends a text" in scored.stderr
    )


@pytest.mark.training
def test_t02_no_pad_token(folder: Path) -> None:
    settings = json.loads((folder / "model/tokenizer_config.json").read_text())
    settings.pop("pad_token")
    (folder / "model/tokenizer_config.json").write_text(json.dumps(settings))
    trained = rlhf("sft")
    assert trained.exit_code == 0 and "warning[T02]" in trained.stderr
    assert json.loads((folder / "sft/model/tokenizer_config.json").read_text())["pad_token"] == "[PAD]"


def test_t03_two_start_tokens(folder: Path) -> None:
    """The tokenizer writes a start token, and so do half of the prompts, as rendered conversations do."""
    tokenizer = tokenizers.load_tokenizer(folder / "model")
    tokenizer.bos_token = "<pad>"  # a token that has an embedding
    special = [("<pad>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<pad> $A", special_tokens=special)
    tokenizer.save_pretrained(folder / "model")
    row = {"prompt": "Tell me", "completion": " Yes."}
    jsonl.write_jsonl(folder / "rows.jsonl", [row, {**row, "prompt": "<pad>Tell me"}] * 4)
    says = (
        "4 of 8 texts start with '<pad>' twice: they contain one, and the tokenizer adds another",
        "hint: remove <pad>",
    )
    assert warned(check("sft.yaml"), "T03", "rows.jsonl: ", *says)


def test_t04_a_reward_model_of_another_tokenizer(folder: Path) -> None:
    foreign_scorer(folder)
    tokenizers.train_tokenizer(folder / "rows.jsonl", 270).save_pretrained(folder / "scorer")
    says = ("models.reward has another tokenizer than models.sft", "hint: train the model of models.reward")
    assert refused(rlhf("ppo"), "T04", "ppo.yaml:1: ", *says)


@pytest.mark.training
def test_t05_template_differs_between_stages(folder: Path) -> None:
    assert rlhf("sft", "-s", "model.chat_template=chatml").exit_code == 0
    (folder / "other.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    replace("reward.yaml", "path: model", "path: sft, chat_template: other.jinja")
    assert refused(rlhf("reward"), "T05", "reward.yaml:1: ", "hint:")


def test_t06_a_template_that_never_trains_the_stop_token(folder: Path) -> None:
    (folder / "open.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    replace("sft.yaml", "path: model", "path: model, chat_template: open.jinja")
    jsonl.write_jsonl(folder / "rows.jsonl", [{"messages": TURNS}] * 8)
    assert warned(
        check("sft.yaml"), "T06", "", "the chat template does not end an answer with a stop token", "'<eos>' is used"
    )


def test_m01_model_path_wrong(folder: Path) -> None:
    replace("sft.yaml", "path: model", "path: ./modle")
    assert refused(rlhf("sft"), "M01", "sft.yaml:1: ", "modle", "hint: did you mean model?")


def test_m02_causal_model_as_reward(folder: Path) -> None:
    replace("ppo.yaml", "reward: scorer", "reward: model")
    result = rlhf("ppo")
    assert refused(result, "M02", "", "no trained reward head", "hint:") and not (folder / "ppo/metrics.jsonl").exists()


def test_m03_a_reward_model_of_two_labels(folder: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    foreign_scorer(folder)
    AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=2).save_pretrained("scorer")
    says = ("scorer has a head of 2 labels, a reward model needs one", "hint: train a reward model with `rlhf reward`")
    assert refused(rlhf("ppo"), "M03", "ppo.yaml:1: ", *says)


@pytest.mark.parametrize(
    ("base", "says"),
    [
        ("owner/base-model", ("its base owner/base-model is neither a folder", "hint: fetch the base (hf download")),
        ("model", ("its base is model", "hint: merge it into its base first", "merge_and_unload()")),
        (None, ("does not name its base", "hint: name a full model")),
    ],
)
def test_m04_an_adapter_in_place_of_a_model(folder: Path, base: str | None, says: tuple[str, ...]) -> None:
    (folder / "adapter").mkdir()
    (folder / "adapter/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    replace("sft.yaml", "path: model", "path: adapter")
    assert refused(rlhf("sft"), "M04", "sft.yaml:1: ", "adapter holds an adapter, not a full model", *says)


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_m10_an_encoder_decoder_model(folder: Path, stage: str) -> None:
    """TRL 0.11's is_encoder_decoder: said before anything loads."""
    from transformers import T5Config

    foreign_scorer(folder)
    T5Config(vocab_size=300, architectures=["T5ForConditionalGeneration"]).save_pretrained(folder / "model")
    assert refused(
        rlhf(stage), "M10", f"{stage}.yaml:1: ", "an encoder-decoder model (t5)", "hint: start from a decoder"
    )


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_m06_token_ids_beyond_the_embedding(folder: Path, stage: str) -> None:
    tokenizer = tokenizers.load_tokenizer(folder / "model")
    tokenizer.add_tokens(["one too many"])
    tokenizer.save_pretrained(folder / "model")
    foreign_scorer(folder)
    size = len(tokenizer) - 1
    says = (f"the tokenizer has ids up to {size}, the model {size} embeddings", "hint: use the tokenizer that belongs")
    assert refused(rlhf(stage), "M06", f"{stage}.yaml:1: ", *says)


@pytest.mark.training
def test_m05_a_finished_stage_that_was_changed(folder: Path) -> None:
    assert rlhf("sft").exit_code == 0
    with open("sft/model/model.safetensors", "r+b") as file:
        file.truncate(1000)
    says = ("model/model.safetensors has 1000 bytes", "hint: --fresh runs the stage again")
    assert refused(rlhf("sft"), "M05", "sft is finished but damaged: ", *says, exit_code=1)


@pytest.mark.training
def test_m05_a_checkpoint_with_a_flipped_bit_is_skipped(folder: Path) -> None:
    """Which file, what is used instead; the run ends as it would have."""
    foreign_scorer(folder)
    sizes = "per_device_train_batch_size: 4\n  gradient_accumulation_steps: 1\n  response_length: 8"
    replace(
        "ppo.yaml", "ppo:\n  total_episodes: 64", f"output: {{save_steps: 1}}\nppo:\n  total_episodes: 12\n  {sizes}"
    )
    assert rlhf("ppo").exit_code == 0
    before = (folder / "ppo/model/model.safetensors").read_bytes()
    (folder / "ppo/manifest.json").unlink()
    state = next((folder / "ppo/state/step_000003").glob("*.safetensors"))
    raw = bytearray(state.read_bytes())
    raw[-1] ^= 1
    state.write_bytes(raw)
    result = rlhf("ppo")
    says = (state.name, "its content is not what was written", "resuming from step_000002")
    assert warned(result, "M05", "ppo/state/step_000003 is damaged: ", *says)
    assert (folder / "ppo/model/model.safetensors").read_bytes() == before


@pytest.mark.parametrize("command", [rlhf, lambda stage: check(f"{stage}.yaml")], ids=["the stage", "check"])
@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_m07_weights_that_are_a_pickle(folder: Path, stage: str, command: Any) -> None:
    foreign_scorer(folder)
    (folder / "model/model.safetensors").rename(folder / "model/pytorch_model.bin")
    result = command(stage)
    says = ("only as a pickle (pytorch_model.bin)", "hint: if you trust it: ", "save_pretrained(FOLDER)")
    assert f"error[M07]: {stage}.yaml:1: " in result.stderr and all(text in result.stderr for text in says)
    assert result.exit_code == 2 and "Traceback" not in result.stderr
