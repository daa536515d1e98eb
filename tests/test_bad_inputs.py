"""Bad configs through the real CLI: each says code, place and fix in a line or two, and exits as promised."""

from pathlib import Path

import pytest
import yaml
from bad_inputs import check, foreign_scorer, refused, replace, rlhf, warned

from rlhf_cli import jsonl


def test_c01_unknown_key(folder: Path) -> None:
    replace("ppo.yaml", "total_episodes: 64", "total_episodes: 64\n  kl_coeff: 0.1")
    assert refused(rlhf("ppo"), "C01", "ppo.yaml:5: ", "kl_coeff", "hint: did you mean kl_coef?")


def test_c02_key_in_the_wrong_section(folder: Path) -> None:
    replace("ppo.yaml", "ppo:", "kl_coef: 0.1\nppo:")
    says = ("kl_coef belongs under ppo:", "hint: write it as ppo.kl_coef")
    assert refused(rlhf("ppo"), "C02", "ppo.yaml:3: ", *says)


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


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("learning_rate: -1", "must be >= 0, got -1"),
        ("learning_rate: .nan", "a finite number >= 0, got nan"),
        ("learning_rate: .inf", "a finite number >= 0, got inf"),
        ("max_steps: true", "expected a whole number > 0, got true"),
    ],
)
def test_c06_out_of_range(folder: Path, line: str, says: str) -> None:
    replace("sft.yaml", "max_steps: 1", line)
    assert refused(rlhf("sft"), "C06", "sft.yaml:3: ", says)


def test_c07_not_one_of_the_choices(folder: Path) -> None:
    replace("sft.yaml", "max_steps: 1", "lr_scheduler_type: cosin")
    says = ("linear, cosine, cosine_with_restarts", "hint: did you mean cosine?")
    assert refused(rlhf("sft"), "C07", "sft.yaml:3: ", *says)


@pytest.mark.parametrize(("given", "command"), [("reward", "sft"), ("ppo", "eval"), ("sft", "reward")])
def test_c07_a_config_given_to_the_wrong_command_is_one_line(folder: Path, given: str, command: str) -> None:
    result = rlhf(command, "-c", f"{given}.yaml")
    says = (f"this config is for {given}, not for {command}", f"hint: run it with: rlhf {given} --config {given}.yaml")
    assert refused(result, "C07", f"{given}.yaml: ", *says) and len(result.stderr.splitlines()) == 2


@pytest.mark.parametrize(
    ("line", "place", "says"),
    [
        ("sft:\n\tmax_steps: 1\n", "sft.yaml:4:1: ", "hint: use spaces"),
        ("sft: {max_steps: 1\n", "sft.yaml:4:1: ", "not valid YAML"),
        ('sft: {lr_scheduler_type: "a\\0b"}\n', "sft.yaml:3: ", "U+0000 is not allowed"),
    ],
)
def test_c08_syntax(folder: Path, line: str, place: str, says: str) -> None:
    replace("sft.yaml", "sft: {max_steps: 1}\n", line)
    assert refused(rlhf("sft"), "C08", place, says)


def test_c09_config_missing(folder: Path) -> None:
    (folder / "ppo.yaml").unlink()
    assert refused(rlhf("ppo"), "C09", "", "ppo.yaml", "sft.yaml")


@pytest.mark.parametrize(
    ("content", "place", "says"),
    [
        (b"", "sft.yaml: the config is empty", "hint: `rlhf init` writes example configs"),
        (b"- model\n", "sft.yaml: the config is a list", "not keys and values"),
        (b"seed: 1\nrun: caf\xe9\n", "sft.yaml:2: byte 0xE9 is not UTF-8", "hint: convert it: iconv -f latin1"),
        (None, "sft.yaml is a folder", "hint: give the stage's YAML file"),
    ],
)
def test_c09_what_is_no_config(folder: Path, content: bytes | None, place: str, says: str) -> None:
    (folder / "sft.yaml").unlink()
    if content is None:
        (folder / "sft.yaml").mkdir()
    else:
        (folder / "sft.yaml").write_bytes(content)
    assert refused(rlhf("sft"), "C09", place, says)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("packing: off", "hint: write true or false"),
        ("max_steps: 012", "hint: write a plain decimal number"),
        ("max_steps: 1:30", 'got "1:30"'),
    ],
)
def test_c10_what_older_yaml_would_convert_is_refused(folder: Path, line: str, says: str) -> None:
    replace("sft.yaml", "max_steps: 1", line)
    assert refused(rlhf("sft"), "C10", "sft.yaml:3: ", says)


def test_c11_bad_override(folder: Path) -> None:
    assert refused(rlhf("ppo", "-s", "ppo.kl_coef"), "C11", "--set ppo.kl_coef", "KEY=VALUE")


def test_c12_batches_that_do_not_divide(folder: Path) -> None:
    replace("ppo.yaml", "total_episodes: 64", "total_episodes: 64\n  num_mini_batches: 3")
    assert refused(
        rlhf("ppo"), "C12", "ppo.yaml:", "16 x 4 = 64", "num_mini_batches 3", "hint: nearest values that fit: 2 or 4"
    )


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
    says = ("sft.max_length 1024 lets rows of ", "more than the model's 128 positions", "by 896, to 128")
    assert refused(result, "C13", "sft.yaml:3: ", *says)


def test_c13_a_response_that_leaves_no_room(folder: Path) -> None:
    foreign_scorer(folder)
    result = rlhf("ppo", "-s", "ppo.response_length=128")
    says = ("no room for a prompt in the model's context of 128 tokens", "hint: lower it by at least 1")
    assert refused(result, "C13", "--set ppo.response_length: ", *says)


@pytest.mark.training
def test_c14_an_interval_beyond_the_end(folder: Path) -> None:
    replace("sft.yaml", "sft:", "output: {save_steps: 9}\nsft:")
    assert warned(rlhf("sft"), "C14", "sft.yaml:3: ", "every 9 steps is more than the 1 of the run", "hint: lower")
    assert (folder / "sft/state/checkpoint-1").is_dir()


def test_c14_in_ppo(folder: Path) -> None:
    foreign_scorer(folder)
    replace("ppo.yaml", "ppo:", "output: {save_steps: 9}\nppo:")
    assert warned(check("ppo.yaml"), "C14", "ppo.yaml:3: ", "every 9 updates is more than the 1 of the run")


@pytest.mark.training
def test_c15_output_of_another_config(folder: Path) -> None:
    assert rlhf("sft").exit_code == 0
    assert refused(rlhf("sft", "-s", "sft.weight_decay=0.1"), "C15", "", "sft.weight_decay 0.0 -> 0.1", "hint: --fresh")


def test_c16_a_token_in_the_config(folder: Path) -> None:
    secret = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"
    replace("sft.yaml", "path: model", f"path: model, revision: {secret}")
    result = rlhf("sft")
    assert refused(result, "C16", "sft.yaml:1: ", "HF_TOKEN") and secret not in result.output
