"""What is written down of a config: the dump that loads again, and the identity that tells two results apart."""

import json
import os
from pathlib import Path

import pytest
import yaml

from rlhf_cli.config.loading import load
from rlhf_cli.config.training import CONFIGS

MINIMAL = {
    "sft": "model: {path: base}\ndata: {train: train.jsonl}\n",
    "reward": "data: {train: pairs.jsonl}\n",
    "ppo": "data: {prompts: prompts.jsonl}\nppo: {total_episodes: 640}\n",
    "eval": "data: {prompts: held-out.jsonl}\n",
}
FULL = {
    "sft": """\
seed: 7
model:
  new: {model_type: llama, hidden_size: 32, tokenizer: {train: data/text.jsonl, vocab_size: 400}}
  chat_template: chat.jinja
data: {train: data/train.jsonl, eval: ../shared/eval.jsonl, columns: {prompt: question}}
sft: {learning_rate: 1e-3, warmup_steps: 5}
trainer: {neftune_noise_alpha: 5, optim: sgd}
""",
    "reward": "model: {path: ./sft}\ndata: {train: pairs.jsonl, on_identical: drop}\nreward: {normalize: none}\n",
    "ppo": """\
models: {reward: org/reward-model, value: ./value-start}
data: {prompts: prompts.jsonl}
rewards: {reward: , short: {function: rewards.short:score, weight: 0.5}, other: {model: ../other}}
ppo: {num_train_epochs: 2, response_length: {min: 8, max: 16}}
""",
    "eval": """\
judges: {gold: "judges.gold:judge", second: ./second-reward}
data: {prompts: held-out.jsonl}
eval: {n: 8, modes: [sampled], best_of: [], require: {win_rate.ppo_vs_sft.gold.value: ">= 0.6"}}
""",
}


def written(folder: Path, stage: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stage}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path


@pytest.mark.parametrize("stage", CONFIGS)
def test_the_dump_loads_again_as_the_same_config_from_another_folder(stage: str, here: Path) -> None:
    (here / "run").mkdir()
    (here / "run" / "chat.jinja").write_text("{{ messages }}")
    first = load(stage, written(here / "run", stage, FULL[stage]))
    resolved = written(first.folder, "config", yaml.safe_dump(first.dump(relative_to=first.folder)))
    again = load(stage, resolved)
    assert again.dump() == first.dump()
    assert again.identity() == first.identity()
    assert again.folder == first.folder
    json.dumps(first.dump(), allow_nan=False)


@pytest.mark.parametrize("stage", CONFIGS)
def test_a_dumped_config_holds_no_absolute_path(stage: str, here: Path) -> None:
    loaded = load(stage, written(here / "run", stage, FULL[stage].replace("chat.jinja", "chatml")))
    assert str(here) not in json.dumps(loaded.dump(relative_to=loaded.folder))


def test_a_model_in_the_folder_of_the_dump_stays_a_path(here: Path) -> None:
    ppo = load("ppo", written(here, "ppo", MINIMAL["ppo"]))
    assert ppo.dump(relative_to=here)["models"]["sft"] == "./sft"
    assert ppo.dump(relative_to=here)["data"]["prompts"] == "prompts.jsonl"


def identity(stage: str, path: Path, *overrides: str) -> dict:
    return load(stage, path, overrides).identity()


@pytest.mark.parametrize("stage", CONFIGS)
def test_the_identity_does_not_see_the_place(stage: str, here: Path) -> None:
    for folder in ("a", "b"):
        written(here / folder, stage, FULL[stage])
        (here / folder / "chat.jinja").write_text("{{ messages }}")
    one, other = (identity(stage, here / folder / f"{stage}.yaml") for folder in ("a", "b"))
    assert one == other
    assert str(here) not in json.dumps(one)


@pytest.mark.parametrize(
    ("stage", "override"),
    [
        ("sft", "output.save_steps=5"), ("sft", "output.run_name=x"), ("sft", "sft.logging_steps=3"), ("sft", "run=x"),
        ("sft", "sft.eval_steps=3"), ("reward", "reward.per_device_eval_batch_size=2"), ("sft", "data.train=x.jsonl"),
        ("ppo", "ppo.num_sample_generations=0"), ("ppo", "models.sft=./x"), 
        ("ppo", "models.sft=org/x"), ("ppo", "models.value=./x"),
        ("eval", "eval.require.a=> 1"), ("eval", "output.keep=3"),
        ("ppo", "output.report_to=[wandb]"), ("ppo", "output.project=x"), ("eval", "output.report_to=[trackio]"),
    ],
)  # fmt: skip
def test_what_cannot_change_the_result_is_not_in_the_identity(stage: str, override: str, here: Path) -> None:
    path = written(here, stage, MINIMAL[stage])
    base = identity(stage, path)
    if override.startswith("models.value"):  # a path instead of the word is another choice; the path itself is none
        base = identity(stage, path, "models.value=./y")
    assert identity(stage, path, override) == base


@pytest.mark.parametrize(
    ("stage", "override"),
    [
        ("sft", "sft.learning_rate=1e-3"), ("sft", "seed=1"), ("sft", "output.snapshots=1"),
        ("sft", "trainer.optim=sgd"), ("sft", "data.columns.prompt=q"),
        ("reward", "reward.normalize=none"), ("ppo", "ppo.kl_coef=0.1"),
        ("ppo", "rewards.reward.weight=2"), ("ppo", "rewards.f.function=a:b"), ("ppo", "models.value=./x"),
        ("eval", "eval.n=4"), ("eval", "judges.gold=a:b"),
    ],
)  # fmt: skip
def test_what_changes_the_result_is_in_the_identity(stage: str, override: str, here: Path) -> None:
    path = written(here, stage, MINIMAL[stage])
    assert identity(stage, path, override) != identity(stage, path)


def test_a_chat_templates_file_counts_by_its_text(here: Path) -> None:
    path = written(here, "sft", MINIMAL["sft"].replace("base", "base, chat_template: chat.jinja"))
    (here / "chat.jinja").write_text("{{ one }}")
    one = identity("sft", path)
    (here / "chat.jinja").write_text("{{ two }}")
    assert identity("sft", path) != one


def test_the_data_files_of_each_stage(here: Path) -> None:
    (here / "chat.jinja").write_text("{{ messages }}")
    files = {stage: load(stage, written(here, stage, text)).sources() for stage, text in FULL.items()}
    assert {
        stage: {key: os.path.relpath(source.name, here) for key, source in found.items()}
        for stage, found in files.items()
    } == {
        "sft": {
            "model.new.tokenizer.train": "data/text.jsonl",
            "data.train": "data/train.jsonl",
            "data.eval": "../shared/eval.jsonl",
        },
        "reward": {"data.train": "pairs.jsonl"},
        "ppo": {"data.prompts": "prompts.jsonl"},
        "eval": {"data.prompts": "held-out.jsonl"},
    }
