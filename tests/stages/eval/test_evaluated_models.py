"""The policies of an evaluation: refused with another tokenizer, and interpolated."""

import json
import shutil
from pathlib import Path

import adapter_folder
import pytest
import torch
from adapter_folder import logits
from ppo_folder import rlhf
from transformers import AutoModelForCausalLM

from rlhf_cli import runs
from rlhf_cli.config.base import Options
from rlhf_cli.config.loading import load
from rlhf_cli.models import load as load_models
from rlhf_cli.models.load import load_causal_lm
from rlhf_cli.models.parallel import SINGLE_PROCESS
from rlhf_cli.stages.common import lifecycle, model_loading
from rlhf_cli.stages.eval.evaluated_models import EvaluatedModels
from tests.stages.eval.test_run import exported, fails, halfway

pytestmark = pytest.mark.full


def test_policies_with_other_weights_or_another_tokenizer_are_refused(trained_folder: Path) -> None:
    run = trained_folder
    config = json.loads((run / "sft_model/config.json").read_text())
    sizes = load_models.read_config(run / "sft_model").from_dict({**config, "num_hidden_layers": 1})
    shutil.copytree(run / "sft_model", run / "short")
    AutoModelForCausalLM.from_config(sizes).save_pretrained(run / "short")
    sets = ["eval.interpolate=[0.5]", f"models.ppo={run / 'short'}", "eval.temperature=1.0", "eval.response_length=8"]
    for command in ("check", "eval"):
        arguments = [part for each in sets for part in ("-s", each)]
        result = rlhf(
            *(("check", run / "eval.yaml") if command == "check" else ("eval", "-c", run / "eval.yaml")), *arguments
        )
        fails(result, "C17", "cannot be interpolated: model.layers.1.", "missing, in the SFT model")
    assert not (run / "eval/report.json").exists()
    shutil.copytree(run / "sft_model", run / "other")
    tokenizer = json.loads((run / "other/tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (run / "other/tokenizer.json").write_text(json.dumps(tokenizer))
    policies = f"policies={{other: {run / 'other'}}}"
    fails(rlhf("eval", "-c", run / "eval.yaml", "-s", policies), "T04", "policies.other has another tokenizer")
    policies = f"policies={{scores: {run / 'ppo/value'}}}"
    fails(rlhf("eval", "-c", run / "eval.yaml", "-s", policies), "M10", "policies.scores", "inside a stage's folder")


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_interpolated_without_a_copy_of_the_weights(
    adapters_copy: Path, monkeypatch: pytest.MonkeyPatch, *, dora: bool
) -> None:
    run = adapters_copy
    kind = "{kind: lora, r: 3, use_dora: true}" if dora else "{kind: lora, r: 3}"
    adapter_folder.run(run, "ppo", "-s", f"models.adapters={kind}", "-s", "ppo.learning_rate=1e-2")
    merged, sft = (load_causal_lm(run / name / "model") for name in ("ppo", "sft"))
    expected = logits(halfway(merged, sft))
    out = exported(run, run / "half")
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(out)), expected, atol=1e-4)
    text = f"policies: {{same: RUN/ppo}}\n{adapter_folder.EVAL}".replace("interpolate: []", "interpolate: [0.5]")
    (run / "eval.yaml").write_text(text)
    config = load("eval", run / "eval.yaml")
    parents = runs.open_parents(config)
    tokenizer = model_loading.load_tokenizer(config, Options(), parents["models.sft"])
    loaded = EvaluatedModels(
        config, lifecycle.StageRun(config, Options(), parents, SINGLE_PROCESS, {}, False, ""), tokenizer
    )
    policy = loaded.policy(parents["models.ppo"], 0.5)
    assert torch.allclose(logits(policy), expected, atol=1e-4)
    shared = {weight.data_ptr() for weight in loaded.sft.parameters()} & {w.data_ptr() for w in policy.parameters()}
    assert len(shared) == (0 if dora else len(list(loaded.sft.parameters())))
    assert torch.equal(logits(loaded.sft), logits(sft)), "the SFT model is as before"
    monkeypatch.setattr("rlhf_cli.report.show.write_beside", lambda folder: None)
    adapter_folder.run(run, "eval")
    report = json.loads((run / "eval/report.json").read_text())
    assert report["models"]["same"] == report["models"]["ppo"]
    assert 0 < report["interpolated"][0]["kl"] < report["models"]["ppo"]["kl"]
