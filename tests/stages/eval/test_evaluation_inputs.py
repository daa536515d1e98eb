"""What is interpolated by default, and what can be, by `rlhf export --interpolate`."""

from pathlib import Path
from typing import Any

import pytest
from ppo_folder import rlhf
from safetensors.torch import load_file, save_file
from typer.testing import Result

from rlhf_cli.config.base import Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.stages.eval import evaluation_inputs
from tests.stages.eval.test_run import fails

pytestmark = pytest.mark.full


def test_a_share_or_an_sft_model_that_cannot_be_exported(trained_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained_folder)

    def export(*arguments: object) -> Result:
        result = rlhf("export", *arguments, "--out", "out")
        assert not Path("out").exists()
        return result

    for share in ("0", "1", "2.5", "nan"):
        says = f"--interpolate {share}: must be above 0 (the SFT model), at most 2, and not 1 (the PPO policy)"
        fails(export(".", "--interpolate", share), "C06", says)
    weights = Path("sft_model/model.safetensors")
    content = load_file(weights)
    save_file({name: weight + 1 for name, weight in content.items()}, weights, {"format": "pt"})
    fails(export(".", "--interpolate", "0.5"), "M10", "sft_model is no longer the model that PPO was trained with")
    Path("sft_model").rename("elsewhere")
    fails(export(".", "--interpolate", "0.5"), "M01", "models.sft: no such folder sft_model")


def test_only_a_policy_of_ppo_is_interpolated(adapters_copy: Path) -> None:
    result = rlhf("export", ".", "--stage", "sft", "--out", "out", "--interpolate", "0.5")
    fails(result, "C11", "sft was written by the sft stage, not by PPO")


@pytest.mark.parametrize("average,expected", [(None, [0.3, 0.5, 0.7]), (0.9, [0.6, 1.25, 1.5])])
def test_by_default_an_average_is_extended_since_it_lags_behind(
    average: float | None, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EvalConfig.model_validate({"data": {"prompts": "prompts.jsonl"}})
    parents: dict[str, Any] = {"models.ppo": None, "models.sft": None}
    monkeypatch.setattr(evaluation_inputs, "ppo_settings", lambda _: PPOSettings(total_episodes=64, average=average))
    for started, shares in ((True, expected), (False, [])):
        monkeypatch.setattr(evaluation_inputs, "started_from", lambda *_, started=started: started)
        assert evaluation_inputs.shares_between(config, Options(), parents) == shares
