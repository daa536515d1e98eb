"""`rlhf export --merge`: the weights of the mean by hand, with a share, of adapters and whole models; refusals."""

import json
import re
import shutil
from pathlib import Path

import adapter_folder
import ppo_folder
import pytest
import torch
from ppo_folder import must_succeed, rlhf
from run_cli import fails
from safetensors.torch import load_file

from rlhf_cli.models.load import load_causal_lm

pytestmark = pytest.mark.full
LORA = ("-s", "models.adapters={kind: lora, r: 3}", "-s", "ppo.learning_rate=1e-2")


@pytest.fixture
def adapters(adapters_copy: Path) -> None:
    """The working directory: three PPO runs of adapters from one SFT model, ppo, second and third, and their reward."""
    for name in ("second", "third", "ppo"):
        adapter_folder.run(adapters_copy, "ppo", *LORA, "-s", f"seed={len(name)}")
        if name != "ppo":
            Path("ppo").rename(name)


@pytest.fixture
def whole(trained_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory: two PPO runs of whole weights from one SFT model, ppo and second."""
    monkeypatch.chdir(trained_folder)
    Path("ppo").rename("second")
    must_succeed(ppo_folder.ppo(trained_folder, "-s", "seed=7"))


def weights(stage: str) -> dict[str, torch.Tensor]:
    """Return a stage's weights with its adapters merged."""
    return load_causal_lm(Path(stage)).state_dict()


def export(*arguments: object) -> dict[str, torch.Tensor]:
    """Export what the arguments say, and return its weights."""
    shutil.rmtree("out", ignore_errors=True)
    must_succeed(rlhf("export", ".", "--out", "out", *arguments))
    return load_file("out/model.safetensors")


def equals(exported: dict[str, torch.Tensor], parts: dict[str, float]) -> bool:
    """Return True if exported weights are the sum of stages' weights, each times its number."""
    sums = dict.fromkeys(exported, torch.zeros(()))
    for stage, number in parts.items():
        sums = {name: sums[name] + number * weight for name, weight in weights(stage).items() if name in sums}
    return all(torch.allclose(exported[name], sums[name], atol=1e-6) for name in exported)


def test_the_mean_of_adapters_is_that_of_their_merged_weights(adapters: None) -> None:
    pair = export("--merge", "second=0.25")
    assert equals(pair, {"ppo/model": 0.75, "second/model": 0.25})
    assert not equals(pair, {"ppo/model": 0.25, "second/model": 0.75}), "the runs differ"
    assert equals(
        export("--merge", "second=0.5", "--merge", "third=0.3"),
        {"ppo/model": 0.2, "second/model": 0.5, "third/model": 0.3},
    )
    assert equals(
        export("--merge", "second=0.25", "--interpolate", "1.5"),
        {"ppo/model": 1.125, "second/model": 0.375, "sft/model": -0.5},
    )


def test_the_mean_of_whole_weights(whole: None) -> None:
    assert equals(export("--merge", "second=0.5"), {"ppo/model": 0.5, "second/model": 0.5})


def test_the_output_and_the_card_say_what_was_merged(whole: None) -> None:
    result = must_succeed(rlhf("export", ".", "--out", "out", "--merge", "second=0.35", "--json"))
    assert f"ppo after update 4 merged with 0.35 of {Path.cwd().name}/second, " in result.stderr
    assert json.loads(result.stdout)["merged"] == {"second": 0.35}
    card = Path("out/README.md").read_text()
    assert re.search(r"Its weights are a mean: 0\.65 of it, 0\.35 of .*/second; all started from one SFT model\.", card)
    assert "This card has no evaluation of this model." in card


def test_c06_weights(whole: None) -> None:
    for assignment in ("second", "second=", "second=x", "second=0", "second=-0.1", "second=nan", "=0.5"):
        result = rlhf("export", ".", "--out", "out", "--merge", assignment)
        fails(result, "C06", f"--merge {assignment}: must be FOLDER=WEIGHT, with a weight above 0")
    result = rlhf("export", ".", "--out", "out", "--merge", "second=0.5", "--merge", "second=0.5")
    fails(result, "C06", "--merge: the weights sum to 1, and the exported policy has what they leave of 1")
    assert not Path("out").exists()


def test_only_policies_of_one_sft_model_are_merged(adapters: None) -> None:
    for other in ("reward", "sft"):
        result = rlhf("export", ".", "--out", "out", "--merge", f"{other}=0.5")
        fails(result, "C17", f"{other} is not a policy trained from the SFT model of ppo")
    result = rlhf("export", ".", "--stage", "sft", "--out", "out", "--merge", "second=0.5")
    fails(result, "C11", "--merge: sft was written by the sft stage, not by PPO")
    fails(rlhf("export", ".", "--out", "out", "--merge", "fourth=0.5"), "M01", "no such folder fourth")
    assert not Path("out").exists()
