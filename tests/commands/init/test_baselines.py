"""`rlhf init --baselines`: dpo.yaml and best_of/sft.yaml with the pairs and sizes of the run."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from bad_inputs import check
from run_cli import fails, must_succeed, rlhf

from rlhf_cli import config, jsonl
from tests.conftest import World


@pytest.mark.parametrize("preset", ["ci", "hh", "instruct"])
def test_baselines_adds_a_dpo_yaml_with_the_pairs_of_reward_yaml(here: Path, preset: str) -> None:
    fails(rlhf("init", "functions", "none", "--baselines"), "C11", "--baselines needs the pairs of a reward.yaml")
    must_succeed(rlhf("init", preset, "with", "--baselines"))
    must_succeed(rlhf("init", preset, "without"))
    names = {
        path.name: sorted(each.relative_to(path).as_posix() for each in path.rglob("*")) for path in here.iterdir()
    }
    added = {"dpo.yaml", ".schema/dpo.json", "best_of", "best_of/sft.yaml"}
    added |= {".schema/sft.json"} if preset == "instruct" else set()
    assert set(names["with"]) - set(names["without"]) == added
    dpo, reward = (config.load(stage, here / "with" / f"{stage}.yaml") for stage in ("dpo", "reward"))
    assert dpo.data == reward.data and dpo.seed == reward.seed
    assert dpo.model.model_dump() == reward.model.model_dump(exclude={"start"})
    shared = (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "max_length",
        "max_steps",
        "num_train_epochs",
    )
    assert all(getattr(dpo.dpo, name) == getattr(reward.reward, name) for name in (*shared, "gradient_checkpointing"))
    assert dpo.dpo.learning_rate == pytest.approx(reward.reward.learning_rate / 10)
    text = (here / "with/dpo.yaml").read_text()
    assert text.count("#") > 4 and yaml.safe_load(text)["model"]["path"]
    best, ppo = config.load("sft", here / "with/best_of/sft.yaml"), config.load("ppo", here / "with/ppo.yaml")
    found = best.model.path, best.best_of.reward, best.data.train, best.best_of.response_length, best.seed
    assert found == (ppo.models.sft, ppo.models.reward, ppo.data.prompts, ppo.ppo.response_length, ppo.seed)
    assert (best.best_of.temperature, bool(best.model.adapters)) == (ppo.ppo.temperature, bool(ppo.models.adapters))
    batch = best.sft.per_device_train_batch_size * best.sft.gradient_accumulation_steps
    assert best.data.max_rows == max(ppo.ppo.total_episodes // best.best_of.n, batch)
    text = (here / "with/best_of/sft.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=../.schema/sft.json\n") and text.count("#") > 4


@pytest.mark.full
def test_preferences_get_a_dpo_yaml_that_fits(here: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_cli.commands.init import sizes

    monkeypatch.setattr(sizes, "measure_speed", lambda folder: sizes.Speed(training=20_000.0, generation=4_000.0))
    rows = [{"prompt": f"What is {n}?", "chosen": f" It is {n}.", "rejected": " No idea."} for n in range(60)]
    jsonl.write_jsonl(here / "pairs.jsonl", rows)
    common: list[Any] = ["--data", "pairs.jsonl", "--base", world.base, "--plain"]
    must_succeed(rlhf("init", "preferences", *common, "plain"))
    must_succeed(rlhf("init", "preferences", *common, "--baselines", "mine"))
    assert not (here / "plain/dpo.yaml").exists() and not (here / "plain/.schema/dpo.json").exists()
    for name in ("sft.yaml", "reward.yaml", "ppo.yaml", "eval.yaml", "data/pairs.jsonl"):
        assert (here / "mine" / name).read_bytes() == (here / "plain" / name).read_bytes(), name
    dpo, reward = (config.load(stage, here / "mine" / f"{stage}.yaml") for stage in ("dpo", "reward"))
    products = [
        each.per_device_train_batch_size * each.gradient_accumulation_steps for each in (dpo.dpo, reward.reward)
    ]
    assert products[0] == products[1] and dpo.data == reward.data
    best = config.load("sft", here / "mine/best_of/sft.yaml")
    assert best.data.train == str(here / "mine/data/prompts.jsonl")
    assert (best.data.max_rows, best.best_of.n) == (9, 64)
    assert "# prompts: 64 x 9 = 576 scored answers; PPO has 3200" in (here / "mine/best_of/sft.yaml").read_text()
    assert check("mine").exit_code == 0
