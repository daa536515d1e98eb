"""Loading a good config: defaults, paths, overrides, what is written down of it, and its schema."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_cli import config
from rlhf_cli.config.base import Config
from rlhf_cli.config.loading import load
from rlhf_cli.config.training import CONFIGS
from rlhf_cli.errors import RLHFError

SFT = "model: {path: base}\ndata: {train: train.jsonl}\n"
REWARD = "data: {train: pairs.jsonl}\n"
PPO = "data: {prompts: prompts.jsonl}\nppo: {total_episodes: 640}\n"
EVAL = "data: {prompts: held-out.jsonl}\n"
NEW = """\
model: {new: {hidden_size: 32, tokenizer: {train: data/text.jsonl, vocab_size: 400}}}
data: {train: t.jsonl}
"""
MINIMAL = {"sft": SFT, "reward": REWARD, "ppo": PPO, "eval": EVAL}


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
def test_a_minimal_config_loads_with_all_defaults(stage: str, here: Path) -> None:
    path = written(here / "run", stage, MINIMAL[stage])
    loaded = load(stage, path)
    assert loaded.folder == here / "run" / stage
    assert loaded.file == path
    assert (loaded.stage, loaded.seed, loaded.output.keep, loaded.output.snapshots) == (stage, 0, 2, 8)


def test_the_expert_defaults(here: Path) -> None:
    sft = load("sft", written(here, "sft", SFT))
    reward = load("reward", written(here, "reward", REWARD))
    assert (sft.sft.learning_rate, sft.sft.num_train_epochs, sft.sft.lr_scheduler_type) == (2e-5, 1.0, "cosine")
    assert (sft.sft.warmup_ratio, sft.sft.warmup_steps, sft.sft.bf16) == (0.03, None, None)
    assert (reward.reward.learning_rate, reward.reward.center_rewards_coefficient) == (1e-5, 0.01)
    assert (reward.reward.normalize, reward.model.path) == ("sft", str(here / "sft"))


def test_paths_are_relative_to_the_file_and_models_may_be_hub_ids(here: Path) -> None:
    (here / "run" / "base").mkdir(parents=True)
    sft = load("sft", written(here / "run", "sft", SFT))
    assert sft.model.path == str(here / "run" / "base")
    assert sft.data.train == str(here / "run" / "train.jsonl")
    assert load("sft", written(here / "run", "sft", SFT.replace("base", "org/base"))).model.path == "org/base"
    assert load("sft", written(here / "run", "sft", SFT.replace("base", "./org/base"))).model.path.endswith(
        "run/org/base"
    )
    assert load("sft", written(here / "run", "sft", SFT.replace("base", "~/base"))).model.path == os.path.expanduser(
        "~/base"
    )
    assert load("sft", written(here / "run", "sft", SFT.replace("base", "/models/base"))).model.path == "/models/base"


def test_models_default_to_the_runs_own_stages(here: Path) -> None:
    ppo = load("ppo", written(here / "configs", "ppo", f"run: ../runs/a\n{PPO}"))
    assert ppo.folder == here / "runs" / "a" / "ppo"
    assert (ppo.models.sft, ppo.models.reward) == tuple(str(here / "runs" / "a" / name) for name in ("sft", "reward"))
    assert ppo.models.value == "reward"
    compared = load("eval", written(here / "e", "eval", MINIMAL["eval"])).models
    assert (compared.sft, compared.ppo, compared.reward) == tuple(str(here / "e" / n) for n in ("sft", "ppo", "reward"))
    assert load("reward", written(here / "e", "reward", REWARD)).model.path == str(here / "e" / "sft")
    named = load("ppo", written(here / "r", "ppo", f"models: {{sft: sft, reward: RUN/other}}\n{PPO}"))
    assert (named.models.sft, named.models.reward) == (str(here / "r" / "sft"), str(here / "r" / "other"))


def test_rewards_default_to_the_reward_model(here: Path) -> None:
    ppo = load("ppo", written(here, "ppo", PPO))
    assert {name: (each.model, each.weight) for name, each in ppo.rewards.items()} == {
        "reward": (ppo.models.reward, 1.0)
    }
    weighted = load("ppo", written(here, "ppo", PPO), ["rewards.reward.weight=2", "rewards.long.function=a.b:c"])
    assert (weighted.rewards["reward"].model, weighted.rewards["reward"].weight) == (ppo.models.reward, 2.0)
    assert (weighted.rewards["long"].model, weighted.rewards["long"].function) == (None, "a.b:c")


@pytest.mark.parametrize("word", ["reward", "policy_head"])
def test_the_value_models_words_are_no_paths(word: str, here: Path) -> None:
    (here / word).mkdir()
    ppo = load("ppo", written(here, "ppo", f"models: {{value: {word}, reward: {word}}}\n{PPO}"))
    assert (ppo.models.value, ppo.models.reward) == (word, str(here / word))
    assert ppo.dump(relative_to=here)["models"]["value"] == ppo.identity()["models"]["value"] == word


def test_first_words_are_a_number_or_a_range(here: Path) -> None:
    for stage, key in (("ppo", "data.prompts"), ("eval", "data.prompts")):
        path = written(here, stage, MINIMAL[stage])
        assert load(stage, path).sources()[key].first_words is None
        assert load(stage, path, ["data.first_words=8"]).sources()[key].first_words == (8, 8)
        ranged = load(stage, path, ["data.first_words.min=2", "data.first_words.max=8"])
        assert ranged.sources()[key].first_words == (2, 8)
        assert ranged.identity() != load(stage, path).identity()
        with pytest.raises(RLHFError, match="min is greater than max"):
            load(stage, path, ["data.first_words.min=8", "data.first_words.max=2"])
    with pytest.raises(RLHFError, match="belongs in ppo"):
        load("sft", written(here, "sft", SFT), ["data.first_words=8"])


def test_a_chat_template_is_a_file_a_text_or_chatml(here: Path) -> None:
    (here / "chat.jinja").write_text("{{ messages }}")
    for value, expected in [("chat.jinja", str(here / "chat.jinja")), ("chatml", "chatml"), ("'{{ m }}'", "{{ m }}")]:
        text = SFT.replace("path: base", f"path: base, chat_template: {value}")
        assert load("sft", written(here, "sft", text)).model.chat_template == expected


def test_new_weights_keep_every_field_of_the_transformers_config(here: Path) -> None:
    sft = load("sft", written(here, "sft", NEW))
    assert sft.model.new.config_fields() == {"model_type": "llama", "hidden_size": 32}
    assert sft.model.new.tokenizer.train == str(here / "data" / "text.jsonl")


def test_an_empty_section_means_its_defaults(here: Path) -> None:
    assert load("sft", written(here, "sft", f"sft:\noutput:\n{SFT}")).sft.max_length == 1024


def test_overrides_win_and_their_paths_start_from_the_working_directory(here: Path) -> None:
    path = written(here / "run", "sft", SFT)
    lines = ["*.seed=3", "sft.learning_rate=1e-3", "data.train=x.jsonl", "data.columns.prompt=question", "run=../other"]
    sft = load("sft", path, [*lines, "output.run_name=first", "output.run_name=second"])
    assert (sft.seed, sft.sft.learning_rate, sft.output.run_name) == (3, 1e-3, "second")
    assert sft.data.train == str(here / "cwd" / "x.jsonl")
    assert sft.data.columns == {"prompt": "question"}
    assert sft.folder == here / "other" / "sft"


def test_an_override_may_hold_a_requirement_and_a_section(here: Path) -> None:
    line = "eval.require.win_rate.ppo_vs_sft.gold.value=>= 0.6"
    found = load("eval", written(here, "eval", EVAL), [line, "eval.modes=[sampled]", "judges={gold: 'a:b'}"])
    assert found.eval.require == {"win_rate.ppo_vs_sft.gold.value": ">= 0.6"}
    assert (found.eval.modes, found.judges) == (["sampled"], {"gold": "a:b"})


def test_where_a_key_was_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    written(here, "sft", "seed: 1\nmodel:\n  path: base\ndata:\n  train: a.jsonl\n")
    sft = load("sft", "sft.yaml", ["sft.max_length=8"])
    assert sft.where("data.train") == "sft.yaml:5"
    assert sft.where("data.eval") == "sft.yaml:4"
    assert sft.where("sft.max_length") == "--set sft.max_length"
    assert load("sft", "sft.yaml", ["data={train: b.jsonl}"]).where("data.train") == "--set data"
    assert sft.where("sft.packing") == sft.where("nothing") == "sft.yaml"


def test_numbers_in_scientific_notation_are_numbers(here: Path) -> None:
    for text in ("1e-5", "1E-5", "1.0e-5", "+1e-05", "0.00001"):
        assert load("sft", written(here, "sft", f"{SFT}sft: {{learning_rate: {text}}}\n")).sft.learning_rate == 1e-5
    assert load("sft", written(here, "sft", f"{SFT}sft: {{weight_decay: 1}}\n")).sft.weight_decay == 1.0


def test_yaml_1_1_texts_stay_texts(here: Path) -> None:
    for text in ("off", "012", "1:30", "2024-01-02", "yes", "0x10", "1_000", "True", "NO"):
        sft = load("sft", written(here, "sft", f"{SFT.replace('base', 'base, revision: ' + text)}"))
        assert sft.model.revision == text


def test_a_config_cannot_be_changed(here: Path) -> None:
    sft = load("sft", written(here, "sft", SFT))
    with pytest.raises(ValueError, match="frozen"):
        sft.seed = 1
    with pytest.raises(ValueError, match="frozen"):
        sft.sft.learning_rate = 1.0


def test_who_takes_an_override() -> None:
    expected = {
        "ppo.kl_coef": ["ppo"], "sft.packing": ["sft"], "rewards.short.weight": ["ppo"],
        "data.prompts": ["ppo", "eval"],
        "data.columns.prompt": ["sft", "reward", "ppo", "eval"], "*.seed": ["sft", "reward", "ppo", "eval"],
        "trainer.packing_strategy": ["sft"], "trainer.optim": ["sft", "reward"], "eval.require.a.b": ["eval"],
        "ppo.kl_coeff": [], "nothing": [],
    }  # fmt: skip
    assert {key: [stage for stage in CONFIGS if config.accepts_key(stage, key)] for key in expected} == expected


@pytest.mark.parametrize("stage", CONFIGS)
def test_every_key_says_what_it_means(stage: str) -> None:
    keys = config.keys(stage)
    assert {"seed", "output.keep", "data.columns"} <= keys.keys()
    for key, field in keys.items():
        assert field.description and field.description.endswith((".", "]")), key


@pytest.mark.parametrize("stage", [None, *CONFIGS])
def test_the_schema_is_pure_json_and_complete(stage: str | None) -> None:
    schema = config.schema(stage)
    assert json.loads(json.dumps(schema, allow_nan=False)) == schema
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    if stage:
        assert set(schema["properties"]) == set(CONFIGS[stage].model_fields)
        assert schema["additionalProperties"] is False
    else:
        assert len(schema["anyOf"]) == len(CONFIGS)


def test_importing_the_configs_is_light() -> None:
    heavy = "{'torch', 'transformers', 'trl', 'datasets', 'numpy', 'rich', 'typer'} & sys.modules.keys()"
    timed = "start = time.process_time(); import rlhf_cli.config; seconds = time.process_time() - start"
    code = f"import time, sys; {timed}; print({heavy}, seconds)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("set() ")
    assert float(result.stdout.split()[1]) < 0.6  # 0.13 s on a quiet machine; pydantic and yaml are most of it


def test_a_missing_chat_template_is_no_template(here: Path) -> None:
    with pytest.raises(RLHFError, match=r"chat\.jinja` is not a file"):
        load("sft", written(here, "sft", SFT.replace("base", "base, chat_template: chat.jinja")))


def test_every_stage_has_the_base_keys() -> None:
    for model in CONFIGS.values():
        assert issubclass(model, Config)
        assert {"stage", "run", "seed", "output"} <= model.model_fields.keys()
