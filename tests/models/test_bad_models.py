"""Bad tokenizers and models through the real CLI: each says code, place and fix, and exits as promised."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from bad_inputs import check, foreign_scorer, refused, replace, rlhf, warned
from safetensors.torch import load_file
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from rlhf_cli import data, jsonl
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import forward, tokenizers
from rlhf_cli.models.batch import Rollout

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]


def edit_tokenizer(change: Callable[[dict[str, Any]], object]) -> None:
    path = Path("model/tokenizer_config.json")
    settings = json.loads(path.read_text())
    change(settings)
    path.write_text(json.dumps(settings))


@pytest.mark.full
def test_t01_pad_is_eos(folder: Path) -> None:
    """SFT takes another pad token; a foreign reward model is read where it was trained. Both say so."""
    edit_tokenizer(lambda settings: settings.update(pad_token=settings["eos_token"]))
    assert warned(rlhf("sft"), "T01", "", "<pad> is used for padding")
    assert json.loads((folder / "sft/manifest.json").read_text())["special_tokens"]["pad"] == 0
    foreign_scorer(folder, pad_token_id=1)
    small = ["total_episodes=8", "per_device_train_batch_size=8", "gradient_accumulation_steps=1", "response_length=8"]
    scored = rlhf("ppo", *(f"ppo.{setting}" for setting in small))
    assert warned(scored, "T01", "ppo.yaml:1: the reward model's pad token is its EOS")


@pytest.mark.full
def test_t02_no_pad_token(folder: Path) -> None:
    edit_tokenizer(lambda settings: settings.pop("pad_token"))
    assert warned(rlhf("sft"), "T02", "")
    assert json.loads((folder / "sft/model/tokenizer_config.json").read_text())["pad_token"] == "<pad>"


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


@pytest.mark.full
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


def test_a_policy_without_an_end_token_passes_the_check_if_no_response_is_to_end(folder: Path) -> None:
    tokenizer = tokenizers.load_tokenizer(folder / "model")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder / "model")
    (folder / "mine.py").write_text("def score(prompts, responses):\n    return [1.0] * len(prompts)\n")
    settings = {"total_episodes": 64, "response_length": 8, "stop_token": "none"}
    config = {"models": {"sft": "model"}, "rewards": {"r": {"function": "mine:score"}}, "ppo": settings}
    (folder / "ppo.yaml").write_text(yaml.safe_dump({**config, "data": {"prompts": "prompts.jsonl"}}))
    result = check("ppo.yaml")
    assert result.exit_code == 0 and "called on 2 rows with a made-up response; scores: 1, 1" in result.stdout


def test_t07_a_template_that_writes_todays_date(folder: Path) -> None:
    text = "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    (folder / "dated.jinja").write_text(text)
    replace("sft.yaml", "path: model", "path: model, chat_template: dated.jinja")
    jsonl.write_jsonl(folder / "rows.jsonl", [{"messages": TURNS}] * 8)
    assert warned(check("sft.yaml"), "T07", "", "2024-07-26", "hint: set data.chat_template_kwargs: {date: ...}")
    says = ("the chat template has no variable `enable_thinking`", "hint: remove it")
    result = rlhf("sft", "-s", "data.chat_template_kwargs={enable_thinking: false}")
    assert refused(result, "C17", "--set data.chat_template_kwargs", *says)


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


@pytest.mark.full
@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_m10_an_encoder_decoder_model(folder: Path, stage: str) -> None:
    """TRL 0.11's is_encoder_decoder: reported before anything loads."""
    from transformers import T5Config

    foreign_scorer(folder)
    T5Config(vocab_size=300, architectures=["T5ForConditionalGeneration"]).save_pretrained(folder / "model")
    assert refused(
        rlhf(stage), "M10", f"{stage}.yaml:1: ", "an encoder-decoder model (t5)", "hint: start from a decoder"
    )


@pytest.mark.parametrize("command", ["reward", "check"])
def test_m10_a_family_without_sequence_classifier(folder: Path, command: str) -> None:
    model = tiny.causal("granite", vocab_size=len(tokenizers.load_tokenizer(folder / "model")))
    model.save_pretrained(folder / "model")
    result = rlhf("reward") if command == "reward" else check("reward.yaml")
    says = "reward.yaml:1: transformers has no sequence classifier for granite"
    assert result.exit_code == 2 and f"error[M10]: {says}" in result.stderr, result.output
    assert "hint: use a reward model of another family" in result.stderr


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_m06_token_ids_beyond_the_embedding(folder: Path, stage: str) -> None:
    tokenizer = tokenizers.load_tokenizer(folder / "model")
    tokenizer.add_tokens(["one too many"])
    tokenizer.save_pretrained(folder / "model")
    foreign_scorer(folder)
    size = len(tokenizer) - 1
    says = (f"the tokenizer has ids up to {size}, the model {size} embeddings", "hint: use the tokenizer that belongs")
    assert refused(rlhf(stage), "M06", f"{stage}.yaml:1: ", *says)


def add_image_token(folder: Path) -> None:
    """A special token without a role and without an embedding, as <image_soft_token> of Gemma 3's text models."""
    tokenizer = tokenizers.load_tokenizer(folder / "model")
    tokenizer.add_tokens([AddedToken("<image>", special=True)], special_tokens=True)
    tokenizer.save_pretrained(folder / "model")


@pytest.mark.full
def test_m06_a_special_token_beyond_the_embedding_that_no_text_contains(folder: Path) -> None:
    add_image_token(folder)
    foreign_scorer(folder)
    says = "the model has no embedding for special tokens of its tokenizer (<image>)"
    for stage, size in (("sft", ()), ("ppo", ("ppo.total_episodes=64", "ppo.response_length=4"))):
        result = rlhf(stage, *size)
        assert warned(result, "M06", "", says) and result.stderr.count(says) == 1
        rows = load_file(f"{stage}/model/model.safetensors")["model.embed_tokens.weight"].shape[0]
        assert rows == len(tokenizers.load_tokenizer(folder / "model")) - 1
    assert check(".").exit_code == 0


def test_m06_a_special_token_beyond_the_embedding_in_the_rows_or_in_the_template(folder: Path) -> None:
    add_image_token(folder)
    foreign_scorer(folder)
    says = "a text contains <image>, for which the model has no embedding"
    for stage, name in (("sft", "rows.jsonl"), ("ppo", "prompts.jsonl")):
        rows = [row for _, row in jsonl.read_jsonl(folder / name)]
        key = "text" if "text" in rows[0] else "prompt"
        rows[2][key] = f"An <image>{rows[2][key]}"
        jsonl.write_jsonl(folder / name, rows)
        result = rlhf(stage)
        assert f"error[M06]: {name}:3: {says}" in result.stderr and result.exit_code == 2, result.output
    tokenizer = tokenizers.load_tokenizer(folder / "model")
    tokenizer.chat_template = "{% for m in messages %}<image>{{ m.content }}<eos>{% endfor %}"
    tokenizers.check_vocabulary_size(len(tokenizer) - 1, tokenizer, None)
    with pytest.raises(RLHFError, match=says):
        data.encode(tokenizer, TURNS[:1], None)


def test_m06_a_token_that_the_policy_generates_beyond_a_scorers_embedding(folder: Path) -> None:
    """The token is not in a text, but the policy has an embedding and a logit for it."""
    add_image_token(folder)
    tokenizer = tokenizers.load_tokenizer(folder / "model")
    tiny.causal("llama", vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    foreign_scorer(folder)
    size = len(tokenizer) - 1
    tiny.scorer("llama", vocab_size=size).save_pretrained(folder / "scorer")
    assert refused(rlhf("ppo"), "M06", "ppo.yaml:1: ", f"ids up to {size}, the model {size} embeddings")
    rollout = Rollout.from_lists([[3]], [[size]])
    with pytest.raises(RLHFError, match=f"M06.*contains the token {size}"):
        forward.rollout_scores(tiny.scorer("llama", vocab_size=size), rollout, max_rows=1)
