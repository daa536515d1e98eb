"""`rlhf ppo` and `rlhf eval` through the real CLI, on tiny Hugging Face folders that we did not train."""

import json
import os
import shutil
import signal
import zlib
from pathlib import Path

import pytest
import tiny
import torch
from ppo_folder import EVAL, ONE, PPO, PROMPTS, as_reward_stage, lines, ppo, rlhf, untimed, write
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from rlhf_cli.models.batch import Rollout
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.stages.eval import sequence_kl
from rlhf_cli.stages.ppo_samples import token_texts

pytestmark = [pytest.mark.training, pytest.mark.usefixtures("no_page")]


def test_leaves_what_the_contract_says(trained_once):
    folder, result = trained_once
    out = folder / "ppo"
    metrics = lines(out / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    named = """episode objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward objective/scores
        policy/approxkl_avg policy/clipfrac_avg policy/entropy_avg loss/policy_avg loss/value_avg val/clipfrac_avg
        val/ratio val/ratio_var
        val/num_eos_tokens lr val/explained_variance objective/kl_coef objective/response_length objective/eos_fraction
        policy/grad_norm
        value/grad_norm policy/first_ratio_error time/rollout_s time/judge_s time/update_s tokens/real tokens/padded
        tokens_per_s
        objective/kl_k1 objective/score/reward time_s step"""
    assert set(named.split()) <= metrics[0].keys()
    assert metrics[0]["objective/kl"] == 0.0 and metrics[0]["policy/first_ratio_error"] == 0.0
    samples = lines(out / "samples.jsonl")
    assert {row["step"] for row in samples} == {2, 4} and len(samples) == 16
    assert set(samples[0]) == {
        "step",
        "episode",
        "index",
        "prompt",
        "response",
        "ended",
        "length",
        "kl",
        "score",
        "scores",
        "tokens",
    }
    assert samples[0].keys() - samples[1].keys() == {"tokens"}
    assert samples[0]["prompt"] in PROMPTS
    assert "samples at step 2" in result.stdout and "4 x 2 = 8 episodes" in result.stderr
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["stage"] == "ppo" and set(manifest["parents"]) == {
        "models.sft",
        "models.reward",
        "rewards.reward.model",
    }
    assert {path.name for path in (out / "state").glob("step_*")} == {"step_000002", "step_000004"}
    best = f"step_{manifest['best']['step']:06d}"
    assert {path.name for path in (out / "snapshots").glob("step_*")} == {"step_000002", "step_000004", best}
    policy = AutoModelForCausalLM.from_pretrained(out / "model")
    assert policy.generation_config.eos_token_id == 1
    AutoModelForSequenceClassification.from_pretrained(out / "value")
    AutoTokenizer.from_pretrained(out / "model")
    assert not list(out.rglob("*.bin")) and not list(out.rglob("*.pt")) and not list(out.rglob("*.pkl"))
    again = ppo(folder)
    assert again.exit_code == 0 and "finished already" in again.stderr


def test_eval_prompts_are_shown_in_place_of_the_rollout_and_change_no_training(trained_folder):
    run_folder = trained_folder
    plain = (run_folder / "ppo/model/model.safetensors").read_bytes()
    assert (
        ppo(
            run_folder,
            "-s",
            f"data.eval_prompts={run_folder / 'heldout.jsonl'}",
            "-s",
            "ppo.num_sample_generations=4",
            "--fresh",
        ).exit_code
        == 0
    )
    samples = lines(run_folder / "ppo/samples.jsonl")
    assert {row["step"] for row in samples} == {1, 2, 3, 4} and all(
        row["prompt"].startswith("what is") for row in samples
    )
    assert (run_folder / "ppo/model/model.safetensors").read_bytes() == plain
    assert (run_folder / ".old/ppo-1/manifest.json").is_file()
    none = ("-s", "ppo.num_sample_generations=0", "-s", "ppo.total_episodes=8")
    assert ppo(run_folder, *none, "--fresh").exit_code == 0
    assert not (run_folder / "ppo/samples.jsonl").exists()


def test_a_tables_first_row_tells_what_its_tokens_are_made_of(run_folder):
    assert ppo(run_folder, "-s", "ppo.num_sample_generations=4").exit_code == 0
    rows = lines(run_folder / "ppo/samples.jsonl")
    assert [row["index"] for row in rows if "tokens" in row] == [0] * len({row["step"] for row in rows})
    coefs = {line["step"]: line["objective/kl_coef"] for line in lines(run_folder / "ppo/metrics.jsonl")}
    for row in rows:
        if "tokens" not in row:
            continue
        tokens = row["tokens"]
        assert {len(values) for values in tokens.values()} == {row["length"]}
        assert "".join(tokens["text"]).startswith(row["response"])
        assert sum(tokens["kl"]) == pytest.approx(row["kl"], abs=1e-5)
        assert sum(tokens["reward"]) == pytest.approx(row["score"] - coefs[row["step"]] * row["kl"], abs=1e-5)


def test_letters_of_several_tokens_stand_with_the_last_of_them():
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    ours = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    ids = [*ours.encode("aé🙂b"), ours.eos_token_id]
    assert token_texts(ours, ids) == ["a", "", "é", "", "", "", "🙂", "b", "<eos>"]
    assert token_texts(ours, ids[:5]) == ["a", "", "é", "", "\N{REPLACEMENT CHARACTER}"]  # cut off within a letter


def test_resumed_run_is_the_straight_run_byte_for_byte(run_folder, tmp_path_factory, monkeypatch):
    """Stopped by SIGTERM between two regular states, and started again. Processes that are killed: test_chaos.py."""
    straight = tmp_path_factory.mktemp("straight")
    shutil.copytree(run_folder, straight, dirs_exist_ok=True)
    long = ("-s", "ppo.total_episodes=80", "-s", "output.save_steps=3")
    assert ppo(straight, *long).exit_code == 0
    real = PPOTrainer.step

    def step(trainer, prompts):
        if trainer.updates == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(trainer, prompts)

    with monkeypatch.context() as patched:
        patched.setattr(PPOTrainer, "step", step)
        stopped = ppo(run_folder, *long)
    assert stopped.exit_code == 143 and "saved; the same command goes on" in stopped.stderr
    assert not (run_folder / "ppo/manifest.json").exists()
    again = ppo(run_folder, *long)
    assert again.exit_code == 0 and "resumes at step 4 of 10" in again.stderr
    for name in ("model/model.safetensors", "value/model.safetensors", "samples.jsonl"):
        assert (run_folder / "ppo" / name).read_bytes() == (straight / "ppo" / name).read_bytes(), name
    assert untimed(run_folder / "ppo/metrics.jsonl") == untimed(straight / "ppo/metrics.jsonl")


def test_another_config_is_refused_and_fresh_moves_aside(trained_folder):
    refused = ppo(trained_folder, "-s", "ppo.kl_coef=0.2")
    assert refused.exit_code == 2 and "error[C15]" in refused.stderr
    assert "ppo.kl_coef 0.05 -> 0.2" in refused.stderr and "hint: --fresh" in refused.stderr


def test_reward_functions_and_weights(run_folder):
    config = {**PPO, "rewards": {"reward": {"weight": 0.5}, "short": {"function": "judges:short", "weight": 2.0}}}
    write(run_folder, "ppo", config)
    assert ppo(run_folder).exit_code == 0
    for row in lines(run_folder / "ppo/samples.jsonl"):
        weighted = 0.5 * row["scores"]["reward"] + 2.0 * row["scores"]["short"] - (not row["ended"])
        assert row["score"] == pytest.approx(weighted, rel=1e-5)


BY_FUNCTION = {
    **PPO,
    "models": {"sft": "sft_model", "value": "policy_head"},
    "rewards": {"short": {"function": "judges:short"}},
}


def test_a_function_and_a_head_on_the_policy_need_no_reward_model(run_folder):
    """From SFT model to report without a reward model anywhere."""
    shutil.rmtree(run_folder / "reward_model")
    write(run_folder, "ppo", BY_FUNCTION)
    result = ppo(run_folder, ONE)
    assert result.exit_code == 0, result.output
    manifest = json.loads((run_folder / "ppo/manifest.json").read_text())
    assert set(manifest["parents"]) == {"models.sft"}
    value = AutoModelForSequenceClassification.from_pretrained(run_folder / "ppo/value")
    assert value.num_labels == 1 and value.config.pad_token_id == 0 and value.score.weight.abs().max() > 0
    refused = ppo(run_folder, ONE, "-s", "models.value=reward")
    assert refused.exit_code == 2 and "models.reward" in refused.stderr and "error[M01]" in refused.stderr
    models = {"sft": "sft_model", "reward": None}
    write(run_folder, "eval", {**EVAL, "models": models, "judges": {"reward": "judges:short"}})
    result = rlhf("eval", "-c", run_folder / "eval.yaml")
    assert result.exit_code == 0, result.output
    report = json.loads((run_folder / "eval/report.json").read_text())
    assert [row["n"] for row in report["best_of"]] == [2, 3]
    assert report["best_of"][1]["reward_mean"] >= report["models"]["sft"]["reward_mean"]
    write(run_folder, "eval", {**EVAL, "models": models, "judges": {}})
    nameless = rlhf("eval", "-c", run_folder / "eval.yaml")
    assert nameless.exit_code == 2 and "error[C17]" in nameless.stderr and "eval.best_of" in nameless.stderr


def test_another_reward_function_or_judge_makes_a_result_stale(run_folder):
    write(run_folder, "ppo", {**BY_FUNCTION, "ppo": {**PPO["ppo"], "total_episodes": 8}})
    assert ppo(run_folder).exit_code == 0
    write(run_folder, "eval", {**EVAL, "eval": {"n": 4, "best_of": [], "modes": ["sampled"]}})
    assert rlhf("eval", "-c", run_folder / "eval.yaml").exit_code == 0
    with (run_folder / "judges.py").open("a") as file:
        file.write("\n# another thought\n")
    refused = ppo(run_folder), rlhf("eval", "-c", run_folder / "eval.yaml")
    for result, key in zip(refused, ("rewards.short.function", "judges.short"), strict=True):
        assert result.exit_code == 2 and "error[C15]" in result.stderr and f"{key}: other content" in result.stderr


def test_a_head_on_the_policy_is_another_value_model_and_resumes(run_folder):
    """The value model's start changes what is learned; stopped and gone on with, it is the same run."""
    write(run_folder, "ppo", {**PPO, "models": {**PPO["models"], "value": "policy_head"}})
    assert ppo(run_folder).exit_code == 0
    straight = (run_folder / "ppo/value/model.safetensors").read_bytes()
    first = lines(run_folder / "ppo/metrics.jsonl")[0]
    refused = ppo(run_folder, "-s", "models.value=reward")
    assert refused.exit_code == 2 and "models.value policy_head -> reward" in refused.stderr
    for name in ("manifest.json", "model", "value"):
        path = run_folder / "ppo" / name
        path.unlink() if path.is_file() else shutil.rmtree(path)
    shutil.rmtree(run_folder / "ppo/state/step_000004")
    again = ppo(run_folder)
    assert again.exit_code == 0 and "resumes at step 2" in again.stderr
    assert (run_folder / "ppo/value/model.safetensors").read_bytes() == straight
    assert ppo(run_folder, "-s", "models.value=reward", "--fresh").exit_code == 0
    other = lines(run_folder / "ppo/metrics.jsonl")[0]
    assert other["objective/scores"] == first["objective/scores"] and other["loss/value_avg"] != first["loss/value_avg"]


@pytest.mark.parametrize(
    "body,says",
    [
        ("raise KeyError('x')", "raised KeyError"),
        ("raise SystemExit(3)", "raised SystemExit"),
        ("return [1.0]", "returned 1 scores for 8"),
        ("return [float('nan')] * 8", "nan for row 0"),
    ],
)
def test_r05_a_reward_function_that_misbehaves(run_folder, body, says):
    name = f"bad_reward_{zlib.crc32(body.encode())}"  # a module of its own: Python imports a name once
    (run_folder / f"{name}.py").write_text(f"def score(prompts, responses):\n    {body}\n")
    write(run_folder, "ppo", {**PPO, "rewards": {"mine": {"function": f"{name}:score"}}})
    result = ppo(run_folder)
    assert (
        result.exit_code == 1
        and "error[R05]" in result.stderr
        and says in result.stderr
        and "Traceback" not in result.stderr
    )


def test_rollout_options_reach_the_engine(run_folder, monkeypatch):
    batches, plain = [], HFEngine._generate_ids

    def spy(engine, prompts):
        batches.append((len(prompts), engine.temperature, engine.stop_token_id))
        return plain(engine, prompts)

    monkeypatch.setattr(HFEngine, "_generate_ids", spy)
    options = ("ppo.stop_token=none", "ppo.local_rollout_forward_batch_size=3", "ppo.temperature=0.9")
    assert ppo(run_folder, *(part for option in options for part in ("-s", option))).exit_code == 0
    assert set(batches) == {(3, 0.9, None), (2, 0.9, None)}
    assert all(row["length"] == 8 and not row["ended"] for row in lines(run_folder / "ppo/samples.jsonl"))
    batches.clear()
    assert ppo(run_folder, ONE, "-s", "ppo.stop_token_id=40", "--fresh").exit_code == 0
    assert {stop for _, _, stop in batches} == {40}
    refused = ppo(run_folder, "-s", "ppo.stop_token_id=99999", "--fresh")
    assert refused.exit_code == 2 and "error[C06]" in refused.stderr


def test_every_update_takes_other_prompts(run_folder):
    assert ppo(run_folder, "-s", "ppo.num_sample_generations=4").exit_code == 0
    samples = lines(run_folder / "ppo/samples.jsonl")
    asked = [{row["prompt"] for row in samples if row["step"] == step} for step in (1, 2, 3, 4)]
    assert len(asked[0] | asked[1]) == 16, "two updates of 8 out of 20 prompts share none"
    assert asked[2] != asked[0] and asked[3] != asked[1]


def test_t05_reward_of_another_template(run_folder):
    """Its copy would be the value model, which reads the policy's tokens."""
    for name, template in (
        ("sft_model", "{{ messages[0].content }}"),
        ("reward_model", "Q: {{ messages[0].content }}"),
    ):
        tokenizer = AutoTokenizer.from_pretrained(run_folder / name)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(run_folder / name)
    result = ppo(run_folder)
    assert result.exit_code == 2 and "error[T05]" in result.stderr


def test_a_scorer_is_no_policy(run_folder):
    result = ppo(run_folder, "-s", f"models.sft={run_folder / 'reward_model'}")
    assert result.exit_code == 2 and "error[M10]" in result.stderr and "not a language model" in result.stderr


def test_m01_and_m02_models_that_are_not_there_or_not_rewards(run_folder):
    missing = ppo(run_folder, "-s", f"models.sft={run_folder / 'sft_modle'}")
    assert missing.exit_code == 2 and "error[M01]" in missing.stderr and "did you mean" in missing.stderr
    wrong = ppo(run_folder, "-s", f"models.reward={run_folder / 'sft_model'}")
    assert wrong.exit_code == 2 and "error[M02]" in wrong.stderr and "no trained reward head" in wrong.stderr


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
    assert result.exit_code == 1 and "error[M09]" in result.stderr
    assert (
        "row 1" in result.stderr
        and f"{scores[1]:.4f}" in result.stderr
        and f"{probes[1]['score']:.4f}" in result.stderr
    )
    assert not (run_folder / "ppo/metrics.jsonl").exists()


def test_c13_response_longer_than_the_context(run_folder):
    result = ppo(run_folder, "-s", "ppo.response_length=64")
    assert result.exit_code == 2 and "error[C13]" in result.stderr and "lower it by at least 1" in result.stderr


def test_an_estimator_without_the_kls_gradient_is_warned_about(run_folder):
    write(run_folder, "ppo", {**PPO, "ppo": {**PPO["ppo"], "total_episodes": 8}})
    warned, silent = ppo(run_folder, "-s", "ppo.kl_estimator=k3"), ppo(run_folder, "--fresh")
    assert warned.exit_code == 0 and "warning[C18]" in warned.stderr and "hint: k1 has it" in warned.stderr
    assert "C18" not in silent.stderr


def test_a_first_ratio_that_is_off_is_warned_about(run_folder, monkeypatch):
    monkeypatch.setattr("rlhf_cli.stages.ppo.RATIO_TOLERANCE", -1.0)
    assert "warning[R07]: step 1: the first ratio of an update is off 1 by 0" in ppo(run_folder, ONE).stderr


def test_d01_prompts_that_are_not_there(run_folder):
    result = ppo(run_folder, "-s", f"data.prompts={run_folder / 'promts.jsonl'}")
    assert result.exit_code == 2 and "error[D01]" in result.stderr and "prompts.jsonl" in result.stderr


# Evaluation


def spoil(folder: Path) -> None:
    """Make PPO's policy clearly worse by the judge `short`: it never stops."""
    weights = load_file(folder / "ppo_model/model.safetensors")
    weights["lm_head.weight"][1] = 0.0
    weights["model.norm.weight"] *= 3
    save_file(weights, folder / "ppo_model/model.safetensors", metadata={"format": "pt"})


def test_eval_report_by_its_own_samples(trained_folder):
    run_folder = trained_folder
    result = rlhf("eval", "-c", run_folder / "eval.yaml")
    assert result.exit_code == 0, result.output
    report, samples = (
        json.loads((run_folder / "eval/report.json").read_text()),
        lines(run_folder / "eval/samples.jsonl"),
    )
    assert (
        report["n"] == 10
        and set(report["models"]) == {"sft", "ppo"}
        and set(report["greedy"]) == {"models", "win_rate"}
    )
    assert len(samples) == 10 * (2 * 2 + 2) + 10 * (len(report["frontier"]) - 1)
    by = {(row["model"], row["mode"], row["index"]): row for row in samples}
    for judge in ("reward", "short"):
        gains = [by["ppo", "sampled", i]["scores"][judge] - by["sft", "sampled", i]["scores"][judge] for i in range(10)]
        rate = report["win_rate"]["ppo_vs_sft"][judge]
        assert rate["value"] == pytest.approx(sum((g > 0) + 0.5 * (g == 0) for g in gains) / 10)
        assert (
            rate["ties"] == sum(g == 0 for g in gains)
            and rate["n"] == 10
            and rate["ci95"][0] < rate["value"] < rate["ci95"][1]
        )
    sft, policy = report["models"]["sft"], report["models"]["ppo"]
    assert sft["kl"] == 0.0 and policy["kl"] == pytest.approx(
        sum(by["ppo", "sampled", i]["kl"] for i in range(10)) / 10
    )
    assert "kl" not in report["greedy"]["models"]["ppo"] and "kl" not in by["ppo", "greedy", 0]
    assert policy["judges"]["short"]["mean"] == pytest.approx(
        -sum(len(by["ppo", "sampled", i]["response"]) for i in range(10)) / 10
    )
    for n in (2, 3):
        best = next(row for row in report["best_of"] if row["n"] == n)
        assert best["reward_mean"] == pytest.approx(
            sum(by[f"best_of_{n}", "sampled", i]["scores"]["reward"] for i in range(10)) / 10
        )
    draws = [(by["best_of_2", "sampled", i]["response"], by["sft", "sampled", i]["response"]) for i in range(10)]
    assert any(best != first for best, first in draws), "best-of draws are draws of their own"
    assert all(
        by["best_of_3", "sampled", i]["scores"]["reward"] >= by["best_of_2", "sampled", i]["scores"]["reward"]
        for i in range(10)
    )
    assert "PPO over SFT" in result.stdout and "report:" in result.stdout


def test_sequence_kl_is_the_sum_of_log_ratios_at_the_temperature():
    policy, sft, temperature = tiny.causal(seed=3), tiny.causal(seed=0), 0.7
    queries, responses = [[5, 6], [7], [8, 9, 4]], [[3, 2], [4, 8, 9, 5, 2], [6]]
    found = sequence_kl(policy, sft, Rollout.from_lists(queries, responses), temperature, max_rows=2)
    for row, (query, response) in enumerate(zip(queries, responses, strict=True)):
        ids = torch.tensor([query + response])
        ours, theirs = (
            torch.log_softmax(model(input_ids=ids).logits[0].detach() / temperature, -1) for model in (policy, sft)
        )
        places = range(len(query) - 1, len(query) + len(response) - 1)
        wanted = sum(float(ours[p, t] - theirs[p, t]) for p, t in zip(places, response, strict=True))
        assert found[row] == pytest.approx(wanted, abs=1e-4)


def test_sft_against_itself_ties_everywhere(run_folder):
    shutil.copytree(run_folder / "sft_model", run_folder / "copy")
    config = {
        **EVAL,
        "models": {**EVAL["models"], "ppo": "copy"},
        "eval": {**EVAL["eval"], "temperature": 1.0, "response_length": 8},
    }
    write(run_folder, "eval", config)
    assert rlhf("eval", "-c", run_folder / "eval.yaml").exit_code == 0
    report = json.loads((run_folder / "eval/report.json").read_text())
    assert report["win_rate"]["ppo_vs_sft"]["reward"] == {
        **report["win_rate"]["ppo_vs_sft"]["reward"],
        "value": 0.5,
        "ties": 10,
    }
    assert report["models"]["ppo"]["kl"] == 0.0


def test_a_policy_that_never_stops_loses_by_the_short_judge(run_folder):
    shutil.copytree(run_folder / "sft_model", run_folder / "ppo_model")
    spoil(run_folder)
    sizes = {
        **EVAL["eval"],
        "temperature": 1.0,
        "response_length": 24,
        "require": {"win_rate.ppo_vs_sft.short.value": ">= 0.6", "models.ppo.eos": "> 0"},
    }
    write(run_folder, "eval", {**EVAL, "models": {**EVAL["models"], "ppo": "ppo_model"}, "eval": sizes})
    result = rlhf("eval", "-c", run_folder / "eval.yaml")
    report = json.loads((run_folder / "eval/report.json").read_text())
    assert report["win_rate"]["ppo_vs_sft"]["short"]["value"] < 0.5
    assert result.exit_code == 1 and result.stderr.count("error[R06]") == 2
    assert "win_rate.ppo_vs_sft.short.value is" in result.stderr and "required >= 0.6" in result.stderr
    assert (run_folder / "eval/manifest.json").is_file(), "the gate closes after the report is kept"
    again = rlhf("eval", "-c", run_folder / "eval.yaml")
    assert again.exit_code == 1 and "finished already" in again.stderr and again.stderr.count("error[R06]") == 2


def test_a_foreign_policy_needs_its_sampling_told(run_folder):
    write(run_folder, "eval", {**EVAL, "models": {**EVAL["models"], "ppo": "sft_model"}})
    result = rlhf("eval", "-c", run_folder / "eval.yaml")
    assert result.exit_code == 2 and "error[C17]" in result.stderr and "eval.temperature" in result.stderr
