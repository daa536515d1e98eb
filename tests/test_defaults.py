"""Why some defaults are what they are: the commands that `rlhf explain KEY` names as their source."""

import math
import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import SIZES, World

from rlhf_cli import jsonl, runs
from rlhf_cli.config.base import Options
from rlhf_cli.config.loading import load
from rlhf_cli.config.training import SFTConfig
from rlhf_cli.evaluation import render
from rlhf_cli.statistics import best_of_n_kl, wilson

EVAL = "data: {prompts: prompts.jsonl}\n"


@pytest.fixture(scope="module")
def trained(world: World, tmp_path_factory: pytest.TempPathFactory) -> SFTConfig:
    """Two epochs of ten steps, with no word of when to save or to evaluate."""
    from rlhf_cli.stages import sft

    folder = tmp_path_factory.mktemp("trained")
    jsonl.write_jsonl(folder / "rows.jsonl", [row for _, row in jsonl.read_jsonl(world.sft)][:80])
    sections = {
        "model": {"path": str(world.base)},
        "data": {"train": "rows.jsonl", "eval": str(world.sft)},
        "output": {"keep": 99},
        "sft": {"num_train_epochs": 2, "max_length": 64},
    }
    config = load("sft", world.config(folder, "sft", **sections))
    sft.run(config, Options())
    return config


@pytest.mark.training
def test_a_run_can_resume_from_each_tenth_of_it(trained: SFTConfig) -> None:
    assert trained.output.save_steps is None
    saved = {int(path.name.rpartition("-")[2]) for path in (trained.folder / "state").glob("checkpoint-*")}
    assert saved == set(range(2, 21, 2))


@pytest.mark.training
def test_each_epoch_ends_with_an_evaluation(trained: SFTConfig) -> None:
    assert trained.sft.eval_steps is None
    lines = [row for _, row in jsonl.read_jsonl(trained.folder / "metrics.jsonl")]
    assert [line["step"] for line in lines if "eval_loss" in line] == [10, 20]


def eval_config(folder: Path, text: str = EVAL):
    (folder / "eval.yaml").write_text(text)
    return load("eval", folder / "eval.yaml")


def test_snapshots_stand_at_the_eighths_of_a_run(tmp_path: Path) -> None:
    from rlhf_cli.stages.ppo_samples import evenly_spaced_steps

    count = eval_config(tmp_path).output.snapshots
    for updates in (8, 100, 157, 10_000):
        steps = sorted(evenly_spaced_steps(updates, count))
        assert len(steps) == 8 and steps[-1] == updates
        assert all(abs(after - before - updates / 8) <= 1 for before, after in pairwise([0, *steps]))


def test_512_prompts_tell_a_win_rate_to_about_four_hundredths(tmp_path: Path) -> None:
    n = eval_config(tmp_path).eval.n
    low, high = wilson(n / 2, n)  # the widest of all
    assert n == 512 and (high - low) / 2 == pytest.approx(0.0431, abs=1e-4)


def test_the_best_of_eight_is_over_a_nat_away(tmp_path: Path) -> None:
    """As far as a short PPO run goes, for eight answers a prompt."""
    sizes = eval_config(tmp_path).eval.best_of
    assert [round(best_of_n_kl(n), 2) for n in sizes] == [0.19, 0.64, 1.2]


def test_256_answers_tell_mean_and_deviation_to_a_tenth() -> None:
    """The standard errors, in deviations, by drawing: 1/16 of the mean, 1/22 of the deviation."""
    from rlhf_cli.config.training import RewardSettings

    count, draw = RewardSettings().normalize_samples, random.Random(0)
    samples = [[draw.gauss(2.0, 3.0) for _ in range(count)] for _ in range(400)]
    mean = math.dist([statistics.fmean(sample) / 3 for sample in samples], [2 / 3] * 400) / 20
    deviation = math.dist([statistics.pstdev(sample) / 3 for sample in samples], [1.0] * 400) / 20
    assert 0.05 < mean < 0.075 and 0.035 < deviation < 0.055


def test_fresh_weights_are_a_llama(world: World, tmp_path: Path) -> None:
    from rlhf_cli.models import build

    fields = {name: size for name, size in SIZES.items() if name != "model_type"}
    new = {**fields, "tokenizer": {"train": str(world.text), "vocab_size": 320}}
    config = load("sft", world.config(tmp_path, "sft", model={"new": new}, data={"train": str(world.sft)}))
    assert config.model.new
    model = build.new_causal_lm(config.model.new.config_fields(), world.tokenizer())
    assert type(model).__name__ == "LlamaForCausalLM"


def test_the_reward_model_is_the_one_judge_unasked(tmp_path: Path) -> None:
    config = eval_config(tmp_path)
    assert [parent.key for parent in runs.references(config)] == ["models.sft", "models.ppo", "models.reward"]


def test_nothing_is_required_of_a_result_unasked(tmp_path: Path) -> None:
    worst = {"win_rate": {"ppo_vs_sft": {"reward": {"value": 0.0}}}}
    render.check_requirements(worst, eval_config(tmp_path).eval.require, where=lambda key: "eval.yaml")
