"""Bad input through the real CLI: each says code, place and fix in a line or two, and exits as promised."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from rlhf_cli import rows
from rlhf_cli.cli import app

PPO = "models: {sft: model, reward: scorer}\ndata: {prompts: prompts.jsonl}\nppo:\n  total_episodes: 64\n"
SFT = "model: {path: model}\ndata: {train: rows.jsonl}\nsft: {max_steps: 1}\n"
REWARD = "model: {path: model}\ndata: {train: pairs.jsonl}\nreward: {max_steps: 1}\n"


@pytest.fixture
def folder(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Configs, data and a base model that are all right, for a test to break one thing."""
    shutil.copytree(world.base, tmp_path / "model")
    for name, path in (("rows", world.sft), ("pairs", world.pairs), ("prompts", world.sft)):
        shutil.copy(path, tmp_path / f"{name}.jsonl")
    for stage, text in (("sft", SFT), ("reward", REWARD), ("ppo", PPO)):
        (tmp_path / f"{stage}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rlhf(stage: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, [stage, "-c", f"{stage}.yaml", *arguments])


def refused(result: Result, code: str, place: str, *says: str, exit_code: int = 2) -> bool:
    """The message in its form: `error[CODE]: PLACE: ...`, a hint at most, no traceback, nothing on stdout."""
    first = result.stderr.splitlines()[0]
    assert first.startswith(f"error[{code}]: {place}"), result.stderr
    assert all(text in result.stderr for text in says), result.stderr
    assert (result.exit_code, result.stdout) == (exit_code, "") and "Traceback" not in result.stderr
    return True


def replace(path: str, old: str, new: str) -> None:
    text = Path(path).read_text()
    assert old in text
    Path(path).write_text(text.replace(old, new))


def test_c01_unknown_key(folder: Path) -> None:
    replace("ppo.yaml", "total_episodes: 64", "total_episodes: 64\n  kl_coeff: 0.1")
    assert refused(rlhf("ppo"), "C01", "ppo.yaml:5: ", "kl_coeff", "hint: did you mean kl_coef?")


def test_c03_duplicate_key(folder: Path) -> None:
    replace("ppo.yaml", "total_episodes: 64", "total_episodes: 64\n  total_episodes: 65")
    assert refused(rlhf("ppo"), "C03", "ppo.yaml:5: ", "line 4")


@pytest.mark.training
def test_c04_1e5_is_a_number(folder: Path) -> None:
    replace("sft.yaml", "max_steps: 1", "max_steps: 1, learning_rate: 1e-5")
    assert rlhf("sft").exit_code == 0
    assert yaml.safe_load((folder / "sft/config.yaml").read_text())["sft"]["learning_rate"] == 1e-5


def test_c05_wrong_type(folder: Path) -> None:
    replace("ppo.yaml", "total_episodes: 64", "total_episodes: eight")
    assert refused(rlhf("ppo"), "C05", "ppo.yaml:4: ", "total_episodes", "eight")


def test_c09_config_missing(folder: Path) -> None:
    (folder / "ppo.yaml").unlink()
    assert refused(rlhf("ppo"), "C09", "", "ppo.yaml", "sft.yaml")


def test_c11_bad_override(folder: Path) -> None:
    assert refused(rlhf("ppo", "-s", "ppo.kl_coef"), "C11", "--set ppo.kl_coef", "KEY=VALUE")


def test_c12_batches_that_do_not_divide(folder: Path) -> None:
    replace("ppo.yaml", "total_episodes: 64", "total_episodes: 64\n  num_mini_batches: 3")
    assert refused(
        rlhf("ppo"), "C12", "ppo.yaml:", "16 x 4 = 64", "num_mini_batches 3", "hint: nearest that fit: 2 or 4"
    )


@pytest.mark.training
def test_c15_output_of_another_config(folder: Path) -> None:
    assert rlhf("sft").exit_code == 0
    assert refused(rlhf("sft", "-s", "sft.weight_decay=0.1"), "C15", "", "sft.weight_decay 0.0 -> 0.1", "hint: --fresh")


def test_d01_data_file_missing(folder: Path) -> None:
    replace("sft.yaml", "rows.jsonl", "row.jsonl")
    assert refused(rlhf("sft"), "D01", "sft.yaml:2: ", "hint: did you mean rows.jsonl?")


def test_d02_column_missing(folder: Path) -> None:
    rows.write_jsonl(folder / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "worse": "c"}])
    assert refused(rlhf("reward"), "D02", "pairs.jsonl", "rejected", "worse", "data.columns")


def test_d03_malformed_json(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a" "completion": "b"}\n')
    assert refused(rlhf("sft"), "D03", "rows.jsonl:2:16: ")


def test_d05_no_usable_row(folder: Path) -> None:
    replace("sft.yaml", "max_steps: 1", "max_steps: 1, max_length: 2")
    assert refused(rlhf("sft"), "D05", "rows.jsonl", "96", "longer than 2 tokens")


@pytest.mark.training
def test_t01_pad_is_eos(folder: Path) -> None:
    """SFT adds a pad token, and says so; a foreign reward model is read where it was trained, and PPO says so."""
    settings = json.loads((folder / "model/tokenizer_config.json").read_text())
    (folder / "model/tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": settings["eos_token"]}))
    trained = rlhf("sft")
    assert trained.exit_code == 0 and "warning[T01]" in trained.stderr and "[PAD]" in trained.stderr
    assert json.loads((folder / "sft/manifest.json").read_text())["special_tokens"]["pad"] > 1
    _foreign_scorer(folder, pad_token_id=1)
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


def _foreign_scorer(folder: Path, **changes: Any) -> None:
    """scorer/: a one-label classifier on the base model, as somebody else would hand it on."""
    import torch

    from rlhf_cli.models import loading, tokenizers

    torch.manual_seed(0)
    model = loading.scorer_from_causal(folder / "model")
    for name, value in changes.items():
        setattr(model.config, name, value)
    loading.save_model(model, tokenizers.load_tokenizer(folder / "model"), folder / "scorer", "A scorer.")


@pytest.mark.training
def test_t02_no_pad_token(folder: Path) -> None:
    settings = json.loads((folder / "model/tokenizer_config.json").read_text())
    settings.pop("pad_token")
    (folder / "model/tokenizer_config.json").write_text(json.dumps(settings))
    trained = rlhf("sft")
    assert trained.exit_code == 0 and "warning[T02]" in trained.stderr
    assert json.loads((folder / "sft/model/tokenizer_config.json").read_text())["pad_token"] == "[PAD]"


@pytest.mark.training
def test_t05_template_differs_between_stages(folder: Path) -> None:
    assert rlhf("sft", "-s", "model.chat_template=chatml").exit_code == 0
    (folder / "other.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    replace("reward.yaml", "path: model", "path: sft, chat_template: other.jinja")
    assert refused(rlhf("reward"), "T05", "reward.yaml:1: ", "hint:")


def test_m01_model_path_wrong(folder: Path) -> None:
    replace("sft.yaml", "path: model", "path: ./modle")
    assert refused(rlhf("sft"), "M01", "sft.yaml:1: ", "modle", "hint: did you mean model?")


def test_m02_causal_model_as_reward(folder: Path) -> None:
    replace("ppo.yaml", "reward: scorer", "reward: model")
    result = rlhf("ppo")
    assert refused(result, "M02", "", "no trained reward head", "hint:") and not (folder / "ppo/metrics.jsonl").exists()
