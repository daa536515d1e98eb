"""`models.policy` and `model.start`: PPO and the reward model start from those of an earlier round."""

import json
import shutil
from pathlib import Path

import ppo_folder
import pytest
import tiny
import torch
import trl_stage
from adapter_folder import run
from run_cli import rlhf
from safetensors.torch import load_file

from rlhf_cli import jsonl, runs
from rlhf_cli.config.base import Options
from rlhf_cli.config.loading import load
from rlhf_cli.models import lora, save
from rlhf_cli.models.load import load_causal_lm, load_reward_model
from rlhf_cli.stages.ppo.setup import PPOComponents, load_components
from rlhf_cli.stages.reward import training
from tests.conftest import World

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_page")]
LORA = "models.adapters={kind: lora, r: 3}"


def loaded(folder: Path, *changes: str) -> PPOComponents:
    """Return a run's models before the first update."""
    config = load("ppo", folder / "ppo.yaml", list(changes))
    return load_components(config, Options(), runs.open_parents(config))


def with_policy(trained: Path, folder: Path) -> Path:
    """A folder whose PPO has not run, beside the finished one of another run."""
    shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("ppo", "eval"))
    return folder


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(5, 17).reshape(2, 6)).logits


def test_the_policy_starts_from_the_named_model_and_the_reference_is_sft(ppo_run: Path, tmp_path: Path) -> None:
    folder = with_policy(ppo_run, tmp_path / "next")
    parts = loaded(folder, f"models.policy={ppo_run / 'ppo'}")
    assert torch.equal(logits(parts.policy), logits(load_causal_lm(ppo_run / "ppo/model")))
    assert torch.equal(logits(parts.trainer.ref), logits(load_causal_lm(ppo_run / "sft_model")))
    assert not torch.equal(logits(parts.policy), logits(parts.trainer.ref))


def test_the_ratio_is_one_at_first_and_the_kl_is_that_from_sft(ppo_run: Path, tmp_path: Path) -> None:
    folder = with_policy(ppo_run, tmp_path / "next")
    policy = ["-s", f"models.policy={ppo_run / 'ppo'}"]
    before = {path: path.stat().st_mtime_ns for path in ppo_run.rglob("*")}
    ppo_folder.must_succeed(ppo_folder.ppo(folder, *policy, "-s", ppo_folder.ONE))
    assert {path: path.stat().st_mtime_ns for path in ppo_run.rglob("*")} == before

    (first,) = ppo_folder.untimed(folder / "ppo/metrics.jsonl")
    (start, *_) = ppo_folder.untimed(ppo_run / "ppo/metrics.jsonl")
    assert first["policy/first_ratio_error"] == start["objective/kl_k1"] == 0 != first["objective/kl_k1"]
    manifest = json.loads((folder / "ppo/manifest.json").read_text())
    assert manifest["parents"]["models.policy"]["stage"] == "ppo"
    verified = ppo_folder.must_succeed(rlhf("verify", folder, "--step", 1))
    assert "1" in verified.output


def test_with_sft_as_the_policy_each_byte_is_as_without(ppo_run: Path, tmp_path: Path) -> None:
    folder = with_policy(ppo_run, tmp_path / "next")
    ppo_folder.must_succeed(ppo_folder.ppo(folder, "-s", "models.policy=" + str(folder / "sft_model")))
    copy = with_policy(ppo_run, tmp_path / "copy")
    shutil.copytree(copy / "sft_model", copy / "same")
    ppo_folder.must_succeed(ppo_folder.ppo(copy, "-s", f"models.policy={copy / 'same'}"))  # it is loaded again
    for other in (folder, copy):
        assert ppo_folder.weights(other) == ppo_folder.weights(ppo_run)
        assert ppo_folder.untimed(other / "ppo/metrics.jsonl") == ppo_folder.untimed(ppo_run / "ppo/metrics.jsonl")


def test_another_policy_makes_the_stage_stale(ppo_run: Path, tmp_path: Path) -> None:
    folder = with_policy(ppo_run, tmp_path / "next")
    shutil.copytree(ppo_run / "ppo/model", tmp_path / "policy")
    policy = ["-s", f"models.policy={tmp_path / 'policy'}", "-s", ppo_folder.ONE]
    ppo_folder.must_succeed(ppo_folder.ppo(folder, *policy))
    shutil.copy(folder / "sft_model/model.safetensors", tmp_path / "policy")
    result = ppo_folder.ppo(folder, *policy)
    assert result.exit_code == 2 and "models.policy: other weights" in result.stderr


def test_adapters_go_on_from_adapters_of_the_same_base(adapters_run: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    shutil.copytree(adapters_run, first)
    run(first, "ppo", "-s", LORA, "-s", "ppo.learning_rate=1e-2")
    trained = load_file(first / "ppo/model/adapter_model.safetensors")

    policy = f"models.policy={first / 'ppo'}"
    parts = loaded(first, LORA, policy, f"run={tmp_path / 'next'}", *absolute(first))
    state = {name: weight for name, weight in parts.policy.named_parameters() if ".lora_" in name}
    assert all(weight.requires_grad for weight in state.values())
    for name, weight in state.items():
        assert torch.equal(weight, trained[name.replace(".default", "")]), name

    whole = loaded(first, policy, f"run={tmp_path / 'next'}", *absolute(first))  # merged
    assert torch.allclose(logits(whole.policy), logits(load_causal_lm(first / "ppo/model")), atol=1e-6)
    for change, says in {
        "models.adapters={kind: lora, r: 2}": "models.adapters.r is 2, and models.policy",
        "models.adapters={kind: lora, r: 3, target_modules: [q_proj]}": "models.adapters.target_modules is ['q_proj']",
    }.items():
        refused = rlhf(
            "ppo",
            "-c",
            first / "ppo.yaml",
            "-s",
            change,
            *options(policy, f"run={tmp_path / 'next'}", *absolute(first)),
        )
        assert refused.exit_code == 2 and "error[C17]" in refused.stderr and says in refused.stderr, refused.stderr


def absolute(folder: Path) -> list[str]:
    return [f"models.sft={folder / 'sft'}", f"models.reward={folder / 'reward'}"]


def options(*changes: str) -> list[str]:
    return [part for change in changes for part in ("-s", change)]


def test_c17_t04_a_policy_that_does_not_fit_is_refused_by_check_too(ppo_run: Path, tmp_path: Path) -> None:
    folder = with_policy(ppo_run, tmp_path / "next")
    wide = tiny.causal(vocab_size=280, pad_token_id=0, eos_token_id=1, bos_token_id=None, intermediate_size=32)
    tokenizer = ppo_folder.tokenizers.load_tokenizer(folder / "sft_model")
    save.save_model(wide, tokenizer, tmp_path / "wide", "Another architecture.")
    other = ppo_folder.tokenizers.train_tokenizer(folder / "heldout.jsonl", 270)
    save.save_model(load_causal_lm(folder / "sft_model"), other, tmp_path / "other", "Another tokenizer.")
    cases = [
        (
            "C17",
            [f"models.policy={tmp_path / 'wide'}"],
            "models.policy has other weights than models.sft: ",
        ),
        ("T04", [f"models.policy={tmp_path / 'other'}"], "models.policy has another tokenizer than models.sft"),
        ("C17", [f"models.policy={ppo_run / 'ppo'}", LORA], "holds whole weights, and models.adapters trains adapters"),
    ]
    for code, changes, says in cases:
        for command in ("check", "ppo"):
            result = rlhf(command, folder / "ppo.yaml", *options(*changes))
            assert result.exit_code == 2 and f"[{code}]" in result.output and says in result.output, result.output
    shared = options(f"models.policy={ppo_run / 'ppo'}", "ppo.num_shared_layers=1")
    result = ppo_folder.ppo(folder, *shared)
    assert result.exit_code == 2 and "error[C17]" in result.stderr and "num_shared_layers" in result.stderr


# The reward model


def reward_config(world: World, folder: Path, sft: Path, **model: object):
    sections = {"model": {"path": str(sft), **model}, "reward": {"max_steps": 4, "normalize_samples": 16}}
    return trl_stage.config_of(world, "reward", folder, sft, world.pairs, **sections)


@pytest.mark.parametrize("adapters", [None, {"kind": "lora", "r": 2}])
def test_a_reward_model_goes_on_with_its_head_and_is_normalized_anew(
    world: World, tmp_path: Path, sft_stage: Path, adapters: dict | None
) -> None:
    kind = {"adapters": adapters} if adapters else {}
    first = reward_config(world, tmp_path / "first", sft_stage, **kind)
    trl_stage.train(first)
    second = reward_config(world, tmp_path / "second", sft_stage, start=str(first.folder), **kind)
    _, model, *_ = training.load_tokenizer_and_models(second, Options(), runs.open_parents(second))
    assert not any(hasattr(model.config, field) for field in lora.SCALE_FIELDS), "its scale is that of the first round"
    state = {name.replace(".default", ""): weight for name, weight in model.named_parameters() if weight.requires_grad}
    name = "adapter_model" if adapters else "model"
    stored = load_file(first.folder / f"model/{name}.safetensors")
    compared = {each.replace(".modules_to_save", ""): weight for each, weight in state.items()}
    assert compared.keys() == stored.keys() and any(each.endswith("score.weight") for each in stored)
    assert all(torch.equal(weight, stored[each]) for each, weight in compared.items())

    manifest = trl_stage.train(second)
    assert manifest["parents"]["model.start"]["sha256"] and manifest["parents"]["model.path"]["stage"] == "sft"
    assert manifest["reward_mean"] != trl_stage.manifest_of(first)["reward_mean"]
    scorer = load_reward_model(second.folder / "model")
    assert scorer.config.reward_mean == manifest["reward_mean"]
    card = (second.folder / "model/README.md").read_text()
    assert "trained from the reward stage" in card


def test_t04_a_reward_model_with_another_tokenizer_is_refused(world: World, tmp_path: Path, sft_stage: Path) -> None:
    jsonl.write_jsonl(tmp_path / "texts.jsonl", [{"text": "other words for another vocabulary"}])
    other = ppo_folder.tokenizers.train_tokenizer(tmp_path / "texts.jsonl", 260)
    save.save_model(tiny.scorer(vocab_size=len(other), pad_token_id=0), other, tmp_path / "other", "A scorer.")
    config = reward_config(world, tmp_path / "second", sft_stage, start=str(tmp_path / "other"))
    with pytest.raises(Exception, match=r"model\.start has another tokenizer than model\.path"):
        trl_stage.run(config)
    checked = rlhf("check", config.file)
    assert checked.exit_code == 2 and "T04" in checked.output
