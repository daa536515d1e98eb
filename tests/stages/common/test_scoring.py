"""Reward models of a stage: stored probes in each dtype, and the token at which the score is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForSequenceClassification
from trl_stage import base_padded_with_eos, train

from rlhf_cli import runs
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import forward
from rlhf_cli.models.load import load_reward_model
from rlhf_cli.stages.common import scoring
from rlhf_cli.stages.reward import run as reward_stage
from tests.conftest import World
from tests.stages.reward.test_run import config_of

pytestmark = pytest.mark.full


def test_probes_in_bfloat16_are_marked_and_checked_in_it(
    world: World, tmp_path: Path, sft_stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model trains and is measured in bfloat16; in that format PPO finds nearly the same scores."""
    config = config_of(world, tmp_path, sft_stage, reward={"bf16": True})
    manifest = train(config)
    assert manifest["probes_dtype"] == "bfloat16"
    formats, score = list[bool](), forward.pooled_scores
    monkeypatch.setattr(
        forward, "pooled_scores", lambda *given: formats.append(torch.is_autocast_enabled("cpu")) or score(*given)
    )
    parent = runs.open_parent(str(config.folder), expect=("reward",), key="models.reward", where="")
    scorer = load_reward_model(config.folder / "model").eval()
    scoring.check_probes(scorer, parent, where="")
    assert formats and all(formats)
    scorer.score.weight.data *= -1
    with pytest.raises(RLHFError, match="M09"):
        scoring.check_probes(scorer, parent, where="")


@pytest.mark.parametrize("bf16", [False, True])
def test_adapters_are_measured_beside_a_base_in_bfloat16(
    bf16: bool, world: World, tmp_path: Path, sft_stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum that is stored in bfloat16 would lose their small changes; a float32 base has them added."""
    measured, card = list[Any](), reward_stage.make_report_card
    monkeypatch.setattr(
        reward_stage,
        "make_report_card",
        lambda config, scorer, *rest, **named: measured.append(scorer) or card(config, scorer, *rest, **named),
    )
    model = {"path": str(sft_stage), "adapters": {"kind": "lora"}}
    train(config_of(world, tmp_path, sft_stage, model=model, reward={"bf16": bf16, "normalize": "none"}))
    (scorer,) = measured
    assert any(isinstance(layer, LoraLayer) for layer in scorer.modules()) == bf16


def test_t01_with_a_new_pad_token_the_score_is_read_at_the_stop_token(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(world, tmp_path, base_padded_with_eos(world, tmp_path))
    manifest = train(config)
    assert "warning[T01]" in capsys.readouterr().err
    scorer = AutoModelForSequenceClassification.from_pretrained(config.folder / "model").eval()
    assert scorer.config.pad_token_id == manifest["special_tokens"]["pad"] == len(world.tokenizer())
    probe = manifest["probes"][0]
    ids = torch.tensor([probe["prompt_ids"] + probe["response_ids"]])
    with torch.no_grad():
        score = float(scorer.score(scorer.model(ids).last_hidden_state[:, -1]))
    assert (score - manifest["reward_mean"]) / manifest["reward_std"] == pytest.approx(probe["score"], abs=1e-4)
