"""`rlhf ppo` and `rlhf eval` through the real CLI, on tiny Hugging Face folders that we did not train.

Modules: `stages/common/lifecycle.py`.
"""

import json
import shutil
from pathlib import Path
from statistics import fmean

import pytest
import tiny
import torch
import yaml
from ppo_folder import (
    EVAL,
    ONE,
    PPO,
    PROMPTS,
    as_reward_stage,
    fails,
    lines,
    manifest,
    must_succeed,
    ppo,
    rlhf,
    settings,
    steps,
    stop_in_update,
    untimed,
    weights,
    write,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli.models import save, tokenizers
from rlhf_cli.models.batch import Rollout
from rlhf_cli.stages.eval.policy_evaluator import sequence_kl
from tests.reference.comparison import compare_run, disagreements

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_page")]
METRICS = """episode objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward objective/scores
    policy/approxkl_avg policy/clipfrac_avg policy/entropy_avg loss/policy_avg loss/value_avg val/clipfrac_avg
    val/ratio val/ratio_var val/num_eos_tokens lr val/explained_variance objective/kl_coef objective/response_length
    objective/eos_fraction policy/grad_norm value/grad_norm policy/first_ratio_error time/rollout_s time/judge_s
    time/update_s tokens/real tokens/padded tokens_per_s objective/kl_k1 objective/score/reward time_s step"""
SAMPLE = "step episode index prompt response ended length kl score scores tokens"


def evaluate(folder: Path, *arguments: str):
    return rlhf("eval", "-c", folder / "eval.yaml", *arguments)


def report_of(folder: Path) -> dict:
    return json.loads((folder / "eval/report.json").read_text())


def test_the_output_is_that_of_the_contract(trained_once):
    folder, result = trained_once
    out = folder / "ppo"
    metrics, samples, made = lines(out / "metrics.jsonl"), lines(out / "samples.jsonl"), manifest(folder)
    assert [row["step"] for row in metrics] == [1, 2, 3, 4] and set(METRICS.split()) <= metrics[0].keys()
    assert metrics[0]["objective/kl"] == 0.0 and metrics[0]["policy/first_ratio_error"] == 0.0
    assert {row["step"] for row in samples} == {2, 4} and len(samples) == 16
    assert set(samples[0]) == set(SAMPLE.split()) and samples[0].keys() - samples[1].keys() == {"tokens"}
    assert samples[0]["prompt"] in PROMPTS
    assert "samples at step 2" in result.stdout and "4 x 2 = 8 episodes" in result.stderr
    assert made["stage"] == "ppo" and set(made["parents"]) == {"models.sft", "models.reward", "rewards.reward.model"}
    assert steps(out / "state") == {2, 4} and steps(out / "snapshots") == {2, 4, made["best"]["step"]}
    assert AutoModelForCausalLM.from_pretrained(out / "model").generation_config.eos_token_id == 1
    AutoModelForSequenceClassification.from_pretrained(out / "value")
    AutoTokenizer.from_pretrained(out / "model")
    assert not [path for path in out.rglob("*") if path.suffix in (".bin", ".pt", ".pkl")]
    must_succeed(ppo(folder), "finished already")


WITHOUT_VALUE = {**PPO, "ppo": {**PPO["ppo"], "advantage": "rloo", "num_samples_per_prompt": 2}}


@pytest.mark.parametrize("value", ["reward", "policy_head", "none"])
def test_resumed_run_is_the_straight_run_byte_for_byte(run_folder, tmp_path_factory, value):
    """Stopped by SIGTERM between two regular checkpoints, and started again; tests/crashes kills processes."""
    values = {**PPO, "models": {**PPO["models"], "value": value}}
    write(run_folder, "ppo", WITHOUT_VALUE if value == "none" else values)
    straight = tmp_path_factory.mktemp("straight")
    shutil.copytree(run_folder, straight, dirs_exist_ok=True)
    long = settings("total_episodes=48", "output.save_steps=3")
    assert ppo(straight, *long).exit_code == 0
    stop_in_update(run_folder, 4, *long)
    must_succeed(ppo(run_folder, *long), "resumes at step 4 of 6")
    assert (run_folder / "ppo/value").exists() is (value != "none")
    for name in ("model/model.safetensors", "samples.jsonl", *(["value/model.safetensors"] if value != "none" else [])):
        assert (run_folder / "ppo" / name).read_bytes() == (straight / "ppo" / name).read_bytes(), name
    assert untimed(run_folder / "ppo/metrics.jsonl") == untimed(straight / "ppo/metrics.jsonl")


def test_the_result_of_a_run_is_the_average_of_its_policies_through_a_stop(run_folder, tmp_path_factory):
    """model/ and snapshots are averages; rollouts, samples and the policy under a value head are of the trained one."""
    straight = shutil.copytree(run_folder, tmp_path_factory.mktemp("average") / "run")
    options = settings("average=0.5", "models.value=policy_head", "output.save_steps=1", "output.keep=9")
    must_succeed(ppo(straight, *options))
    stop_in_update(run_folder, 3, *options)
    must_succeed(ppo(run_folder, *options), "resumes at step 3 of 4")
    made, expected = manifest(run_folder), load_file(run_folder / "sft_model/model.safetensors")
    for step in range(1, 5):
        trained = save.load_tree(run_folder / f"ppo/state/step_00000{step}")["trainer"]["policy"]
        expected = {
            name: torch.lerp(weight, trained[name], (1, 2 / 3, 1 / 2, 1 / 2)[step - 1])
            for name, weight in expected.items()
        }
        for result in [f"snapshots/step_00000{step}"] * (step % 2 == 0) + ["model"] * (step == 4):
            saved = load_file(run_folder / "ppo" / result / "model.safetensors")
            torch.testing.assert_close(saved, expected, rtol=1e-6, atol=1e-8)
    trunk = load_file(run_folder / "ppo/value/model.safetensors")
    assert all(torch.equal(weight, trained[name]) for name, weight in trunk.items() if name != "score.weight")
    assert weights(run_folder) == weights(straight) and made["metrics"] == manifest(straight)["metrics"]
    assert "averaged weights (decay 0.5 an update) after 4" in (run_folder / "ppo/model/README.md").read_text()
    must_succeed(ppo(straight, *options, "-s", "ppo.average=null", "--fresh"))
    assert made["metrics"] != manifest(straight)["metrics"] and weights(run_folder) != weights(straight)
    for name in ("samples.jsonl", "value/model.safetensors"):
        assert (run_folder / "ppo" / name).read_bytes() == (straight / "ppo" / name).read_bytes()


def test_later_commands_read_a_run_without_a_value_model(run_folder):
    """Nor does it need a reward model. The default of models.value is written to the config that the run records."""
    shutil.rmtree(run_folder / "reward_model")
    source = {"models": {"sft": "sft_model"}, "rewards": {"short": {"function": "judges:short"}}}
    write(run_folder, "ppo", {**WITHOUT_VALUE, **source})
    must_succeed(ppo(run_folder))
    assert yaml.safe_load((run_folder / "ppo/config.yaml").read_text())["models"]["value"] == "none"
    assert all(not name.startswith(("value/", "loss/value")) for name in lines(run_folder / "ppo/metrics.jsonl")[0])
    assert lines(run_folder / "ppo/samples.jsonl")[0]["tokens"].keys() == {"text", "reward", "kl", "advantage"}
    write(run_folder, "eval", {**EVAL, "models": {"sft": "sft_model", "reward": None}, "eval": {"n": 4, "best_of": []}})
    must_succeed(evaluate(run_folder))
    for words in (("verify", run_folder, "--step", "3"), ("export", run_folder, "--out", run_folder / "out")):
        must_succeed(rlhf(*words))
    assert disagreements(compare_run(run_folder, 3)) == {}
    for words in (("check", "--deep"), ("status",), ("report",), ("plan", "--flops", "1e9")):
        must_succeed(rlhf(words[0], run_folder, *words[1:]))
    weights_file = run_folder / "ppo/model/model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:-1])
    assert "damaged" in rlhf("status", run_folder).stdout


BY_FUNCTION = {
    **PPO,
    "models": {"sft": "sft_model", "value": "policy_head"},
    "rewards": {"short": {"function": "judges:short"}},
}


def test_a_policy_whose_family_has_no_classifier_is_trained_with_a_value_head(run_folder):
    tokenizer = tokenizers.load_tokenizer(run_folder / "sft_model")
    model = tiny.causal("granite", vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1)
    save.save_model(model, tokenizer, run_folder / "sft_model", "A tiny model.")
    write(run_folder, "ppo", BY_FUNCTION)
    must_succeed(ppo(run_folder, ONE), "value/ is not written")
    assert manifest(run_folder)["step"] == 1 and not (run_folder / "ppo/value").exists()
    assert AutoModelForCausalLM.from_pretrained(run_folder / "ppo/model").config.model_type == "granite"


def test_a_function_and_a_head_on_the_policy_need_no_reward_model(run_folder):
    """From SFT model to report without a reward model."""
    shutil.rmtree(run_folder / "reward_model")
    write(run_folder, "ppo", BY_FUNCTION)
    must_succeed(ppo(run_folder, ONE))
    assert set(manifest(run_folder)["parents"]) == {"models.sft"}
    value = AutoModelForSequenceClassification.from_pretrained(run_folder / "ppo/value")
    policy = AutoModelForCausalLM.from_pretrained(run_folder / "ppo/model")
    assert value.num_labels == 1 and value.config.pad_token_id == 0 and value.score.weight.abs().max() > 0
    pairs = zip(value.model.parameters(), policy.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    fails(ppo(run_folder, ONE, "-s", "models.value=reward"), "M01", "models.reward")
    no_reward = {**EVAL, "models": {"sft": "sft_model", "reward": None}}
    write(run_folder, "eval", {**no_reward, "judges": {"reward": "judges:short"}})
    must_succeed(evaluate(run_folder))
    report = report_of(run_folder)
    assert [row["n"] for row in report["best_of"]] == [2, 3]
    assert report["best_of"][1]["reward_mean"] >= report["models"]["sft"]["reward_mean"]
    write(run_folder, "eval", {**no_reward, "judges": {}})
    fails(evaluate(run_folder), "C17", "eval.best_of")
    write(run_folder, "eval", {**no_reward, "judges": {}, "eval": {"best_of": [], "limit": {}}})
    fails(evaluate(run_folder), "C17", "eval.limit needs a reward, but models.reward is null")


def test_another_reward_function_or_judge_makes_a_result_stale(run_folder):
    write(run_folder, "ppo", {**BY_FUNCTION, "ppo": {**PPO["ppo"], "total_episodes": 8}})
    assert ppo(run_folder).exit_code == 0
    write(run_folder, "eval", {**EVAL, "eval": {"n": 4, "best_of": [], "modes": ["sampled"]}})
    assert evaluate(run_folder).exit_code == 0
    with (run_folder / "judges.py").open("a") as file:
        file.write("\n# changed\n")
    fails(ppo(run_folder), "C15", "rewards.short.function: other content")
    fails(evaluate(run_folder), "C15", "judges.short: other content")


@pytest.mark.parametrize(
    "change,code,says",
    [
        ("stop_token_id=99999", "C06", "ppo.stop_token_id 99999 is not a token of the model"),
        ("stop_token_id=[3, 99999]", "C06", "ppo.stop_token_id 99999 is not a token of the model"),
        ("num_shared_layers=2", "C06", "--set ppo.num_shared_layers: ppo.num_shared_layers 2 of 2 layers"),
        ("response_length=64", "C13", "lower it by at least 1"),
        ("models.sft={}/reward_model", "M10", "not a language model"),
        ("models.sft={}/sft_modle", "M01", "did you mean"),
        ("models.reward={}/sft_model", "M02", "no trained reward head"),
        ("data.prompts={}/promts.jsonl", "D01", "prompts.jsonl"),
    ],
)
def test_c06_c13_d01_m01_m02_m10_inputs_that_do_not_fit(run_folder, change, code, says):
    fails(ppo(run_folder, *settings(change.format(run_folder))), code, says)


def test_m09_scores_that_do_not_come_back(run_folder):
    model = AutoModelForSequenceClassification.from_pretrained(run_folder / "reward_model")
    asked = [([40, 41, 42], [50, 1]), ([43], [51, 52, 53, 1])]
    scores = [model(input_ids=torch.tensor([p + r])).logits.item() for p, r in asked]
    probes = [{"prompt_ids": p, "response_ids": r, "score": s} for (p, r), s in zip(asked, scores, strict=True)]
    as_reward_stage(run_folder, probes=probes)
    write(run_folder, "ppo", {**PPO, "models": {"sft": "sft_model"}})
    assert ppo(run_folder, ONE).exit_code == 0, "the same scores pass"
    probes[1]["score"] += 0.01
    shutil.rmtree(run_folder / "reward")
    as_reward_stage(run_folder, probes=probes)
    result = ppo(run_folder, ONE, "--fresh")
    fails(result, "M09", "row 1", f"{scores[1]:.4f}", f"{probes[1]['score']:.4f}", exit_code=1)
    assert not (run_folder / "ppo/metrics.jsonl").exists()


def test_an_estimator_and_a_first_ratio_that_are_off_are_warned_about(run_folder, monkeypatch):
    silent = must_succeed(ppo(run_folder, ONE)).stderr
    assert "C18" not in silent and "R07" not in silent
    monkeypatch.setattr("rlhf_cli.stages.ppo.runner.RATIO_TOLERANCE", -1.0)
    warned = must_succeed(ppo(run_folder, *settings(ONE, "kl_estimator=k3"), "--fresh")).stderr
    assert "warning[C18]" in warned and "hint: k1 has it" in warned
    assert "warning[R07]: step 1: the first ratio of an update differs from 1 by 0" in warned


# Evaluation


def test_eval_report_by_its_own_samples(trained_folder):
    result = evaluate(trained_folder)
    assert result.exit_code == 0 and "PPO over SFT" in result.stdout and "report:" in result.stdout, result.output
    report, samples = report_of(trained_folder), lines(trained_folder / "eval/samples.jsonl")
    assert report["n"] == 10 and set(report["models"]) == {"sft", "ppo"}
    assert set(report["greedy"]) == {"models", "win_rate"}
    assert len(samples) == 10 * (2 * 2 + 2) + 10 * (len(report["frontier"]) - 1)
    kinds = [(model, "sampled") for model in ("sft", "ppo", "best_of_2", "best_of_3")] + [("ppo", "greedy")]
    of_kind = {kind: [row for row in samples if (row["model"], row["mode"]) == kind] for kind in kinds}
    sft, policy, *best_of, greedy = of_kind.values()
    for judge in ("reward", "short"):
        gains = [ours["scores"][judge] - theirs["scores"][judge] for ours, theirs in zip(policy, sft, strict=True)]
        rate = report["win_rate"]["ppo_vs_sft"][judge]
        assert rate["value"] == pytest.approx(fmean((g > 0) + 0.5 * (g == 0) for g in gains))
        assert rate["ties"] == gains.count(0) and rate["n"] == 10
        assert rate["ci95"][0] < rate["value"] < rate["ci95"][1]
    scored = report["models"]["ppo"]
    assert report["models"]["sft"]["kl"] == 0.0 and scored["kl"] == pytest.approx(fmean(row["kl"] for row in policy))
    assert "kl" not in report["greedy"]["models"]["ppo"] and "kl" not in greedy[0]
    assert scored["judges"]["short"]["mean"] == pytest.approx(-fmean(len(row["response"]) for row in policy))
    rewards = [[row["scores"]["reward"] for row in best] for best in best_of]
    assert [row["reward_mean"] for row in report["best_of"]] == pytest.approx([fmean(each) for each in rewards])
    assert all(three >= two for two, three in zip(*rewards, strict=True))
    assert [row["response"] for row in best_of[0]] != [row["response"] for row in sft], "separate samples"


def test_sequence_kl_is_the_sum_of_log_ratios_at_the_temperature():
    policy, sft, temperature = tiny.causal(seed=3), tiny.causal(seed=0), 0.7
    queries, responses = [[5, 6], [7], [8, 9, 4]], [[3, 2], [4, 8, 9, 5, 2], [6]]
    kl = sequence_kl(policy, sft, Rollout.from_lists(queries, responses), temperature, max_rows=2)
    for row, (query, response) in enumerate(zip(queries, responses, strict=True)):
        logprobs, sft_logprobs = (
            torch.log_softmax(model(input_ids=torch.tensor([query + response])).logits[0].detach() / temperature, -1)
            for model in (policy, sft)
        )
        ratios = (logprobs - sft_logprobs)[len(query) - 1 : -1].gather(-1, torch.tensor(response)[:, None])
        assert kl[row] == pytest.approx(float(ratios.sum()), abs=1e-4)


def test_an_external_policy_that_never_stops_loses_by_the_short_judge(run_folder):
    """An external policy needs sampling options."""
    write(run_folder, "eval", {**EVAL, "models": {**EVAL["models"], "ppo": "sft_model"}})
    fails(evaluate(run_folder), "C17", "eval.temperature")
    shutil.copytree(run_folder / "sft_model", run_folder / "ppo_model")
    for name, stop_weight in (("sft_model", 99.0), ("ppo_model", -99.0)):  # the SFT model always stops at once
        state = load_file(run_folder / name / "model.safetensors")
        state["model.embed_tokens.weight"][:, 0] = 99.0  # of any token, so that the last state has it, too
        state["lm_head.weight"][1] = 0.0
        state["lm_head.weight"][1, 0] = stop_weight
        save_file(state, run_folder / name / "model.safetensors", metadata={"format": "pt"})
    require = {"win_rate.ppo_vs_sft.short.value": ">= 0.6", "models.ppo.eos": "> 0"}
    options = {**EVAL["eval"], "temperature": 1.0, "response_length": 24, "require": require}
    write(run_folder, "eval", {**EVAL, "models": {**EVAL["models"], "ppo": "ppo_model"}, "eval": options})
    result = evaluate(run_folder)
    assert report_of(run_folder)["win_rate"]["ppo_vs_sft"]["short"]["value"] == 0.0
    fails(result, "R06", "win_rate.ppo_vs_sft.short.value is", "required >= 0.6", exit_code=1)
    assert (run_folder / "eval/manifest.json").is_file(), "the report is complete before the requirements fail"
    again = evaluate(run_folder)
    fails(again, "R06", "finished already", exit_code=1)
    assert result.stderr.count("error[R06]") == again.stderr.count("error[R06]") == 2
