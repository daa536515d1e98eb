"""`reward.ensemble`: members by real training on a tiny model, and their combined score in PPO.

Modules: `config/reward.py`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import trl_stage
from plans import plan_json
from run_cli import fails, must_succeed, rlhf
from trl_stage import manifest_of, signal_at, train

from rlhf_cli import data, jsonl
from rlhf_cli.config.loading import load
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.models import forward, tokenizers
from rlhf_cli.models.batch import EnsembleScores, Rollout
from rlhf_cli.models.load import load_reward_model
from rlhf_cli.pipeline.status import find_runs, read_run_and_next
from rlhf_cli.rewards.model import EnsembleReward
from rlhf_cli.runs import locks
from rlhf_cli.stages.common import lifecycle
from tests.conftest import World

pytestmark = pytest.mark.full

QUICK = {"max_steps": 6, "normalize_samples": 24}
PPO: dict[str, Any] = {
    "total_episodes": 8, "per_device_train_batch_size": 8, "response_length": 6, "num_sample_generations": 0,
}  # fmt: skip


def config_of(world: World, folder: Path, parent: Path, **settings: Any) -> RewardConfig:
    sections = {"reward": {**QUICK, **settings}}
    return trl_stage.config_of(world, "reward", folder, parent, world.pairs, **sections)


def folders_of(config: RewardConfig) -> list[Path]:
    return [config.folder, *(Path(config.run) / f"members/{number}/reward" for number in (2, 3))]


@pytest.fixture(scope="module")
def ensemble(world: World, sft_stage: Path, tmp_path_factory: pytest.TempPathFactory) -> RewardConfig:
    """The config of a finished ensemble of three. Read-only."""
    config = config_of(world, tmp_path_factory.mktemp("ensemble"), sft_stage, ensemble=3)
    train(config)
    return config


def scores_of(folder: Path, world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of the chosen and the rejected answers by one member, as PPO sees them."""
    scorer = load_reward_model(folder / "model").eval()
    tokenizer = tokenizers.load_tokenizer(folder / "model")
    rows = [row for _, row in jsonl.read_jsonl(world.pairs)]
    scores = []
    for name in ("chosen", "rejected"):
        encoded = data.encode_many(tokenizer, [row["prompt"] for row in rows], [row[name] for row in rows])
        rollout = Rollout.from_lists([prompt for prompt, _ in encoded], [answer for _, answer in encoded])
        scores.append(forward.rollout_scores(scorer, rollout, max_rows=32))
    return scores[0], scores[1]


def test_members_are_runs_with_seeds_of_their_own_and_the_card_compares_them(
    world: World, tmp_path: Path, sft_stage: Path, ensemble: RewardConfig
) -> None:
    manifest = manifest_of(ensemble)
    alone = load("reward", ensemble.file, ["reward.ensemble=null", "seed=1000", f"run={tmp_path}"])
    assert train(alone)["model_sha256"] == manifest["members"]["2"]["sha256"] != manifest["model_sha256"]
    assert manifest["members"].keys() == {"2", "3"}
    assert manifest["members"]["3"]["path"] == "../members/3/reward"

    chosen, rejected = zip(*(scores_of(folder, world) for folder in folders_of(ensemble)), strict=True)
    card = manifest["card"]["ensemble"]
    margins = torch.stack(chosen) - torch.stack(rejected)
    assert card["accuracies"] == pytest.approx((margins > 0).float().mean(1).tolist())
    assert card["accuracy"] == pytest.approx(float((margins.mean(0) > 0).float().mean()))
    answers = torch.cat([torch.stack(chosen), torch.stack(rejected)], 1)
    assert card["disagreement"] == pytest.approx(float(answers.std(0, unbiased=False).mean()), rel=1e-3)
    assert card["disagreement"] > 0.01


def test_a_kill_in_the_second_member_keeps_the_first(
    world: World, tmp_path: Path, sft_stage: Path, ensemble: RewardConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(world, tmp_path, sft_stage, ensemble=3)
    ran = 0
    real = lifecycle.run_stage_in

    def run_stage_in(*args: Any) -> None:
        nonlocal ran
        ran += 1
        with signal_at(3 if ran == 3 else 0):  # after RUN/reward, which is started first, and member 2
            real(*args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(lifecycle, "run_stage_in", run_stage_in)
        trl_stage.run(config)
    assert stopped.value.code == 143
    assert read_run_and_next(Path(config.run))[1].action == "wait", "this process holds the locks"
    locks.release()
    run, following = read_run_and_next(Path(config.run))
    conditions = {name: stage.condition for name, stage in run.all_stages.items()}
    assert conditions == {"members/3/reward": "stopped", "reward": "stopped"}
    assert following.decisions["reward"].fresh is False, "members that are finished are not trained again"
    assert [found.folder for found in find_runs([Path(config.run)])] == [Path(config.run)]
    first = folders_of(config)[1] / "manifest.json"
    before = first.stat().st_mtime_ns
    resumed = train(config)
    assert first.stat().st_mtime_ns == before and "resumes at step 3 of 6" in capfd.readouterr().err
    assert resumed["model_sha256"] == manifest_of(ensemble)["model_sha256"]
    assert resumed["members"] == manifest_of(ensemble)["members"] and resumed["card"] == manifest_of(ensemble)["card"]


@pytest.mark.parametrize("combine", ["min", "mean"])
def test_ppo_and_evaluation_score_by_the_members_combined(
    combine: str, world: World, tmp_path: Path, sft_stage: Path, ensemble: RewardConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[tuple[Rollout, EnsembleScores]] = []
    real = EnsembleReward.__call__

    def call(self: EnsembleReward, rollout: Rollout) -> EnsembleScores:
        scored.append((rollout, real(self, rollout)))
        return scored[-1][1]

    monkeypatch.setattr(EnsembleReward, "__call__", call)
    models = {"sft": str(sft_stage), "reward": str(ensemble.folder)}
    data = {"prompts": str(world.sft)}
    path = world.config(tmp_path, "ppo", models=models, data=data, rewards={"reward": {"combine": combine}}, ppo=PPO)
    must_succeed(rlhf("ppo", path))
    (line,) = [row for _, row in jsonl.read_jsonl(tmp_path / "ppo/metrics.jsonl")]
    assert {f"objective/score/reward/{number}" for number in (1, 2, 3)} <= line.keys()
    manifest = manifest_of(load("ppo", path))
    assert {"rewards.reward.model", "rewards.reward.models.2", "rewards.reward.models.3"} <= manifest["parents"].keys()

    of_ppo = len(scored)
    quick = {"n": 8, "modes": ["sampled"], "best_of": [2], "frontier": False, "interpolate": []}
    path = world.config(tmp_path, "eval", models=models, data=data, eval=quick)
    assert "models.reward.members.3" in must_succeed(rlhf("check", path)).stdout
    must_succeed(rlhf("eval", path))
    report = json.loads((tmp_path / "eval/report.json").read_text())
    assert report["models"]["sft"]["reward_mean"] == pytest.approx(float(scored[of_ppo][1].score.mean()), abs=1e-4)
    assert report["best_of"][0]["n"] == 2 and len(scored) == of_ppo + 4, "SFT, PPO and two draws"
    parents = manifest_of(load("eval", path))["parents"]
    assert {"models.reward", "models.reward.members.2", "models.reward.members.3"} <= parents.keys()

    scorers = [load_reward_model(folder / "model").eval() for folder in folders_of(ensemble)]
    for rollout, found in scored:
        by_hand = torch.stack([forward.rollout_scores(scorer, rollout, max_rows=8) for scorer in scorers])
        expected = by_hand.amin(0) if combine == "min" else by_hand.mean(0)
        assert found.score.tolist() == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_plan_counts_every_member(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensemble = "reward.ensemble=3"
    one = plan_json("reward.yaml")["reward"]
    three = plan_json("reward.yaml", "-s", ensemble)["reward"]
    assert three["steps"] == 3 * one["steps"]
    assert three["seconds"] == pytest.approx(3 * one["seconds"])

    monkeypatch.setattr("rlhf_cli.system.free_disk_bytes", lambda folder: 1)
    fails(rlhf("check", "reward.yaml"), "E03", "3 checkpoints of")
    fails(rlhf("check", "reward.yaml", ensemble), "E03", "9 checkpoints of")


def test_another_number_of_members_is_refused_before_one_is_trained(ensemble: RewardConfig) -> None:
    fails(rlhf("reward", ensemble.file, "-s", "reward.ensemble=4"), "C15", "reward.ensemble 3 -> 4")
    assert not Path(ensemble.run, "members/4").exists()


def test_a_damaged_member_is_damage_of_the_stage(
    world: World, tmp_path: Path, sft_stage: Path, ensemble: RewardConfig
) -> None:
    shutil.copytree(ensemble.run, tmp_path / "copy")
    config = config_of(world, tmp_path / "copy", sft_stage, ensemble=3)
    shutil.rmtree(folders_of(config)[1])
    _, following = read_run_and_next(tmp_path / "copy")
    assert following.decisions["reward"].reason.startswith("damaged: member 2: ") and following.decisions["reward"].runs
    fails(rlhf("reward", config.file), "M05", "member 2: manifest.json is missing", exit_code=1)

    models = {"sft": str(sft_stage), "reward": str(config.folder)}
    world.config(tmp_path / "copy", "ppo", models=models, data={"prompts": str(world.sft)}, ppo=PPO)
    result = must_succeed(rlhf("check", tmp_path / "copy"))
    assert "members/2/reward, which the reward stage is to make" in result.stdout + result.stderr


def test_bad_ensembles(world: World, tmp_path: Path, sft_stage: Path, ensemble: RewardConfig) -> None:
    for settings, text in (
        ({"reward": {"ensemble": 1}}, "C06"),
        ({"reward": {"ensemble": 2}, "model": {"path": str(sft_stage), "start": str(ensemble.folder)}}, "C17"),
        ({"reward": {"ensemble": 2, "normalize": "none"}}, "C17"),
    ):
        sections = {"model": {"path": str(sft_stage)}, "data": {"train": str(world.pairs)}, **settings}
        fails(rlhf("reward", world.config(tmp_path, "reward", **sections)), text, "reward.ensemble")

    one = folders_of(ensemble)[1]
    sections = {"models": {"sft": str(sft_stage), "reward": str(one)}, "data": {"prompts": str(world.sft)}}
    path = world.config(tmp_path, "ppo", **sections, rewards={"reward": {"combine": "min"}}, ppo=PPO)
    for command in ("check", "ppo"):
        fails(rlhf(command, path), "C17", "its model is no ensemble")

    path = world.config(tmp_path, "ppo", **sections, ppo={**PPO, "watchdog": {"disagreement": 3.0}})
    for command in ("check", "ppo"):
        fails(rlhf(command, path), "C17", "ppo.watchdog.disagreement has no effect without an ensemble")
