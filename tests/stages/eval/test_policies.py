"""`policies` and `eval.interpolate` of eval.yaml, and `rlhf export --interpolate`, on trained policies.

Modules: `evaluation/summary.py`, `stages/eval/evaluated_models.py`, `stages/eval/evaluation_inputs.py`,
`stages/eval/policy_evaluator.py`, `stages/eval/run.py`.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import adapter_folder
import pytest
import torch
from adapter_folder import logits
from ppo_folder import EVAL, PPO, evaluate, lines, manifest, must_succeed, rlhf, write
from report_run import text_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import Result

from rlhf_cli import runs
from rlhf_cli.config.base import Options
from rlhf_cli.config.loading import load
from rlhf_cli.models import load as load_models
from rlhf_cli.models.load import load_causal_lm
from rlhf_cli.models.parallel import SINGLE_PROCESS
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.stages.common import lifecycle, model_loading
from rlhf_cli.stages.eval import evaluated_models, evaluation_inputs
from rlhf_cli.stages.eval import run as stage
from rlhf_cli.stages.eval.evaluated_models import EvaluatedModels

pytestmark = pytest.mark.full
QUICK = {"n": 8, "best_of": [2], "frontier": False, "per_device_batch_size": 8}
POLICIES = {"same": "same", "before": "sft_model", "half": "half"}


def halfway(ours: Any, theirs: Any) -> Any:
    """Change a model to the mean of the two, by state dict."""
    both = ours.state_dict(), theirs.state_dict()
    ours.load_state_dict({name: (both[0][name].double() + both[1][name].double()) / 2 for name in both[0]})
    return ours


def fails(result: Result, code: str, *texts: str) -> None:
    errors = [line for line in result.stderr.splitlines() if line.startswith("error[")]
    assert len(errors) == 1 and errors[0].startswith(f"error[{code}]"), result.stderr
    assert all(text in result.stderr for text in texts) and result.exit_code == 2, result.stderr
    assert "Traceback" not in result.stderr


def exported(run: Path, out: Path, *arguments: str) -> Path:
    must_succeed(rlhf("export", run, "--out", out, "--interpolate", "0.5", *arguments))
    return out


def test_policies_are_evaluated_beside_and_between_sft_and_ppo(trained_folder: Path) -> None:
    run = trained_folder
    shutil.copytree(run / "ppo/model", run / "same")
    plain = [AutoModelForCausalLM.from_pretrained(run / name) for name in ("ppo/model", "sft_model")]
    half = AutoModelForCausalLM.from_pretrained(exported(run, run / "half"))
    assert torch.allclose(logits(half), logits(halfway(*plain)), atol=1e-5), "an export has the by-hand weights"
    card = (run / "half/README.md").read_text()
    assert "SFT + 0.5 (PPO - SFT)" in card and "Its KL from the SFT model is unknown." in card
    assert "This card has no evaluation of this model." in card
    write(run, "eval", {**EVAL, "policies": POLICIES, "eval": {**QUICK, "interpolate": [0.9999999, 0.5]}})
    report, result = evaluate(run)
    models, rates = report["models"], report["win_rate"]
    assert list(models) == ["sft", "ppo", "before", "half", "same"] == list(report["greedy"]["models"])
    assert models["same"] == models["ppo"] and rates["same_vs_sft"] == rates["ppo_vs_sft"]
    assert models["before"] == models["sft"] and rates["ppo_vs_before"] == rates["ppo_vs_sft"]
    tie = rates["ppo_vs_same"]["short"]
    assert (tie["value"], tie["ties"], tie["n"]) == (0.5, 8, 8) and models["before"]["kl"] == 0 < models["ppo"]["kl"]
    between, end = report["interpolated"]
    assert (between["share"], end["share"]) == (0.5, 0.9999999)
    for point, name in ((between, "half"), (end, "ppo")):
        assert point["kl"] == pytest.approx(models[name]["kl"], rel=1e-4)
        assert point["reward"] == pytest.approx(models[name]["reward_mean"], rel=1e-4)
        assert point["win_rate"]["short"]["value"] == rates[f"{name}_vs_sft"]["short"]["value"]
    assert between["kl"] != pytest.approx(end["kl"], rel=0.01)
    rows = [(row["model"], row["mode"]) for row in lines(run / "eval/samples.jsonl")]
    assert rows.count(("half", "greedy")) == rows.count(("interpolated_0.5", "sampled")) == 8
    assert "eval 14/14 round" in result.stderr, "five policies in two modes, two shares, two draws"
    parents = manifest(run, "eval")["parents"]
    assert parents["policies.same"] == {
        "path": "../same",
        "stage": "foreign",
        "sha256": parents["policies.same"]["sha256"],
    }
    page = (run / "eval/report.html").read_text()
    assert "PPO over same by judge short: 0.500 [" in page and "; share 0.5: " in page
    assert "PPO over same by judge short: 0.500 [" in result.stdout and (run / "eval/frontier.svg").is_file()
    card = (exported(run, run / "measured") / "README.md").read_text()
    assert f"its KL from the SFT model is {between['kl']:.3f} " in card and "is unknown" not in card
    changed = load_file(run / "same/model.safetensors")
    save_file({name: weight + 1 for name, weight in changed.items()}, run / "same/model.safetensors", {"format": "pt"})
    fails(rlhf("eval", "-c", run / "eval.yaml"), "C15", "policies.same")


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
    text = adapter_folder.EVAL.replace("eval: {", "policies: {same: RUN/ppo}\neval: {interpolate: [0.5], ")
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


def test_a_share_or_an_sft_model_that_cannot_be_exported(trained_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained_folder)

    def export(*arguments: object) -> Result:
        result = rlhf("export", *arguments, "--out", "out")
        assert not Path("out").exists()
        return result

    for share in ("0", "1", "1.5", "nan"):
        fails(export(".", "--interpolate", share), "C06", f"--interpolate {share}: not between 0 (the SFT model) and 1")
    weights = Path("sft_model/model.safetensors")
    content = load_file(weights)
    save_file({name: weight + 1 for name, weight in content.items()}, weights, {"format": "pt"})
    fails(export(".", "--interpolate", "0.5"), "M10", "sft_model is no longer the model that PPO was trained with")
    Path("sft_model").rename("elsewhere")
    fails(export(".", "--interpolate", "0.5"), "M01", "models.sft: no such folder sft_model")


def test_only_a_policy_of_ppo_is_interpolated(adapters_copy: Path) -> None:
    result = rlhf("export", ".", "--stage", "sft", "--out", "out", "--interpolate", "0.5")
    fails(result, "C11", "sft was written by the sft stage, and only PPO starts from SFT")


# eval.limit


SETTINGS = {**EVAL["eval"], "modes": ["sampled"], "interpolate": [0.5], "limit": {"samples": 6}}
LIMITED = {**EVAL, "policies": {"before": "sft_model"}, "eval": SETTINGS}


def test_the_limit_of_a_run(trained_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten prompts. Best of 3 has three of the six draws, and the judge `short` scores no others."""
    judged, rounds, given = [], [], {}
    plain, score_texts, build = HFEngine.generate, evaluated_models.score_texts, stage.build_limit

    def generate(engine: Any, prompts: Any) -> Any:
        rounds.append(prompts.seeds)
        return plain(engine, prompts)

    def score(name: str, function: Any, rows: Any) -> list[float]:
        judged.append(name)
        return score_texts(name, function, rows)

    def build_limit(draws: Any, evaluated: Any, *rest: Any) -> Any:
        given.update(draws=draws, penalty=rest[0], evaluated=evaluated)
        return build(draws, evaluated, *rest)

    write(trained_folder, "eval", {**LIMITED, "eval": {**LIMITED["eval"], "limit": None}})
    without, _ = evaluate(trained_folder)
    with monkeypatch.context() as patch:
        patch.setattr(HFEngine, "generate", generate)
        patch.setattr(evaluated_models, "score_texts", score)
        patch.setattr(stage, "build_limit", build_limit)
        write(trained_folder, "eval", LIMITED)
        report, result = evaluate(trained_folder, "--fresh")
    policies = 3 + len(report["frontier"])  # SFT, `before`, a share, PPO and its snapshots
    assert len(rounds) == policies + 6 and len(set(rounds[policies:])) == 6, "no draw is repeated"
    assert judged.count("short") == policies + 3
    assert "eval     limit: 6 SFT answers to each of 10 prompts, 30 more than" in result.stderr
    assert f"eval {policies + 6}/{policies + 6} round" in result.stderr
    section = report.pop("limit")
    assert report == without, "nothing else changes"
    samples = lines(trained_folder / "eval/samples.jsonl")
    assert len(samples) == 10 * (policies + 2), "the draws are not written"
    assert section["samples"] == 6 and section["missing_eos_penalty"] == given["penalty"] == 1.0
    names = {f"ppo_step_{point['step']:06d}" for point in report["frontier"][:-1]}
    assert section["policies"].keys() == {"ppo", "before", "interpolated_0.5", "best_of_2", "best_of_3"} | names
    points = {**report["models"], "interpolated_0.5": report["interpolated"][0]}
    for name in ("ppo", "before", "interpolated_0.5"):
        policy, rows = section["policies"][name], [row for row in samples if row["model"] == name]
        assert policy["score"] == pytest.approx(sum(row["scores"]["reward"] - (not row["ended"]) for row in rows) / 10)
        assert policy["kl"] == pytest.approx(points[name]["kl"])
    best = max(range(3), key=lambda draw: given["draws"][draw].scores["reward"][0])
    (row,) = [row for row in samples if row["model"] == "best_of_3" and row["index"] == 0]
    assert row["response"] == given["draws"][best].responses[0], "best of n has the first draws"
    page = (trained_folder / "eval/report.html").read_text()
    for text in (text_of(page), " ".join(result.stdout.split())):
        assert "KL overhead" in text and "less 1 for an answer that does not end" in text and "PPO pays" in text
        assert "share 0.5" in text and "interpolated_" not in text


def test_a_score_that_is_not_finite_is_named_and_no_report_is_written(trained_folder: Path) -> None:
    file = trained_folder / "reward_model/model.safetensors"
    weights = load_file(file)
    save_file({name: weight * (math.nan if name == "score.weight" else 1) for name, weight in weights.items()}, file)
    write(trained_folder, "eval", {**EVAL, "eval": QUICK})
    result = rlhf("eval", "--config", trained_folder / "eval.yaml", "--fresh")
    assert result.exit_code == 1 and "error[R01]: reward of the answer of" in result.stderr, result.stderr
    assert not (trained_folder / "eval/report.json").exists()


def test_an_endless_policy_has_no_penalty(trained_folder: Path) -> None:
    assert evaluation_inputs.missing_eos_penalty(None) == 0.0
    for changes, penalty in (({"stop_token": "none"}, 0.0), ({"missing_eos_penalty": None}, 0.0), ({}, 1.0)):
        write(trained_folder, "ppo", {**PPO, "ppo": {**PPO["ppo"], **changes}})
        settings = load("ppo", trained_folder / "ppo.yaml").ppo
        assert evaluation_inputs.missing_eos_penalty(settings) == penalty
