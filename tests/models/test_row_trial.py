"""Families whose rows in a batch are not the rows alone: refused with a line, or computed so that they are."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import every_family
import pytest
import tiny
import torch
from ppo_folder import fails, must_succeed, rlhf, write
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

from rlhf_cli import jsonl, terminal
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import load, packing, row_trial, save, tokenizers
from rlhf_cli.models.batch import Prompts, Rollout
from rlhf_cli.ppo import graph_engine, rollout
from rlhf_cli.ppo.rollout import HFEngine
from tests.conftest import SHARED

pytestmark = pytest.mark.full

CACHED = ["mamba", "mamba2", "falcon_mamba", "granitemoehybrid", "doge", "mllama", "modernbert-decoder"]
UNCACHED = ["recurrent_gemma", "rwkv", "deepseek_v4", "minimax", "openai-gpt", "xlm", "roberta"]
REFUSED = ["deepseek_v32", "glm_moe_dsa", "axk2"]
PAD = 0
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [12, 13], [14, 15, 16, 17]]


def draw(model: Any) -> Rollout:
    prompts = replace(Prompts.from_lists(PROMPTS), seeds=tuple(range(len(PROMPTS))), response_length=12)
    return HFEngine(model, 2, PAD).generate(prompts)


@torch.no_grad()
def largest_gap(model: Any, drawn: Rollout) -> float:
    """The largest |log-prob of the engine - log-prob of a pass over the row alone|, over the response tokens."""
    assert drawn.logprobs is not None
    gaps = []
    for row in range(len(drawn)):
        prompt, response = drawn.prompt_tokens(row), drawn.response_tokens(row)
        if PAD in response:  # XLM counts a row's tokens by it
            continue
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        alone = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        gaps.append(float((alone - drawn.logprobs[row, : len(response)]).abs().max()))
    return max(gaps)


@pytest.mark.parametrize("name", [*CACHED, *UNCACHED])
def test_what_is_drawn_in_a_batch_has_the_log_probs_of_the_row_alone(name: str) -> None:
    model = every_family.causal(name)
    row_trial.require_rows_alone(model)
    assert largest_gap(model, draw(model)) < 1e-4
    warned = [problem.code for problem in terminal.emitted_problems()]
    assert warned == (["M17"] if name in UNCACHED else [])


@pytest.fixture
def family_folder(run_folder: Path) -> Any:
    """A function that makes a family's model the SFT model of a folder; configs train it or generate from it."""
    (run_folder / "rewards.py").write_text(
        "def longer(prompts, responses):\n    return [float(len(each)) for each in responses]\n"
    )
    data = {"train": "rows.jsonl"}
    rows = [{"prompt": f"tell me {'all ' * (n % 3)}", "completion": "it is so", "chosen": "yes", "rejected": "no"}
            for n in range(8)]  # fmt: skip
    (run_folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for stage in ("sft", "reward", "dpo"):
        sizes = {"max_steps": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
        write(run_folder, stage, {"model": {"path": "sft_model"}, "data": data, stage: sizes})
    sizes = {"total_episodes": 8, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    sizes |= {"response_length": 8, "num_sample_generations": 0}
    models = {"sft": "sft_model", "value": "policy_head", "engine": "graph"}
    rewards = {"longer": {"function": "rewards:longer"}}
    write(run_folder, "ppo", {"models": models, "data": {"prompts": "prompts.jsonl"}, "rewards": rewards, "ppo": sizes})
    tokenizer = tokenizers.load_tokenizer(run_folder / "sft_model")

    def make(name: str, **fields: Any) -> Path:
        model = every_family.causal(name, vocab_size=len(tokenizer), **fields)
        save.set_special_token_ids(model, tokenizer, 1)
        save.save_model(model, tokenizer, run_folder / "sft_model", "A tiny model.")
        return run_folder

    return make


@pytest.mark.parametrize(
    "name", ["minimax", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mamba2", "modernbert-decoder"))]
)
def test_ppo_trains_on_the_log_probs_of_the_rows_alone(name: str, family_folder: Any) -> None:
    folder = family_folder(name)
    must_succeed(rlhf("check", "--deep", folder / "ppo.yaml"))
    result = must_succeed(rlhf("ppo", "-c", folder / "ppo.yaml"))
    assert max(row["rollout/logprob_gap_p99"] for _, row in jsonl.read_jsonl(folder / "ppo/metrics.jsonl")) < 1e-4
    assert "models.engine: hf instead of graph" in result.stderr
    assert (f"warning[M17]: {name} models are sampled from without a cache" in result.stderr) == (name in UNCACHED)


@pytest.mark.parametrize("name", REFUSED)
def test_m16_a_family_that_reads_padding_is_refused_before_training(name: str, family_folder: Any) -> None:
    folder = family_folder(name)
    for command in (("check", "--deep", "sft.yaml"), ("sft", "-c", "sft.yaml"), ("ppo", "-c", "ppo.yaml")):
        result = rlhf(*command[:-1], folder / command[-1])
        fails(result, "M16", f"{command[-1]}:", f"{name} models cannot be used in batches", " nats ", "hint: take a")
    assert not any((folder / stage).exists() for stage in ("sft/model", "ppo/model"))


def test_m16_a_reward_model_that_reads_padding_is_refused(family_folder: Any) -> None:
    result = rlhf("reward", "-c", family_folder("axk2") / "reward.yaml")
    fails(result, "M16", "reward.yaml:", "axk2 models", "a row's scores differ by")


def test_m10_a_classifier_without_a_linear_score_is_refused_before_it_is_trained(family_folder: Any) -> None:
    folder = family_folder("modernbert-decoder")
    result = rlhf("reward", "-c", folder / "reward.yaml")
    fails(result, "M10", "(modernbert-decoder) does not score the last token", "policy_head")
    assert not (folder / "reward/state").exists()


def test_m18_towers_that_no_stage_keeps_are_named(family_folder: Any) -> None:
    folder = family_folder("gpt2")
    config = every_family.config("qwen3_5", vocab_size=300)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder / "sft_model")
    result = rlhf("check", folder / "sft.yaml")
    assert "warning[M18]: " in result.stderr and "only the text model is read" in result.stderr, result.stderr


def test_c17_trl_has_no_balancing_loss_for_a_familys_experts(family_folder: Any) -> None:
    result = rlhf("sft", "-c", family_folder("deepseek_v4") / "sft.yaml")
    fails(result, "C17", "no balancing loss", "router_aux_loss_coef: 0")


def test_doge_without_experts_has_no_balancing_loss(family_folder: Any) -> None:
    """Its config has the fields of experts, by which TRL takes it for a mixture of them."""
    must_succeed(rlhf("sft", "-c", family_folder("doge") / "sft.yaml"))


def test_a_generation_config_that_transformers_does_not_save(family_folder: Any) -> None:
    """That of Llama 2 has a temperature without sampling; the first checkpoint failed."""
    folder = family_folder("gpt2")
    path = folder / "sft_model/generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 1, "do_sample": False, "temperature": 0.9, "top_p": 0.6}))
    must_succeed(rlhf("sft", "-c", folder / "sft.yaml"))
    assert "temperature" not in (folder / "sft/model/generation_config.json").read_text()


def test_as_many_experts_as_doge_has_are_no_mistake(tmp_path: Path) -> None:
    every_family.config("doge", num_experts=16384).save_pretrained(tmp_path)
    assert load.read_config(tmp_path).num_experts == 16384
    every_family.config("doge", num_experts=10**6).save_pretrained(tmp_path)
    with pytest.raises(RLHFError, match=r"M01.*num_experts is 1000000"):
        load.read_config(tmp_path)


def test_what_packing_and_graphs_cannot_compute_falls_back() -> None:
    assert not packing.enable([every_family.causal("doge")])
    reason = graph_engine.reason_against(every_family.causal("falcon", alibi=True))
    assert reason is not None and "its token step raises" in reason
    assert graph_engine.reason_against(every_family.causal("falcon", alibi=False)) is None


def test_r19_says_that_padding_enters_a_row_and_not_that_weights_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "uses_cache", lambda model: True)
    model = every_family.causal("recurrent_gemma", vocab_size=tiny.VOCABULARY)
    trainer = tiny.trainer_of(
        model, tiny.settings(max_logprob_gap=1e-3),
        ref=every_family.causal("recurrent_gemma", vocab_size=tiny.VOCABULARY),
    )  # fmt: skip
    with pytest.raises(RLHFError, match=r"R19.*depends on the padding beside a row; row \d+ drawn alone is right"):
        trainer.step(tiny.prompts(4))


def test_the_trial_leaves_the_model_and_the_random_state_as_they_were() -> None:
    model = every_family.causal("gpt2").train()
    before, state = tiny.weights(model), torch.get_rng_state()
    assert row_trial.padding_problem(model) is None and rollout.uses_cache(model)
    assert model.training and torch.equal(tiny.weights(model), before) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["stories260K", "reviews-sft", "reviews-rm"])
def test_real_models_are_not_refused(name: str) -> None:
    folder = SHARED / "models" / name
    if not folder.exists():
        pytest.skip(f"needs {folder}")
    scores = "rm" in name
    model = (AutoModelForSequenceClassification if scores else AutoModelForCausalLM).from_pretrained(folder).eval()
    for dtype in (torch.float32, torch.bfloat16):
        model = model.to(dtype)
        assert row_trial.padding_problem(model) is None and (scores or rollout.uses_cache(model))


# In float32 alone; in float64 those that torch computes so agree.
ROUNDING = ["hrm_text", "nemotron_h", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"]
# Beyond what the trial reads: ties of an indexer, and what is beyond a sliding window. R19 stops them.
UNSEEN = ["hy_v4", "moshi"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in every_family.NAMES if name != "kimi_linear"])  # takes minutes
def test_every_family_is_refused_or_right(name: str) -> None:
    """Also in bfloat16 no family is refused that is right in float32."""
    try:
        model = every_family.causal(name)
    except Exception as error:  # each family validates its config with different exceptions
        pytest.skip(f"the small config builds none: {type(error).__name__}")
    try:
        row_trial.require_rows_alone(model)
        drawn = draw(model)
    except RLHFError as error:
        assert error.problems[0].code == "M16" and name in [*REFUSED, "cpmant", "prophetnet", "xlnet"]
        return
    assert largest_gap(model, drawn) < (0.02 if name in ROUNDING else 1e-4) or name in UNSEEN
    assert row_trial.padding_problem(model.bfloat16()) is None
