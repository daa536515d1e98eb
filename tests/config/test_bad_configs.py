"""Bad configs through the real CLI: each says code, place and fix in a line or two, and exits as promised."""

from pathlib import Path

import pytest
import yaml
from bad_inputs import check, foreign_scorer, refused, replace, rlhf, warned

from rlhf_cli import jsonl

SECRET = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"
EPISODES, STEPS = "total_episodes: 64", "max_steps: 1"
# code, file, text in it, text instead, line of the message, what the message says. More: test_messages.py
BAD_CONFIGS = [
    ("C01", "ppo", EPISODES, f"{EPISODES}\n  kl_coeff: 0.1", "5", ["kl_coeff", "hint: did you mean kl_coef?"]),
    ("C02", "ppo", "ppo:", "kl_coef: 0.1\nppo:", "3", ["kl_coef belongs under ppo:", "hint: indent it below `ppo:`"]),
    ("C03", "ppo", EPISODES, f"{EPISODES}\n  total_episodes: 65", "5", ["line 4"]),
    ("C05", "ppo", EPISODES, "total_episodes: eight", "4", ["total_episodes", "eight"]),
    ("C06", "sft", STEPS, "learning_rate: -1", "3", ["must be >= 0, got -1"]),
    ("C07", "sft", STEPS, "lr_scheduler_type: cosin", "3", ["linear, cosine, ", "hint: did you mean cosine?"]),
    ("C08", "sft", "sft: {", "sft:\n\t{", "4:1", ["hint: use spaces"]),
    ("C10", "sft", STEPS, "packing: off", "3", ["hint: write true or false"]),
    ("C12", "ppo", EPISODES, f"{EPISODES}\n  num_mini_batches: 3", "5", ["16 x 4 = 64", "batches 3", "fit: 2 or 4"]),
    ("C16", "sft", "path: model", f"path: model, revision: {SECRET}", "1", ["HF_TOKEN"]),
]


@pytest.mark.parametrize(("code", "stage", "old", "new", "line", "says"), BAD_CONFIGS)
def test_a_bad_config_is_refused(
    folder: Path, code: str, stage: str, old: str, new: str, line: str, says: list[str]
) -> None:
    replace(f"{stage}.yaml", old, new)
    result = rlhf(stage)
    assert refused(result, code, f"{stage}.yaml:{line}: ", *says) and SECRET not in result.output


@pytest.mark.full
def test_c04_1e5_is_a_number(folder: Path) -> None:
    replace("sft.yaml", "max_steps: 1", "max_steps: 1, learning_rate: 1e-5")
    assert rlhf("sft").exit_code == 0
    assert yaml.safe_load((folder / "sft/config.yaml").read_text())["sft"]["learning_rate"] == 1e-5


def test_c09_c11_a_missing_config_and_a_bad_override(folder: Path) -> None:
    assert refused(rlhf("ppo", "-s", "ppo.kl_coef"), "C11", "--set ppo.kl_coef", "KEY=VALUE")
    (folder / "ppo.yaml").unlink()
    assert refused(rlhf("ppo"), "C09", "", "ppo.yaml", "sft.yaml")


def test_c13_a_new_model_of_fewer_positions_than_max_length(folder: Path) -> None:
    new = "new: {hidden_size: 32, max_position_embeddings: 64, tokenizer: {train: rows.jsonl, vocab_size: 300}}"
    replace("sft.yaml", "path: model", new)
    replace("sft.yaml", "max_steps: 1", "max_steps: 1, max_length: 100")
    says = ("sft.max_length 100 is 36 more than the model's 64 positions", "hint: lower sft.max_length by 36, to 64")
    assert refused(rlhf("sft"), "C13", "sft.yaml:3: ", *says)
    assert "C13" in check("sft.yaml").stderr


def test_c13_rows_longer_than_the_context(folder: Path) -> None:
    jsonl.write_jsonl(folder / "rows.jsonl", [{"prompt": "Tell me", "completion": " about the sun" * 100}] * 8)
    result = rlhf("sft")
    says = ("sft.max_length 1024 admits rows of ", "more than the model's 128 positions", "by 896, to 128")
    assert refused(result, "C13", "sft.yaml:3: ", *says)


@pytest.mark.full
def test_c14_an_interval_beyond_the_end(folder: Path) -> None:
    replace("sft.yaml", "sft:", "output: {save_steps: 9}\nsft:")
    assert warned(rlhf("sft"), "C14", "sft.yaml:3: ", "every 9 steps exceeds the 1 of the run", "hint: lower")
    assert (folder / "sft/state/checkpoint-1").is_dir()


@pytest.mark.parametrize(
    ("code", "old", "new", "place", "says"),
    [
        ("C14", "ppo:", "output: {save_steps: 9}\nppo:", "ppo.yaml:3: ", "every 9 updates exceeds the 1 of the run"),
        ("C19", "data: {", "data: {first_words: 2, ", "ppo.yaml:2: ", "data.first_words is now data.truncate_prompt"),
    ],
)
def test_c14_c19_warnings_of_ppo(folder: Path, code: str, old: str, new: str, place: str, says: str) -> None:
    foreign_scorer(folder)
    replace("ppo.yaml", old, new)
    assert warned(check("ppo.yaml"), code, place, says)
